"""S3 as a storage. Only this module calls boto3.

Address, credentials and region come from the usual environment variables: AWS_ENDPOINT_URL, AWS_ACCESS_KEY_ID, …
"""

import functools
import logging
import math
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from components.adapters.storage import Entry
from infoxlm_core import user_files
from infoxlm_core.errors import InfoXLMError, InputError, StorageUnavailable, one_line

logger = logging.getLogger(__name__)

LIMITS = {"attempts": 10, "connect_seconds": 5, "read_seconds": 60}
QUICK_LIMITS = {"attempts": 3, "connect_seconds": 4, "read_seconds": 4}
"""Limits of calls that must fail sooner than a lease expires (`lease.EXPIRY_SECONDS`)."""
_READ_ATTEMPTS = 3
_DELETION_BATCH = 1000  # largest number of objects that S3 deletes in one request
_MISSING = 404  # HTTP status for a missing object
_TEMPORARY_STATUSES = (408, 429)  # timeout, too many requests; like every status from 500
_TEMPORARY_CODES = ("InternalError", "RequestTimeout", "ServiceUnavailable", "SlowDown")
"""S3's codes for errors that may not occur again. S3 sends some of them with a status below 500."""


class S3Store:
    """A `Store` in a bucket, below a prefix of a bucket, or in a single object. Versions are ETags.

    Args:
        uri: s3://bucket/prefix
    """

    directory = None

    def __init__(self, uri: str) -> None:
        self.uri = uri
        self.bucket, _, key = uri.removeprefix("s3://").partition("/")
        self._prefix = key.strip("/")

    def get(self, name: str = "", quick: bool = False) -> tuple[bytes, str] | None:
        """Return the content and ETag of a small file, or None if the file does not exist."""
        attempts = 1 if quick else _READ_ATTEMPTS
        with self._open_client(name, quick) as client, _ignore_statuses(_MISSING):
            return self._read_object(client, {"Key": self._key(name)}, attempts, max_size=user_files.MAX_JSON)
        return None  # reached if S3 answers that the file is missing

    def read(self, name: str = "", start: int = 0, length: int | None = None) -> bytes:
        """Return `length` bytes of a file from the offset `start`, or all following bytes if `length` is None."""
        if length == 0:  # HTTP has no range of zero bytes
            return b""
        request = {"Key": self._key(name)}
        if start > 0 or length is not None:  # S3 refuses a range of an empty file
            last_byte = "" if length is None else start + length - 1
            request["Range"] = f"bytes={start}-{last_byte}"
        with self._open_client(name) as client:
            content, _ = self._read_object(client, request, _READ_ATTEMPTS)
            return content

    def _read_object(
        self, client: Any, request: dict[str, str], attempts: int, max_size: float = math.inf
    ) -> tuple[bytes, str]:
        """Return the content and ETag of an object.

        Args:
            client: S3 client.
            request: arguments of `get_object`, except the bucket.
            attempts: number of requests before a response that breaks off is an error. botocore repeats a request that
                fails, but not one whose response breaks off.
            max_size: largest size in bytes. Another program's file at this address must not fill the memory.

        Raises:
            InputError: the object is larger than `max_size`.
        """
        from botocore.exceptions import BotoCoreError

        attempt = 1
        while True:
            response = client.get_object(Bucket=self.bucket, **request)
            size = response["ContentLength"]
            if size > max_size:
                uri = f"s3://{self.bucket}/{request['Key']}"
                raise InputError(f"{uri} has {size:,} bytes, but at most {max_size:,} are read: remove it")
            try:
                return response["Body"].read(), response["ETag"]
            except BotoCoreError:
                if attempt == attempts:
                    raise
            attempt += 1

    def put(self, name: str, content: str | bytes) -> None:
        """Write a small file, or replace it if it exists."""
        with self._open_client(name) as client:
            client.put_object(**self._make_put_request(name, content))

    def put_if(self, name: str, content: str | bytes, version: str | None, quick: bool = False) -> str | None:
        """Write a small file only if its ETag is still `version`, or (for None) only if the file does not exist.

        Returns:
            The new ETag, or None if another process has changed the file.
        """
        condition = {"IfMatch": version} if version else {"IfNoneMatch": "*"}
        # S3 answers 412 if the condition fails, 409 after a concurrent write, and 404 after a concurrent deletion.
        with self._open_client(name, quick) as client, _ignore_statuses(404, 409, 412):
            return client.put_object(**self._make_put_request(name, content), **condition)["ETag"]
        # S3 refused the write. If only the response to an earlier attempt was lost, the file already has this content.
        existing_file = self.get(name, quick)
        if existing_file is None:
            return None
        existing_content, existing_version = existing_file
        return existing_version if existing_content == _encode(content) else None

    def delete(self, *names: str) -> None:
        """Delete files. Ignore missing files."""
        if len(names) == 1:
            with self._open_client(names[0]) as client:  # begin error messages with the URI of this file
                client.delete_object(Bucket=self.bucket, Key=self._key(names[0]))
            return
        with self._open_client() as client:
            for start in range(0, len(names), _DELETION_BATCH):
                batch = names[start : start + _DELETION_BATCH]
                objects = [{"Key": self._key(name)} for name in batch]
                response = client.delete_objects(Bucket=self.bucket, Delete={"Objects": objects, "Quiet": True})
                self._check_deletion(response)

    def _check_deletion(self, response: dict[str, Any]) -> None:
        """Raise an error if S3 has not deleted all objects. S3 answers with status 200 even then."""
        errors = response.get("Errors")
        if not errors:
            return
        first_error = errors[0]
        code = first_error.get("Code")
        example = f"{first_error.get('Key')} ({code} {first_error.get('Message', '')})"
        if code in _TEMPORARY_CODES:
            raise StorageUnavailable(
                f"{self.uri}: S3 fails to delete {len(errors)} files, such as {example}: run again"
            )
        message = f"S3 refuses to delete {len(errors)} files, such as {example}: check your rights"
        raise InputError(f"{self.uri}: {message}")

    def entries(self, deep: bool = True) -> list[Entry]:
        """Return all files below the URI, or with `deep=False` only the files directly below it."""
        prefix = self._make_list_request()["Prefix"]
        delimiter = {} if deep else {"Delimiter": "/"}
        objects = self._list_all("list_objects_v2", "Contents", **delimiter)
        entries = []
        with self._open_client():  # reports a missing field, such as Key, as "not S3"
            for s3_object in objects:
                key = s3_object["Key"]
                if key == prefix:  # some tools create an empty object to represent the directory
                    continue
                name = key.removeprefix(prefix)
                entries.append(Entry(name, s3_object["Size"], s3_object["ETag"], s3_object["LastModified"]))
        return entries

    def directories(self) -> list[str]:
        """Return the names of the directories directly below the URI, sorted."""
        names = []
        # S3 has no directories. With a delimiter, it lists the beginnings that several keys share.
        for common_prefix in self._list_all("list_objects_v2", "CommonPrefixes", Delimiter="/"):
            _, _, name = common_prefix["Prefix"].rstrip("/").rpartition("/")
            names.append(name)
        return sorted(names)

    def head(self, name: str = "") -> Entry | None:
        """Return the size, version and digest of a file, or None if the file does not exist."""
        if not self._key(name):  # the URI of a whole bucket does not name a file
            return None
        with self._open_client() as client, _ignore_statuses(_MISSING):
            response = client.head_object(Bucket=self.bucket, Key=self._key(name))
            digest = response["Metadata"].get("sha256", "")  # S3 does not compute the SHA-256 of a multipart upload
            return Entry(name, response["ContentLength"], response["ETag"], response["LastModified"], digest)
        return None

    def upload(self, path: Path, name: str, sha256: str) -> None:
        """Upload a large file in parts, with its digest as metadata."""
        arguments = {"ChecksumAlgorithm": "SHA256", "Metadata": {"sha256": sha256}}
        with self._open_client() as client:
            client.upload_file(str(path), self.bucket, self._key(name), ExtraArgs=arguments)

    def download(self, name: str, path: Path) -> None:
        """Download a file to a local path. boto3 verifies the checksum that S3 sends."""
        with self._open_client() as client:
            client.download_file(self.bucket, self._key(name), str(path))

    def sweep(self) -> int:
        """Abort multipart uploads of killed processes, because their parts take up space but appear in no listing."""
        uploads = self._list_all("list_multipart_uploads", "Uploads")
        with self._open_client() as client:
            for upload in uploads:
                client.abort_multipart_upload(Bucket=self.bucket, Key=upload["Key"], UploadId=upload["UploadId"])
        if uploads:
            logger.info("aborted %d unfinished uploads below %s", len(uploads), self.uri)
        return len(uploads)

    def _key(self, name: str) -> str:
        """Return the key of a file, or the URI's own key for an empty name."""
        if not name:
            return self._prefix
        return f"{self._prefix}/{name}" if self._prefix else name

    def _make_put_request(self, name: str, content: str | bytes) -> dict[str, Any]:
        """Return the arguments of `put_object`, with a checksum that S3 verifies."""
        body = _encode(content)
        return {"Bucket": self.bucket, "Key": self._key(name), "Body": body, "ChecksumAlgorithm": "SHA256"}

    def _make_list_request(self) -> dict[str, str]:
        """Return the arguments of a request that lists all objects below the URI."""
        return {"Bucket": self.bucket, "Prefix": f"{self._prefix}/" if self._prefix else ""}

    def _list_all(self, operation: str, field: str, **arguments: str) -> list[dict[str, Any]]:
        """Call a paginated S3 operation. Return the elements of a response field from all pages."""
        elements: list[dict[str, Any]] = []
        with self._open_client() as client:
            for page in client.get_paginator(operation).paginate(**self._make_list_request(), **arguments):
                elements += page.get(field, ())
        return elements

    def _open_client(self, name: str = "", quick: bool = False) -> AbstractContextManager[Any]:
        """Open a client whose error messages name the file."""
        return open_client(f"{self.uri}/{name}" if name else self.uri, quick)


