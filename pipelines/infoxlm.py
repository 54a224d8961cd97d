"""The DAG: text in many languages -> an evaluated, registered InfoXLM. Reads as a list of sentences.

Each stage's config is one parameter, so that a change to one stage leaves the cached results before it valid.
"""

from kfp import dsl

from components.evaluate import evaluate
from components.finetune import finetune
from components.prepare_corpus import prepare_corpus
from components.pretrain import pretrain
from components.register import register
from components.tokenize_corpus import tokenize_corpus


@dsl.pipeline(name="infoxlm", description="Text in many languages in; an evaluated, registered InfoXLM encoder out.")
def infoxlm(
    preparation: dict,
    tokenization: dict,
    pretraining: dict,
    finetuning: dict,
    evaluation: dict,
    registration: dict,
    store: str,
    num_workers: int = 0,
):
    """Prepare, tokenize, pre-train, fine-tune, evaluate, register.

    Args:
        preparation: a `PreparationConfig`: corpora, cleaning, what is held out.
        tokenization: a `TokenizationConfig`: vocabulary.
        pretraining: a `PretrainingConfig`: model, objectives, contrast, batches, optimization.
        finetuning: a `FinetuningConfig`: labelled text, recipe.
        evaluation: an `EvaluationConfig`: sizes of the test sets.
        registration: a `RegistrationConfig`: name in the registry, metric of the gate.
        store: directory where artifacts are found by content and checkpoints are kept.
        num_workers: Ray workers of the training stages, one per GPU; 0 trains inside the step.
    """
    corpus = prepare_corpus(config=preparation, store=store)
    shards = tokenize_corpus(config=tokenization, store=store, corpus=corpus.outputs["corpus"])
    pretrained = pretrain(config=pretraining, num_workers=num_workers, store=store, shards=shards.outputs["shards"])
    tuned = finetune(
        config=finetuning,
        num_workers=num_workers,
        store=store,
        encoder=pretrained.outputs["encoder"],
        corpus=corpus.outputs["corpus"],
    )
    tuned_start = finetune(
        config=finetuning,
        num_workers=num_workers,
        store=store,
        encoder=pretrained.outputs["start"],
        corpus=corpus.outputs["corpus"],
    ).set_display_name("finetune the untrained encoder")
    scores = evaluate(
        config=evaluation,
        store=store,
        corpus=corpus.outputs["corpus"],
        encoder=pretrained.outputs["encoder"],
        start=pretrained.outputs["start"],
        classifier=tuned.outputs["classifier"],
        classifier_of_start=tuned_start.outputs["classifier"],
    )
    register(
        config=registration, store=store, encoder=pretrained.outputs["encoder"], scores=scores.outputs["scores"]
    ).set_display_name("register and promote")
