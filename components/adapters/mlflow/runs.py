"""MLflow: where it is, and the one run that all stages of a pipeline run share.

Where MLflow is comes from the platform (MLFLOW_TRACKING_URI), never from a pipeline parameter; without it everything
goes to a SQLite file in the local store. MLflow takes seconds to import, so it is imported where it is used.
"""

import functools
import gc
import json
import logging
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from components.adapters.mlflow import moved, tables
from components.settings import environment
from infoxlm_core import locks, outside
from infoxlm_core.corpora.datasets import Dataset
from infoxlm_core.errors import ConfigMismatch, InfoXLMError, InputError, StorageUnavailable, one_line, without_password
from infoxlm_core.results import note

if TYPE_CHECKING:
    from mlflow import MlflowClient

RUN_TAG = "infoxlm.run"
"""Tag whose value all stages of one pipeline run share."""
COMMIT = "INFOXLM_COMMIT"
"""Environment variable of the image: the commit that it was built from."""
_ANSWER_SECONDS = 30.0
PARENT = "mlflow.parentRunId"
"""MLflow's own tag of a nested run."""


def tracking_uri(default: Path) -> str:
    """Say where MLflow is: MLFLOW_TRACKING_URI, else a SQLite file in the directory `default`; InputError if that has a
    name which cannot stand in an address."""
    if given := os.environ.get("MLFLOW_TRACKING_URI"):
        return given
    if any(sign in str(default.resolve()) for sign in "%?#"):
        raise InputError(f"{default}: MLflow's database cannot lie below a name with %, ? or #: rename the store")
    return f"sqlite:///{default.resolve() / 'mlflow.db'}"


def is_missing(default: Path) -> bool:
    """Whether MLflow's database would be made now, empty: for who wants to read what others have written."""
    file = _sqlite_file(tracking_uri(default))
    return file is not None and not file.exists()


def _sqlite_file(uri: str) -> Path | None:
    return Path(uri.removeprefix("sqlite:///").partition("?")[0]) if uri.startswith("sqlite://") else None


@contextmanager
def _importing() -> Iterator[None]:
    """Import MLflow in half the time: its 400,000 objects stay, and garbage collection goes over them for nothing.

    Nor does it later (`freeze`): at its end a process would go over them several times.
    """
    if "mlflow" in sys.modules or not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def check_uri(uri: str) -> None:
    """Refuse a place where MLflow would fail, or wait, for minutes before it says something else.

    Raises:
        InputError: it is no server and no file that holds, or may become, MLflow's database.
        StorageUnavailable: a server accepts the connection and says nothing.
    """
    shown, kind = without_password(uri), uri.partition("://")[0] if "://" in uri else ""
    if kind in ("http", "https"):
        _wait_for_answer(uri)
    elif kind.startswith("sqlite") and not re.fullmatch(r"sqlite:///(?!:memory:)[^?]+(\?.*)?", uri):
        raise InputError(
            f"MLFLOW_TRACKING_URI={shown}: names no file that the next stage would find: set it to "
            "sqlite:///…/mlflow.db, or not at all"
        )
    elif path := _sqlite_file(uri):
        if path.exists() and outside.look(path).stat().st_size:
            with path.open("rb") as file:
                if not file.read(16).startswith(b"SQLite format 3"):
                    raise InputError(f"{path} is no database of MLflow: move it elsewhere, or restore it")
    elif not kind or kind == "file":
        raise InputError(
            f"MLFLOW_TRACKING_URI={shown}: MLflow keeps no folders of files any more: set it to a server "
            "(https://…), to sqlite:///…/mlflow.db, or not at all"
        )


