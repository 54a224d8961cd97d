"""S3 as a place to write to: a directory is there when its manifest is, and the manifest comes last.

    push      every file with its SHA-256, sizes compared; then the manifest, if there is none yet
    pull      the manifest first; its files into a folder that appears when every byte is right
    drop      the manifest first

All names are URLs, s3://bucket/prefix. Address and credentials are the environment's; see `s3.answering`.
"""

import json
import logging
import shutil
import tempfile
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from components.adapters.s3 import client as s3
from infoxlm_core import manifests
from infoxlm_core.errors import InputError, ShardCorrupt, StorageUnavailable

logger = logging.getLogger(__name__)

_FORGOTTEN = timedelta(days=1)
"""After this long nobody goes on with an upload in parts: it is a dead process's."""


def is_url(place: str | Path) -> bool:
    return str(place).startswith("s3://")


def split(url: str) -> tuple[str, str]:
    """Bucket and key."""
    bucket, _, key = url.removeprefix("s3://").partition("/")
    return bucket, key.strip("/")


# ---------------------------------------------------------------- single objects


def get(url: str, quick: bool = False) -> tuple[bytes, str] | None:
    """Content and ETag of a small object; None if there is none. For `quick` see `s3.answering`, here and below."""
    from botocore.exceptions import ClientError

    bucket, key = split(url)
    with s3.answering(url, quick) as client:
        try:
            answer = client.get_object(Bucket=bucket, Key=key)
            return answer["Body"].read(), answer["ETag"]
        except ClientError as error:
            if _status(error) != 404:
                raise
    return None


def put(url: str, content: str | bytes) -> None:
    """Write a small object, whatever was there."""
    bucket, key = split(url)
    with s3.answering(url) as client:
        client.put_object(Bucket=bucket, Key=key, Body=_bytes(content), ChecksumAlgorithm="SHA256")


def put_if(url: str, content: str | bytes, etag: str | None, quick: bool = False) -> str | None:
    """Write a small object only over what is known to be there: the content of that ETag, or nothing (None).

    Returns:
        its new ETag; None if somebody else was faster. A lost answer to our own write is no somebody else.
    """
    from botocore.exceptions import ClientError

    bucket, key = split(url)
    condition = {"IfMatch": etag} if etag else {"IfNoneMatch": "*"}
    with s3.answering(url, quick) as client:
        try:
            answer = client.put_object(
                Bucket=bucket, Key=key, Body=_bytes(content), ChecksumAlgorithm="SHA256", **condition
            )
            return answer["ETag"]
        except ClientError as error:
            if _status(error) not in (404, 409, 412):  # 409: two writers at the same moment; 404: deleted meanwhile
                raise
    found = get(url, quick)
    return found[1] if found and found[0] == _bytes(content) else None


def delete(url: str) -> None:
    bucket, key = split(url)
    with s3.answering(url) as client:
        client.delete_object(Bucket=bucket, Key=key)


# ---------------------------------------------------------------- directories with a manifest


def manifest(url: str) -> dict[str, Any] | None:
    """The manifest of a directory; None if there is none, and so no directory.

    Raises:
        ShardCorrupt: it cannot be read.
    """
    found = get(f"{url}/{manifests.NAME}")
    if found is None:
        return None
    try:
        return json.loads(found[0])
    except ValueError as error:
        raise ShardCorrupt(f"{url}/{manifests.NAME} cannot be read ({error}): delete it and make it again") from None


def manifest_exists(url: str) -> bool:
    from botocore.exceptions import ClientError

    bucket, key = split(f"{url}/{manifests.NAME}")
    with s3.answering(url) as client:
        try:
            client.head_object(Bucket=bucket, Key=key)
        except ClientError as error:
            if _status(error) != 404:
                raise
            return False
    return True


def push(directory: Path, url: str, before_commit: Callable[[], None] = lambda: None, replace: bool = False) -> None:
    """Upload a directory that has a manifest. Called again it sends only what is not there yet.

    Args:
        directory: what is uploaded.
        url: s3://bucket/prefix of the copy.
        before_commit: called when all files have arrived, before the manifest makes them a directory.
        replace: put it in the place of another of this name, which is gone first.

    Raises:
        ShardCorrupt: a file is not what the manifest says, or did not arrive so.
        InputError: S3 refuses, or has something else under this name already.
        StorageUnavailable: S3 does not answer; what was sent is no directory yet.
    """
    content = (directory / manifests.NAME).read_bytes()
    files = {name: entry["sha256"] for name, entry in json.loads(content)["files"].items()}
    inner = {str(path.relative_to(directory)) for path in directory.rglob(manifests.NAME)} - {manifests.NAME}
    files |= {name: manifests.file_sha256(directory / name) for name in inner}  # of artifacts within this one
    sweep(url, _FORGOTTEN)
    if replace and manifest_exists(url):
        drop(url)
    bucket, prefix = split(url)
    with s3.answering(url) as client:
        for name, digest in sorted(files.items()):
            path, key = manifests.inside(directory, name), f"{prefix}/{name}"
            if _has(client, bucket, key, path.stat().st_size, digest):
                continue
            if manifests.file_sha256(path) != digest:
                raise ShardCorrupt(f"{path} changed after it was made: remove {directory} and run again")
            said = {"ChecksumAlgorithm": "SHA256", "Metadata": {"sha256": digest}}
            client.upload_file(str(path), bucket, key, ExtraArgs=said)
            if not _has(client, bucket, key, path.stat().st_size, digest):
                raise StorageUnavailable(f"{url}/{name} is not what was sent: run again")
    before_commit()
    if put_if(f"{url}/{manifests.NAME}", content, None) is None:
        raise InputError(f"{url} is there already with other content: remove it, or take it from there")
    logger.info("sent %d files to %s", len(files) + 1, url)


