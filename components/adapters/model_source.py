"""Where a model to start from may be, and a local copy of it that cannot run code.

    configs/… or /data/xlmr            a Hugging Face directory on this machine
    s3://bucket/prefix                 the same on S3; AWS_ENDPOINT_URL and the usual credentials of the environment
    FacebookAI/xlm-roberta-base        on the Hugging Face hub, or with `@revision`
    models:/infoxlm@champion           in the registry, or models:/infoxlm/3

Copies lie in the store, where all workers of a run see them, and are whole or not there.
"""

import logging
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from components.adapters import mlflow_runs, model_registry
from infoxlm_core import manifests
from infoxlm_core.errors import InputError, ShardCorrupt, StorageUnavailable

logger = logging.getLogger(__name__)

_HUB = re.compile(r"(?P<name>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(@(?P<revision>[\w./-]+))?", re.ASCII)
_FILES = ["*.safetensors", "*.json", "*.model"]
"""What is taken from the hub: nothing that could run code."""


def fetch(source: str, store: Path, only: str | None = None) -> Path:
    """Return the local directory of an encoder, or the one file `only` of it.

    Args:
        source: see above; with `only` also the file itself.
        store: copies go to `store/models`; it holds the registry where there is no MLflow server.
        only: a file that needs no model beside it, such as `sentencepiece.bpe.model`.

    Raises:
        InputError: there is no such model, or it holds pickles or asks for code of its own.
        ShardCorrupt: what was downloaded is not what was stored.
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
        model_registry.check_encoder(found)
        return found
    file = found / only if found.is_dir() else found
    if not file.is_file():
        raise InputError(f"{source} has no {only}: give a model with its tokenizer, or the file itself")
    return file


def _keep(cache: Path, name: str, partial: Path) -> Path:
    """Move a finished directory into the cache; somebody may have been faster."""
    final = cache / name
    try:
        os.replace(partial, final)
    except OSError:
        if not final.is_dir():
            raise
    logger.info("fetched %s", final)
    return final


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
        return _keep(cache, name, Path(folder) / "it")


def _from_s3(source: str, cache: Path, only: str | None) -> Path:
    """Files directly under a prefix, or one object, in a folder named by a digest of their names, sizes and ETags."""
    bucket, _, prefix = source.removeprefix("s3://").partition("/")
    with _answering_s3(source) as client:
        wanted = {Path(item["Key"]).name: item for item in _list(client, bucket, prefix.rstrip("/"))}
        wanted = {only: wanted[only]} if only in wanted else wanted
        if not wanted:
            raise InputError(f"{source} holds no file: check bucket and prefix")
        state = [(item["Key"], item["Size"], item["ETag"]) for _, item in sorted(wanted.items())]
        name = "s3-" + manifests.digest([bucket, state]).removeprefix("sha256:")[:16]
        cache.mkdir(parents=True, exist_ok=True)
        if not (cache / name).is_dir():
            with tempfile.TemporaryDirectory(prefix=".fetch-", dir=cache) as folder:
                partial = Path(folder) / "it"
                partial.mkdir()
                for file, item in wanted.items():
                    client.download_file(bucket, item["Key"], str(partial / file))  # compares the checksum S3 has
                    manifests.verify_file(partial / file, {"size": item["Size"]}, "run again", hashed=False)
                _verify(partial, source)
                _keep(cache, name, partial)
    return cache / name if only is None or only in wanted else cache / name / next(iter(wanted))


def _list(client: Any, bucket: str, prefix: str) -> list[dict]:
    """Objects directly under a prefix; if there is none, the object of that very name."""
    under = f"{prefix}/" if prefix else ""
    pages = client.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=under, Delimiter="/")
    found = [item for page in pages for item in page.get("Contents", ()) if item["Key"] != under]
    alone = client.list_objects_v2(Bucket=bucket, Prefix=prefix, MaxKeys=1).get("Contents", ()) if not found else ()
    return found or [item for item in alone if item["Key"] == prefix]


def _verify(directory: Path, source: str) -> None:
    """Compare files with their digests where our manifest came along."""
    if (directory / manifests.NAME).is_file():
        for name, entry in manifests.load(directory)["files"].items():
            if (directory / name).is_file():
                manifests.verify_file(directory / name, entry, f"upload {source} again")


@contextmanager
def _answering_s3(source: str) -> Iterator:
    """A client of S3 whose errors become ours, one line each."""
    import boto3
    from boto3.exceptions import Boto3Error
    from botocore.config import Config
    from botocore.exceptions import BotoCoreError, ClientError, NoCredentialsError, ParamValidationError

    own = any(name.startswith("AWS_ENDPOINT_URL") for name in os.environ)  # most servers know no bucket as a host
    settings = Config(
        retries={"mode": "standard", "total_max_attempts": 5},
        connect_timeout=5,
        read_timeout=60,
        s3={"addressing_style": "path"} if own else {},
    )
    try:
        region = os.environ.get("AWS_DEFAULT_REGION", "us-east-1")
        yield boto3.Session().client("s3", config=settings, region_name=region)
    except (NoCredentialsError, ParamValidationError) as error:
        raise InputError(f"{source}: {mlflow_runs.one_line(error)}: set AWS_ACCESS_KEY_ID and its secret") from error
    except ClientError as error:
        said = mlflow_runs.one_line(error)
        if error.response["ResponseMetadata"].get("HTTPStatusCode", 500) < 500:
            raise InputError(f"{source}: S3 refuses ({said}): check name and rights") from error
        raise StorageUnavailable(f"{source}: S3 does not answer ({said}): run again") from error
    except (BotoCoreError, Boto3Error) as error:
        raise StorageUnavailable(f"{source}: S3 does not answer ({mlflow_runs.one_line(error)}): run again") from error


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
    for path in Path(snapshot).iterdir():
        blob = path.resolve()
        if re.fullmatch("[0-9a-f]{64}", blob.name) and manifests.file_sha256(blob) != blob.name:
            blob.unlink()
            raise ShardCorrupt(f"{blob} is not what the hub has: it was removed, run again")
    return Path(snapshot)
