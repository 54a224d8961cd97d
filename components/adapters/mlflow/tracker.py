"""The tracker `mlflow`. It implements the protocols of `components.platform.tracking`."""

import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from components.adapters.mlflow import outbox, runs, trial_runs
from components.adapters.mlflow.errors import translate_errors
from infoxlm_core.corpora.datasets import Dataset
from infoxlm_core.errors import ConfigMismatch, InputError, without_password
from infoxlm_core.results.trials import LINK, Trial

if TYPE_CHECKING:
    from mlflow import MlflowClient

PAGES = "INFOXLM_MLFLOW_PAGES"
"""Environment variable with MLflow's URL for people, if it differs from the URL for steps."""


def open_run(key: str, name: str, store: str, local_store: Path, trial: Trial | None) -> "MlflowRun":
    """Find or open the MLflow run for a pipeline run, or the nested run for a trial.

    Raises:
        InputError: MLFLOW_TRACKING_URI is not set, although several machines share the store.
    """
    if "://" in store and not os.environ.get("MLFLOW_TRACKING_URI"):
        raise InputError(f"{store} is shared by many machines, but a local SQLite file is not: set MLFLOW_TRACKING_URI")
    tags = {runs.RUN_TAG: key, **runs.make_source_tags()}
    run_id = runs.open_run(_experiment_name(), name, tags, local_store)
    if trial:
        run_id = trial_runs.open_trial(run_id, key, trial)
    return MlflowRun(run_id)


def find_run(run_id: str) -> "MlflowRun":
    """Return a run that another process has opened."""
    return MlflowRun(run_id)


def end_unfinished(key: str, local_store: Path, status: str, stage: str, message: str) -> None:
    """End a pipeline run's MLflow run and all nested runs. Skip runs that have ended or do not exist."""
    for run_id in runs.find_unfinished(_experiment_name(), key, local_store):
        MlflowRun(run_id).end(status, stage, message)


def check_sweeps_supported() -> None:
    """Do nothing, because MLflow stores trials."""


def find_ablation(ablation: str, local_store: Path) -> "MlflowRun":
    """Return the run of an ablation. See `trial_runs.find_ablation`."""
    return MlflowRun(trial_runs.find_ablation(ablation, local_store))


