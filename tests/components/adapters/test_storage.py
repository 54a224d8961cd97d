"""Every storage keeps the promises of the `Store` protocol: a directory, and S3 on a real server that also fails."""

import os
import shutil
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest

from components.adapters import storage
from components.adapters.directory import Directory
from components.adapters.s3 import store as s3
from components.adapters.storage import Entry
from infoxlm_core import manifests
from infoxlm_core.errors import InputError, StorageUnavailable
from tests.servers.processes import answering

OWN_STORE = os.environ.get("INFOXLM_TEST_STORE")
"""A prefix on another S3 server that is tested too: see RB05 in the runbook."""


@pytest.fixture(params=["directory", pytest.param("s3", marks=pytest.mark.slow), *(["own"] if OWN_STORE else [])])
def uri(request, tmp_path) -> str:
    """Return the URI of an empty storage."""
    if request.param == "directory":
        return str(tmp_path / "store")
    if request.param == "own":
        return f"{OWN_STORE}/{uuid.uuid4().hex}"
    request.getfixturevalue("bucket")
    return f"s3://models/{uuid.uuid4().hex}"  # SeaweedFS also lists the empty folders of other tests


@pytest.fixture
def large_file(tmp_path) -> Path:
    """Return a file that is uploaded to S3 in two parts."""
    path = tmp_path / "large"
    path.write_bytes(bytes(range(256)) * 40_000)
    return path


def test_files_are_written_read_listed_and_deleted(uri):
    store = storage.open(uri)
    assert store.get("a/b") is None
    assert store.head("a/b") is None
    assert store.entries() == []
    assert store.directories() == []

    store.put("a/b", "first")
    store.put("c", b"second")

    content, version = store.get("a/b")
    assert content == b"first"
    assert storage.open(f"{uri}/a/b").get() == (content, version)
    assert [(entry.name, entry.size) for entry in store.entries()] == [("a/b", 5), ("c", 6)]
    assert store.entries()[0].version == version
    assert [entry.name for entry in store.entries(deep=False)] == ["c"]
    assert store.directories() == ["a"]
    assert store.read("c") == b"second"
    assert store.read("c", start=2) == b"cond"
    assert store.read("c", start=1, length=3) == b"eco"
    assert store.read("c", start=6, length=0) == b""

    store.delete("a/b", "c", "missing")
    store.delete("c")
    assert store.entries() == []


def test_files_that_another_process_deletes_are_not_listed(tmp_path, monkeypatch):
    store = storage.open(tmp_path)
    for name in ("checkpoint/state", "checkpoint/meta.json", "corpus"):
        store.put(name, "content")
    read_entry = Directory._entry

    def delete_checkpoint_first(store: Directory, name: str) -> Entry:
        shutil.rmtree(tmp_path / "checkpoint", ignore_errors=True)
        return read_entry(store, name)

    monkeypatch.setattr(Directory, "_entry", delete_checkpoint_first)

    assert [entry.name for entry in store.entries()] == ["corpus"]


def test_file_is_replaced_only_if_its_version_is_known(uri):
    store = storage.open(uri)

    first_version = store.put_if("file", "first", None)
    assert first_version
    assert store.put_if("file", "other", None) is None
    second_version = store.put_if("file", "second", first_version)

    assert second_version not in (None, first_version)
    assert store.put_if("file", "other", first_version) is None
    assert store.get("file") == (b"second", second_version)


def test_one_of_many_simultaneous_writers_succeeds(uri):
    version = storage.open(uri).put_if("file", "", None)

    def write(content: str) -> str | None:
        return storage.open(uri).put_if("file", content, version)

    with ThreadPoolExecutor(8) as threads:
        new_versions = list(threads.map(write, "01234567"))

    assert new_versions.count(None) == 7


def test_large_file_is_downloaded_with_the_digest_it_was_uploaded_with(uri, large_file, tmp_path):
    sha256 = manifests.file_sha256(large_file)
    store = storage.open(uri)

    store.upload(large_file, "folder/large", sha256)
    store.download("folder/large", tmp_path / "copy")

    assert manifests.file_sha256(tmp_path / "copy") == sha256
    assert store.head("folder/large").sha256 == sha256
    assert store.sweep() == 0


# ---------------------------------------------------------------- faults of a server


