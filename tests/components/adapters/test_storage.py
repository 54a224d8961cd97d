"""What every storage promises, shown by each that we have: a directory, and S3 on a real server."""

import os
import threading
import uuid
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import pytest

from components.adapters import lease, storage
from components.adapters.directory import Directory
from components.adapters.lease import Lease
from components.platform import artifact_files, artifacts, sources
from infoxlm_core import manifests
from infoxlm_core.errors import Fenced, InputError, LeaseHeld

KEY = "0123456789abcdef"
GIVEN = os.environ.get("INFOXLM_TEST_STORE")
"""A place on an S3 of one's own that keeps the promises, too? The runbook asks, page RB05."""


@pytest.fixture(params=["directory", pytest.param("s3", marks=pytest.mark.slow), *(["given"] if GIVEN else [])])
def uri(request, tmp_path) -> str:
    if request.param == "directory":
        return str(tmp_path / "store")
    if request.param == "given":
        return f"{GIVEN}/{uuid.uuid4().hex}"
    request.getfixturevalue("bucket")
    return f"s3://models/{uuid.uuid4().hex}"  # SeaweedFS lists folders that are empty, of other tests too


def test_what_was_put_is_read_and_listed_until_it_is_deleted(uri):
    store = storage.open(uri)
    assert store.get("a/b") is None and store.head("a/b") is None and store.entries() == [] == store.folders()

    store.put("a/b", "first")
    store.put("c", b"second")

    assert store.get("a/b")[0] == b"first" and storage.open(f"{uri}/a/b").get()[0] == b"first"
    assert [(entry.name, entry.size) for entry in store.entries()] == [("a/b", 5), ("c", 6)]
    assert [entry.name for entry in store.entries(deep=False)] == ["c"] and store.folders() == ["a"]
    assert {entry.name: entry.version for entry in store.entries()} == {n: store.get(n)[1] for n in ("a/b", "c")}
    store.delete("a/b", "c", "never there")
    store.delete("c")
    assert store.entries() == []


def test_a_file_is_written_only_over_what_is_known_to_be_there(uri):
    store = storage.open(uri)

    first = store.put_if("file", "first", None)
    assert first and store.put_if("file", "other", None) is None
    second = store.put_if("file", "second", first)

    assert second not in (None, first) and store.put_if("file", "other", first) is None
    assert store.get("file") == (b"second", second)


def test_of_many_who_write_at_once_over_the_same_one_succeeds(uri):
    known = storage.open(uri).put_if("file", "", None)
    done: list[str | None] = []

    def write(content: str) -> None:
        done.append(storage.open(uri).put_if("file", content, known))

    threads = [threading.Thread(target=write, args=(str(number),)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert len(done) == 8 and len([version for version in done if version]) == 1


def test_a_large_file_comes_back_with_the_digest_that_it_was_sent_with(uri, tmp_path):
    (tmp_path / "large").write_bytes(bytes(range(256)) * 40_000)
    digest = manifests.file_sha256(tmp_path / "large")
    store = storage.open(uri)

    store.upload(tmp_path / "large", "folder/large", digest)
    store.download("folder/large", tmp_path / "back")

    assert manifests.file_sha256(tmp_path / "back") == digest == store.head("folder/large").sha256
    assert store.sweep(timedelta(0)) == 0


def test_directories_travel_and_leases_fence_in_any_storage(uri, tmp_path, monkeypatch):
    monkeypatch.setattr(lease, "BEAT", 0.1)
    (tmp_path / "made/inner").mkdir(parents=True)
    (tmp_path / "made/inner/file").write_text("content")
    manifests.write(tmp_path / "made", "corpus")

    with Lease(f"{uri}/lease.json", "first") as held:
        with pytest.raises(LeaseHeld, match="first is at work"), Lease(held.url, "second"):
            pytest.fail("it was taken")
        artifact_files.push(tmp_path / "made", f"{uri}/a", before_commit=held.renew)
        with Lease(held.url, "first"), pytest.raises(Fenced):
            artifact_files.push(tmp_path / "made", f"{uri}/b", before_commit=held.renew)
    artifact_files.pull(f"{uri}/a", tmp_path / "back")

    assert (tmp_path / "back/inner/file").read_text() == "content" and not artifact_files.manifest_exists(f"{uri}/b")
    artifact_files.drop(f"{uri}/a")
    assert artifact_files.manifest(f"{uri}/a") is None


@pytest.mark.parametrize("uri", ["gs://bucket/prefix", "http://169.254.169.254/latest"])
def test_a_storage_that_nobody_has_written_is_refused_in_one_line(uri):
    with pytest.raises(InputError, match=f"{uri}: no storage that is known: give a directory, or .* s3://"):
        storage.open(uri)
    with pytest.raises(InputError, match="the store has no name: give a directory, or a URI"):  # a variable is not set
        storage.open("")


class Shelf:
    """A storage that is elsewhere, as far as its users know."""

    root: Path
    directory = None

    def __init__(self, uri: str) -> None:
        self.uri = uri
        self._inner = Directory(str(self.root / uri.removeprefix("shelf://")))

    def __getattr__(self, name: str):
        return getattr(self._inner, name)


@pytest.mark.parametrize("store", ["shelf://a", "shelf://team/suite", "shelf://team/points/x", "shelf://suite"])
def test_another_storage_is_a_class_and_a_line(tmp_path, monkeypatch, store):
    monkeypatch.setattr(Shelf, "root", tmp_path / "shelf", raising=False)
    monkeypatch.setitem(storage.SCHEMES, "shelf", f"{__name__}:Shelf")
    monkeypatch.setenv("INFOXLM_CACHE", str(tmp_path / "here"))
    place = f"{store}/corpus/{KEY}"

    made = artifacts.get_or_build(store, "corpus", KEY, lambda output: (output / "file").write_text("x") and {})
    monkeypatch.setenv("INFOXLM_CACHE", str(tmp_path / "another machine"))
    found = artifacts.get_or_build(store, "corpus", KEY, lambda output: pytest.fail("made twice"))
    data = sources.fetch_data(f"{place}/file", tmp_path / "store")

    assert artifacts.url_of(made) == place and artifacts.locate(place) == found != made
    assert artifacts.locate(f"{place}/file").read_text() == "x"
    assert data.read_text() == (found / "file").read_text() == "x" and data.is_relative_to(tmp_path / "store")
    for wrong in (f"{store}/x", f"{store}/corpus/abc", store):
        with pytest.raises(InputError, match=rf"{wrong} is not an artifact \(STORE/KIND/KEY\)"):
            artifacts.locate(wrong)


class _Page(BaseHTTPRequestHandler):
    """A proxy that answers everything with a page to log in, or sends whoever asks to itself."""

    def do_GET(self) -> None:
        self.send_response(302 if self.path.startswith("/round") else 200)
        self.send_header("Content-Type", "text/html")
        self.send_header("Location", self.path)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(b"<html>log in</html>")

    do_HEAD = do_PUT = do_GET

    def log_message(self, *_: object) -> None:
        """Say nothing."""


def test_what_answers_and_is_no_s3_is_refused_in_one_line(monkeypatch):
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Page)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "x")
    try:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.server_address[1]}")
        for ask in (lambda store: store.get("manifest.json"), lambda store: store.head("manifest.json")):
            with pytest.raises(InputError, match="what answers is no S3"):
                ask(storage.open("s3://bucket/prefix"))
        with pytest.raises(InputError, match=r"what answers is no S3 \(RecursionError"):
            storage.open("s3://round/prefix").get("manifest.json")
    finally:
        server.shutdown()
        server.server_close()


