"""The DAG of an ablation: prepare and tokenize once, train every variant with every seed, end in one table."""

from typing import Any

from kfp import dsl

from components.check_settings import check_settings
from components.compare import compare
from components.evaluate import evaluate
from components.finetune import finetune
from components.prepare_corpus import prepare_corpus
from components.pretrain import pretrain
from components.tokenize_corpus import tokenize_corpus
from pipelines.placing import LIMITS, place, size

AT_A_TIME = 2
"""Trials that run at the same time."""


@dsl.pipeline(
    name="infoxlm-ablations",
    description="Variants x seeds of InfoXLM, compared in one table.",
    pipeline_config=LIMITS,
)
def ablations(
    preparation: dict[str, Any],
    tokenization: dict[str, Any],
    trials: list,  # type: ignore[type-arg]  # with an item's type KFP compiles another loop
    finetuning: dict[str, Any],
    evaluation: dict[str, Any],
    store: str,
    image: str,
    overrides: dict[str, Any] = {},  # noqa: B006
    num_workers: int = 0,
    data_workers: int = 0,
    cluster: dict[str, Any] = {},  # noqa: B006
) -> None:
    """Prepare and tokenize; for each trial pre-train, fine-tune, evaluate; compare, also what is left if one failed.

    Args:
        preparation: a `PreparationConfig`.
        tokenization: a `TokenizationConfig`.
        trials: what to train: {"trial": {"variant", "seed", "what"}, "pretraining": a `PretrainingConfig`} each.
        finetuning: a `ClassificationConfig`; each trial puts its own seed in.
        evaluation: an `EvaluationConfig`; all trials answer the same questions.
        store: directory, or s3://bucket/prefix, where artifacts are found by content and checkpoints are kept.
        overrides: single fields of these sections, or of pretraining in every trial, such as
            {"pretraining.optimization.steps": 2000}.
        num_workers: Ray workers of each trial, one per GPU; 0 trains inside the step.
        data_workers: Ray Data workers of preparation and tokenization; 0 does both inside the steps.
        cluster: a `ClusterConfig`: train in RayJobs of KubeRay, with its pool of GPUs; empty: in the steps themselves.
        image: of all steps; on a cluster by digest.
    """
    text = {"store": store, "num_workers": data_workers, "cluster": cluster}
    training = {"store": store, "num_workers": num_workers, "cluster": cluster}
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
        prepared = prepare_corpus(config=settings.outputs["preparation"], **text)
        corpus = prepared.outputs["corpus"]
        shards = tokenize_corpus(config=settings.outputs["tokenization"], corpus=corpus, **text)
        # KFP's local runner takes each output of a step outside for the items of the loop: so an item has all settings
        with dsl.ParallelFor(items=settings.outputs["Output"], parallelism=AT_A_TIME) as item:
            trial = {"trial": item.trial}
            pretrained = pretrain(config=item.pretraining, shards=shards.outputs["shards"], **training, **trial)
            encoder = pretrained.outputs["encoder"]
            tuned = finetune(config=item.finetuning, encoder=encoder, corpus=corpus, **training, **trial)
            classifier = tuned.outputs["classifier"]
            scores = evaluate(
                config=item.evaluation, store=store, corpus=corpus, encoder=encoder, classifier=classifier, **trial
            )
    for task in (compared, pretrained, tuned, scores):  # each logs to the new MLflow run, and finds its artifact
        task.set_caching_options(False)
    steps = {
        "compare the variants": compared,
        "check the settings": settings,
        "prepare the text": prepared,
        "tokenize it": shards,
        "pre-train a variant": pretrained,
        "fine-tune it": tuned,
        "evaluate it": scores,
    }
    place(image, steps)
    size(prepared, shards, scores)
