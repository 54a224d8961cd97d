"""Component: points of a suite -> scores; what must be trained for them is trained, on Ray workers or here."""

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
    """Fine-tune an encoder on a task, if it needs that, and measure it; likewise the other points of the batch.

    Args:
        batch: of `plan_suite`: its points, each which model, task, place in the grid and seed, with all settings.
        store: directory, or s3://bucket/prefix, where artifacts are found by content and checkpoints are kept.
        num_workers: Ray workers of a fine-tuning, one per GPU; 0 trains inside this process.
        scores: where scores.json and the predictions of every point are.
        metrics: the main scores of a point that is alone; else how many points there are.
    """
    import json
    from pathlib import Path

    from components.platform import artifacts, measuring
    from components.platform.stage_run import stage_run
    from infoxlm_core import manifests

    with stage_run("measure", store, reports=False) as step:
        points = step.read(batch["points"])
    measured = measuring.measure_all(points, store, num_workers)
    pointers = {name: {"location": one.location, "digest": one.digest} for name, one in measured.items()}
    Path(scores.path).parent.mkdir(parents=True, exist_ok=True)
    manifests.write_atomically(Path(scores.path), json.dumps(pointers, indent=1))
    alone = next(iter(measured.values())).figures if len(measured) == 1 else {}
    artifacts.show(alone or {"points": len(measured)}, metrics)
