"""Copy a registered version to another registered model on the same server, or to another server.

MLflow keeps the URI and the login of a server in the environment and in global state. Therefore, calls to the target
server run in their own process. Variables with the prefix TARGET_ hold the login of the target server, such as
TARGET_MLFLOW_TRACKING_USERNAME, …_PASSWORD and …_TOKEN.
"""

import logging
import multiprocessing
import os
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from components.adapters.mlflow import model_versions, runs, signing
from components.adapters.mlflow.errors import translate_errors
from components.adapters.mlflow.model_versions import CANDIDATE, DECISION, GATE, PREVIOUS
from components.adapters.mlflow.tracker import MlflowRun
from infoxlm_core import manifests
from infoxlm_core.errors import DataCorrupt

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities.model_registry import ModelVersion

logger = logging.getLogger(__name__)
T = TypeVar("T")

ORIGIN = "copied_from"
"""Tag of a copy: the original version."""
_TARGET_PREFIX = "TARGET_"
_SERVER_VARIABLES = ("MLFLOW_RUN_ID", "MLFLOW_EXPERIMENT_ID", "MLFLOW_EXPERIMENT_NAME")
"""Environment variables that are valid only for this process's own server."""
_ROLE_TAGS = (GATE, DECISION, PREVIOUS)
"""Tags that describe a version's role in its registered model. They are not copied."""


@dataclass(frozen=True)
class VersionCopy:
    """A version to register on the target server."""

    name: str
    """Name of the registered model on the target server."""
    digest: str
    """Digest of the version, by which a repeated call finds an existing copy."""
    tags: dict[str, str]
    """All tags of the original version."""
    origin: str
    """Server and name of the original version."""
    store: Path
    """Directory with MLflow's database if MLFLOW_TRACKING_URI is not set."""


def copy_within_server(client: "MlflowClient", version: "ModelVersion", name: str) -> "ModelVersion":
    """Copy a version to another registered model on the same server, and give the copy the alias `candidate`.

    An existing version with the same digest is reused. The version and its copy share their files.
    """
    digest = model_versions.read_digest(version)
    origin = model_versions.make_uri(version)
    with translate_errors(f"registered model {name}"):
        if not model_versions.find_by_digest(client, name, digest):
            tags = _make_tags(version.tags, origin)
            model_versions.create_version(client, name, origin, version.run_id, tags, version.model_id)
        return _make_candidate(client, name, digest, origin)


def run_on_server(uri: str, function: Callable[..., T], *arguments: Any) -> T:
    """Call a function in a new process that is connected to another server. Return its result, or raise its error."""
    spawn = multiprocessing.get_context("spawn")  # a forked process would share this process's connections
    with ProcessPoolExecutor(max_workers=1, mp_context=spawn, initializer=_switch_server, initargs=(uri,)) as executor:
        return executor.submit(function, *arguments).result()


def register(client: "MlflowClient", version_copy: VersionCopy, files: Path) -> "ModelVersion":
    """Register a copy on this process's server, and give the copy the alias `candidate`.

    An existing version with the same digest is reused.

    Args:
        client: registry client.
        version_copy: the version to register.
        files: local directory with all files of the version.

    Raises:
        DataCorrupt: the files on the server differ from the local files.
        InputError: the server refuses.
        StorageUnavailable: the server does not answer.
    """
    name = version_copy.name
    run_tags = {runs.RUN_TAG: f"copy of {version_copy.origin}"}
    run_id = runs.open_run("infoxlm", f"copy of {name}", run_tags, version_copy.store)
    with translate_errors(f"registered model {name} of the target"):
        if not model_versions.find_by_digest(client, name, version_copy.digest):
            logged_model = model_versions.open_upload(client, run_id)
            source = model_versions.upload(client, run_id, logged_model, files)
            tags = _make_tags(version_copy.tags, version_copy.origin)
            model_versions.create_version(client, name, source, run_id, tags, logged_model.model_id)
        version = _make_candidate(client, name, version_copy.digest, version_copy.origin)
        # `checked_download` verifies the signature and the registered digest.
        with model_versions.checked_download(client, version) as received_files:
            _compare_files(files, received_files, f"{name} version {version.version}")
    MlflowRun(run_id).end()
    return version


def _switch_server(uri: str) -> None:
    """Set this process's environment to another server, with the login from the TARGET_ variables."""
    for variable in list(os.environ):
        if variable.startswith("MLFLOW_TRACKING_") or variable in _SERVER_VARIABLES:
            del os.environ[variable]
    for variable in list(os.environ):
        if variable.startswith(f"{_TARGET_PREFIX}MLFLOW_"):
            os.environ[variable.removeprefix(_TARGET_PREFIX)] = os.environ[variable]
    os.environ["MLFLOW_TRACKING_URI"] = uri


def _compare_files(sent_files: Path, received_files: Path, version: str) -> None:
    """Raise DataCorrupt if the model, its evaluation, signature or card differs between two directories.

    Other files are not compared, because MLflow changes them.
    """
    for name in (model_versions.MODEL, model_versions.EVALUATION, signing.FILE, model_versions.CARD):
        sent = sent_files / name
        received = received_files / name
        if not sent.exists():
            continue
        if not received.exists() or manifests.digest_files(received) != manifests.digest_files(sent):
            raise DataCorrupt(f"{name} of {version} differs on the target server: delete that version, then copy again")


def _make_tags(original_tags: Mapping[str, str], origin: str) -> dict[str, str]:
    """Return the tags of a copy: those of the original except its role, and the original's name."""
    tags = {key: value for key, value in original_tags.items() if key not in _ROLE_TAGS}
    return {**tags, ORIGIN: origin}


def _make_candidate(client: "MlflowClient", name: str, digest: str, origin: str) -> "ModelVersion":
    """Give the copy with this digest the alias `candidate`, and return the copy. Duplicate copies are deleted."""
    version = model_versions.keep_oldest(client, name, digest)
    client.set_registered_model_alias(name, CANDIDATE, version.version)
    logger.info("copied %s to %s version %s", origin, name, version.version)
    return version
