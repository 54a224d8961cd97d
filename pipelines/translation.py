"""The machine translation pipelines: one trains and registers a translator, one compares initial weights.

Source: Lample and Conneau 2019, sections 5.3 and 5.4.
"""

from typing import Any

from kfp import dsl

from components.check_settings import check_settings
from components.end_run import end_run
from components.prepare_corpus import prepare_corpus
from components.pretrain import pretrain
from components.register import register
from components.tokenize_corpus import tokenize_corpus
from components.translate import compare_translations, evaluate_translation, translate
from pipelines.steps import (
    LIMITS,
    PARALLEL_TRIALS,
    configure_steps,
    disable_cache,
    give_registry_access,
    request_default_resources,
)


@dsl.pipeline(
    name="infoxlm-translation",
    description="Train a translator between two languages from a pre-trained XLM, evaluate it and register it.",
    pipeline_config=LIMITS,
)
def translation(
    preparation: dict[str, Any],
    tokenization: dict[str, Any],
    pretraining: dict[str, Any],
    translation: dict[str, Any],
    registration: dict[str, Any],
    store: str,
    image: str,
    overrides: dict[str, Any] = {},  # noqa: B006
    num_workers: int = 0,
    data_workers: int = 0,
    cluster: dict[str, Any] = {},  # noqa: B006
) -> None:
    """Prepare and tokenize the text, pre-train a language model, and train, evaluate and register a translator.

    Args:
        preparation: a `PreparationConfig`: corpora, cleaning, held-out text.
        tokenization: a `TokenizationConfig`: vocabulary.
        pretraining: a `PretrainingConfig` with system xlm and objective CLM or MLM.
        translation: a `TranslationConfig`: languages, initial weights, objectives.
        registration: a `RegistrationConfig`: name in the registry, gate metrics.
        store: directory or s3://bucket/prefix of artifacts and checkpoints.
        image: container image of all steps; by digest on a cluster.
        overrides: single settings of these sections, such as {"translation.parallel_share": 0.1}.
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
            translation=translation,
            registration=registration,
            overrides=overrides,
            num_workers=num_workers,
        )
        section = settings.outputs
        prepared = prepare_corpus(config=section["preparation"], **data_options)
        corpus = prepared.outputs["corpus"]
        tokenized = tokenize_corpus(config=section["tokenization"], corpus=corpus, **data_options)
        shards = tokenized.outputs["shards"]
        pretrained = pretrain(config=section["pretraining"], shards=shards, **training_options)
        trained = translate(
            config=section["translation"],
            corpus=corpus,
            shards=shards,
            encoder=pretrained.outputs["encoder"],
            **training_options,
        )
        translator = trained.outputs["translator"]
        evaluated = evaluate_translation(
            config=section["translation"], store=store, corpus=corpus, translator=translator
        )
        scores = evaluated.outputs["scores"]
        registered = register(
            config=section["registration"], store=store, encoder=translator, scores=scores, image=image
        )
    steps = {
        "check the settings": settings,
        "prepare the text": prepared,
        "tokenize the text": tokenized,
        "pre-train the language model": pretrained,
        "train the translator": trained,
        "evaluate the translator": evaluated,
        "register and promote": registered,
        "end the run": ending,
    }
    configure_steps(image, steps)
    disable_cache(registered, ending)  # their results depend on the current champion and on the other steps
    request_default_resources(prepared, tokenized, evaluated, registered)
    give_registry_access(registered)


@dsl.pipeline(
    name="infoxlm-translation-ablations",
    description="Train translators from several initial weights and seeds, and compare their BLEU in one table.",
    pipeline_config=LIMITS,
)
def translation_ablations(
    preparation: dict[str, Any],
    tokenization: dict[str, Any],
    trials: list,  # type: ignore[type-arg]  # KFP compiles a different loop for a list with an item type
    store: str,
    image: str,
    overrides: dict[str, Any] = {},  # noqa: B006
    num_workers: int = 0,
    data_workers: int = 0,
    cluster: dict[str, Any] = {},  # noqa: B006
) -> None:
    """Prepare and tokenize the text, train and evaluate a translator for each trial, and compare the translators.

    Args:
        preparation: a `PreparationConfig`.
        tokenization: a `TokenizationConfig`.
        trials: list of {"trial": {"variant", "seed", "what"}, "pretraining": a `PretrainingConfig`, "translation": a
            `TranslationConfig`}. Trials with the same pre-training share its result.
        store: directory or s3://bucket/prefix of artifacts and checkpoints.
        image: container image of all steps; by digest on a cluster.
        overrides: single settings of these sections, or of every trial.
        num_workers: number of training workers per trial, one per GPU; 0 trains in the step.
        data_workers: number of Ray workers for preparation and tokenization; 0 runs both in their steps.
        cluster: a `ClusterConfig`, to train in RayJobs; if empty, training runs in the steps.
    """
    data_options = {"store": store, "num_workers": data_workers, "cluster": cluster}
    training_options = {"store": store, "num_workers": num_workers, "cluster": cluster}
    compared = compare_translations(trials=trials, store=store)
    with dsl.ExitHandler(compared):
        settings = check_settings(
            store=store,
            preparation=preparation,
            tokenization=tokenization,
            trials=trials,
            overrides=overrides,
            num_workers=num_workers,
        )
        prepared = prepare_corpus(config=settings.outputs["preparation"], **data_options)
        corpus = prepared.outputs["corpus"]
        tokenized = tokenize_corpus(config=settings.outputs["tokenization"], corpus=corpus, **data_options)
        shards = tokenized.outputs["shards"]
        with dsl.ParallelFor(items=settings.outputs["Output"], parallelism=PARALLEL_TRIALS) as item:
            trial = item.trial
            pretrained = pretrain(config=item.pretraining, shards=shards, trial=trial, **training_options)
            trained = translate(
                config=item.translation,
                corpus=corpus,
                shards=shards,
                encoder=pretrained.outputs["encoder"],
                trial=trial,
                **training_options,
            )
            translator = trained.outputs["translator"]
            evaluated = evaluate_translation(
                config=item.translation, store=store, corpus=corpus, translator=translator, trial=trial
            )
    steps = {
        "compare the variants": compared,
        "check the settings": settings,
        "prepare the text": prepared,
        "tokenize the text": tokenized,
        "pre-train a language model": pretrained,
        "train a translator": trained,
        "evaluate a translator": evaluated,
    }
    configure_steps(image, steps)
    disable_cache(compared, pretrained, trained, evaluated)  # a cached step would not log to the new MLflow run
    request_default_resources(prepared, tokenized, evaluated)
