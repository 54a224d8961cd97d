"""Artifacts are uploaded and downloaded completely or not at all, whatever fails on the way to a real S3 server."""

import hashlib
import json
import os
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
    """No pauses between attempts of the S3 client."""
    monkeypatch.setattr("botocore.retries.standard.ExponentialBackoff.delay_amount", lambda *_: 0.01)


@pytest.fixture
def directory(tmp_path) -> Path:
    """An artifact of two files, one so large that it is uploaded in parts, with another artifact inside."""
    made = tmp_path / "made"
    (made / "inner").mkdir(parents=True)
    (made / "small").write_text("content")
    (made / "inner" / "large").write_bytes(bytes(range(256)) * 40_000)  # 10 MB
    manifests.write(made / "inner", "encoder", {"steps": 1})
    manifests.write(made, "corpus", {"lines": 3})
    return made


def tree(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("storage", ["directory", pytest.param("s3", marks=pytest.mark.slow)])
def test_an_artifact_comes_back_as_it_was_sent_until_it_is_dropped(request, directory, tmp_path, storage):
    if storage == "s3":
        request.getfixturevalue("bucket")
    uri = URL if storage == "s3" else str(tmp_path / "store/a")

    artifact_files.push(directory, uri)
    artifact_files.pull(uri, tmp_path / "back")

    assert tree(tmp_path / "back") == tree(directory)
    assert artifact_files.manifest(uri)["facts"] == {"lines": 3}
    artifact_files.drop(uri)
    assert artifact_files.manifest(uri) is None
    with pytest.raises(InputError, match=rf"{uri} has no manifest.json"):
        artifact_files.pull(uri, tmp_path / "again")
    assert not (tmp_path / "again").exists()


@pytest.mark.item("F08")
def test_a_part_that_never_arrives_leaves_no_artifact_and_the_next_upload_sends_what_is_missing(
    bucket, faults, directory
):
    faults.inject("PUT", "small", "503")

    with pytest.raises(StorageUnavailable, match="run again"):
        artifact_files.push(directory, URL)
    assert artifact_files.manifest(URL) is None
    faults.heal()
    faults.requests.clear()
    artifact_files.push(directory, URL)

    assert artifact_files.manifest_exists(URL)
    assert not [target for method, target in faults.requests if method == "PUT" and "inner/large" in target]


@pytest.mark.item("F07")
def test_a_bit_that_flips_on_the_way_is_found_and_nothing_stays(bucket, faults, directory, tmp_path):
    artifact_files.push(directory, URL)
    faults.inject("GET", "inner/large", "flipped")

    with pytest.raises((DataCorrupt, StorageUnavailable)):
        artifact_files.pull(URL, tmp_path / "back")

    assert not (tmp_path / "back").exists() and faults.injected


def test_an_account_that_may_not_write_is_told_so_and_not_to_try_again(bucket, directory, monkeypatch):
    for name, value in s3.environment(os.environ["AWS_ENDPOINT_URL"], "reader").items():
        monkeypatch.setenv(name, value)

    with pytest.raises(InputError, match=rf"{URL}: S3 refuses .*: check the name and your rights"):
        artifact_files.push(directory, URL)


@pytest.fixture
def literal(directory, monkeypatch):
    """Objects of a server that keeps keys such as `a//b`; among them the artifact."""
    (directory / "inner/large").write_bytes(b"small enough to come in one piece")
    manifests.write(directory / "inner", "encoder", {"steps": 1})
    manifests.write(directory, "corpus", {"lines": 3})
    objects = {f"store/a/{name}": content for name, content in tree(directory).items()}
    with literal_s3.serving(objects) as url:
        for name, value in s3.environment(url).items():
            monkeypatch.setenv(name, value)
        yield objects


@pytest.mark.item("S10")
def test_what_a_manifest_does_not_name_is_not_fetched_wherever_its_key_leads(literal, directory, tmp_path):
    literal[f"store/a/{tmp_path}/outside/manifest.json"] = b"{}"
    literal["store/a/unnamed/manifest.json"] = literal["store/a/my-manifest.json"] = b"{}"

    artifact_files.pull(URL, tmp_path / "back")

    assert tree(tmp_path / "back") == tree(directory) and not (tmp_path / "outside").exists()


@pytest.mark.item("S10")
@pytest.mark.parametrize("lead", ["{}/outside", "../../outside", "x//outside"])
def test_a_manifest_that_names_a_place_outside_is_refused_before_anything_is_written(literal, tmp_path, lead):
    described = json.loads(literal["store/a/manifest.json"])
    name = lead.format(tmp_path)
    described["files"][name] = {"size": 1, "sha256": hashlib.sha256(b"x").hexdigest()}
    described["digest"] = manifests.digest({part: described[part] for part in ("kind", "files", "facts")})
    literal |= {"store/a/manifest.json": json.dumps(described).encode(), f"store/a/{name}": b"x"}

    for fetch in (artifact_files.pull, lambda _, to: RemoteRun("s3://models/store", "job").fetch("a", to)):
        with pytest.raises(InputError, match=r"store/a/.*outside: the file name leads out of its folder"):
            fetch(URL, tmp_path / "back")

    assert {path.name for path in tmp_path.iterdir()} == {"made"}
