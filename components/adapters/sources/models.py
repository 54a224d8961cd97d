"""Where a model to start from may be, and a local copy of it that cannot run code.

    configs/… or /data/xlmr            a Hugging Face directory on this machine
    s3://bucket/prefix                 the same on S3; AWS_ENDPOINT_URL and the usual credentials of the environment
    FacebookAI/xlm-roberta-base        on the Hugging Face hub, or with `@revision`
    models:/infoxlm@champion           in the registry, or models:/infoxlm/3

Copies lie in the store, where all workers of a run see them, and are whole or not there.
"""

import os
import re
import shutil
import tempfile
from pathlib import Path

from components.adapters.mlflow import registry as model_registry
from components.adapters.mlflow import runs as mlflow_runs
from components.adapters.mlflow import versions as registered
from components.adapters.s3 import client as s3
from infoxlm_core import manifests
from infoxlm_core.errors import InputError, ShardCorrupt, StorageUnavailable
from infoxlm_core.training import selection

_HUB = re.compile(r"(?P<name>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(@(?P<revision>[\w./-]+))?", re.ASCII)
_FILES = ["*.safetensors", "*.json", "*.model", "*.txt"]
"""What is taken from the hub: nothing that could run code."""


def fetch(source: str, store: Path, only: str | None = None) -> Path:
    """Return the local directory of an encoder, or the one file `only` of it.

    Args:
        source: see above; with `only` also the file itself.
        store: copies go to `store/models`; it holds the registry where there is no MLflow server.
        only: a file that needs no model beside it, such as `sentencepiece.bpe.model`.

    Raises:
        InputError: there is no such model, or it holds pickles or asks for code of its own.
        ShardCorrupt: what was downloaded is not what was stored, or a model of ours is not what was made.
        SignatureInvalid: a version of the registry is not signed with the key that is set.
        StorageUnavailable: S3, the hub or MLflow does not answer.
    """
    cache = store.resolve() / "models"
    if Path(source).exists():
        found = Path(source)
    elif source.startswith("s3://"):
        found = _from_s3(source, cache, only)
    elif source.startswith("models:/"):
        found = _from_registry(source, store, cache)
    elif match := _HUB.fullmatch(source):
        found = _from_hub(match["name"], match["revision"], cache, only)
    else:
        raise InputError(f"{source}: no such file or directory: give a path, s3://…, models:/NAME@ALIAS or ORG/NAME")
    if only is None:
        if source.startswith("models:/") or Path(source).exists():  # what else is downloaded is compared there
            registered.check_directory(found)
        else:
            registered.check_encoder(found)
        return found
    file = found / only if found.is_dir() else found
    if not file.is_file():
        raise InputError(f"{source} has no {only}: give a model with its tokenizer, or the file itself")
    return file


def _from_registry(source: str, store: Path, cache: Path) -> Path:
    """A copy: what the registry hands out may lie in a folder of this process alone."""
    found = model_registry.load_encoder(source, store)
    (weights, *_) = sorted(found.glob("*.safetensors"))
    name = f"registry-{manifests.file_sha256(weights)[:16]}"
    cache.mkdir(parents=True, exist_ok=True)
    if (cache / name).is_dir():
        return cache / name
    with tempfile.TemporaryDirectory(prefix=".fetch-", dir=cache) as folder:
        shutil.copytree(found, Path(folder) / "it")
        return s3.keep(cache, name, Path(folder) / "it")


def _from_s3(source: str, cache: Path, only: str | None) -> Path:
    """Files directly under a prefix, or one of them, or one object; of a fine-tuned model also those in `steps/`."""
    return s3.mirror(
        source,
        cache,
        choose=lambda found: {only: found[only]} if only in found else found,
        folders=lambda found: ("steps",) if selection.FILE in found and not only else (),
    )


def _from_hub(name: str, revision: str | None, cache: Path, only: str | None) -> Path:
    """A snapshot of the hub, or of the cache if the hub cannot be reached; large files are named by their SHA-256."""
    from huggingface_hub import constants, errors, snapshot_download

    offline, constants.HF_HUB_OFFLINE = constants.HF_HUB_OFFLINE, False  # off for all that nobody asked for: see MLflow
    try:
        snapshot = snapshot_download(
            name,
            revision=revision,
            cache_dir=cache / "hub",
            allow_patterns=[only] if only else _FILES,
            endpoint=os.environ.get("HF_ENDPOINT"),
        )
    except (errors.RepositoryNotFoundError, errors.RevisionNotFoundError, errors.HFValidationError) as error:
        said = mlflow_runs.one_line(error)
        raise InputError(f"{name}: no such directory, and no such model on the hub ({said}): check its name") from error
    except OSError as error:  # all the hub's errors are
        raise StorageUnavailable(
            f"{name}: no such directory, and the hub does not answer ({mlflow_runs.one_line(error)}): "
            "download the model where there is a network and give its directory"
        ) from error
    finally:
        constants.HF_HUB_OFFLINE = offline
    for path in Path(snapshot).rglob("*"):
        blob = path.resolve()
        if re.fullmatch("[0-9a-f]{64}", blob.name) and manifests.file_sha256(blob) != blob.name:
            blob.unlink()
            raise ShardCorrupt(f"{blob} is not what the hub has: it was removed, run again")
    return Path(snapshot)