@functools.cache
def _wait_for_answer(uri: str) -> None:
    """See whether a server answers at all, which MLflow itself would wait for eight minutes: four times two.

    One that refuses the connection is left to MLflow's own tries: it may just be starting.
    """
    import requests

    for last in (False, True):
        try:
            requests.get(
                f"{uri.rstrip('/')}/health", timeout=_ANSWER_SECONDS, allow_redirects=False, stream=True
            ).close()
            return
        except requests.Timeout:
            if last:
                said = f"{without_password(uri)}: MLflow accepts connections and does not answer"
                raise StorageUnavailable(
                    f"{said} (2 x {_ANSWER_SECONDS:.0f} s): see whether it is well, run again"
                ) from None
        except requests.RequestException:
            return


@_importing()
def connect(default_store: Path) -> "MlflowClient":
    """Point this process, and those it starts, to `tracking_uri(default_store)`; raises as `check_uri` and
    `translate_errors` do."""
    os.environ.update(environment.MLFLOW)
    check_uri(tracking_uri(default_store))
    import mlflow

    for noisy in ("mlflow", "alembic"):  # a new SQLite file means dozens of lines about migrations
        logging.getLogger(noisy).setLevel(logging.WARNING)
    logging.getLogger("mlflow.store.db.utils").setLevel(logging.CRITICAL)  # of errors, which we translate, whole stacks
    mlflow.set_tracking_uri(tracking_uri(default_store))  # also sets MLFLOW_TRACKING_URI
    if not (file := _sqlite_file(os.environ["MLFLOW_TRACKING_URI"])):
        with translate_errors(without_password(os.environ["MLFLOW_TRACKING_URI"])):
            return mlflow.MlflowClient()
    directory = file.resolve().parent
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise outside.translate(error) or InputError(f"{directory} cannot be made ({error}): give another") from None
    with (
        locks.acquire(directory / ".mlflow.lock"),  # two processes creating the tables at once: one would fail
        translate_errors(str(file)),
    ):
        if not (file.exists() and file.stat().st_size):
            tables.create_file(file.resolve())
        client = mlflow.MlflowClient()
        moved.settle(file)
        return client


@contextmanager
def translate_errors(what: str) -> Iterator[None]:
    """Turn errors of MLflow into ours, one line each.

    Raises:
        StorageUnavailable: MLflow does not answer, or with a 5xx.
        StorageFull: there is no space for it.
        InputError: it answers, and refuses; or its database is damaged.
    """
    from mlflow.exceptions import MlflowException

    try:
        yield
    except InfoXLMError:
        raise
    except Exception as error:
        status = error.get_http_status_code() if isinstance(error, MlflowException) else 0
        said = outside.translate(error, what) or _of_database(error, what, status) or _of_server(error, what, status)
        if not said:
            raise
        raise said from error


def _of_database(error: Exception, what: str, status: int) -> InfoXLMError | None:
    """An error of a database that this process itself opens, a file mostly: another try helps only if it is busy."""
    reason = one_line(error)
    if isinstance(error, ImportError):
        return InputError(f"{what}: {error}: install it, or give the address of a server, https://…")
    if "out-of-date database schema" in reason:
        remedy = "use that one, or back the database up and call `mlflow db upgrade`"
        return InputError(f"{what}: the tables are those of another version of MLflow ({reason}): {remedy}")
    is_file = os.environ.get("MLFLOW_TRACKING_URI", "").startswith("sqlite")
    if not type(error).__module__.startswith("sqlalchemy") and not (is_file and status >= 500):
        return None
    if "locked" in str(error):
        return StorageUnavailable(f"{what}: MLflow's database is locked: run the same again")
    if "disk I/O error" in str(error):
        return StorageUnavailable(f"{what}: the disk of MLflow's database fails: run again when it is well")
    return InputError(f"{what}: MLflow's database cannot be used ({reason}): restore it")


def _of_server(error: Exception, what: str, status: int) -> InfoXLMError | None:
    """What an answer of MLflow's means, or that there is none; no status: it is no error of MLflow."""
    reason = one_line(error)
    if status >= 500:
        return StorageUnavailable(f"{what}: MLflow does not answer ({reason}): run the same again")
    if status in (401, 403):
        account = "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD"
        return InputError(f"{what}: MLflow refuses this account ({status}): check {account}")
    return InputError(f"{what}: MLflow refuses ({reason})") if status else None


