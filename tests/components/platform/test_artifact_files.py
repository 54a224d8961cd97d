"""Artifacts are uploaded to and downloaded from a real S3 server completely or not at all, whatever fails."""

import hashlib
import json
from pathlib import Path

import pytest

from components.platform import artifact_files
from components.platform.training_runs import RemoteRun
from infoxlm_core import manifests
from infoxlm_core.errors import DataCorrupt, InputError, StorageUnavailable
from tests.servers import literal_s3, s3

URL = "s3://models/store/a"


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch):
    """Remove the pauses between attempts of the S3 client."""
    monkeypatch.setattr("botocore.retries.standard.ExponentialBackoff.delay_amount", lambda *_: 0.01)


@pytest.fixture
def directory(tmp_path) -> Path:
    """Return an artifact with a small file and a nested artifact, whose file is uploaded in several parts."""
    directory = tmp_path / "artifact"
    (directory / "inner").mkdir(parents=True)
    (directory / "small").write_text("content")
    (directory / "inner" / "large").write_bytes(bytes(range(256)) * 40_000)  # 10 MB
    manifests.write(directory / "inner", "encoder", {"steps": 1})
    manifests.write(directory, "corpus", {"lines": 3})
    return directory


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("storage", ["directory", pytest.param("s3", marks=pytest.mark.slow)])
def test_uploaded_artifact_can_be_downloaded_until_it_is_deleted(request, directory, tmp_path, storage):
    if storage == "s3":
        request.getfixturevalue("bucket")
    uri = URL if storage == "s3" else str(tmp_path / "store/a")

    artifact_files.upload(directory, uri)
    artifact_files.download(uri, tmp_path / "copy")

    assert contents(tmp_path / "copy") == contents(directory)
    assert artifact_files.read_manifest(uri)["facts"] == {"lines": 3}
    artifact_files.delete(uri)
    assert artifact_files.read_manifest(uri) is None
    with pytest.raises(InputError, match=rf"{uri} has no manifest.json"):
        artifact_files.download(uri, tmp_path / "second copy")
    assert not (tmp_path / "second copy").exists()


@pytest.mark.item("F08")
def test_failed_upload_leaves_no_artifact_and_the_next_one_sends_missing_files(bucket, faults, directory):
    faults.inject("PUT", "small", "503")

    with pytest.raises(StorageUnavailable, match="run again"):
        artifact_files.upload(directory, URL)
    assert artifact_files.read_manifest(URL) is None
    faults.heal()
    faults.requests.clear()
    artifact_files.upload(directory, URL)

    assert artifact_files.manifest_exists(URL)
    assert not [target for method, target in faults.requests if method == "PUT" and "inner/large" in target]


@pytest.mark.item("F07")
def test_bit_that_flips_during_a_download_is_found(bucket, faults, directory, tmp_path):
    artifact_files.upload(directory, URL)
    faults.inject("GET", "inner/large", "flipped")

    with pytest.raises((DataCorrupt, StorageUnavailable)):
        artifact_files.download(URL, tmp_path / "copy")

    assert faults.injected
    assert not (tmp_path / "copy").exists()


@pytest.fixture
def objects(directory, monkeypatch):
    """Return the objects of a server that allows keys such as `a//b`. They include the artifact."""
    (directory / "inner/large").write_bytes(b"small enough for one request")
    manifests.write(directory / "inner", "encoder", {"steps": 1})
    manifests.write(directory, "corpus", {"lines": 3})
    objects = {f"store/a/{name}": content for name, content in contents(directory).items()}
    with literal_s3.serving(objects) as url:
        for name, value in s3.environment(url).items():
            monkeypatch.setenv(name, value)
        yield objects


@pytest.mark.item("S10")
def test_objects_that_no_manifest_lists_are_not_downloaded(objects, directory, tmp_path):
    objects[f"store/a/{tmp_path}/outside/manifest.json"] = b"{}"
    objects["store/a/unnamed/manifest.json"] = b"{}"
    objects["store/a/my-manifest.json"] = b"{}"

    artifact_files.download(URL, tmp_path / "copy")

    assert contents(tmp_path / "copy") == contents(directory)
    assert not (tmp_path / "outside").exists()


@pytest.mark.item("S10")
@pytest.mark.parametrize("pattern", ["{}/outside", "../../outside", "x//outside"])
def test_manifest_with_a_path_outside_is_refused_before_a_download(objects, tmp_path, pattern):
    manifest = json.loads(objects["store/a/manifest.json"])
    name = pattern.format(tmp_path)
    manifest["files"][name] = {"size": 1, "sha256": hashlib.sha256(b"x").hexdigest()}
    manifest["digest"] = manifests.digest({part: manifest[part] for part in ("kind", "files", "facts")})
    objects |= {"store/a/manifest.json": json.dumps(manifest).encode(), f"store/a/{name}": b"x"}

    for download in (artifact_files.download, lambda _, copy: RemoteRun("s3://models/store", "job").fetch("a", copy)):
        with pytest.raises(InputError, match=r"store/a/.*outside: the file name leads out of its directory"):
            download(URL, tmp_path / "copy")

    assert {path.name for path in tmp_path.iterdir()} == {"artifact"}
