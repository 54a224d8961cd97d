"""What every storage promises, shown by each that we have: a directory, and S3 on a real server that also fails."""

import os
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import ClassVar

import pytest

from components.adapters import storage
from components.adapters.directory import Directory
from components.adapters.s3 import store as s3
from components.platform import artifacts, sources
from infoxlm_core import manifests
from infoxlm_core.errors import InputError, StorageUnavailable
from tests.servers.processes import answering

KEY = "0123456789abcdef"
OWN_STORE = os.environ.get("INFOXLM_TEST_STORE")
"""A folder on an S3 server of one's own, which must keep the promises too: page RB05 of the runbook."""


@pytest.fixture(params=["directory", pytest.param("s3", marks=pytest.mark.slow), *(["own"] if OWN_STORE else [])])
def uri(request, tmp_path) -> str:
    if request.param == "directory":
        return str(tmp_path / "store")
    if request.param == "own":
        return f"{OWN_STORE}/{uuid.uuid4().hex}"
    request.getfixturevalue("bucket")
    return f"s3://models/{uuid.uuid4().hex}"  # SeaweedFS lists empty folders, also those of other tests


@pytest.fixture
def large(tmp_path) -> Path:
    """A file that is uploaded to S3 in two parts."""
    (tmp_path / "large").write_bytes(bytes(range(256)) * 40_000)
    return tmp_path / "large"


def test_what_was_put_is_read_and_listed_until_it_is_deleted(uri):
    store = storage.open(uri)
    assert store.get("a/b") is None and store.head("a/b") is None and store.entries() == [] == store.folders()

    store.put("a/b", "first")
    store.put("c", b"second")

    assert store.get("a/b")[0] == b"first" and storage.open(f"{uri}/a/b").get()[0] == b"first"
    assert [(entry.name, entry.size) for entry in store.entries()] == [("a/b", 5), ("c", 6)]
    assert [store.read("c"), store.read("c", 2), store.read("c", 1, 3), store.read("c", 6, 0)] == [
        b"second",
        b"cond",
        b"eco",
        b"",
    ]
    assert [entry.name for entry in store.entries(deep=False)] == ["c"] and store.folders() == ["a"]
    assert {entry.name: entry.version for entry in store.entries()} == {n: store.get(n)[1] for n in ("a/b", "c")}
    store.delete("a/b", "c", "never there")
    store.delete("c")
    assert store.entries() == []


def test_a_file_is_written_only_over_the_version_that_is_known(uri):
    store = storage.open(uri)

    first = store.put_if("file", "first", None)
    assert first and store.put_if("file", "other", None) is None
    second = store.put_if("file", "second", first)

    assert second not in (None, first) and store.put_if("file", "other", first) is None
    assert store.get("file") == (b"second", second)