@pytest.fixture
def failing_store(bucket, faults, monkeypatch):
    """Return a storage on an S3 server that fails on demand, with a client that retries without pauses."""
    monkeypatch.setattr("botocore.retries.standard.ExponentialBackoff.delay_amount", lambda *_: 0.01)
    return storage.open("s3://models/store")


@pytest.mark.item("F07")
@pytest.mark.parametrize(
    ("method", "key", "fault"),
    [
        ("PUT", "small", "500"),
        ("PUT", "partNumber=2", "503"),
        ("HEAD", "large", "reset"),
        ("POST", "uploadId", "500"),
        ("GET", "small", "503"),
        ("GET", "small", "truncated"),
        ("GET", "large", "truncated"),
        ("GET", "list-type", "reset"),
    ],
)
def test_temporary_faults_lose_nothing(failing_store, faults, large_file, tmp_path, method, key, fault):
    fault_count = 2 if fault == "truncated" else 6
    faults.inject(method, key, fault, times=fault_count)

    failing_store.put("small", "content")
    failing_store.upload(large_file, "large", manifests.file_sha256(large_file))
    failing_store.download("large", tmp_path / "copy")

    assert (tmp_path / "copy").read_bytes() == large_file.read_bytes()
    assert failing_store.get("small")[0] == b"content"
    assert failing_store.head("large").sha256 == manifests.file_sha256(large_file)
    assert [entry.name for entry in failing_store.entries()] == ["large", "small"]
    assert len(faults.injected) == fault_count


@pytest.mark.item("F09")
def test_written_file_whose_answer_was_lost_is_accepted(failing_store, faults):
    faults.inject("PUT", "manifest.json", "applied-500", times=1)

    version = failing_store.put_if("manifest.json", "content", None)

    assert failing_store.get("manifest.json") == (b"content", version)
    assert [method for method, _ in faults.requests].count("PUT") == 2


@pytest.mark.item("F08")
def test_failed_upload_leaves_no_file_and_no_pending_upload(bucket, failing_store, faults, large_file):
    faults.inject("PUT", "partNumber=1", "503")

    with pytest.raises(StorageUnavailable, match="run again"):
        failing_store.upload(large_file, "large", manifests.file_sha256(large_file))
    faults.heal()

    assert failing_store.head("large") is None
    failing_store.sweep()
    assert not list(bucket.multipart_uploads.all())


@pytest.mark.item("F08")
def test_only_unfinished_uploads_below_the_uri_are_swept(bucket):
    client = bucket.meta.client
    client.create_multipart_upload(Bucket="models", Key="store/a/large")
    client.create_multipart_upload(Bucket="models", Key="elsewhere/large")

    assert storage.open("s3://models/store/a").sweep() == 1
    assert [upload.object_key for upload in bucket.multipart_uploads.all()] == ["elsewhere/large"]
    storage.open("s3://models/elsewhere").sweep()


# ---------------------------------------------------------------- URIs and other storages


@pytest.mark.parametrize(
    ("uri", "separator", "scheme"),
    [
        ("models:/infoxlm@champion", ":", "models"),
        ("./runs/a:b", ":", ""),
        ("C:\\data", ":", ""),
        ("s3://bucket/prefix", "://", "s3"),
        ("pypi:package", "://", ""),
    ],
)
def test_scheme_is_the_text_before_the_separator(uri, separator, scheme):
    assert storage.scheme(uri, separator) == scheme


def test_unknown_or_missing_storage_is_refused():
    with pytest.raises(InputError, match=r"gs://bucket/prefix: unknown storage: give a directory, or .* s3://"):
        storage.open("gs://bucket/prefix")
    with pytest.raises(InputError, match="the store has no name: give a directory, or a URI"):  # an unset variable
        storage.open("")


# ---------------------------------------------------------------- other servers and wrong settings


class Handler(BaseHTTPRequestHandler):
    """Base of a server that answers with a status and a body."""

    def reply(self, status: int, content: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)


@pytest.fixture
def credentials(monkeypatch):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "x")


@contextmanager
def store_on(handler: type[Handler], monkeypatch) -> Iterator[storage.Store]:
    """Yield a storage on a server with this handler."""
    with answering(handler) as url:
        monkeypatch.setenv("AWS_ENDPOINT_URL", url)
        yield storage.open("s3://bucket/prefix")


