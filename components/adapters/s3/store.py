"""S3 as a storage, and the only module that speaks to boto3.

Address, credentials and region are the environment's (AWS_ENDPOINT_URL, AWS_ACCESS_KEY_ID, …), as everywhere.
"""

import functools
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any

from components.adapters.storage import Entry
from infoxlm_core import outside
from infoxlm_core.errors import InputError, StorageUnavailable, one_line

logger = logging.getLogger(__name__)

_QUICK = 4.0
"""Seconds that a quick client waits for an answer: three tries fit into the patience of a lease."""


class S3Store:
    """See `Store`: a bucket, what lies below a prefix of it, or one object. Versions are ETags.

    Args:
        uri: s3://bucket/prefix
    """

    directory = None

    def __init__(self, uri: str) -> None:
        self.uri = uri
        self.bucket, _, key = uri.removeprefix("s3://").partition("/")
        self._prefix = key.strip("/")

    def get(self, name: str = "", quick: bool = False) -> tuple[bytes, str] | None:
        with self._client(name, quick) as client, _missing():
            answer = client.get_object(Bucket=self.bucket, Key=self._key(name))
            if (size := answer["ContentLength"]) > outside.MAX_JSON:
                raise InputError(f"{self.uri}/{name} has {size:,} bytes: it is none of our small files: remove it")
            return answer["Body"].read(), answer["ETag"]
        return None

    def put(self, name: str, content: str | bytes) -> None:
        with self._client(name) as client:
            client.put_object(**self._new(name, content))

    def put_if(self, name: str, content: str | bytes, version: str | None, quick: bool = False) -> str | None:
        condition = {"IfMatch": version} if version else {"IfNoneMatch": "*"}
        # 409: two writers at the same moment; 404: deleted meanwhile
        with self._client(name, quick) as client, _missing(404, 409, 412):
            return client.put_object(**self._new(name, content), **condition)["ETag"]
        found = self.get(name, quick)  # perhaps it is there because the answer to an earlier try of ours was lost
        return found[1] if found and found[0] == _bytes(content) else None

    def delete(self, *names: str) -> None:
        keys = [{"Key": self._key(name)} for name in names]
        with self._client(names[0] if len(names) == 1 else "") as client:
            if len(keys) == 1:
                client.delete_object(Bucket=self.bucket, **keys[0])
                return
            for first in range(0, len(keys), 1000):  # as many as a request may name
                said = {"Objects": keys[first : first + 1000], "Quiet": True}
                if refused := client.delete_objects(Bucket=self.bucket, Delete=said).get("Errors"):  # the answer is 200
                    known = f"{refused[0].get('Key')} ({refused[0].get('Code')} {refused[0].get('Message', '')})"
                    raise InputError(
                        f"{self.uri}: S3 refuses to delete {len(refused)}, the first {known}: check rights"
                    )

    def entries(self, deep: bool = True) -> list[Entry]:
        under = self._under()
        found = self._pages("list_objects_v2", "Contents", **({} if deep else {"Delimiter": "/"}))
        with self._client():
            return [
                Entry(item["Key"].removeprefix(under), item["Size"], item["ETag"], item["LastModified"])
                for item in found
                if item["Key"] != under
            ]

    def folders(self) -> list[str]:
        found = self._pages("list_objects_v2", "CommonPrefixes", Delimiter="/")
        return sorted(item["Prefix"].rstrip("/").rpartition("/")[2] for item in found)

    def head(self, name: str = "") -> Entry | None:
        if not self._key(name):
            return None
        with self._client() as client, _missing():
            said = client.head_object(Bucket=self.bucket, Key=self._key(name))
            digest = said["Metadata"].get("sha256", "")  # S3 itself knows none of what came in parts
            return Entry(name, said["ContentLength"], said["ETag"], said["LastModified"], digest)
        return None

    def upload(self, path: Path, name: str, sha256: str) -> None:
        said = {"ChecksumAlgorithm": "SHA256", "Metadata": {"sha256": sha256}}
        with self._client() as client:
            client.upload_file(str(path), self.bucket, self._key(name), ExtraArgs=said)

    def download(self, name: str, path: Path) -> None:
        with self._client() as client:
            client.download_file(self.bucket, self._key(name), str(path))  # compares the checksum that S3 has

    def sweep(self, older: timedelta = timedelta(0)) -> int:
        """A process that is killed leaves its parts behind: they cost money, and no listing shows them.

        How old they are the server's clock says: by ours, a day ahead, we would abort what others are sending.
        """
        with self._client() as client:
            pages = list(client.get_paginator("list_multipart_uploads").paginate(**self._listed()))
            said = pages[0]["ResponseMetadata"]["HTTPHeaders"].get("date")
            begun_by = parsedate_to_datetime(said) - older if said else None
            pending = [upload for page in pages for upload in page.get("Uploads", ())]
            old = [one for one in pending if not older or (begun_by and one["Initiated"] <= begun_by)]
            for upload in old:
                client.abort_multipart_upload(Bucket=self.bucket, Key=upload["Key"], UploadId=upload["UploadId"])
        if old:
            logger.info("aborted %d uploads that were left unfinished below %s", len(old), self.uri)
        return len(old)

    def _key(self, name: str) -> str:
        return "/".join(part for part in (self._prefix, name) if part)

    def _under(self) -> str:
        return f"{self._prefix}/" if self._prefix else ""

    def _new(self, name: str, content: str | bytes) -> dict[str, Any]:
        return {
            "Bucket": self.bucket, "Key": self._key(name), "Body": _bytes(content), "ChecksumAlgorithm": "SHA256"
        }  # fmt: skip

    def _listed(self) -> dict[str, str]:
        return {"Bucket": self.bucket, "Prefix": self._under()}

    def _pages(self, request: str, part: str, **more: str) -> list[dict[str, Any]]:
        with self._client() as client:
            pages = client.get_paginator(request).paginate(**self._listed(), **more)
            return [item for page in pages for item in page.get(part, ())]

    def _client(self, name: str = "", quick: bool = False) -> Any:
        return translate_errors(f"{self.uri}/{name}" if name else self.uri, quick)


