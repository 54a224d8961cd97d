"""Runs of MLflow: all stages of a pipeline run find or open the same one, and log to it."""

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from components.adapters.mlflow.connection import artifact_root, check_location, connect, quote
from components.adapters.mlflow.errors import translate_errors
from infoxlm_core.corpora.datasets import Dataset
from infoxlm_core.errors import ConfigMismatch, StorageUnavailable
from infoxlm_core.results.trials import LINK

if TYPE_CHECKING:
    from mlflow import MlflowClient

RUN_TAG = "infoxlm.run"
"""Tag whose value all stages of one pipeline run share."""
COMMIT = "INFOXLM_COMMIT"
"""Environment variable of the image: the commit that it was built from."""
PARENT = "mlflow.parentRunId"
"""MLflow's own tag of a nested run."""


def open_run(experiment: str, name: str, tags: dict[str, str], default_store: Path) -> str:
    """Find or create the MLflow run of this pipeline run; return its id.

    KFP's MLflow plugin opens a run for the pipeline run, one nested in it for each task, and names the latter by
    MLFLOW_RUN_ID: the outermost one is adopted, and left to the plugin to end. Without the plugin it is the run of the
    experiment with the same `RUN_TAG`. Either way all stages share one, though they are different processes.
    """
    client = connect(default_store)
    from mlflow.entities import RunTag

    with translate_errors(f"MLflow run {name}"):
        theirs = os.environ.get("MLFLOW_RUN_ID")
        run_id = outermost(client, theirs) if theirs else find_or_create(client, experiment, name, tags)
        run = client.get_run(run_id)
        check_location(run.info.artifact_uri)
        if run.info.status != "RUNNING":  # a retried stage; points are only taken by a run that is open
            client.update_run(run_id, status="RUNNING")
        client.log_batch(run_id, tags=[RunTag(key, value) for key, value in tags.items()])
    return run_id


def page(run_id: str) -> str:
    """Where MLflow's pages show a run, below `#/`.

    Its last part: without it MLflow 3 opens any experiment as one of a chat application, whatever its tags say.
    """
    from mlflow import MlflowClient

    with translate_errors(f"MLflow run {run_id}"):
        experiment = MlflowClient().get_run(run_id).info.experiment_id
    return f"experiments/{experiment}/runs/{run_id}?workflowType=machine_learning"


def end_run(run_id: str, status: str = "FINISHED") -> None:
    """End a run of ours; the one that MLFLOW_RUN_ID names, or is nested in, is left to whoever opened it."""
    from mlflow import MlflowClient

    client, theirs = MlflowClient(), os.environ.get("MLFLOW_RUN_ID")
    with translate_errors(f"MLflow run {run_id}"):
        if not theirs or run_id not in (theirs, outermost(client, theirs)):
            client.set_terminated(run_id, status)


def outermost(client: "MlflowClient", run_id: str) -> str:
    """The run that a run is nested in, over all levels (a task in a loop is two or three deep); else itself."""
    while parent := client.get_run(run_id).data.tags.get(PARENT):
        run_id = parent
    return run_id


def log_params(run_id: str, config: Mapping[str, Any]) -> None:
    """Log a nested config as parameters such as `pretraining.optimization.steps`; what is there already may repeat.

    Raises:
        ConfigMismatch: a parameter of the run has another value; MLflow's parameters cannot change.
    """
    from mlflow import MlflowClient
    from mlflow.entities import Param
    from mlflow.utils.validation import MAX_PARAM_VAL_LENGTH, MAX_PARAMS_TAGS_PER_BATCH

    values = {key: str(value)[:MAX_PARAM_VAL_LENGTH] for key, value in _flatten(config)}
    client = MlflowClient()
    with translate_errors(f"parameters of MLflow run {run_id}"):
        known = client.get_run(run_id).data.params
        for key in values.keys() & known.keys():
            if values[key] != known[key]:
                raise ConfigMismatch(
                    f"MLflow run {run_id} has {key} = {known[key]:.120}, not {values[key]:.120}: "
                    "set it back or start another run"
                )
        new = [Param(key, values[key]) for key in values if key not in known]
        for first in range(0, len(new), MAX_PARAMS_TAGS_PER_BATCH):
            client.log_batch(run_id, params=new[first : first + MAX_PARAMS_TAGS_PER_BATCH])


def log_metrics(run_id: str, metrics: Mapping[str, float], step: int = 0) -> None:
    """Log results of a stage; the same again is stored once."""
    from mlflow import MlflowClient
    from mlflow.utils.validation import MAX_METRICS_PER_BATCH

    client = MlflowClient()
    with translate_errors(f"metrics of MLflow run {run_id}"):
        found = points(metrics, step, client.get_run(run_id).info.start_time)
        for first in range(0, len(found), MAX_METRICS_PER_BATCH):
            client.log_batch(run_id, found[first : first + MAX_METRICS_PER_BATCH])


