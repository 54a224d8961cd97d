"""Component: the sections of a run and single changes to them -> the sections that its steps get, all checked."""

from typing import Any, NamedTuple

from components.platform.stage import stage


@stage
def check_settings(
    store: str,
    preparation: dict[str, Any],
    tokenization: dict[str, Any],
    finetuning: dict[str, Any],
    evaluation: dict[str, Any],
    pretraining: dict[str, Any] = {},  # noqa: B006
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
        ("Output", list),  # the trials: KFP's local runner loops over outputs of no other name
    ],
):
    """Change single fields of sections, and check all of them before a step has cost anything.

    Each step gets its section alone, so that a change of one leaves what Kubeflow remembers of the steps before it.

    Args:
        store: directory, or s3://bucket/prefix, that is told if a setting is wrong.
        preparation: a `PreparationConfig` as a mapping; the others likewise.
        tokenization: see above.
        finetuning: see above.
        evaluation: see above.
        pretraining: see above; of an ablation its trials have one each.
        registration: see above; an ablation registers nothing.
        trials: of an ablation: {"trial", "pretraining"} each.
        overrides: single fields by their names, such as {"pretraining.optimization.steps": 2000}.
        num_workers: of the trainings; must fit their settings.

    Returns:
        the sections with their defaults, and the trials; the settings are references to the store.
    """
    from components.platform import parameters, tracking
    from components.platform.stage_run import stage_run
    from infoxlm_core import run_file

    with stage_run("check_settings", store, reports=False) as step:
        given = {"preparation": preparation, "tokenization": tokenization, "pretraining": pretraining}
        given |= {"finetuning": finetuning, "evaluation": evaluation, "registration": registration}
        given = {name: step.read(section) for name, section in given.items()}
        trials = step.read(trials)
        if trials:
            tracking.tracker().check_sweeps()
            given["pretraining"] = trials[0]["pretraining"]
        overrides = step.read(overrides)
        run = run_file.override_sections(given, overrides, num_workers)
        changed = run_file.override_trials(given, trials, overrides, num_workers)
        run = {name: parameters.by_reference(store, section) for name, section in run.items()}
        for trial in changed:
            trial |= {name: parameters.by_reference(store, trial[name]) for name in trial if name != "trial"}
    return (
        run["preparation"],
        run["tokenization"],
        run["pretraining"],
        run["finetuning"],
        run["evaluation"],
        run["registration"],
        changed,
    )
