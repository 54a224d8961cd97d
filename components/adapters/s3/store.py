"""S3 as a storage; the only module that calls boto3.

Address, credentials and region come from the usual environment variables: AWS_ENDPOINT_URL, AWS_ACCESS_KEY_ID, …
"""

import contextlib
import functools
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from components.adapters.storage import Entry
from infoxlm_core import user_files
from infoxlm_core.errors import InputError, StorageUnavailable, one_line

logger = logging.getLogger(__name__)

LIMITS = {"attempts": 10, "connect_seconds": 5, "read_seconds": 60}
QUICK_LIMITS = {"attempts": 3, "connect_seconds": 4, "read_seconds": 4}
"""Limits of calls that must fail sooner than a lease expires (`lease.PATIENCE`)."""
_READ_ATTEMPTS = 3  # botocore does not repeat a request whose body breaks off
_MAX_DELETED = 1000  # objects that S3 deletes in one request


class S3Store:
    """A storage in a bucket, below a prefix of it, or in one object. See `Store`. Versions are ETags.

    Args:
        uri: s3://bucket/prefix
    """

    directory = None

    def __init__(self, uri: str) -> None:
        self.uri = uri
        self.bucket, _, key = uri.removeprefix("s3://").partition("/")
        self._prefix = key.strip("/")

    def get(self, name: str = "", quick: bool = False) -> tuple[bytes, str] | None:
        with self._client(name, quick) as client, _ignore_statuses():
            answer = client.get_object(Bucket=self.bucket, Key=self._key(name))
            size = answer["ContentLength"]
            if size > user_files.MAX_JSON:
                limit = user_files.MAX_JSON
                raise InputError(f"{self.uri}/{name} has {size:,} bytes, but at most {limit:,} are read: remove it")
            return answer["Body"].read(), answer["ETag"]
        return None

    def read(self, name: str = "", start: int = 0, length: int | None = None) -> bytes:
        from botocore.exceptions import BotoCoreError

        if length == 0:
            return b""
        request = {"Bucket": self.bucket, "Key": self._key(name)}
        if start > 0 or length is not None:  # S3 refuses a range of an empty file
            end = "" if length is None else start + length - 1
            request["Range"] = f"bytes={start}-{end}"
        with self._client(name) as client:
            for _ in range(_READ_ATTEMPTS - 1):
                with contextlib.suppress(BotoCoreError):
                    return client.get_object(**request)["Body"].read()
            return client.get_object(**request)["Body"].read()

    def put(self, name: str, content: str | bytes) -> None:
        with self._client(name) as client:
            client.put_object(**self._put_request(name, content))

    def put_if(self, name: str, content: str | bytes, version: str | None, quick: bool = False) -> str | None:
        condition = {"IfMatch": version} if version else {"IfNoneMatch": "*"}
        # S3 answers 412 if the condition fails, 409 to one of two simultaneous writers, and 404 if another process has
        # deleted the file.
        with self._client(name, quick) as client, _ignore_statuses(404, 409, 412):
            return client.put_object(**self._put_request(name, content), **condition)["ETag"]
        # An earlier attempt may have written this content, although its answer was lost.
        existing = self.get(name, quick)
        if existing is None:
            return None
        existing_content, existing_version = existing
        return existing_version if existing_content == _encode(content) else None

    def delete(self, *names: str) -> None:
        if len(names) == 1:
            with self._client(names[0]) as client:
                client.delete_object(Bucket=self.bucket, Key=self._key(names[0]))
            return
        with self._client() as client:
            for start in range(0, len(names), _MAX_DELETED):
                keys = [{"Key": self._key(name)} for name in names[start : start + _MAX_DELETED]]
                answer = client.delete_objects(Bucket=self.bucket, Delete={"Objects": keys, "Quiet": True})
                # The status is 200 even if some of the objects could not be deleted.
                errors = answer.get("Errors")
                if errors:
                    first_error = errors[0]
                    reason = f"{first_error.get('Code')} {first_error.get('Message', '')}"
                    raise InputError(
                        f"{self.uri}: S3 refuses to delete {len(errors)} files, the first is "
                        f"{first_error.get('Key')} ({reason}): check your rights"
                    )

    def entries(self, deep: bool = True) -> list[Entry]:
        prefix = self._list_request()["Prefix"]
        arguments = {} if deep else {"Delimiter": "/"}
        objects = self._list_all("list_objects_v2", "Contents", **arguments)
        entries = []
        with self._client():  # translates the KeyError of an answer that does not come from S3
            for item in objects:
                if item["Key"] == prefix:  # an empty object that some tools create to represent the folder
                    continue
                name = item["Key"].removeprefix(prefix)
                entries.append(Entry(name, item["Size"], item["ETag"], item["LastModified"]))
        return entries

    def folders(self) -> list[str]:
        names = []
        for item in self._list_all("list_objects_v2", "CommonPrefixes", Delimiter="/"):
            _, _, name = item["Prefix"].rstrip("/").rpartition("/")
            names.append(name)
        return sorted(names)

    def head(self, name: str = "") -> Entry | None:
        if not self._key(name):
            return None
        with self._client() as client, _ignore_statuses():
            head = client.head_object(Bucket=self.bucket, Key=self._key(name))
            digest = head["Metadata"].get("sha256", "")  # S3 itself computes no SHA-256 of a whole multipart upload
            return Entry(name, head["ContentLength"], head["ETag"], head["LastModified"], digest)
        return None

    def upload(self, path: Path, name: str, sha256: str) -> None:
        arguments = {"ChecksumAlgorithm": "SHA256", "Metadata": {"sha256": sha256}}
        with self._client() as client:
            client.upload_file(str(path), self.bucket, self._key(name), ExtraArgs=arguments)

    def download(self, name: str, path: Path) -> None:
        with self._client() as client:
            client.download_file(self.bucket, self._key(name), str(path))  # verifies S3's checksum

    def sweep(self) -> int:
        """Abort multipart uploads of killed processes, because their parts cost money but appear in no listing."""
        uploads = self._list_all("list_multipart_uploads", "Uploads")
        with self._client() as client:
            for upload in uploads:
                client.abort_multipart_upload(Bucket=self.bucket, Key=upload["Key"], UploadId=upload["UploadId"])
        if uploads:
            logger.info("aborted %d unfinished uploads below %s", len(uploads), self.uri)
        return len(uploads)

    def _key(self, name: str) -> str:
        """Return the key of a file, or the key that the URI itself names if there is no name."""
        if not name:
            return self._prefix
        return f"{self._prefix}/{name}" if self._prefix else name

    def _put_request(self, name: str, content: str | bytes) -> dict[str, Any]:
        return {
            "Bucket": self.bucket,
            "Key": self._key(name),
            "Body": _encode(content),
            "ChecksumAlgorithm": "SHA256",
        }

    def _list_request(self) -> dict[str, str]:
        return {"Bucket": self.bucket, "Prefix": f"{self._prefix}/" if self._prefix else ""}

    def _list_all(self, request: str, field: str, **arguments: str) -> list[dict[str, Any]]:
        """Return the items of one field from all pages of a listing."""
        items: list[dict[str, Any]] = []
        with self._client() as client:
            for page in client.get_paginator(request).paginate(**self._list_request(), **arguments):
                items += page.get(field, ())
        return items

    def _client(self, name: str = "", quick: bool = False) -> Any:
        return translate_errors(f"{self.uri}/{name}" if name else self.uri, quick)


