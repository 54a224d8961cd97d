"""S3, as a place to read from: whole local copies of what lies under a prefix, and errors of one line.

Address, credentials and region are the environment's (AWS_ENDPOINT_URL, AWS_ACCESS_KEY_ID, …), as everywhere.
"""

import functools
import logging
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any

from components.adapters.mlflow.runs import one_line
from infoxlm_core import manifests
from infoxlm_core.errors import InputError, StorageUnavailable

logger = logging.getLogger(__name__)

_QUICK = 4.0
"""Seconds that a quick client waits for an answer: three tries fit into the patience of a lease."""

Objects = dict[str, dict[str, Any]]
"""Name below the prefix -> what S3 says of the object."""


def mirror(
    source: str,
    cache: Path,
    deep: bool = False,
    choose: Callable[[Objects], Objects] = lambda found: found,
    folders: Callable[[Objects], Sequence[str]] = lambda _: (),
) -> Path:
    """Copy objects into a folder of `cache` that is named by a digest of their names, sizes and ETags, once.

    Args:
        source: s3://bucket/prefix; without anything below it the object of that very name.
        cache: folder of all such copies.
        deep: also what lies in folders below the prefix; the copy keeps the prefix's own last name.
        choose: which of the objects are wanted.
        folders: which folders below the prefix are wanted too, all that is in them, by what lies directly under it.

    Returns:
        the folder, or the one file if that is what `source` names.

    Raises:
        InputError: there is nothing, or S3 refuses.
        ShardCorrupt: what came is not what was stored: another size, or another digest than our manifest's.
        StorageUnavailable: S3 does not answer.
    """
    bucket, _, prefix = source.removeprefix("s3://").partition("/")
    with answering(source) as client:
        prefix = prefix.rstrip("/")
        found = _list(client, bucket, prefix, deep)
        for folder in folders(found):
            more = _list(client, bucket, f"{prefix}/{folder}".lstrip("/"), True)
            found |= {f"{folder}/{name}": item for name, item in more.items()}
        wanted = choose(found)
        if not wanted:
            raise InputError(f"{source} holds no file: check bucket and prefix")
        alone = [item["Key"] for item in wanted.values()] == [prefix]
        below = (PurePosixPath(prefix).name or bucket) if deep and not alone else ""
        name = "s3-" + _digest(bucket, prefix, wanted).removeprefix("sha256:")[:16]
        cache.mkdir(parents=True, exist_ok=True)
        if not (cache / name).is_dir():
            with tempfile.TemporaryDirectory(prefix=".fetch-", dir=cache) as folder:
                whole = Path(folder) / "it"
                _download(client, source, wanted, manifests.inside(whole, below, source) if below else whole)
                keep(cache, name, Path(folder) / "it")
    return cache / name / below / next(iter(wanted)) if alone else cache / name / below


def state(source: str, deep: bool = False) -> str:
    """A digest of names, sizes and ETags of what lies under a prefix; raises as `mirror` does."""
    bucket, _, prefix = source.removeprefix("s3://").partition("/")
    prefix = prefix.rstrip("/")
    with answering(source) as client:
        found = _list(client, bucket, prefix, deep)
    if not found:
        raise InputError(f"{source} holds no file: check bucket and prefix")
    return _digest(bucket, prefix, found)


def _digest(bucket: str, prefix: str, objects: Objects) -> str:
    listed = [(item["Key"], item["Size"], item["ETag"]) for _, item in sorted(objects.items())]
    return manifests.digest([bucket, prefix, listed])


def _download(client: Any, source: str, wanted: Objects, directory: Path) -> None:
    """Copy objects into a directory and compare them with what S3, and perhaps our manifest, says of them."""
    bucket = source.removeprefix("s3://").partition("/")[0]
    paths = {name: manifests.inside(directory, name, source) for name in wanted}  # all, before the first is written
    for name, path in paths.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        client.download_file(bucket, wanted[name]["Key"], str(path))  # compares the checksum that S3 has
        manifests.verify_file(path, {"size": wanted[name]["Size"]}, "run again", hashed=False)
    _verify(directory, paths, source)


def keep(cache: Path, name: str, partial: Path) -> Path:
    """Move a finished directory into a cache; somebody may have been faster."""
    final = cache / name
    try:
        partial.replace(final)
    except OSError:
        if not final.is_dir():
            raise
    logger.info("fetched %s", final)
    return final


def _list(client: Any, bucket: str, prefix: str, deep: bool) -> Objects:
    """Objects under a prefix by their names below it; if there is none, the object of that very name."""
    under = f"{prefix}/" if prefix else ""
    pages = client.get_paginator("list_objects_v2").paginate(
        Bucket=bucket, Prefix=under, **({} if deep else {"Delimiter": "/"})
    )
    keys = [item for page in pages for item in page.get("Contents", ()) if not item["Key"].endswith("/")]
    found = {item["Key"].removeprefix(under): item for item in keys}
    alone = client.list_objects_v2(Bucket=bucket, Prefix=prefix, MaxKeys=1).get("Contents", ()) if not found else ()
    return found or {PurePosixPath(item["Key"]).name: item for item in alone if item["Key"] == prefix}


def _verify(directory: Path, paths: Mapping[str, Path], source: str) -> None:
    """Compare files with their digests where our manifest came along; a data set may have another of that name."""
    if not (directory / manifests.NAME).is_file():
        return
    try:
        files = dict(manifests.load(directory)["files"])
    except (ValueError, KeyError, TypeError):
        return
    for name, entry in files.items():
        if name in paths and "sha256" in entry:
            manifests.verify_file(paths[name], entry, f"upload {source} again")


@contextmanager
def answering(source: str, quick: bool = False) -> Iterator[Any]:
    """A client of S3 whose errors become ours, one line each; a quick one gives up within seconds."""
    from boto3.exceptions import Boto3Error
    from botocore.exceptions import BotoCoreError, ClientError, NoCredentialsError, ParamValidationError

    try:
        yield _client(tuple(sorted(item for item in os.environ.items() if item[0].startswith("AWS_"))), quick)
    except (NoCredentialsError, ParamValidationError) as error:
        raise InputError(f"{source}: {one_line(error)}: set AWS_ACCESS_KEY_ID and its secret") from error
    except (BotoCoreError, Boto3Error, ClientError) as error:
        inner = error if isinstance(error, ClientError) else error.__cause__ or error.__context__
        if isinstance(inner, ClientError) and inner.response["ResponseMetadata"].get("HTTPStatusCode", 500) < 500:
            raise InputError(f"{source}: S3 refuses ({one_line(inner)}): check name and rights") from error
        raise StorageUnavailable(f"{source}: S3 does not answer ({one_line(error)}): run again") from error


@functools.lru_cache(8)
def _client(environment: tuple[tuple[str, str], ...], quick: bool) -> Any:
    """A client for the settings that boto3 itself takes from the environment; making one takes a fifth of a second."""
    import boto3
    from botocore.config import Config

    own = any(name.startswith("AWS_ENDPOINT_URL") for name, _ in environment)  # most servers know no bucket as a host
    settings = Config(
        retries={"mode": "standard", "total_max_attempts": 3 if quick else 10},
        connect_timeout=_QUICK if quick else 5,
        read_timeout=_QUICK if quick else 60,
        s3={"addressing_style": "path"} if own else {},
    )
    known = dict(environment)
    region = known.get("AWS_REGION") or known.get("AWS_DEFAULT_REGION") or "us-east-1"
    return boto3.Session().client("s3", config=settings, region_name=region)
