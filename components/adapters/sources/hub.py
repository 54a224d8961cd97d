"""Download a model from the Hugging Face hub: FacebookAI/xlm-roberta-base, optionally with `@revision`."""

import os
import re
from collections.abc import Sequence
from pathlib import Path

from infoxlm_core import manifests
from infoxlm_core.errors import DataCorrupt, InputError, StorageUnavailable, one_line

_HUB = re.compile(r"(?P<name>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(@(?P<revision>[\w./-]+))?", re.ASCII)
_FILES = ["*.safetensors", "*.json", "*.model", "*.txt", "README.md"]  # README.md states the licence
"""Files to download: none of them can contain code."""


def fetch(source: str, store: Path, only: Sequence[str] = ()) -> Path | None:
    """Fetch a snapshot from the hub, or from the cache if the hub cannot be reached.

    Returns:
        the folder of the snapshot; None if the source cannot be a name on the hub.

    Raises:
        InputError: the hub has no such model.
        DataCorrupt: the download differs from the hub's file.
        StorageUnavailable: the hub does not answer.
    """
    match = _HUB.fullmatch(source)
    if not match:
        return None
    from huggingface_hub import constants, errors, snapshot_download

    name = match["name"]
    was_offline = constants.HF_HUB_OFFLINE  # usually True: without it, MLflow would download files by itself
    constants.HF_HUB_OFFLINE = False
    try:
        snapshot = snapshot_download(
            name,
            revision=match["revision"],
            cache_dir=store.resolve() / "models" / "hub",
            allow_patterns=list(only) or _FILES,
            endpoint=os.environ.get("HF_ENDPOINT"),
        )
    except (errors.RepositoryNotFoundError, errors.RevisionNotFoundError, errors.HFValidationError) as error:
        reason = f"no such directory, and no such model on the hub ({one_line(error)})"
        raise InputError(f"{name}: {reason}: check its name") from error
    except OSError as error:  # base class of all other errors of the hub
        status = getattr(getattr(error, "response", None), "status_code", 0)
        failure = f"fails with status {status}" if status else "does not answer"
        raise StorageUnavailable(
            f"{name}: no such directory, and the hub {failure} ({one_line(error)}): run again, or download the model "
            "where there is a network and give its directory"
        ) from error
    finally:
        constants.HF_HUB_OFFLINE = was_offline
    for path in Path(snapshot).rglob("*"):  # links to blobs; a large blob is named by its SHA-256
        blob = path.resolve()
        if re.fullmatch("[0-9a-f]{64}", blob.name) and manifests.file_sha256(blob) != blob.name:
            blob.unlink()
            raise DataCorrupt(f"{blob} differs from the hub's file: the copy was removed, run again")
    return Path(snapshot)
