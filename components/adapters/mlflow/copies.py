"""A version of one registry -> another registered model, of the same server or of another one.

The first server is where MLFLOW_TRACKING_URI points, with its credentials as ever. Those of the other one are the same
variables with TARGET_ in front: TARGET_MLFLOW_TRACKING_USERNAME, …_PASSWORD, …_TOKEN, and the others of MLflow.
"""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from components.adapters.mlflow import connection, model_versions, runs, signing
from components.adapters.mlflow.errors import translate_errors
from infoxlm_core import manifests
from infoxlm_core.errors import DataCorrupt, without_password

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities.model_registry import ModelVersion

logger = logging.getLogger(__name__)

ORIGIN = "copied_from"
_TARGET = "TARGET_"
_STAYS = (model_versions.GATE, model_versions.DECISION, model_versions.PREVIOUS)
"""Tags that speak of the registry they are in."""


def copy(client: "MlflowClient", version: "ModelVersion", name: str) -> "ModelVersion":
    """Copy a version to another registered model of the same server, once per digest; it is `candidate` there.

    Both point to the same files.
    """
    with translate_errors(f"registered model {name}"):
        if not model_versions.versions_of(client, name, model_versions.digest_of(version)):
            client.copy_model_version(f"models:/{version.name}/{version.version}", name)
        return _finish(client, name, version, f"models:/{version.name}/{version.version}")


def copy_to_server(client: "MlflowClient", version: "ModelVersion", uri: str, name: str, store: Path) -> "ModelVersion":
    """Copy a version with all its files to another server, once per digest; it is `candidate` there.

    The process is connected to that server from here on, until a `coming_back` around it ends. What has arrived is read
    back and compared, file by file.

    Raises:
        DataCorrupt, SignatureInvalid: the files are not those that were registered.
        InputError, StorageUnavailable: one of the servers refuses, or does not answer.
    """
    model = f"models:/{version.name}/{version.version}"
    origin = f"{without_password(connection.tracking_uri(store))} {model}"
    with translate_errors(model), model_versions.fetched(client, version) as files:
        sent = _contents(files)
        _go_to(uri)
        target = connection.connect(store)
        tags = {runs.RUN_TAG: f"copy of {origin}"}
        run_id = runs.open_run("infoxlm", f"copy of {version.name}", tags, store)
        with translate_errors(f"registered model {name} of the target"):
            if not model_versions.versions_of(target, name, model_versions.digest_of(version)):
                source = _send(target, run_id, files)
                kept = {key: value for key, value in version.tags.items() if key not in _STAYS}
                model_versions.create(target, name, source, run_id, kept)
            made = model_versions.versions_of(target, name, model_versions.digest_of(version))[0]
            with model_versions.fetched(target, made) as arrived:
                if differ := sorted(path for path, digest in sent.items() if _contents(arrived).get(path) != digest):
                    raise DataCorrupt(f"{name} version {made.version} at the target differs in {differ[0]}: delete it")
            copied = _finish(target, name, version, origin)
        runs.end_run(run_id)
    return copied


@contextmanager
def coming_back(store: Path) -> Iterator[None]:
    """Connect to the same server as before at the end of the block: a promotion's figures belong to its own run."""
    before = {name: value for name, value in os.environ.items() if name.startswith("MLFLOW_")}
    try:
        yield
    finally:
        for name in [name for name in os.environ if name.startswith("MLFLOW_")]:
            del os.environ[name]
        os.environ.update(before)
        connection.connect(store)


def _send(target: "MlflowClient", run_id: str, files: Path) -> str:
    """Make the files a logged model of the target as they are; return its URI."""
    from mlflow.entities import LoggedModelOutput

    experiment = target.get_run(run_id).info.experiment_id
    logged = target.create_logged_model(experiment, "encoder", source_run_id=run_id)
    target.log_model_artifacts(logged.model_id, str(files))
    target.finalize_logged_model(logged.model_id, "READY")
    target.log_outputs(run_id, [LoggedModelOutput(logged.model_id, step=0)])
    return logged.model_uri


def _contents(folder: Path) -> dict[str, str]:
    """Digests of what makes a version: the encoder, its evaluation, its signature, its card."""
    parts = (model_versions.MODEL, model_versions.EVALUATION, signing.FILE, model_versions.CARD)
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    named = {str(path.relative_to(folder)): path for path in files}
    return {name: manifests.file_sha256(path) for name, path in named.items() if name.partition("/")[0] in parts}


def _finish(client: "MlflowClient", name: str, version: "ModelVersion", origin: str) -> "ModelVersion":
    """Leave one version of the digest, that says where it comes from; `candidate` last."""
    copied, *doubles = model_versions.versions_of(client, name, model_versions.digest_of(version))
    for double in doubles:
        client.delete_model_version(name, double.version)
    if ORIGIN not in copied.tags:
        for tag in _STAYS:
            if tag in copied.tags:
                client.delete_model_version_tag(name, copied.version, tag)
        model_versions.put(client.set_model_version_tag, name, copied.version, ORIGIN, origin)
    model_versions.put(client.set_registered_model_alias, name, model_versions.CANDIDATE, copied.version)
    logger.info("copied %s to %s version %s", origin, name, copied.version)
    return client.get_model_version(name, copied.version)


def _go_to(uri: str) -> None:
    """Let this process speak to another server, with the credentials for that one and none of the first's."""
    for name in [name for name in os.environ if name.startswith("MLFLOW_TRACKING_")]:
        del os.environ[name]
    for name in ("MLFLOW_RUN_ID", "MLFLOW_EXPERIMENT_ID", "MLFLOW_EXPERIMENT_NAME"):
        os.environ.pop(name, None)
    for name in [name for name in os.environ if name.startswith(f"{_TARGET}MLFLOW_")]:
        os.environ[name.removeprefix(_TARGET)] = os.environ[name]
    os.environ["MLFLOW_TRACKING_URI"] = uri
