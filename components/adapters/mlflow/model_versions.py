"""Find, create, upload, download and check versions of registered models.

A version has these files:

model/                    unchanged Hugging Face directory of the encoder or translator, with its manifest
evaluation/scores.json    all scores
evaluation/items.parquet  the answer to each question
sentence-transformers/    the encoder up to its output layer, as `infoxlm export` writes it
signature.json            signature of model/, if a signing key was set
sentence-transformers.signature.json    signature of sentence-transformers/, if a signing key was set
model_card.md             description for people
MLmodel                   description for MLflow
"""

import re
import tempfile
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from components.adapters.mlflow import connection, signing
from components.adapters.mlflow.errors import ignore_error, translate_errors
from infoxlm_core import manifests
from infoxlm_core.errors import DataCorrupt, InputError
from infoxlm_core.model.huggingface import directories
from infoxlm_core.results import evidence

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import LoggedModel
    from mlflow.entities.model_registry import ModelVersion

MODEL = "model"
EVALUATION = "evaluation"
EXPORT = "sentence-transformers"
EXPORT_SIGNATURE = f"{EXPORT}.{signing.FILE}"
CARD = "model_card.md"
MADE_AS = "made_as"
"""Tag: kind and key of the source artifact. A version with this tag has our manifest."""
CHAMPION = "champion"
CANDIDATE = "candidate"
GATE = "gate"
"""Tag: the gate's verdict in words. It is set after the alias moves, so a version with this tag is fully processed."""
DECISION = "decision"
"""Tag: the last decision on a version as JSON, with the verdict, the intervals, the person or run, and the time."""
AGAINST = "against"
"""Tag: `start` if the gate also compares the version with the model that its training started from."""
PREVIOUS = "previous_champion"
"""Tag of a champion: the replaced version."""
_PRODUCER = "the registration of another version"  # what to run, in messages about missing or damaged files
_URI = re.compile(r"models:/(?P<name>[^/@]+)(@(?P<alias>[^/@]+)|/(?P<version>[0-9]{1,18}))")


def is_uri(source: str) -> bool:
    """Return whether the source is models:/NAME@ALIAS or models:/NAME/VERSION."""
    return bool(_URI.fullmatch(source))


def make_uri(version: "ModelVersion") -> str:
    """Return the URI models:/NAME/VERSION of a version."""
    return f"models:/{version.name}/{version.version}"


def find_version(client: "MlflowClient", uri: str) -> "ModelVersion":
    """Return the version that a URI names, models:/NAME@ALIAS or models:/NAME/VERSION.

    Raises:
        InputError: the URI is malformed, or the version does not exist.
    """
    match = _URI.fullmatch(uri)
    if not match:
        raise InputError(f"{uri!r}: give models:/NAME@ALIAS or models:/NAME/VERSION")
    with translate_errors(uri):
        if match["version"]:
            return client.get_model_version(match["name"], match["version"])
        return client.get_model_version_by_alias(match["name"], match["alias"])


def read_digest(version: "ModelVersion") -> str:
    """Return a version's registered digest.

    Raises:
        InputError: the version has no digest, because `register` did not create it.
    """
    digest = version.tags.get("digest")
    if not digest:
        name = f"{version.name} version {version.version}"
        raise InputError(f"{name} has no tag digest: choose a version that `register` has created")
    return str(digest)


def find_by_digest(client: "MlflowClient", name: str, digest: str) -> "list[ModelVersion]":
    """Return all versions of a registered model with this digest, oldest first."""
    filter_string = f"name = {connection.quote(name)} and tags.digest = {connection.quote(digest)}"
    versions = client.search_model_versions(filter_string)
    return sorted(versions, key=lambda version: int(version.version))


def keep_oldest(client: "MlflowClient", name: str, digest: str) -> "ModelVersion":
    """Return the oldest version with this digest. Delete its duplicates, which repeated requests may have created."""
    oldest, *duplicates = find_by_digest(client, name, digest)
    for duplicate in duplicates:
        client.delete_model_version(name, duplicate.version)
    return oldest


def find_source_artifacts(aliases: Collection[str] = ()) -> set[str]:
    """Return the digests and keys of the artifacts from which registered versions were made.

    `infoxlm gc` keeps these artifacts.

    Args:
        aliases: aliases of the versions to include; by default all versions, with or without an alias.

    Raises:
        InputError: no model has one of the aliases.
    """
    import mlflow

    source_artifacts: set[str] = set()
    unknown_aliases = set(aliases)
    with translate_errors("the registry"):
        for model in mlflow.search_registered_models():
            unknown_aliases -= model.aliases.keys()
            selected_versions = {str(model.aliases[alias]) for alias in aliases if alias in model.aliases}
            for version in mlflow.search_model_versions(filter_string=f"name = {connection.quote(model.name)}"):
                if aliases and str(version.version) not in selected_versions:
                    continue
                # Tags that name no artifact do no harm, because their values match no key.
                for tag_value in version.tags.values():
                    _, _, key = str(tag_value).rpartition("/")  # a tag names an artifact as kind/key or by its digest
                    source_artifacts.add(key)
    if unknown_aliases:
        alias = sorted(unknown_aliases)[0]
        raise InputError(f"no registered model has the alias {alias!r}: see the list of models in MLflow")
    return source_artifacts