class _Keeper(BaseHTTPRequestHandler):
    """An S3 whose policy lets nobody delete: to many at once that is an answer like any other."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        said = b"<Error><Key>prefix/b</Key><Code>AccessDenied</Code><Message>no</Message></Error>"
        said = b"<DeleteResult>" + said + b"</DeleteResult>"
        self.send_response(200)
        self.send_header("Content-Length", str(len(said)))
        self.end_headers()
        self.wfile.write(said)

    def log_message(self, *_: object) -> None:
        """Say nothing."""


def test_of_many_to_delete_the_first_that_s3_refuses_is_named(monkeypatch):
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Keeper)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "x")
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.server_address[1]}")
    try:
        with pytest.raises(InputError, match=r"refuses to delete 1, the first prefix/b \(AccessDenied no\)"):
            storage.open("s3://bucket/prefix").delete("a", "b")
    finally:
        server.shutdown()
        server.server_close()


class _Ahead(_Keeper):
    """An S3 that holds an upload of two days ago and one of an hour ago, by a clock that is ten days before ours."""

    aborted: ClassVar[list[str]] = []
    now = datetime.now(UTC) - timedelta(days=10)

    def date_time_string(self, timestamp: float | None = None) -> str:
        return format_datetime(self.now, usegmt=True)

    def do_GET(self) -> None:
        uploads = "".join(
            f"<Upload><Key>prefix/{name}</Key><UploadId>{name}</UploadId><Initiated>"
            f"{(self.now - age).isoformat(timespec='seconds').replace('+00:00', 'Z')}</Initiated></Upload>"
            for name, age in (("old", timedelta(days=2)), ("new", timedelta(hours=1)))
        )
        said = f"<ListMultipartUploadsResult>{uploads}</ListMultipartUploadsResult>".encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(said)))
        self.end_headers()
        self.wfile.write(said)

    def do_DELETE(self) -> None:
        self.aborted.append(self.path.partition("uploadId=")[2])
        self.send_response(204)
        self.end_headers()


def test_unfinished_uploads_are_as_old_as_the_server_says_whatever_our_clock_is(monkeypatch):
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Ahead)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "x")
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.server_address[1]}")
    try:
        assert storage.open("s3://bucket/prefix").sweep(timedelta(days=1)) == 1
        assert _Ahead.aborted == ["old"]
        assert storage.open("s3://bucket/prefix").sweep() == 2  # of a prefix that is ours alone
    finally:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize(
    ("variable", "value", "said"),
    [
        ("AWS_ENDPOINT_URL", "not a url", "check AWS_ENDPOINT_URL"),
        ("AWS_ENDPOINT_URL", "http://", "check AWS_ENDPOINT_URL"),
        ("AWS_ENDPOINT_URL", "ftp://127.0.0.1", "not a valid URI: check AWS_ENDPOINT_URL"),
        ("AWS_REGION", "not a region!", "check AWS_ENDPOINT_URL, AWS_REGION"),
        ("AWS_PROFILE", "nobody", "and AWS_PROFILE"),
    ],
)
def test_settings_of_s3_that_cannot_be_are_refused_naming_them(monkeypatch, variable, value, said):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "x")
    monkeypatch.setenv(variable, value)

    with pytest.raises(InputError, match=said):
        storage.open("s3://bucket/prefix").get("manifest.json")


def test_a_bucket_whose_name_cannot_be_is_not_taken_for_missing_credentials(monkeypatch):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "x")

    with pytest.raises(InputError, match="check the name of the bucket"):
        storage.open("s3://a b/prefix").get("manifest.json")