@contextmanager
def open_client(uri: str, quick: bool = False) -> Iterator[Any]:
    """Yield an S3 client. Convert errors in the block to one-line errors that begin with the URI.

    Args:
        uri: URI of the file or bucket that the block uses.
        quick: whether calls must fail within seconds if S3 does not answer.

    Raises:
        InputError: S3 refuses, or the client's settings are wrong.
        StorageUnavailable: S3 does not answer.
    """
    from boto3.exceptions import Boto3Error
    from botocore.exceptions import BotoCoreError, ClientError

    # A cached client is valid only for the settings with which it was created.
    aws_variables = sorted((name, value) for name, value in os.environ.items() if name.startswith("AWS_"))
    try:
        client = _get_client(tuple(aws_variables), quick)
    except (BotoCoreError, ValueError) as error:  # a malformed address raises ValueError
        raise InputError(f"{uri}: {one_line(error)}: check AWS_ENDPOINT_URL, AWS_REGION and AWS_PROFILE") from error
    try:
        yield client
    except (BotoCoreError, Boto3Error, ClientError) as error:
        raise _to_infoxlm_error(error, uri) from error
    except (KeyError, TypeError, AttributeError, RecursionError) as error:
        # The response lacks a field that S3 always sends. If the server redirects to itself, boto3 follows the redirect
        # until it raises RecursionError.
        cause = None if isinstance(error, RecursionError) else error  # a RecursionError's traceback has 1,000 frames
        raise InputError(
            f"{uri}: the server is not S3 ({type(error).__name__}: {error}): check AWS_ENDPOINT_URL and proxies"
        ) from cause


