"""Component: trials of a suite -> scores."""

from typing import Any

from kfp import dsl

from components.platform.stage import stage


@stage
def measure(
    batch: dict[str, Any],
    store: str,
    num_workers: int,
    scores: dsl.Output[dsl.Artifact],
    metrics: dsl.Output[dsl.Metrics],
) -> None:
    """Measure the trials of a batch, each after fine-tuning its encoder if its task needs that.

    Args:
        batch: of `plan_suite`: its trials, each with its settings.
        store: directory, or s3://bucket/prefix, where artifacts are found by content and checkpoints are kept.
        num_workers: Ray workers of a fine-tuning, one per GPU; 0 trains inside this process.
        scores: the locations of scores.json and predictions of every trial.
        metrics: the scores of the trial; of several trials only their number.
    """
    import json
    from pathlib import Path

    from components.platform import artifacts, measuring
    from components.platform.stage_run import stage_run
    from infoxlm_core import manifests

    with stage_run("measure", store, reports=False) as step:
        planned = step.read(batch["points"])
    measured = measuring.measure_all(planned, store, num_workers)
    pointers = {name: {"location": trial.location, "digest": trial.digest} for name, trial in measured.items()}
    Path(scores.path).parent.mkdir(parents=True, exist_ok=True)
    manifests.write_atomically(Path(scores.path), json.dumps(pointers, indent=1))
    figures = next(iter(measured.values())).figures if len(measured) == 1 else {}
    artifacts.show(figures or {"points": len(measured)}, metrics)