def connect_existing(default_store: Path) -> "MlflowClient":
    """`connect` for who reads, or changes, what others have written: a mistyped store is refused, not made.

    Raises:
        InputError: there is no database; and what `connect` raises.
    """
    if is_missing(default_store):
        raise InputError(
            f"{default_store} has no database of MLflow: give the --store of the run, or set MLFLOW_TRACKING_URI"
        )
    return connect(default_store)


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
    linked = re.sub(rf"\]\({note.FILE}([^)\s]+)\)", lambda link: f"](#/{at}/artifacts/{link[1]}?{query})", text)
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


def check_location(location: str) -> None:
    """Refuse artifacts outside `_artifact_root`: MLflow lets any user point an experiment or a model anywhere."""
    root = _artifact_root()
    below = location == root or location.startswith(root.rstrip("/") + "/")
    if not below or ".." in location:
        raise InputError(f"MLflow keeps artifacts at {location}, not below {root}: use another experiment")


def find_or_create(client: "MlflowClient", experiment: str, name: str, tags: dict[str, str]) -> str:
    """The oldest run of an experiment with the same `RUN_TAG`, made if there is none."""
    experiment_id = _experiment(client, experiment)

    def find() -> list[Any]:
        return client.search_runs(
            [experiment_id], f"tags.`{RUN_TAG}` = {quoted(tags[RUN_TAG])}", order_by=["start_time ASC", "run_id ASC"]
        )

    if found := find():
        return found[0].info.run_id
    created = client.create_run(experiment_id, tags=tags, run_name=name).info.run_id
    if not (found := find()):
        raise StorageUnavailable("MLflow does not show the run that was just made: see whether it is one, run again")
    if (first := found[0].info.run_id) != created:  # another stage was as fast: the older run stands
        client.delete_run(created)
    return first


def put(call: Callable[..., None], *row: str) -> None:
    """Set an alias or a tag, once more if another process made the same row at the same moment.

    MLflow looks whether there is one, then inserts or updates: of two processes that found none, one is refused.
    """
    from mlflow.exceptions import MlflowException

    try:
        call(*row)
    except MlflowException as error:
        if not re.search("unique|duplicate", str(error), re.IGNORECASE):
            raise
        call(*row)


def quoted(value: str) -> str:
    """A text for MLflow's filters, which know no way to write a quotation mark; InputError if it has both kinds."""
    for mark in "'\"":
        if mark not in value and "`" not in value:
            return f"{mark}{value}{mark}"
    raise InputError(f"{value!r:.120}: MLflow cannot search for a name with such quotation marks: rename it")


def _experiment(client: "MlflowClient", name: str) -> str:
    from mlflow.exceptions import MlflowException

    if found := client.get_experiment_by_name(name):
        return found.experiment_id
    location = _artifact_root()
    try:
        return client.create_experiment(name, location if location.startswith("file:") else None)
    except MlflowException as error:
        if error.error_code != "RESOURCE_ALREADY_EXISTS":
            raise
        return _experiment(client, name)  # another stage was faster


def _sqlite_directory() -> Path | None:
    """Where the SQLite file is; none if MLflow is a server."""
    file = _sqlite_file(os.environ["MLFLOW_TRACKING_URI"])
    return file.resolve().parent if file else None


def _artifact_root() -> str:
    """Where all artifacts belong: beside the SQLite file, or behind the server."""
    directory = _sqlite_directory()
    return (directory / moved.FOLDER).as_uri() if directory else "mlflow-artifacts:/"


def _flatten(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping) and value:
        for key, part in value.items():
            yield from _flatten(part, f"{prefix}.{key}" if prefix else str(key))
    elif isinstance(value, (list, tuple)) and any(isinstance(part, Mapping) for part in value):
        yield from _flatten({str(index): part for index, part in enumerate(value)}, prefix)
    else:
        yield prefix, list(value) if isinstance(value, tuple) else value