def test_of_many_who_write_at_once_over_the_same_version_one_succeeds(uri):
    version = storage.open(uri).put_if("file", "", None)
    results: list[str | None] = []

    def write(content: str) -> None:
        results.append(storage.open(uri).put_if("file", content, version))

    threads = [threading.Thread(target=write, args=(str(number),)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert len(results) == 8 and len([result for result in results if result]) == 1


def test_a_large_file_comes_back_with_the_digest_that_it_was_sent_with(uri, large, tmp_path):
    digest = manifests.file_sha256(large)
    store = storage.open(uri)

    store.upload(large, "folder/large", digest)
    store.download("folder/large", tmp_path / "back")

    assert manifests.file_sha256(tmp_path / "back") == digest == store.head("folder/large").sha256
    assert store.sweep() == 0


# ---------------------------------------------------------------- faults of a server


@pytest.fixture
def failing(bucket, faults, monkeypatch):
    """A storage on an S3 server that fails on demand, without pauses between attempts of the client."""
    monkeypatch.setattr("botocore.retries.standard.ExponentialBackoff.delay_amount", lambda *_: 0.01)
    return storage.open("s3://models/store")


@pytest.mark.item("F07")
@pytest.mark.parametrize(
    ("method", "key", "kind"),
    [
        ("PUT", "small", "500"),
        ("PUT", "partNumber=2", "503"),
        ("HEAD", "large", "reset"),
        ("POST", "uploadId", "500"),
        ("GET", "small", "503"),
        ("GET", "list-type", "reset"),
    ],
)
def test_faults_that_pass_cost_nothing_but_time(failing, faults, large, tmp_path, method, key, kind):
    faults.inject(method, key, kind, times=6)

    failing.put("small", "content")
    failing.upload(large, "large", manifests.file_sha256(large))
    failing.download("large", tmp_path / "back")

    assert (tmp_path / "back").read_bytes() == large.read_bytes() and failing.get("small")[0] == b"content"
    assert failing.head("large").sha256 == manifests.file_sha256(large)
    assert [entry.name for entry in failing.entries()] == ["large", "small"]
    assert len(faults.injected) == 6


@pytest.mark.item("F07")
def test_a_download_that_is_cut_short_is_begun_again(failing, faults, large, tmp_path):
    failing.upload(large, "large", manifests.file_sha256(large))
    faults.inject("GET", "large", "truncated", times=3)

    failing.download("large", tmp_path / "back")

    assert (tmp_path / "back").read_bytes() == large.read_bytes() and len(faults.injected) == 3


@pytest.mark.item("F09")
def test_a_manifest_whose_answer_was_lost_is_our_own(failing, faults):
    faults.inject("PUT", "manifest.json", "applied-500", times=1)

    version = failing.put_if("manifest.json", "ours", None)

    assert failing.get("manifest.json") == (b"ours", version)
    assert [method for method, _ in faults.requests].count("PUT") == 2  # the second met its own first


@pytest.mark.item("F08")
def test_an_upload_whose_part_never_arrives_leaves_no_file_and_no_pending_upload(bucket, failing, faults, large):
    faults.inject("PUT", "partNumber=1", "503")

    with pytest.raises(StorageUnavailable, match="run again"):
        failing.upload(large, "large", manifests.file_sha256(large))
    faults.heal()

    assert failing.head("large") is None
    failing.sweep()
    assert not list(bucket.multipart_uploads.all())


@pytest.mark.item("F08")
def test_uploads_that_a_killed_process_left_are_swept(bucket):
    client = bucket.meta.client
    client.create_multipart_upload(Bucket="models", Key="store/a/large")
    client.create_multipart_upload(Bucket="models", Key="elsewhere/large")

    assert storage.open("s3://models/store/a").sweep() == 1
    assert [upload.object_key for upload in bucket.multipart_uploads.all()] == ["elsewhere/large"]
    storage.open("s3://models/elsewhere").sweep()


# ---------------------------------------------------------------- other storages


@pytest.mark.parametrize(
    ("uri", "separator", "scheme"),
    [
        ("models:/infoxlm@champion", ":", "models"),
        ("pypi:package==1.0", ":", "pypi"),
        ("FacebookAI/xlm-roberta-base", ":", ""),
        ("./runs/a:b", ":", ""),
        ("C:\\data", ":", ""),
        ("", ":", ""),
        ("s3://bucket/prefix", "://", "s3"),
        ("pypi:package", "://", ""),
        ("./a://b", "://", ""),
    ],
)
def test_the_scheme_is_the_text_before_the_separator_and_a_path_has_none(uri, separator, scheme):
    assert storage.scheme(uri, separator) == scheme


@pytest.mark.parametrize("uri", ["gs://bucket/prefix", "http://169.254.169.254/latest"])
def test_a_storage_that_nobody_has_written_is_refused_in_one_line(uri):
    with pytest.raises(InputError, match=f"{uri}: unknown storage: give a directory, or .* s3://"):
        storage.open(uri)
    with pytest.raises(InputError, match="the store has no name: give a directory, or a URI"):  # a variable is not set
        storage.open("")


class Shelf:
    """A storage that is remote, as far as its users know."""

    root: ClassVar[Path]
    directory = None

    def __init__(self, uri: str) -> None:
        self.uri = uri
        self._files = Directory(str(self.root / uri.removeprefix("shelf://")))

    def __getattr__(self, name: str):
        return getattr(self._files, name)


@pytest.mark.parametrize("store", ["shelf://a", "shelf://team/points/x", "shelf://suite"])
def test_another_storage_is_a_class_and_a_line(tmp_path, monkeypatch, store):
    monkeypatch.setattr(Shelf, "root", tmp_path / "shelf", raising=False)
    monkeypatch.setitem(storage.SCHEMES, "shelf", f"{__name__}:Shelf")
    monkeypatch.setenv("INFOXLM_CACHE", str(tmp_path / "here"))
    location = f"{store}/corpus/{KEY}"

    made = artifacts.get_or_build(store, "corpus", KEY, lambda output: (output / "file").write_text("x") and {})
    monkeypatch.setenv("INFOXLM_CACHE", str(tmp_path / "another machine"))
    found = artifacts.get_or_build(store, "corpus", KEY, lambda output: pytest.fail("made twice"))
    data = sources.fetch_data(f"{location}/file", tmp_path / "store")

    assert artifacts.url_of(made) == location and artifacts.locate(location) == found != made
    assert data.read_text() == (found / "file").read_text() == "x" and data.is_relative_to(tmp_path / "store")
    for wrong in (f"{store}/x", f"{store}/corpus/abc", store):
        with pytest.raises(InputError, match=rf"{wrong} is not an artifact \(STORE/KIND/KEY\)"):
            artifacts.locate(wrong)


# ---------------------------------------------------------------- servers and settings that cannot be


class Handler(BaseHTTPRequestHandler):
    """Answers with a status and a body."""

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
    """Yield a storage whose S3 server answers as `handler` does."""
    with answering(handler) as url:
        monkeypatch.setenv("AWS_ENDPOINT_URL", url)
        yield storage.open("s3://bucket/prefix")


class LoginPage(Handler):
    """A proxy that answers everything with a page to log in, or redirects a client to the same URL."""

    def do_GET(self) -> None:
        self.reply(302 if self.path.startswith("/round") else 200, b"<html>log in</html>", Location=self.path)

    do_HEAD = do_PUT = do_GET


def test_a_server_that_is_not_s3_is_refused_in_one_line(credentials, monkeypatch):
    with store_on(LoginPage, monkeypatch) as store:
        for ask in (store.get, store.head):
            with pytest.raises(InputError, match="the server is not S3"):
                ask("manifest.json")
        with pytest.raises(InputError, match=r"the server is not S3 \(RecursionError"):
            storage.open("s3://round/prefix").get("manifest.json")


class Fails(Handler):
    """An S3 server that cannot reach its disks."""

    def do_GET(self) -> None:
        self.reply(500, b"<Error><Code>InternalError</Code><Message>no volume is writable</Message></Error>")

    do_PUT = do_GET


def test_a_server_that_fails_is_told_from_one_that_does_not_answer_with_status_and_body(
    credentials, monkeypatch, tmp_path
):
    monkeypatch.setitem(s3.LIMITS, "attempts", 1)
    s3._client.cache_clear()
    (tmp_path / "file").write_text("x")
    failure = r"S3 fails with status 500 \(.*InternalError.*no volume is writable\): run again"

    with store_on(Fails, monkeypatch) as store:
        for act in (lambda: store.get("a"), lambda: store.upload(tmp_path / "file", "a", "0" * 64)):
            with pytest.raises(StorageUnavailable, match=failure):
                act()
    with pytest.raises(StorageUnavailable, match=r"S3 does not answer \(.*Connection refused"):
        store.get("a")
    s3._client.cache_clear()


class Keeper(Handler):
    """An S3 server whose policy refuses deletions: in a request for many, with status 200."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        error = b"<Error><Key>prefix/b</Key><Code>AccessDenied</Code><Message>no</Message></Error>"
        self.reply(200, b"<DeleteResult>" + error + b"</DeleteResult>")


def test_of_many_to_delete_the_first_that_s3_refuses_is_named(credentials, monkeypatch):
    with (
        store_on(Keeper, monkeypatch) as store,
        pytest.raises(InputError, match=r"refuses to delete 1 files, the first is prefix/b \(AccessDenied no\)"),
    ):
        store.delete("a", "b")


@pytest.mark.parametrize(
    ("uri", "variable", "value", "message"),
    [
        ("s3://bucket/prefix", "AWS_ENDPOINT_URL", "not a url", "check AWS_ENDPOINT_URL"),
        ("s3://bucket/prefix", "AWS_ENDPOINT_URL", "http://", "check AWS_ENDPOINT_URL"),
        ("s3://bucket/prefix", "AWS_ENDPOINT_URL", "ftp://127.0.0.1", "not a valid URI: check AWS_ENDPOINT_URL"),
        ("s3://bucket/prefix", "AWS_REGION", "not a region!", "check AWS_ENDPOINT_URL, AWS_REGION"),
        ("s3://bucket/prefix", "AWS_PROFILE", "nobody", "and AWS_PROFILE"),
        ("s3://a b/prefix", "AWS_REGION", "us-east-1", "check .* the name of the bucket"),
    ],
)
def test_settings_of_s3_that_cannot_be_are_refused_naming_them(credentials, monkeypatch, uri, variable, value, message):
    monkeypatch.setenv(variable, value)

    with pytest.raises(InputError, match=message):
        storage.open(uri).get("manifest.json")
