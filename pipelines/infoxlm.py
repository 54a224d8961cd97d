"""The DAG: text in many languages -> an evaluated, registered InfoXLM. Reads as a list of sentences.

Each stage's config is one parameter, so that a change to one stage leaves the cached results before it valid.
"""

from typing import Any

from kfp import dsl

from components.check_settings import check_settings
from components.evaluate import evaluate
from components.finetune import finetune
from components.prepare_corpus import prepare_corpus
from components.pretrain import pretrain
from components.register import register
from components.tokenize_corpus import tokenize_corpus
from pipelines.placing import LIMITS, place, size, trust


@dsl.pipeline(
    name="infoxlm",
    description="Text in many languages in; an evaluated, registered InfoXLM encoder out.",
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
    """Check the settings; prepare, tokenize, pre-train, fine-tune, evaluate, register.

    Args:
        preparation: a `PreparationConfig`: corpora, cleaning, what is held out.
        tokenization: a `TokenizationConfig`: vocabulary.
        pretraining: a `PretrainingConfig`: model, objectives, contrast, batches, optimization.
        finetuning: a `ClassificationConfig`: labelled text, recipe.
        evaluation: an `EvaluationConfig`: sizes of the test sets.
        registration: a `RegistrationConfig`: name in the registry, metric of the gate.
        store: directory, or s3://bucket/prefix, where artifacts are found by content and checkpoints are kept.
        overrides: single fields of these sections, such as {"pretraining.optimization.steps": 2000}.
        num_workers: Ray workers of the training stages, one per GPU; 0 trains inside the step.
        data_workers: Ray Data workers of preparation and tokenization; 0 does both inside the steps.
        cluster: a `ClusterConfig`: train in RayJobs of KubeRay, with its pool of GPUs; empty: in the steps themselves.
        image: of all steps; on a cluster by digest.
    """
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
    ).set_display_name("check the settings")
    corpus = prepare_corpus(
        config=settings.outputs["preparation"],
        store=store,
        num_workers=data_workers,
        cluster=cluster,
    )
    shards = tokenize_corpus(
        config=settings.outputs["tokenization"],
        store=store,
        num_workers=data_workers,
        corpus=corpus.outputs["corpus"],
        cluster=cluster,
    )
    pretrained = pretrain(
        config=settings.outputs["pretraining"],
        num_workers=num_workers,
        store=store,
        shards=shards.outputs["shards"],
        cluster=cluster,
    )
    tuned = finetune(
        config=settings.outputs["finetuning"],
        num_workers=num_workers,
        store=store,
        encoder=pretrained.outputs["encoder"],
        corpus=corpus.outputs["corpus"],
        cluster=cluster,
    )
    tuned_start = finetune(
        config=settings.outputs["finetuning"],
        num_workers=num_workers,
        store=store,
        encoder=pretrained.outputs["start"],
        corpus=corpus.outputs["corpus"],
        cluster=cluster,
    )
    scores = evaluate(
        config=settings.outputs["evaluation"],
        store=store,
        corpus=corpus.outputs["corpus"],
        encoder=pretrained.outputs["encoder"],
        start=pretrained.outputs["start"],
        classifier=tuned.outputs["classifier"],
        classifier_of_start=tuned_start.outputs["classifier"],
    )
    registered = register(
        config=settings.outputs["registration"],
        store=store,
        encoder=pretrained.outputs["encoder"],
        scores=scores.outputs["scores"],
        image=image,
    )
    stories = {
        corpus: "prepare the text",
        shards: "tokenize it",
        pretrained: "pre-train the encoder",
        tuned: "fine-tune it",
        tuned_start: "fine-tune the untrained encoder",
        scores: "evaluate both",
        registered: "register and promote",
    }
    for task, story in stories.items():
        task.set_display_name(story)
    place(image, settings, corpus, shards, pretrained, tuned, tuned_start, scores, registered)
    size(corpus, shards, scores, registered)
    trust(registered)