@contextmanager
def translate_errors(uri: str, quick: bool = False) -> Iterator[Any]:
    """A client of S3 whose errors become ours, one line each that begins with the URI."""
    from boto3.exceptions import Boto3Error
    from botocore.exceptions import (
        BotoCoreError,
        ClientError,
        EndpointProviderError,
        NoCredentialsError,
        ParamValidationError,
    )

    try:
        client = _client(tuple(sorted(item for item in os.environ.items() if item[0].startswith("AWS_"))), quick)
    except (BotoCoreError, ValueError) as error:  # ValueError: an address that is none
        raise InputError(f"{uri}: {one_line(error)}: check AWS_ENDPOINT_URL, AWS_REGION and AWS_PROFILE") from error
    try:
        yield client
    except NoCredentialsError as error:
        raise InputError(f"{uri}: {one_line(error)}: set AWS_ACCESS_KEY_ID and its secret") from error
    except ParamValidationError as error:
        raise InputError(f"{uri}: {one_line(error)}: check the name of the bucket") from error
    except EndpointProviderError as error:
        raise InputError(f"{uri}: {one_line(error)}: check AWS_ENDPOINT_URL and AWS_REGION") from error
    except (KeyError, TypeError, AttributeError, RecursionError) as error:
        # an answer without what every answer of S3 has; one that leads to itself is followed until the stack is full
        raise InputError(
            f"{uri}: what answers is no S3 ({type(error).__name__}: {error}): check AWS_ENDPOINT_URL and proxies"
        ) from (None if isinstance(error, RecursionError) else error)
    except (BotoCoreError, Boto3Error, ClientError) as error:
        inner = error if isinstance(error, ClientError) else error.__cause__ or error.__context__
        if isinstance(inner, ClientError) and _status(inner) < 500:
            raise InputError(f"{uri}: S3 refuses ({one_line(inner)}): check name and rights") from error
        raise StorageUnavailable(f"{uri}: S3 does not answer ({one_line(error)}): run again") from error


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


@contextmanager
def _missing(*statuses: int) -> Iterator[None]:
    """Go on after the block if S3 answers with one of these; without any: that there is no such object."""
    from botocore.exceptions import ClientError

    try:
        yield
    except ClientError as error:
        if _status(error) not in (statuses or (404,)):
            raise


def _status(error: Any) -> int:
    return error.response["ResponseMetadata"].get("HTTPStatusCode", 500)


def _bytes(content: str | bytes) -> bytes:
    return content.encode() if isinstance(content, str) else content