def pull(url: str, directory: Path) -> None:
    """Download a directory, whole or not at all: what its manifest names, and the manifests of artifacts within.

    Raises:
        InputError: there is none, or its manifest names a place outside of it.
        ShardCorrupt: a file is missing or not what its manifest says.
        StorageUnavailable: S3 does not answer.
    """
    described = manifest(url)
    if described is None:
        raise InputError(f"{url} holds no {manifests.NAME}: run the stage that makes it first")
    bucket, prefix = split(url)
    directory.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".fetch-", dir=directory.parent) as folder, s3.answering(url) as client:
        partial = Path(folder) / "it"
        named = {manifests.inside(partial, name, url) for name in described["files"]}
        named |= {above / manifests.NAME for path in named for above in path.parents if above.is_relative_to(partial)}
        wanted = {str(path.relative_to(partial)): path for path in (*named, partial / manifests.NAME)}
        for name, item in _objects(client, bucket, prefix):
            if path := wanted.get(name):
                path.parent.mkdir(parents=True, exist_ok=True)
                client.download_file(bucket, item["Key"], str(path))
        manifests.read(partial, described["kind"], made_with="the stage that makes it")
        shutil.rmtree(directory, ignore_errors=True)  # what an interrupted process left, if anything
        try:
            partial.replace(directory)
        except OSError:
            if not (directory / manifests.NAME).is_file():  # else another process of this machine was faster
                raise
    logger.info("fetched %s", url)


def drop(url: str) -> None:
    """Delete a directory: it is gone with its manifest, the rest follows."""
    delete(f"{url}/{manifests.NAME}")
    bucket, prefix = split(url)
    with s3.answering(url) as client:
        keys = [{"Key": item["Key"]} for _, item in _objects(client, bucket, prefix)]
        for first in range(0, len(keys), 1000):
            client.delete_objects(Bucket=bucket, Delete={"Objects": keys[first : first + 1000], "Quiet": True})


def folders(url: str) -> list[str]:
    """Names of the folders directly below a prefix."""
    bucket, prefix = split(url)
    with s3.answering(url) as client:
        pages = client.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=f"{prefix}/", Delimiter="/")
        found = [item["Prefix"] for page in pages for item in page.get("CommonPrefixes", ())]
    return sorted(name.rstrip("/").rpartition("/")[2] for name in found)


def sweep(url: str, older: timedelta = timedelta(0)) -> int:
    """Abort uploads in parts below a prefix that were begun at least so long ago; return how many.

    A process that is killed leaves its parts behind: they cost money, and no listing shows them.
    """
    bucket, prefix = split(url)
    with s3.answering(url) as client:
        pages = client.get_paginator("list_multipart_uploads").paginate(Bucket=bucket, Prefix=f"{prefix}/")
        pending = [upload for page in pages for upload in page.get("Uploads", ())]
        old = [upload for upload in pending if upload["Initiated"] <= datetime.now(UTC) - older]
        for upload in old:
            client.abort_multipart_upload(Bucket=bucket, Key=upload["Key"], UploadId=upload["UploadId"])
    if old:
        logger.info("aborted %d uploads that were left unfinished below %s", len(old), url)
    return len(old)


def _objects(client: Any, bucket: str, prefix: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Names below a prefix, with what S3 says of the objects; whoever makes paths of them asks `manifests.inside`."""
    for page in client.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=f"{prefix}/"):
        for item in page.get("Contents", ()):
            name = item["Key"].removeprefix(f"{prefix}/")
            if name:
                yield name, item


def _has(client: Any, bucket: str, key: str, size: int, digest: str) -> bool:
    """Whether an object is the file of this size and SHA-256; S3 itself knows no digest of what came in parts."""
    from botocore.exceptions import ClientError

    try:
        said = client.head_object(Bucket=bucket, Key=key)
    except ClientError as error:
        if _status(error) != 404:
            raise
        return False
    return said["ContentLength"] == size and said["Metadata"].get("sha256") == digest


def _status(error: Any) -> int:
    return error.response["ResponseMetadata"].get("HTTPStatusCode", 500)


def _bytes(content: str | bytes) -> bytes:
    return content.encode() if isinstance(content, str) else content
