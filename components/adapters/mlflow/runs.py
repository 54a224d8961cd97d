"""Find or open the MLflow run that all stages of a pipeline run share."""

import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

from components.adapters.mlflow.connection import artifact_root, check_location, connect, quote
from components.adapters.mlflow.errors import ignore_error, translate_errors
from infoxlm_core.errors import StorageUnavailable

if TYPE_CHECKING:
    from mlflow import MlflowClient

RUN_TAG = "infoxlm.run"
"""Tag with the id of the pipeline run, which all its stages share."""
COMMIT = "INFOXLM_COMMIT"
"""Environment variable with the commit that the image was built from."""
PARENT = "mlflow.parentRunId"
"""MLflow's own tag with the parent of a nested run."""
FAILED_STAGE = "infoxlm.failed_stage"
"""Tag with the failed stage of a failed or cancelled run."""
ERROR = "infoxlm.error"
"""Tag with the cause of a failed or cancelled run."""
_MAX_TRIALS = 5000  # largest number of nested runs in a search result


def open_run(experiment: str, name: str, tags: dict[str, str], store: Path) -> str:
    """Find or create the MLflow run for this pipeline run. Return the run's id.

    KFP's MLflow plugin opens a run for the pipeline run and a nested run for each task, and sets MLFLOW_RUN_ID to the
    nested run. With the plugin, this function returns the outermost run, which the plugin ends. Without the plugin, it
    returns the experiment's run with the same `RUN_TAG`.
    """
    client = connect(store)
    from mlflow.entities import RunTag

    with translate_errors(f"MLflow run {name}"):
        plugin_run_id = os.environ.get("MLFLOW_RUN_ID")
        if plugin_run_id:
            run_id = find_outermost_run(client, plugin_run_id)
        else:
            run_id = find_or_create(client, experiment, name, tags)
        run = client.get_run(run_id)
        check_location(run.info.artifact_uri)
        if run.info.status != "RUNNING":  # an earlier attempt has ended the run, but MLflow logs only to open runs
            client.update_run(run_id, status="RUNNING")
        for tag in {FAILED_STAGE, ERROR} & run.data.tags.keys():  # the previous attempt has set these tags
            client.delete_tag(run_id, tag)
        # If the plugin has created the run, the run does not have these tags yet.
        client.log_batch(run_id, tags=[RunTag(key, value) for key, value in tags.items()])
    return run_id


def find_unfinished(experiment: str, key: str, store: Path) -> list[str]:
    """Return the ids of a pipeline run's MLflow runs, including those of its trials, that are still RUNNING."""
    client = connect(store)
    with translate_errors(f"MLflow run of {key}"):
        mlflow_experiment = client.get_experiment_by_name(experiment)
        if not mlflow_experiment:
            return []
        experiment_ids = [mlflow_experiment.experiment_id]
        run_tag_filter = f"tags.`{RUN_TAG}` = {quote(key)}"
        parents = []
        plugin_run_id = os.environ.get("MLFLOW_RUN_ID")  # set by KFP's MLflow plugin
        if plugin_run_id:
            parents.append(client.get_run(find_outermost_run(client, plugin_run_id)))
        parents.extend(client.search_runs(experiment_ids, run_tag_filter))
        unfinished_ids = [parent.info.run_id for parent in parents if parent.info.status == "RUNNING"]
        for parent in parents:
            unfinished_trials_filter = f"tags.`{PARENT}` = '{parent.info.run_id}' AND attributes.status = 'RUNNING'"
            for trial in client.search_runs(experiment_ids, unfinished_trials_filter, max_results=_MAX_TRIALS):
                unfinished_ids.append(trial.info.run_id)
        return list(dict.fromkeys(unfinished_ids))  # without duplicates: the plugin's run may have `RUN_TAG`, too


def find_outermost_run(client: "MlflowClient", run_id: str) -> str:
    """Return the id of the outermost run that contains a run, or the run's own id. A KFP loop nests its runs deeper."""
    while True:
        parent = client.get_run(run_id).data.tags.get(PARENT)
        if not parent:
            return run_id
        run_id = parent


def find_or_create(client: "MlflowClient", experiment: str, name: str, tags: dict[str, str]) -> str:
    """Return the id of an experiment's oldest run with the same `RUN_TAG`. Create a run if none exists.

    The caller must hold a lock, because two processes that create a run at the same time may each see only their own.
    """
    experiment_id = _find_or_create_experiment(client, experiment)
    existing_id = _find_oldest_run(client, experiment_id, tags[RUN_TAG])
    if existing_id:
        return existing_id
    created_id = client.create_run(experiment_id, tags=tags, run_name=name).info.run_id
    # MLflow's client repeats a request whose answer was lost, and MLflow then creates a second run.
    oldest_id = _find_oldest_run(client, experiment_id, tags[RUN_TAG])
    if not oldest_id:
        raise StorageUnavailable("MLflow does not list the run that was just created: check the server, then run again")
    if oldest_id != created_id:
        client.delete_run(created_id)
    return oldest_id


def _find_oldest_run(client: "MlflowClient", experiment_id: str, run_tag: str) -> str | None:
    """Return the id of an experiment's oldest run with this `RUN_TAG` value, or None if no run has it."""
    run_tag_filter = f"tags.`{RUN_TAG}` = {quote(run_tag)}"
    runs = client.search_runs([experiment_id], run_tag_filter, order_by=["start_time ASC", "run_id ASC"])
    return runs[0].info.run_id if runs else None


def make_source_tags() -> dict[str, str]:
    """Return MLflow's tags for the commit of the image or the checkout. Return no tags if the commit is unknown."""
    commit = os.environ.get(COMMIT) or _read_checkout_commit()
    if not re.fullmatch("[0-9a-f]{40}", commit):
        return {}
    return {"mlflow.source.name": "infoxlm", "mlflow.source.git.commit": commit}


def _read_checkout_commit() -> str:
    """Return the commit of the Git checkout that contains this file, or "" outside a checkout."""
    root = Path(__file__).parents[3]
    git = shutil.which("git")
    if not git or not (root / ".git").exists():
        return ""
    completed = subprocess.run([git, "-C", str(root), "rev-parse", "HEAD"], capture_output=True, text=True)  # noqa: S603
    return completed.stdout.strip()


def _find_or_create_experiment(client: "MlflowClient", name: str) -> str:
    """Return the id of an experiment. If it does not exist, create it with artifacts below `artifact_root`."""
    experiment = client.get_experiment_by_name(name)
    if experiment:
        return experiment.experiment_id
    location = artifact_root()  # a server chooses the location itself
    with ignore_error("RESOURCE_ALREADY_EXISTS"):
        return client.create_experiment(name, location if location.startswith("file:") else None)
    return _find_or_create_experiment(client, name)  # another stage has created the experiment meanwhile