class LoginPage(Handler):
    """A proxy that answers with a login page, or redirects the bucket `round` to itself."""

    def do_GET(self) -> None:
        self.reply(302 if self.path.startswith("/round") else 200, b"<html>log in</html>", Location=self.path)

    do_HEAD = do_PUT = do_GET


def test_server_that_is_not_s3_is_refused(credentials, monkeypatch):
    with store_on(LoginPage, monkeypatch) as store:
        with pytest.raises(InputError, match="the server is not S3"):
            store.get("manifest.json")
        with pytest.raises(InputError, match="the server is not S3"):
            store.head("manifest.json")
        with pytest.raises(InputError, match=r"the server is not S3 \(RecursionError"):
            storage.open("s3://round/prefix").get("manifest.json")


class FailingS3(Handler):
    """An S3 server that fails with `status` and `code`."""

    status = 500
    code = b"InternalError"

    def do_GET(self) -> None:
        self.reply(self.status, b"<Error><Code>%s</Code><Message>no volume is writable</Message></Error>" % self.code)

    do_PUT = do_GET


@pytest.fixture
def one_attempt(monkeypatch):
    """Let boto3's client fail at once."""
    monkeypatch.setitem(s3.LIMITS, "attempts", 1)
    s3._get_client.cache_clear()
    yield
    s3._get_client.cache_clear()


def test_failing_and_silent_servers_have_different_errors(credentials, one_attempt, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("x")
    failure = r"S3 fails with status 500 \(.*InternalError.*no volume is writable\): run again"

    with store_on(FailingS3, monkeypatch) as store:
        with pytest.raises(StorageUnavailable, match=failure):
            store.get("a")
        with pytest.raises(StorageUnavailable, match=failure):
            store.upload(tmp_path / "file", "a", "0" * 64)
    with pytest.raises(StorageUnavailable, match=r"S3 does not answer \(.*Connection refused"):
        store.get("a")


@pytest.mark.item("F07")
@pytest.mark.parametrize(("status", "code"), [(400, b"RequestTimeout"), (429, b"TooManyRequests")])
def test_temporary_failure_with_the_status_of_a_refusal_can_be_repeated(
    credentials, one_attempt, monkeypatch, status, code
):
    server = type("Server", (FailingS3,), {"status": status, "code": code})
    with store_on(server, monkeypatch) as store, pytest.raises(StorageUnavailable, match=f"{status} .*: run again"):
        store.put("a", "content")


class UndeletingS3(Handler):
    """An S3 server that does not delete one of many objects, with the status 200 of such requests."""

    code = b"AccessDenied"

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        error = b"<Error><Key>prefix/b</Key><Code>%s</Code><Message>no</Message></Error>" % self.code
        self.reply(200, b"<DeleteResult>" + error + b"</DeleteResult>")


@pytest.mark.parametrize(
    ("code", "error", "message"),
    [
        (b"AccessDenied", InputError, r"refuses to delete 1 files, such as prefix/b \(AccessDenied no\): check your"),
        (b"SlowDown", StorageUnavailable, r"fails to delete 1 files, such as prefix/b \(SlowDown no\): run again"),
    ],
)
def test_first_file_that_s3_does_not_delete_is_named(credentials, monkeypatch, code, error, message):
    server = type("Server", (UndeletingS3,), {"code": code})
    with store_on(server, monkeypatch) as store, pytest.raises(error, match=message):
        store.delete("a", "b")


@pytest.mark.parametrize(
    ("uri", "variable", "value", "message"),
    [
        ("s3://bucket/prefix", "AWS_ENDPOINT_URL", "not a url", "check AWS_ENDPOINT_URL"),
        ("s3://bucket/prefix", "AWS_ENDPOINT_URL", "ftp://127.0.0.1", "not a valid URI: check AWS_ENDPOINT_URL"),
        ("s3://bucket/prefix", "AWS_REGION", "not a region!", "check AWS_ENDPOINT_URL, AWS_REGION"),
        ("s3://bucket/prefix", "AWS_PROFILE", "nobody", "and AWS_PROFILE"),
        ("s3://a b/prefix", "AWS_REGION", "us-east-1", "check .* the name of the bucket"),
    ],
)
def test_wrong_settings_of_s3_are_named(credentials, monkeypatch, uri, variable, value, message):
    monkeypatch.setenv(variable, value)

    with pytest.raises(InputError, match=message):
        storage.open(uri).get("manifest.json")