@contextmanager
def translate_errors(uri: str, quick: bool = False) -> Iterator[Any]:
    """Yield an S3 client, and raise its errors as InfoXLMErrors: one line each that begins with the URI."""
    from boto3.exceptions import Boto3Error
    from botocore import exceptions
    from botocore.exceptions import BotoCoreError, ClientError

    configuration_errors = (
        exceptions.NoCredentialsError,
        exceptions.ParamValidationError,
        exceptions.EndpointProviderError,
    )
    aws_variables = sorted((name, value) for name, value in os.environ.items() if name.startswith("AWS_"))
    try:
        client = _client(tuple(aws_variables), quick)
    except (BotoCoreError, ValueError) as error:  # ValueError: a malformed address
        raise InputError(f"{uri}: {one_line(error)}: check AWS_ENDPOINT_URL, AWS_REGION and AWS_PROFILE") from error
    try:
        yield client
    except configuration_errors as error:
        remedy = "check AWS_ENDPOINT_URL, AWS_REGION, AWS_ACCESS_KEY_ID and the name of the bucket"
        raise InputError(f"{uri}: {one_line(error)}: {remedy}") from error
    except (KeyError, TypeError, AttributeError, RecursionError) as error:
        # The answer lacks a field that S3 always sends. RecursionError: boto3 follows a redirect of the server to
        # itself until the stack overflows.
        raise InputError(
            f"{uri}: the server is not S3 ({type(error).__name__}: {error}): check AWS_ENDPOINT_URL and proxies"
        ) from (None if isinstance(error, RecursionError) else error)
    except (BotoCoreError, Boto3Error, ClientError) as error:
        # The errors of uploads and downloads wrap the answer of the server.
        answer = error if isinstance(error, ClientError) else error.__cause__ or error.__context__
        if not isinstance(answer, ClientError):
            raise StorageUnavailable(f"{uri}: S3 does not answer ({one_line(error)}): run again") from error
        status = _read_status(answer)
        if status < 500:
            raise InputError(f"{uri}: S3 refuses ({one_line(answer)}): check the name and your rights") from error
        raise StorageUnavailable(f"{uri}: S3 fails with status {status} ({one_line(answer)}): run again") from error


@functools.lru_cache(8)
def _client(environment: tuple[tuple[str, str], ...], quick: bool) -> Any:
    """Return a client for these environment variables, from a cache: creating a client takes 0.2 seconds.

    boto3 reads the variables from the environment; the argument is the key of the cache.
    """
    import boto3
    from botocore.config import Config

    logging.getLogger("botocore").setLevel(logging.WARNING)  # it logs where each client finds its credentials
    limits = QUICK_LIMITS if quick else LIMITS
    uses_other_server = any(name.startswith("AWS_ENDPOINT_URL") for name, _ in environment)
    settings = Config(
        retries={"mode": "standard", "total_max_attempts": limits["attempts"]},
        connect_timeout=limits["connect_seconds"],
        read_timeout=limits["read_seconds"],
        s3={"addressing_style": "path"} if uses_other_server else {},  # most servers have no host name for each bucket
    )
    variables = dict(environment)
    region = variables.get("AWS_REGION") or variables.get("AWS_DEFAULT_REGION") or "us-east-1"
    return boto3.Session().client("s3", config=settings, region_name=region)


@contextmanager
def _ignore_statuses(*statuses: int) -> Iterator[None]:
    """Leave the block silently if S3 answers with one of these statuses, by default 404 (no such object)."""
    from botocore.exceptions import ClientError

    try:
        yield
    except ClientError as error:
        if _read_status(error) not in (statuses or (404,)):
            raise


def _read_status(error: Any) -> int:
    """Return the HTTP status of an answer, or 500 if it has none."""
    return error.response["ResponseMetadata"].get("HTTPStatusCode", 500)


def _encode(content: str | bytes) -> bytes:
    return content.encode() if isinstance(content, str) else content
