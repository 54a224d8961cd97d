"""Component: apply overrides to a run's settings, and validate the result."""

from typing import Any, NamedTuple

from components.platform.stage import stage


@stage
def check_settings(
    store: str,
    preparation: dict[str, Any],
    tokenization: dict[str, Any],
    finetuning: dict[str, Any] = {},  # noqa: B006
    evaluation: dict[str, Any] = {},  # noqa: B006
    pretraining: dict[str, Any] = {},  # noqa: B006
    translation: dict[str, Any] = {},  # noqa: B006
    registration: dict[str, Any] = {},  # noqa: B006
    trials: list = [],  # type: ignore[type-arg]  # noqa: B006
    overrides: dict[str, Any] = {},  # noqa: B006
    num_workers: int = 0,
) -> NamedTuple(  # type: ignore[valid-type]  # KFP reads the outputs from the call
    "Settings",
    [
        ("preparation", dict),
        ("tokenization", dict),
        ("pretraining", dict),
        ("finetuning", dict),
        ("evaluation", dict),
        ("registration", dict),
        ("translation", dict),
        ("Output", list),  # the trials; KFP's local runner can only loop over an output named `Output`
    ],
):
    """Apply overrides to a run's settings, and validate all settings before an expensive step starts.

    The check includes the guard set, the files of labelled text without their rows, and the start model's tokenizer and
    config.json, but not its weights.

    Each later step receives only its own section of the settings. A change of one section therefore leaves the cached
    results of earlier steps valid.

    Args:
        store: directory or s3://bucket/prefix that receives the error message if a setting is invalid.
        preparation: a `PreparationConfig` as a mapping, like the other sections.
        tokenization: a `TokenizationConfig`.
        finetuning: a `ClassificationConfig`.
        evaluation: an `EvaluationConfig`.
        pretraining: a `PretrainingConfig`; empty for an ablation, whose trials have their own.
        translation: a `TranslationConfig`; empty unless the pipeline trains a translator.
        registration: a `RegistrationConfig`; empty for an ablation, which registers nothing.
        trials: trials of an ablation, each with the keys "trial", "pretraining" and, for translators, "translation".
        overrides: single settings by dotted name, such as {"pretraining.optimization.steps": 2000}.
        num_workers: number of training workers; the batches must have work for every worker.

    Returns:
        The sections with their defaults, and the trials. All settings are references to the store.
    """
    from components.platform import parameters, sources, tracking
    from components.platform.stage_run import stage_run
    from infoxlm_core import run_file, tasks
    from infoxlm_core.config import EvaluationConfig, PretrainingConfig

    with stage_run("check_settings", store, reports_to_tracker=False) as step:
        sections = {
            "preparation": step.read(preparation),
            "tokenization": step.read(tokenization),
            "pretraining": step.read(pretraining),
            "finetuning": step.read(finetuning),
            "evaluation": step.read(evaluation),
            "registration": step.read(registration),
        }
        output_names = [*sections, "translation"]  # in the order of the signature
        if translation:
            sections["translation"] = step.read(translation)
        trials = step.read(trials)
        overrides = step.read(overrides)
        if trials:
            tracking.get_tracker().check_sweeps_supported()  # fail now instead of after the training
            # Only the trials of an ablation have these sections. The first trial completes the run for the check.
            first_trial = trials[0]
            sections |= {name: first_trial[name] for name in ("pretraining", "translation") if name in first_trial}
        checked = run_file.override_sections(sections, overrides, num_workers)
        checked_trials = run_file.override_all_trials(sections, trials, overrides, num_workers)

        if checked["tokenization"].get("model"):  # a wrong name must not stop the run after hours of preparation
            sources.fetch_tokenizer(checked["tokenization"]["model"], step.local_store)
        pretraining_sections = [trial["pretraining"] for trial in checked_trials] or [checked["pretraining"]]
        for section in pretraining_sections:
            sources.check_start(PretrainingConfig.parse(section, "pretraining"), step.local_store)
        # The labelled text is read, and the guard set is measured, only after the training.
        sources.check_labelled_text(tasks.parse(checked["finetuning"], "finetuning"), step.local_store)
        sources.check_guard_set(EvaluationConfig.parse(checked["evaluation"], "evaluation"), step.local_store)

        # Return references, because the settings of many trials are too large for a Kubeflow parameter.
        for trial in checked_trials:
            for name in trial:
                if name != "trial":  # a small mapping: variant, seed, description and rank
                    trial[name] = parameters.write_reference(store, trial[name])
        # KFP requires all outputs, even if this run has no translator.
        references = [parameters.write_reference(store, checked.get(name, {})) for name in output_names]
        return (*references, checked_trials)
