"""What lies in the registry under a version: the encoder, its evaluation, its signature. Reading only.

model/                    the encoder's Hugging Face directory, byte for byte, with its manifest
evaluation/scores.json    all scores, and evaluation/items.parquet: which questions were answered
signature.json            of model/, if it was signed
model_card.md, MLmodel    for people, and for MLflow
"""

import functools
import re
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from components.adapters.mlflow import connection, signing
from components.adapters.mlflow.errors import translate_errors
from infoxlm_core import manifests
from infoxlm_core.errors import DataCorrupt, InputError
from infoxlm_core.model.huggingface import directories
from infoxlm_core.results import evidence

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities.model_registry import ModelVersion

MODEL, EVALUATION, CARD = "model", "evaluation", "model_card.md"
MADE_AS = "made_as"
"""Tag of a version: kind and key of the artifact that it was made of, which has a manifest of ours."""
CHAMPION, CANDIDATE = "champion", "candidate"
GATE = "gate"
"""Tag with the verdict in words; written after the alias, so a version that has it is through."""
DECISION = "decision"
"""Tag with the last decision on a version, as JSON: verdict, intervals, who, when, by which run."""
PREVIOUS = "previous_champion"
"""Tag of a champion: the version that it replaced."""
_URI = re.compile(r"models:/(?P<name>[^/@]+)(@(?P<alias>[^/@]+)|/(?P<version>[0-9]{1,18}))")


def is_uri(source: str) -> bool:
    """Whether this is models:/NAME@ALIAS or models:/NAME/VERSION."""
    return bool(_URI.fullmatch(source))


def find(client: "MlflowClient", uri: str) -> "ModelVersion":
    """The version that models:/NAME@ALIAS or models:/NAME/VERSION names.

    Raises:
        InputError: it is no such address, or there is no such version.
    """
    if not (match := _URI.fullmatch(uri)):
        raise InputError(f"{uri!r}: give models:/NAME@ALIAS or models:/NAME/VERSION")
    with translate_errors(uri):
        number = match["version"] or client.get_model_version_by_alias(match["name"], match["alias"]).version
        return client.get_model_version(match["name"], number)


def digest_of(version: "ModelVersion") -> str:
    """The digest that a version was registered with; InputError if it was made elsewhere, by other means."""
    if not (found := version.tags.get("digest")):
        raise InputError(f"{version.name} version {version.version} has no tag digest: give one that `register` made")
    return str(found)


def versions_of(client: "MlflowClient", name: str, digest: str) -> "list[ModelVersion]":
    """All versions with a digest, the oldest first."""
    named, made = connection.quoted(name), connection.quoted(digest)
    found = client.search_model_versions(f"name = {named} and tags.digest = {made}")
    return sorted(found, key=lambda version: int(version.version))


def all_versions(client: "MlflowClient", name: str) -> "Iterator[ModelVersion]":
    """Of a registered model."""
    return _pages(functools.partial(client.search_model_versions, f"name = {connection.quoted(name)}"))


def made_of(client: "MlflowClient", aliases: Collection[str] = ()) -> set[str]:
    """Digests, and keys of artifacts, that versions were made of: of all, or of those that one of `aliases` names.

    Raises InputError: no model has such an alias.
    """
    found, unknown = set(), set(aliases)
    with translate_errors("the registry"):
        for model in _pages(client.search_registered_models):
            unknown -= model.aliases.keys()
            named = {str(model.aliases[alias]) for alias in aliases if alias in model.aliases}
            for version in all_versions(client, model.name):
                if not aliases or str(version.version) in named:
                    found |= {str(value).rpartition("/")[2] for value in version.tags.values()}
    if unknown:
        raise InputError(f"no registered model has the alias {sorted(unknown)[0]!r}: look at the page of the registry")
    return found


def _pages(search: Callable[..., Any]) -> Iterator[Any]:
    """All that a search of MLflow finds."""
    page = search()
    yield from page
    while page.token:
        page = search(page_token=page.token)
        yield from page


def download(client: "MlflowClient", version: "ModelVersion", path: str, target: Path | None) -> Path:
    """Fetch a file or folder of a version; with no target, files on this machine are read where they are."""
    import mlflow

    location = client.get_model_version_download_uri(version.name, version.version)
    connection.check_location(location)
    where = str(target) if target else None
    return Path(mlflow.artifacts.download_artifacts(artifact_uri=f"{location}/{path}".rstrip("/"), dst_path=where))


def read_outcomes(client: "MlflowClient", version: "ModelVersion") -> evidence.Outcomes | None:
    """The outcomes by question of a version; none if it was registered without."""
    from mlflow.exceptions import MlflowException

    with tempfile.TemporaryDirectory() as folder:
        try:
            found = download(client, version, EVALUATION, Path(folder))
        except MlflowException as error:
            if error.get_http_status_code() >= 500 and "No such" not in str(error):
                raise
            return None
        except OSError:  # a store of files says so
            return None
        if not (found / evidence.FILE).is_file():
            return None
        scores = evidence.read_scores(found)
        return evidence.Outcomes(evidence.read(found / evidence.FILE, scores["model"]), scores["pivot"])


@contextmanager
def fetched(client: "MlflowClient", version: "ModelVersion") -> Iterator[Path]:
    """All files of a version, in a directory that is gone afterwards, checked: complete, unchanged, signed.

    Raises:
        DataCorrupt: the encoder is not the one that was registered.
        SignatureInvalid: its signature does not fit, and a key to verify it is set.
    """
    with tempfile.TemporaryDirectory(prefix="infoxlm-") as folder:
        found = download(client, version, "", Path(folder))
        check(found, version)
        yield found


def check(files: Path, version: "ModelVersion") -> None:
    """Make sure that the files of a version are those that were registered: complete, unchanged, signed, an encoder.

    Raises:
        DataCorrupt: the encoder is not the one that was registered.
        SignatureInvalid: its signature does not fit, and a key to verify it is set.
        InputError: it is no encoder.
    """
    model, name = files / MODEL, f"{version.name} version {version.version}"
    signing.verify(model, files / signing.FILE, name)
    if (model / manifests.NAME).is_file() or MADE_AS in version.tags:  # else it was made elsewhere
        digest = manifests.read(model, "encoder", made_with="the registration of another version")["digest"]
        if digest != version.tags.get("digest"):
            raise DataCorrupt(
                f"{name} holds {digest[:19]}…, it was registered as {version.tags.get('digest', 'nothing')[:19]}…: "
                "take another version"
            )
    directories.check_encoder(model)


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


def create(client: "MlflowClient", name: str, source: str, run_id: str, tags: Mapping[str, str]) -> None:
    """Make a version, of a registered model that is made with the first one."""
    from mlflow.exceptions import MlflowException

    try:
        client.create_registered_model(name)
    except MlflowException as error:
        if error.error_code != "RESOURCE_ALREADY_EXISTS":
            raise
    try:
        client.create_model_version(name, source, run_id, tags=dict(tags), model_id=source.removeprefix("models:/"))
    except MlflowException:  # the answer may be lost: what counts is what the registry holds
        if not versions_of(client, name, tags["digest"]):
            raise