def create_version(
    client: "MlflowClient", name: str, source: str, run_id: str | None, tags: Mapping[str, str], model_id: str | None
) -> None:
    """Create a version. First create the registered model if it does not exist.

    Args:
        client: registry client.
        name: name of the registered model.
        source: URI of the files: models:/m-… of a logged model, or models:/NAME/VERSION of another version.
        run_id: id of the MLflow run that trained the model, or None if it is unknown.
        tags: tags of the version, including `digest`.
        model_id: id of the logged model, m-…, or None if it is unknown.
    """
    from mlflow.exceptions import MlflowException

    with ignore_error("RESOURCE_ALREADY_EXISTS"):
        client.create_registered_model(name)
    try:
        client.create_model_version(name, source, run_id, tags=dict(tags), model_id=model_id)
    except MlflowException:  # the version may exist: perhaps only the answer was lost
        if not find_by_digest(client, name, tags["digest"]):
            raise


def open_upload(client: "MlflowClient", run_id: str) -> "LoggedModel":
    """Create an empty logged model in an MLflow run, whose files `upload` uploads."""
    return client.create_logged_model(client.get_run(run_id).info.experiment_id, "encoder", source_run_id=run_id)


def upload(client: "MlflowClient", run_id: str, logged_model: "LoggedModel", files: Path) -> str:
    """Upload a logged model's files, and make the model an output of its run. Return its URI, models:/m-…."""
    from mlflow.entities import LoggedModelOutput

    client.log_model_artifacts(logged_model.model_id, str(files))
    client.finalize_logged_model(logged_model.model_id, "READY")
    client.log_outputs(run_id, [LoggedModelOutput(logged_model.model_id, step=0)])
    return str(logged_model.model_uri)


def download(client: "MlflowClient", version: "ModelVersion", path: str = "", target: Path | None = None) -> Path:
    """Download a version's files, or only `path`. Return the local path. Local files are copied only to a `target`."""
    import mlflow

    location = client.get_model_version_download_uri(version.name, version.version)
    connection.check_location(location)
    artifact_uri = f"{location}/{path}".rstrip("/")
    target_directory = str(target) if target else None
    return Path(mlflow.artifacts.download_artifacts(artifact_uri=artifact_uri, dst_path=target_directory))


def download_encoder(client: "MlflowClient", version: "ModelVersion", target: Path) -> None:
    """Download a version's model directory and its signature, but not the export for sentence-transformers."""
    for name in _list_files(client, version) & {MODEL, signing.FILE}:
        download(client, version, name, target)


def _list_files(client: "MlflowClient", version: "ModelVersion", directory: str = "") -> set[str]:
    """Return the names in a directory of a version's files. The directory need not exist."""
    import mlflow

    location = client.get_model_version_download_uri(version.name, version.version)
    connection.check_location(location)
    entries = mlflow.artifacts.list_artifacts(artifact_uri=f"{location}/{directory}".rstrip("/"))
    return {Path(entry.path).name for entry in entries}


def read_outcomes(
    client: "MlflowClient", version: "ModelVersion", of_start_model: bool = False
) -> evidence.Outcomes | None:
    """Return which questions a model answered correctly, or None if the version does not have the model's answers.

    Args:
        client: registry client.
        version: registered version. Its evaluation file may also have the answers of the model it started from.
        of_start_model: whether to read the answers of the model that the version's training started from.
    """
    if evidence.FILE not in _list_files(client, version, EVALUATION):
        return None
    with tempfile.TemporaryDirectory() as directory:
        evaluation = download(client, version, EVALUATION, Path(directory))
        scores = evidence.read_scores(evaluation)
        answers_file = evaluation / evidence.FILE
        model = evidence.find_start(answers_file) if of_start_model else scores["model"]
        if not model:
            return None
        return evidence.Outcomes(evidence.read(answers_file, model), scores["pivot"])


@contextmanager
def checked_download(client: "MlflowClient", version: "ModelVersion") -> Iterator[Path]:
    """Download all files of a version to a temporary directory, and check them. Raises the errors of `check_files`."""
    with tempfile.TemporaryDirectory(prefix="infoxlm-") as directory:
        files = download(client, version, target=Path(directory))
        check_files(files, version)
        yield files


def check_files(files: Path, version: "ModelVersion") -> None:
    """Check that a version's files contain an encoder, are complete and signed, and match the registered digest.

    Args:
        files: local directory with the version's files.
        version: the registered version.

    Raises:
        DataCorrupt: the files differ from the registered files.
        SignatureInvalid: a verifying key is set, and the model has no valid signature.
        InputError: the files are not an encoder.
    """
    model = files / MODEL
    name = f"{version.name} version {version.version}"
    signing.verify(model, files / signing.FILE, name)
    # Versions registered by other tools have no manifest. A version with our tag `MADE_AS` must have one.
    if (model / manifests.NAME).is_file() or MADE_AS in version.tags:
        kind = "translator" if directories.is_translator(model) else "encoder"
        digest = manifests.load_verified(model, kind, producer=_PRODUCER)["digest"]
        registered_digest = version.tags.get("digest", "nothing")
        if digest != registered_digest:  # the message shows "sha256:" and 12 digits of each
            raise DataCorrupt(
                f"{name} contains {digest[:19]}…, but was registered as {registered_digest[:19]}…: use another version"
            )
    directories.check_encoder(model)
    if (files / EXPORT).is_dir():
        signing.verify(files / EXPORT, files / EXPORT_SIGNATURE, f"{EXPORT} of {name}")
        manifests.load_verified(files / EXPORT, "export", producer=_PRODUCER)
