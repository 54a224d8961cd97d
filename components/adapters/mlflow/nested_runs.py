"""MLflow: runs nested in the run of a pipeline: the trials of an ablation, the points of a suite."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from components.adapters.mlflow import runs as mlflow_runs
from components.adapters.mlflow.runs import PARENT, RUN_TAG, answering

if TYPE_CHECKING:
    from mlflow.entities import Run


def open_nested(parent: str, key: str, name: str, tags: Mapping[str, str]) -> str:
    """Find or create a run nested in `parent`; it is open afterwards. Returns its id.

    Args:
        parent: MLflow run of the pipeline run.
        key: what tells this run from all others; the same key finds the same run.
        name: what people read.
        tags: of the run.
    """
    from mlflow import MlflowClient
    from mlflow.entities import RunTag

    client = MlflowClient()
    with answering(f"MLflow run of {name}"):
        tags = {**tags, RUN_TAG: key, PARENT: root(parent)}
        experiment = client.get_experiment(client.get_run(parent).info.experiment_id).name
        run_id = mlflow_runs.find_or_create(client, experiment, name, tags)
        client.update_run(run_id, status="RUNNING")
        client.log_batch(run_id, tags=[RunTag(key, value) for key, value in tags.items()])
    return run_id


def root(run_id: str) -> str:
    """The run that a run is nested in (as one that KFP opens for a task is), else itself."""
    from mlflow import MlflowClient

    return mlflow_runs.outermost(MlflowClient(), run_id)


def name_of(run_id: str) -> str:
    """The name of a run, or of the one that it is nested in."""
    from mlflow import MlflowClient

    with answering(f"MLflow run {run_id}"):
        return MlflowClient().get_run(root(run_id)).info.run_name or run_id


def list_nested(run_id: str, tag: str) -> list["Run"]:
    """The runs nested in a run that have a tag, oldest first."""
    from mlflow import MlflowClient

    client = MlflowClient()
    with answering(f"runs nested in MLflow run {run_id}"):
        parent = root(run_id)
        experiment = client.get_run(parent).info.experiment_id
        wanted = f"tags.`{PARENT}` = '{parent}' AND tags.{tag} LIKE '%'"
        return list(
            client.search_runs([experiment], wanted, max_results=5000, order_by=["start_time ASC", "run_id ASC"])
        )
