"""MLflow: the points of a suite: each a run nested in the suite's own, with its scores as an artifact."""

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from components.adapters.mlflow import runs as mlflow_runs
from components.adapters.mlflow.nested_runs import list_nested, open_nested
from components.adapters.mlflow.runs import answering

SCORES = "scores.json"


def open_point(parent: str, pipeline_run: str, point: Mapping[str, Any]) -> str:
    """Find or create the run of a point, nested in `parent`; it is open afterwards. Returns its id.

    Args:
        parent: MLflow run of the pipeline run.
        pipeline_run: what tells this pipeline run from others.
        point: model, task, seed, grid, and the name of the whole.
    """
    grid = " ".join(f"{field}={str(value).removesuffix('.0')}" for field, value in sorted(point["grid"].items()))
    tags = {"point": point["name"], "model": point["model"], "task": point["task"], "grid": grid}
    tags["seed"] = str(int(point["seed"]))
    return open_nested(parent, f"{pipeline_run}/{point['name']}", point["name"], tags)


def read(run_id: str) -> dict[str, dict[str, Any]]:
    """Read the scores of the points of a suite that are finished, by the names of the points."""
    from mlflow import MlflowClient

    client, found = MlflowClient(), {}
    for run in list_nested(run_id, "point"):
        if run.info.status == "FINISHED":
            with answering(f"scores of MLflow run {run.info.run_id}"), tempfile.TemporaryDirectory() as folder:
                path = client.download_artifacts(run.info.run_id, SCORES, folder)
                found[run.data.tags["point"]] = json.loads(Path(path).read_bytes())
    return found


def close_unfinished(run_id: str) -> None:
    """End the runs of points that nobody works on any more."""
    for run in list_nested(run_id, "point"):
        if run.info.status == "RUNNING":
            mlflow_runs.end_run(run.info.run_id, "FAILED")
