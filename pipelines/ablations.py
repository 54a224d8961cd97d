"""The ablation pipeline: it trains every variant with every seed, and compares the variants in one table."""

from typing import Any

from kfp import dsl

from components.check_settings import check_settings
from components.compare import compare
from components.evaluate import evaluate
from components.finetune import finetune
from components.prepare_corpus import prepare_corpus
from components.pretrain import pretrain
from components.tokenize_corpus import tokenize_corpus
from pipelines.steps import LIMITS, PARALLEL_TRIALS, configure_steps, disable_cache, request_default_resources


@dsl.pipeline(
    name="infoxlm-ablations",
    description="Train variants of InfoXLM with several seeds and compare them in one table.",
    pipeline_config=LIMITS,
)
def ablations(
    preparation: dict[str, Any],
    tokenization: dict[str, Any],
    trials: list,  # type: ignore[type-arg]  # KFP compiles a different loop for a list with an item type
    finetuning: dict[str, Any],
    evaluation: dict[str, Any],
    store: str,
    image: str,
    overrides: dict[str, Any] = {},  # noqa: B006
    num_workers: int = 0,
    data_workers: int = 0,
    cluster: dict[str, Any] = {},  # noqa: B006
) -> None:
    """Prepare and tokenize the text; pre-train, fine-tune and evaluate each trial; compare the successful trials.

    Args:
        preparation: a `PreparationConfig`.
        tokenization: a `TokenizationConfig`.
        trials: list of {"trial": {"variant", "seed", "what", "rank"}, "pretraining": a `PretrainingConfig`}.
        finetuning: a `ClassificationConfig`; each trial replaces the seed with its own.
        evaluation: an `EvaluationConfig` for all trials.
        store: directory or s3://bucket/prefix of artifacts and checkpoints.
        overrides: single settings of these sections, or of `pretraining` in every trial, such as
            {"pretraining.optimization.steps": 2000}.
        num_workers: number of training workers per trial, one per GPU; 0 trains in the step.
        data_workers: number of Ray workers for preparation and tokenization; 0 runs both in their steps.
        cluster: a `ClusterConfig`, to train in RayJobs; if empty, training runs in the steps.
        image: container image of all steps; by digest on a cluster.
    """
    data_options = {"store": store, "num_workers": data_workers, "cluster": cluster}
    training_options = {"store": store, "num_workers": num_workers, "cluster": cluster}
    compared = compare(trials=trials, store=store)
    with dsl.ExitHandler(compared):
        settings = check_settings(
            store=store,
            preparation=preparation,
            tokenization=tokenization,
            finetuning=finetuning,
            evaluation=evaluation,
            trials=trials,
            overrides=overrides,
            num_workers=num_workers,
        )
        prepared = prepare_corpus(config=settings.outputs["preparation"], **data_options)
        corpus = prepared.outputs["corpus"]
        tokenized = tokenize_corpus(config=settings.outputs["tokenization"], corpus=corpus, **data_options)
        shards = tokenized.outputs["shards"]
        # Each item carries all settings, because KFP's local runner treats any outer output in a loop as the items.
        with dsl.ParallelFor(items=settings.outputs["Output"], parallelism=PARALLEL_TRIALS) as item:
            trial = item.trial
            pretrained = pretrain(config=item.pretraining, shards=shards, trial=trial, **training_options)
            encoder = pretrained.outputs["encoder"]
            tuned = finetune(config=item.finetuning, encoder=encoder, corpus=corpus, trial=trial, **training_options)
            evaluated = evaluate(
                config=item.evaluation,
                store=store,
                corpus=corpus,
                encoder=encoder,
                classifier=tuned.outputs["classifier"],
                trial=trial,
            )
    steps = {
        "compare the variants": compared,
        "check the settings": settings,
        "prepare the text": prepared,
        "tokenize the text": tokenized,
        "pre-train a variant": pretrained,
        "fine-tune a variant": tuned,
        "evaluate a variant": evaluated,
    }
    configure_steps(image, steps)
    disable_cache(compared, pretrained, tuned, evaluated)  # a cached step would not log to the new MLflow run
    request_default_resources(prepared, tokenized, evaluated)