def _to_infoxlm_error(error: Exception, uri: str) -> InfoXLMError:
    """Convert a boto3 error to InputError or StorageUnavailable."""
    from botocore import exceptions

    configuration_errors = (
        exceptions.NoCredentialsError,
        exceptions.ParamValidationError,
        exceptions.EndpointProviderError,
    )
    if isinstance(error, configuration_errors):
        remedy = "check AWS_ENDPOINT_URL, AWS_REGION, AWS_ACCESS_KEY_ID and the name of the bucket"
        return InputError(f"{uri}: {one_line(error)}: {remedy}")
    # The server's answer is the cause of an upload or download error.
    answer = error if isinstance(error, exceptions.ClientError) else error.__cause__ or error.__context__
    if not isinstance(answer, exceptions.ClientError):
        return StorageUnavailable(f"{uri}: S3 does not answer ({one_line(error)}): run again")
    status = _read_status(answer)
    code = answer.response.get("Error", {}).get("Code")
    is_temporary = status >= 500 or status in _TEMPORARY_STATUSES or code in _TEMPORARY_CODES
    if not is_temporary:
        return InputError(f"{uri}: S3 refuses ({one_line(answer)}): check the name and your rights")
    return StorageUnavailable(f"{uri}: S3 fails with status {status} ({one_line(answer)}): run again")


@functools.lru_cache(8)
def _get_client(aws_variables: tuple[tuple[str, str], ...], quick: bool) -> Any:
    """Return a cached S3 client, because creating a client takes 0.2 seconds.

    Args:
        aws_variables: environment variables that configure boto3. They are part of the cache key.
        quick: whether calls must fail within seconds.
    """
    import boto3
    from botocore.config import Config

    logging.getLogger("botocore").setLevel(logging.WARNING)  # INFO logs the credentials' source for each client
    variables = dict(aws_variables)
    limits = QUICK_LIMITS if quick else LIMITS
    # Servers other than AWS usually have no host name for each bucket.
    has_custom_endpoint = any(name.startswith("AWS_ENDPOINT_URL") for name in variables)
    s3_settings = {"addressing_style": "path"} if has_custom_endpoint else {}
    config = Config(
        retries={"mode": "standard", "total_max_attempts": limits["attempts"]},
        connect_timeout=limits["connect_seconds"],
        read_timeout=limits["read_seconds"],
        s3=s3_settings,
    )
    # boto3 itself ignores AWS_REGION.
    region = variables.get("AWS_REGION") or variables.get("AWS_DEFAULT_REGION") or "us-east-1"
    return boto3.Session().client("s3", config=config, region_name=region)


@contextmanager
def _ignore_statuses(*statuses: int) -> Iterator[None]:
    """Suppress errors in the block if S3 answers with one of these HTTP statuses."""
    from botocore.exceptions import ClientError

    try:
        yield
    except ClientError as error:
        if _read_status(error) not in statuses:
            raise


def _read_status(error: Any) -> int:
    """Return the HTTP status of an S3 error. If the error has none, return 500, which counts as temporary."""
    return error.response["ResponseMetadata"].get("HTTPStatusCode", 500)


def _encode(content: str | bytes) -> bytes:
    return content.encode() if isinstance(content, str) else content
