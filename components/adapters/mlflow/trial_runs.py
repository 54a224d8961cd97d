"""MLflow: the trials of an ablation. A trial is one variant with one seed: a run nested in the ablation's own run."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from components.adapters.mlflow import runs as mlflow_runs
from components.adapters.mlflow.nested_runs import PARENT, list_nested, name_of, open_nested
from components.adapters.mlflow.runs import answering
from infoxlm_core.errors import InputError


def open_trial(parent: str, pipeline_run: str, trial: Mapping[str, Any]) -> str:
    """Find or create the run of a trial, nested in `parent`; it is open afterwards. Returns its id.

    Args:
        parent: MLflow run of the pipeline run.
        pipeline_run: what tells this pipeline run from others.
        trial: variant, seed, and what the variant is.
    """
    variant, seed = trial["variant"], int(trial["seed"])
    tags = {"variant": variant, "seed": str(seed), "what": trial.get("what", "")}
    return open_nested(parent, f"{pipeline_run}/{variant}/{seed}", f"{variant} seed {seed}", tags)


def read(run_id: str) -> list[dict[str, Any]]:
    """Read the trials of an ablation, oldest first: variant, seed, what, run, metrics (empty if not finished)."""
    return [
        {
            "variant": run.data.tags["variant"],
            "seed": int(run.data.tags["seed"]),
            "what": run.data.tags.get("what", ""),
            "run": run.info.run_id,
            "metrics": dict(run.data.metrics) if run.info.status == "FINISHED" else {},
        }
        for run in list_nested(run_id, "variant")
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
