"""Download models such as FacebookAI/xlm-roberta-base, optionally with `@revision`, from the Hugging Face hub."""

import contextlib
import logging
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from infoxlm_core import manifests
from infoxlm_core.errors import DataCorrupt, InputError, StorageUnavailable, one_line

logger = logging.getLogger(__name__)

_MODEL_NAME = re.compile(r"(?P<name>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(@(?P<revision>[\w./-]+))?", re.ASCII)
_MODEL_FILES = ["*.safetensors", "*.json", "*.model", "*.txt", "README.md"]  # README.md states the licence
"""Patterns of the files to download. These files cannot contain code."""


def fetch_snapshot(source: str, store: Path, only: Sequence[str] = ()) -> Path | None:
    """Download a model from the Hugging Face hub, or find it in the cache if the hub is not reachable.

    Args:
        source: ORG/NAME or ORG/NAME@REVISION.
        store: local store that contains the cache.
        only: patterns of the files to download; by default `_MODEL_FILES`, all files that cannot contain code.

    Returns:
        The snapshot's directory, or None if `source` does not have the form of a hub name.

    Raises:
        InputError: the model does not exist on the hub.
        DataCorrupt: a downloaded file differs from the hub's file.
        StorageUnavailable: the hub does not answer.
    """
    match = _MODEL_NAME.fullmatch(source)
    if not match:
        return None
    from huggingface_hub import snapshot_download

    with _use_network(match["name"]):
        snapshot = snapshot_download(
            match["name"],
            revision=match["revision"],
            cache_dir=store.resolve() / "models" / "hub",
            allow_patterns=list(only) or _MODEL_FILES,
            endpoint=os.environ.get("HF_ENDPOINT"),  # the library itself reads the variable only when it is imported
        )
    _verify_snapshot(Path(snapshot))
    return Path(snapshot)


def _verify_snapshot(snapshot: Path) -> None:
    """Compare large files with their SHA-256. Remove a corrupt file and raise DataCorrupt.

    The files of a snapshot are links to blobs. A large blob is named by its SHA-256, a small blob by a shorter hash.
    """
    for path in snapshot.rglob("*"):
        blob = path.resolve()
        is_named_by_sha256 = re.fullmatch("[0-9a-f]{64}", blob.name) is not None
        if is_named_by_sha256 and manifests.file_sha256(blob) != blob.name:
            blob.unlink()
            raise DataCorrupt(f"{blob} differs from the hub's file: the copy was removed, run again")


def list_files(source: str) -> list[str] | None:
    """Return the file names of a model on the hub, or None if the hub does not list them."""
    from huggingface_hub import HfApi

    name, _, revision = source.partition("@")
    try:
        with _use_network(name):
            model = HfApi(os.environ.get("HF_ENDPOINT")).model_info(name, revision=revision or None, timeout=30)
    except Exception as error:  # the hub's and the HTTP client's errors have no common base class
        logger.warning("%s: the hub does not list its files: %s", name, one_line(error))
        return None
    return [sibling.rfilename for sibling in model.siblings or ()]


@contextlib.contextmanager
def _use_network(model: str) -> Iterator[None]:
    """Allow network access to the hub's client in the block. Convert errors to one-line errors that name the model."""
    from huggingface_hub import constants, errors

    was_offline = constants.HF_HUB_OFFLINE  # usually True, so that MLflow does not download files by itself
    constants.HF_HUB_OFFLINE = False
    try:
        yield
    except (errors.RepositoryNotFoundError, errors.RevisionNotFoundError, errors.HFValidationError) as error:
        reason = f"no such directory, and no such model on the hub ({one_line(error)})"
        raise InputError(f"{model}: {reason}: check its name") from error
    except OSError as error:  # base class of all other errors of the hub
        status = getattr(getattr(error, "response", None), "status_code", 0)
        failure = f"fails with status {status}" if status else "does not answer"
        raise StorageUnavailable(
            f"{model}: no such directory, and the hub {failure} ({one_line(error)}): run again, or download the model "
            "where there is a network and give its directory"
        ) from error
    finally:
        constants.HF_HUB_OFFLINE = was_offline
