"""Component: measure the trials of a suite."""

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
    """Measure the trials of a batch; fine-tune the encoder first if the task needs it.

    Args:
        batch: trials with their settings, from `plan_suite`.
        store: directory or s3://bucket/prefix of artifacts and checkpoints.
        num_workers: workers per fine-tuning, one per GPU; 0 trains in this process.
        scores: location and digest of the scores and predictions of each trial.
        metrics: the scores of a single trial, or the number of several trials.
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
    figures: dict[str, float] = {}
    if len(measured) == 1:
        [trial] = measured.values()
        figures = trial.figures
    artifacts.log_metrics(figures or {"points": len(measured)}, metrics)