def read_metrics(run_id: str) -> dict[str, float]:
    """Return the newest value of each metric of a run."""
    from mlflow import MlflowClient

    with translate_errors(f"metrics of MLflow run {run_id}"):
        return dict(MlflowClient().get_run(run_id).data.metrics)


def log_artifacts(run_id: str, source: Path, path: str | None = None) -> None:
    """Copy a file, or all files below a directory, into the folder `path` of the run."""
    from mlflow import MlflowClient

    client = MlflowClient()
    with translate_errors(f"artifacts of MLflow run {run_id}"):
        (client.log_artifacts if source.is_dir() else client.log_artifact)(run_id, str(source), path)


def log_datasets(run_id: str, datasets: Sequence[Dataset], source: str) -> None:
    """List corpora as what a run has read; the same again is stored once."""
    from mlflow import MlflowClient
    from mlflow.entities import Dataset as Input
    from mlflow.entities import DatasetInput, InputTag
    from mlflow.utils.validation import MAX_DATASET_DIGEST_SIZE

    found = [
        DatasetInput(
            Input(
                name=one.name,
                digest=one.digest[:MAX_DATASET_DIGEST_SIZE],
                source_type="s3" if source.startswith("s3:") else "local",
                source=json.dumps({"uri": source}),
                profile=json.dumps({"languages": one.languages, **one.lines}),
            ),
            [InputTag("mlflow.data.context", "evaluation" if one.held_out else "training")],
        )
        for one in datasets
    ]
    with translate_errors(f"datasets of MLflow run {run_id}"):
        MlflowClient().log_inputs(run_id, found)


def annotate(run_id: str, text: str) -> None:
    """Make a text the description of a run; its links to files of the run become those of MLflow's pages."""
    from mlflow import MlflowClient

    at, _, query = page(run_id).partition("?")
    linked = re.sub(rf"\]\({LINK}([^)\s]+)\)", lambda link: f"](#/{at}/artifacts/{link[1]}?{query})", text)
    with translate_errors(f"description of MLflow run {run_id}"):
        MlflowClient().set_tag(run_id, "mlflow.note.content", linked)


def source() -> dict[str, str]:
    """MLflow's tags of where the code came from, if that is known: of an image, or of a checkout."""
    root = Path(__file__).parents[3]
    commit = os.environ.get(COMMIT, "")
    if not commit and (root / ".git").exists() and (git := shutil.which("git")):
        asked = subprocess.run([git, "-C", str(root), "rev-parse", "HEAD"], capture_output=True, text=True)  # noqa: S603
        commit = asked.stdout.strip()
    known = re.fullmatch("[0-9a-f]{40}", commit)
    return {"mlflow.source.name": "infoxlm", "mlflow.source.git.commit": commit} if known else {}


def points(values: Mapping[str, float], step: int, start_ms: int) -> list[Any]:
    """Values of one step as MLflow's points.

    MLflow keeps a point once only if its time is the same too: it follows from the step, not from a clock.
    """
    from mlflow.entities import Metric

    return [Metric(name, float(value), start_ms + 1000 * step, step) for name, value in values.items()]


def find_or_create(client: "MlflowClient", experiment: str, name: str, tags: dict[str, str]) -> str:
    """The oldest run of an experiment with the same `RUN_TAG`, made if there is none."""
    experiment_id = _experiment(client, experiment)

    def find() -> list[Any]:
        return client.search_runs(
            [experiment_id], f"tags.`{RUN_TAG}` = {quote(tags[RUN_TAG])}", order_by=["start_time ASC", "run_id ASC"]
        )

    if found := find():
        return found[0].info.run_id
    created = client.create_run(experiment_id, tags=tags, run_name=name).info.run_id
    if not (found := find()):
        raise StorageUnavailable("MLflow does not show the run that was just made: see whether it is one, run again")
    if (first := found[0].info.run_id) != created:  # another stage was as fast: the older run stands
        client.delete_run(created)
    return first


def _experiment(client: "MlflowClient", name: str) -> str:
    from mlflow.exceptions import MlflowException

    if found := client.get_experiment_by_name(name):
        return found.experiment_id
    location = artifact_root()
    try:
        return client.create_experiment(name, location if location.startswith("file:") else None)
    except MlflowException as error:
        if error.error_code != "RESOURCE_ALREADY_EXISTS":
            raise
        return _experiment(client, name)  # another stage was faster


def _flatten(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping) and value:
        for key, part in value.items():
            yield from _flatten(part, f"{prefix}.{key}" if prefix else str(key))
    elif isinstance(value, (list, tuple)) and any(isinstance(part, Mapping) for part in value):
        yield from _flatten({str(index): part for index, part in enumerate(value)}, prefix)
    else:
        yield prefix, list(value) if isinstance(value, tuple) else value
