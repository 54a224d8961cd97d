"""The DAG of an ablation: prepare and tokenize once, train every variant with every seed, end in one table."""

from kfp import dsl

from components.compare import compare
from components.evaluate import evaluate
from components.finetune import finetune
from components.prepare_corpus import prepare_corpus
from components.pretrain import pretrain
from components.tokenize_corpus import tokenize_corpus

AT_A_TIME = 2
"""Trials that run at the same time."""


@dsl.pipeline(name="infoxlm-ablations", description="Variants x seeds of InfoXLM, compared in one table.")
def ablations(
    preparation: dict, tokenization: dict, trials: list, finetuning: dict, evaluation: dict, store: str,
    num_workers: int = 0,
):  # fmt: skip
    """Prepare and tokenize; for each trial pre-train, fine-tune, evaluate; compare, also what is left if one failed.

    Args:
        preparation: a `PreparationConfig`.
        tokenization: a `TokenizationConfig`.
        trials: what to train: {"trial": {"variant", "seed", "what"}, "pretraining": a `PretrainingConfig`} each.
        finetuning: a `FinetuningConfig`; each trial puts its own seed in.
        evaluation: an `EvaluationConfig`; all trials answer the same questions.
        store: directory where artifacts are found by content and checkpoints are kept.
        num_workers: Ray workers of each trial, one per GPU; 0 trains inside the step.
    """
    with dsl.ExitHandler(compare(trials=trials, store=store).set_caching_options(False)):
        corpus = prepare_corpus(config=preparation, store=store)
        shards = tokenize_corpus(config=tokenization, store=store, corpus=corpus.outputs["corpus"])
        with dsl.ParallelFor(items=trials, parallelism=AT_A_TIME) as item:
            pretrained = pretrain(
                config=item.pretraining,
                num_workers=num_workers,
                store=store,
                shards=shards.outputs["shards"],
                trial=item.trial,
            )
            tuned = finetune(
                config=finetuning,
                num_workers=num_workers,
                store=store,
                encoder=pretrained.outputs["encoder"],
                corpus=corpus.outputs["corpus"],
                trial=item.trial,
            )
            scores = evaluate(
                config=evaluation,
                store=store,
                corpus=corpus.outputs["corpus"],
                encoder=pretrained.outputs["encoder"],
                classifier=tuned.outputs["classifier"],
                trial=item.trial,
            )
        for task in (pretrained, tuned, scores):  # each finds its artifact in the store, and tells the new MLflow run
            task.set_caching_options(False)
