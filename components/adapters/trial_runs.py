"""MLflow: the trials of an ablation. A trial is one variant with one seed: a run nested in the ablation's own run."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from components.adapters import mlflow_runs
from components.adapters.mlflow_runs import RUN_TAG, answering
from infoxlm_core.errors import InputError

PARENT = "mlflow.parentRunId"
"""MLflow's own tag of a nested run."""


def open_trial(parent: str, pipeline_run: str, trial: Mapping[str, Any]) -> str:
    """Find or create the run of a trial, nested in `parent`; it is open afterwards. Returns its id.

    Args:
        parent: MLflow run of the pipeline run.
        pipeline_run: what tells this pipeline run from others.
        trial: variant, seed, and what the variant is.
    """
    from mlflow import MlflowClient
    from mlflow.entities import RunTag

    variant, seed = trial["variant"], int(trial["seed"])
    tags = {RUN_TAG: f"{pipeline_run}/{variant}/{seed}", PARENT: root(parent)}
    tags |= {"variant": variant, "seed": str(seed), "what": trial.get("what", "")}
    client = MlflowClient()
    with answering(f"MLflow run of {variant} seed {seed}"):
        experiment = client.get_experiment(client.get_run(parent).info.experiment_id).name
        run_id = mlflow_runs.find_or_create(client, experiment, f"{variant} seed {seed}", tags)
        client.update_run(run_id, status="RUNNING")
        client.log_batch(run_id, tags=[RunTag(key, value) for key, value in tags.items()])
    return run_id


def root(run_id: str) -> str:
    """The run that a run is nested in (as one that KFP opens for a task is), else itself."""
    from mlflow import MlflowClient

    return MlflowClient().get_run(run_id).data.tags.get(PARENT, run_id)


def name_of(run_id: str) -> str:
    """The name of a run, or of the one that it is nested in."""
    from mlflow import MlflowClient

    with answering(f"MLflow run {run_id}"):
        return MlflowClient().get_run(root(run_id)).info.run_name or run_id


def read(run_id: str) -> list[dict[str, Any]]:
    """Read the trials of an ablation, oldest first: variant, seed, what, run, metrics (empty if not finished)."""
    from mlflow import MlflowClient

    client = MlflowClient()
    with answering(f"trials of MLflow run {run_id}"):
        parent = root(run_id)
        experiment = client.get_run(parent).info.experiment_id
        wanted = f"tags.`{PARENT}` = '{parent}' AND tags.variant LIKE '%'"
        runs = client.search_runs([experiment], wanted, max_results=5000, order_by=["start_time ASC", "run_id ASC"])
    return [
        {
            "variant": run.data.tags["variant"],
            "seed": int(run.data.tags["seed"]),
            "what": run.data.tags.get("what", ""),
            "run": run.info.run_id,
            "metrics": dict(run.data.metrics) if run.info.status == "FINISHED" else {},
        }
        for run in runs
    ]


def expect(found: Sequence[dict[str, Any]], trials: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The trials that there should be, in their order; one that was not found has no metrics."""
    known = {(trial["variant"], trial["seed"]): trial for trial in found}
    return [
        known.get((trial["variant"], int(trial["seed"]))) or {**trial, "seed": int(trial["seed"]), "metrics": {}}
        for trial in trials
    ]


def find_ablation(which: str, store: Path) -> tuple[str, str]:
    """Id and name of the run of an ablation.

    Args:
        which: `latest`, an id, or a name (then the newest of that name).
        store: where MLflow's database is if MLFLOW_TRACKING_URI names no server.

    Raises:
        InputError: there is no such run, or it has no trials.
    """
    if not os.environ.get("MLFLOW_TRACKING_URI") and not (store / "mlflow.db").is_file():
        raise InputError(f"{store} has no mlflow.db: give the --store of an ablation, or set MLFLOW_TRACKING_URI")
    client = mlflow_runs.connect(store)
    with answering("runs of ablations"):
        experiments = [experiment.experiment_id for experiment in client.search_experiments()]
        trials = client.search_runs(
            experiments, "tags.variant LIKE '%'", max_results=5000, order_by=["start_time DESC", "run_id ASC"]
        )
        ids = list(dict.fromkeys(run.data.tags[PARENT] for run in trials if PARENT in run.data.tags))
        if not ids:
            raise InputError(f"{mlflow_runs.tracking_uri(store)} has no ablation: run `infoxlm ablate` first")
        named = {run_id: name_of(run_id) for run_id in ids}
    for run_id, name in named.items():
        if which in ("latest", run_id, name):
            return run_id, name
    known = ", ".join(f"{name} ({run_id})" for run_id, name in list(named.items())[:10])
    raise InputError(f"no ablation {which!r}; known are {known}")