class MlflowRun:
    """An MLflow run for stages to log to. A value that is logged twice is stored once."""

    def __init__(self, run_id: str) -> None:
        self.id = run_id

    @property
    def name(self) -> str:
        """Name of the outermost run that contains this run, or this run's own name."""
        return trial_runs.read_name(self.id)

    def log_params(self, config: Mapping[str, Any]) -> None:
        """Log a nested config as parameters such as `pretraining.optimization.steps`.

        Raises:
            ConfigMismatch: a logged parameter has a different value. MLflow's parameters cannot change.
        """
        from mlflow.entities import Param
        from mlflow.utils.validation import MAX_PARAM_VAL_LENGTH

        # Truncate values that MLflow would refuse. The artifacts contain the complete settings.
        values = {name: value[:MAX_PARAM_VAL_LENGTH] for name, value in _flatten(config).items()}
        with translate_errors(f"parameters of MLflow run {self.id}"):
            logged_values = self._client.get_run(self.id).data.params
            new_params = []
            for name, value in values.items():
                if name not in logged_values:
                    new_params.append(Param(name, value))
                elif value != logged_values[name]:
                    raise ConfigMismatch(
                        f"MLflow run {self.id} has {name} = {logged_values[name]:.120}, not {value:.120}: "
                        "change it back, or start another run"
                    )
            self._client.log_batch(self.id, params=new_params)

    def log_metrics(self, metrics: Mapping[str, float], step: int = 0) -> None:
        """Log results by metric name."""
        with translate_errors(f"metrics of MLflow run {self.id}"):
            start_ms = self._client.get_run(self.id).info.start_time
            self._client.log_batch(self.id, outbox.make_metrics(metrics, step, start_ms))

    def read_metrics(self) -> dict[str, float]:
        """Return the newest value of each metric."""
        with translate_errors(f"metrics of MLflow run {self.id}"):
            return dict(self._client.get_run(self.id).data.metrics)

    def log_artifacts(self, source: Path, path: str | None = None) -> None:
        """Copy a file, or all files below a directory, into the run's directory `path`."""
        with translate_errors(f"artifacts of MLflow run {self.id}"):
            if source.is_dir():
                self._client.log_artifacts(self.id, str(source), path)
            else:
                self._client.log_artifact(self.id, str(source), path)

    def log_datasets(self, datasets: Sequence[Dataset], source: str) -> None:
        """Log corpora as inputs of the run."""
        from mlflow import entities
        from mlflow.utils.validation import MAX_DATASET_DIGEST_SIZE

        inputs = []
        for dataset in datasets:
            mlflow_dataset = entities.Dataset(
                name=dataset.name,
                digest=dataset.digest[:MAX_DATASET_DIGEST_SIZE],  # MLflow refuses longer digests
                source_type="s3" if source.startswith("s3:") else "local",
                source=json.dumps({"uri": source}),
                profile=json.dumps({"languages": dataset.languages, **dataset.lines}),
            )
            context = "evaluation" if dataset.held_out else "training"
            inputs.append(entities.DatasetInput(mlflow_dataset, [entities.InputTag("mlflow.data.context", context)]))
        with translate_errors(f"datasets of MLflow run {self.id}"):
            self._client.log_inputs(self.id, inputs)

    def annotate(self, text: str) -> None:
        """Set the run's description. Links to the run's files become links to MLflow's pages."""
        path, _, query = self._path.partition("?")  # the query belongs at the end of each link
        linked_text = re.sub(rf"\]\({LINK}([^)\s]+)\)", rf"](#/{path}/artifacts/\1?{query})", text)
        with translate_errors(f"description of MLflow run {self.id}"):
            self._client.set_tag(self.id, "mlflow.note.content", linked_text)

    def log_curves(self, path: Path, prefix: str = "") -> None:
        """Send all points of a `metrics.jsonl` that MLflow did not receive during the training."""
        outbox.ship(path, self.id, prefix)

    def follow(self, path: Path) -> outbox.MlflowTracker:
        """Return a tracker for a training run. It writes points to a file, and sends them during the training."""
        return outbox.MlflowTracker(path, self.id)

    def trials(self) -> list[trial_runs.TrialRun]:
        """Return the trials of a sweep, oldest first."""
        return trial_runs.read_trials(self.id)

    def end(self, status: str = "FINISHED", stage: str = "", message: str = "") -> None:
        """End the run, unless KFP's MLflow plugin ends it.

        The plugin ends the run whose id is in MLFLOW_RUN_ID, and the outermost run that contains it.

        Args:
            status: FINISHED, FAILED or KILLED.
            stage: name of the failed stage, stored as a tag.
            message: error message, stored as a tag.
        """
        plugin_run_id = os.environ.get("MLFLOW_RUN_ID")
        with translate_errors(f"MLflow run {self.id}"):
            if stage:
                self._client.set_tag(self.id, runs.FAILED_STAGE, stage)
            if message:
                self._client.set_tag(self.id, runs.ERROR, message)
            if plugin_run_id and self.id in (plugin_run_id, runs.find_outermost_run(self._client, plugin_run_id)):
                return
            self._client.set_terminated(self.id, status)

    @property
    def page(self) -> str:
        """URL of the run's page, or "" without a server."""
        server = os.environ.get(PAGES) or _server_uri()
        if not server.startswith("http"):
            return ""
        return f"{server.rstrip('/')}/#/{self._path}"

    def describe(self) -> str:
        """Return console instructions for opening the run's page."""
        page = self.page
        if page:
            return f"MLflow      {page}"
        return (
            f"MLflow      mlflow ui --backend-store-uri {_server_uri()}   (run {self.id})\n"
            f"            then http://127.0.0.1:5000/#/{self._path}"
        )

    @property
    def _path(self) -> str:
        """Path of the run's page. The query keeps MLflow 3 from displaying the experiment as a chat application."""
        with translate_errors(f"MLflow run {self.id}"):
            experiment_id = self._client.get_run(self.id).info.experiment_id
        return f"experiments/{experiment_id}/runs/{self.id}?workflowType=machine_learning"

    @property
    def _client(self) -> "MlflowClient":
        from mlflow import MlflowClient

        return MlflowClient()


def _experiment_name() -> str:
    """Return the experiment name from MLFLOW_EXPERIMENT_NAME, or the default."""
    return os.environ.get("MLFLOW_EXPERIMENT_NAME", "infoxlm")


def _server_uri() -> str:
    """Return MLFLOW_TRACKING_URI without its password."""
    return without_password(os.environ["MLFLOW_TRACKING_URI"]).rstrip("/")


def _flatten(value: Any, prefix: str = "") -> dict[str, str]:
    """Flatten a nested config to text values by dotted name, such as `pretraining.optimization.steps`.

    In a list of mappings, each element is named after its index. Any other list is a single value.
    """
    if isinstance(value, tuple):
        value = list(value)  # a config from JSON has lists instead of tuples, but must give the same text
    if isinstance(value, list) and any(isinstance(element, Mapping) for element in value):
        value = {str(index): element for index, element in enumerate(value)}
    if not isinstance(value, Mapping) or not value:
        return {prefix: str(value)}
    flat_values: dict[str, str] = {}
    for key, element in value.items():
        name = f"{prefix}.{key}" if prefix else str(key)
        flat_values |= _flatten(element, name)
    return flat_values
