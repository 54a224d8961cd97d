"""The main pipeline: it prepares text, and trains, evaluates and registers InfoXLM.

Each stage has its own config parameter, so that changing one stage does not invalidate earlier cached steps.
"""

from typing import Any

from kfp import dsl

from components.check_settings import check_settings
from components.end_run import end_run
from components.evaluate import evaluate
from components.finetune import finetune
from components.merge import merge
from components.prepare_corpus import prepare_corpus
from components.pretrain import pretrain
from components.register import register
from components.tokenize_corpus import tokenize_corpus
from pipelines.steps import LIMITS, configure_steps, disable_cache, give_registry_access, request_default_resources


@dsl.pipeline(
    name="infoxlm",
    description="Train an InfoXLM encoder on text in many languages, evaluate it and register it.",
    pipeline_config=LIMITS,
)
def infoxlm(
    preparation: dict[str, Any],
    tokenization: dict[str, Any],
    pretraining: dict[str, Any],
    finetuning: dict[str, Any],
    evaluation: dict[str, Any],
    registration: dict[str, Any],
    store: str,
    image: str,
    overrides: dict[str, Any] = {},  # noqa: B006
    num_workers: int = 0,
    data_workers: int = 0,
    cluster: dict[str, Any] = {},  # noqa: B006
) -> None:
    """Prepare and tokenize the text, pre-train an encoder, merge it with its start model, evaluate and register it.

    Args:
        preparation: a `PreparationConfig`: corpora, cleaning, held-out text.
        tokenization: a `TokenizationConfig`: vocabulary.
        pretraining: a `PretrainingConfig`: model, objectives, contrast, batches, optimization.
        finetuning: a `ClassificationConfig`: labelled text, recipe.
        evaluation: an `EvaluationConfig`: sizes of the test sets.
        registration: a `RegistrationConfig`: name in the registry, gate metrics.
        store: directory or s3://bucket/prefix of artifacts and checkpoints.
        image: container image of all steps; by digest on a cluster.
        overrides: single settings of these sections, such as {"pretraining.optimization.steps": 2000}.
        num_workers: number of training workers, one per GPU; 0 trains in the step, on its CPU.
        data_workers: number of Ray workers for preparation and tokenization; 0 runs both in their steps.
        cluster: a `ClusterConfig`, to train in RayJobs; if empty, training runs in the steps.
    """
    data_options = {"store": store, "num_workers": data_workers, "cluster": cluster}
    training_options = {"store": store, "num_workers": num_workers, "cluster": cluster}
    ending = end_run(store=store)
    with dsl.ExitHandler(ending, name="train and evaluate"):
        settings = check_settings(
            store=store,
            preparation=preparation,
            tokenization=tokenization,
            pretraining=pretraining,
            finetuning=finetuning,
            evaluation=evaluation,
            registration=registration,
            overrides=overrides,
            num_workers=num_workers,
        )
        section = settings.outputs
        prepared = prepare_corpus(config=section["preparation"], **data_options)
        corpus = prepared.outputs["corpus"]
        tokenized = tokenize_corpus(config=section["tokenization"], corpus=corpus, **data_options)
        pretrained = pretrain(config=section["pretraining"], shards=tokenized.outputs["shards"], **training_options)
        start = pretrained.outputs["start"]
        trained = pretrained.outputs["encoder"]
        merged = merge(config=section["evaluation"], store=store, corpus=corpus, encoder=trained, start=start)
        encoder = merged.outputs["merged"]
        tuned = finetune(config=section["finetuning"], corpus=corpus, encoder=encoder, **training_options)
        # The start model gets the same fine-tuning, so that both encoders are compared on classification, too.
        tuned_start = finetune(config=section["finetuning"], corpus=corpus, encoder=start, **training_options)
        evaluated = evaluate(
            config=section["evaluation"],
            store=store,
            corpus=corpus,
            encoder=encoder,
            start=start,
            classifier=tuned.outputs["classifier"],
            classifier_of_start=tuned_start.outputs["classifier"],
        )
        scores = evaluated.outputs["scores"]
        registered = register(config=section["registration"], store=store, encoder=encoder, scores=scores, image=image)
    steps = {
        "check the settings": settings,
        "prepare the text": prepared,
        "tokenize the text": tokenized,
        "pre-train the encoder": pretrained,
        "merge with the start": merged,
        "fine-tune the encoder": tuned,
        "fine-tune the untrained encoder": tuned_start,
        "evaluate both encoders": evaluated,
        "register and promote": registered,
        "end the run": ending,
    }
    configure_steps(image, steps)
    disable_cache(registered, ending)  # their results depend on the current champion and on the other steps
    request_default_resources(prepared, tokenized, merged, evaluated, registered)
    give_registry_access(registered)
