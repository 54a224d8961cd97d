"""Artifacts are built completely or not at all, found by the digest of their inputs, and verified."""

import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from components.platform import artifact_files, artifacts
from infoxlm_core import manifests, run_file
from infoxlm_core.config import PretrainingConfig, TokenizationConfig
from infoxlm_core.errors import DataCorrupt, InputError, StorageUnavailable

URL = "s3://models/store"
KEY = "0123456789abcdef"


def build(output: Path) -> dict:
    (output / "part").mkdir()
    (output / "part" / "file").write_text("content")
    return {"lines": 3}


def get_or_build(store: Path, build=build) -> Path:
    return artifacts.get_or_build(str(store), "corpus", "abc", build)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_published_artifact_is_found_by_the_next_stage(tmp_path):
    directory = get_or_build(tmp_path)
    output = SimpleNamespace(path=str(tmp_path / "kfp" / "corpus"), metadata={})

    artifacts.publish(output, directory)

    digest = manifests.load_verified(directory, "corpus", "x")["digest"]
    assert artifacts.resolve(output) == (directory, digest)
    assert output.metadata["digest"] == digest
    assert get_or_build(tmp_path, lambda output: pytest.fail("built twice")) == directory


@pytest.mark.item("F14")
def test_failed_build_leaves_no_files(tmp_path):
    def fail(output: Path) -> dict:
        build(output)
        raise InputError("no")

    with pytest.raises(InputError):
        get_or_build(tmp_path, fail)

    assert list((tmp_path / "corpus").iterdir()) == []


@pytest.mark.item("F14")
def test_artifact_whose_deletion_was_interrupted_is_built_again(tmp_path):
    directory = get_or_build(tmp_path)
    (directory / manifests.NAME).unlink()  # `infoxlm gc` deletes it first
    (directory / "left").touch()

    assert get_or_build(tmp_path) == directory

    assert not (directory / "left").exists()
    assert [path.name for path in (tmp_path / "corpus").iterdir()] == ["abc"]


@pytest.mark.item("F14")
def test_concurrent_stages_build_an_artifact_once_and_one_at_a_time(tmp_path):
    builds, running, running_counts = [], [], []

    def run_stage(number: int) -> None:
        with artifacts.exclusive(str(tmp_path), "corpus", "abc"):
            running.append(number)
            running_counts.append(len(running))
            get_or_build(tmp_path, lambda output: builds.append(number) or time.sleep(0.2))
            running.remove(number)

    threads = [threading.Thread(target=run_stage, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert len(builds) == 1
    assert running_counts == [1, 1, 1]


def test_files_are_hashed_again_only_after_a_change(tmp_path, monkeypatch):
    directory = get_or_build(tmp_path)
    hashed: list[Path] = []
    file_sha256 = manifests.file_sha256
    monkeypatch.setattr(manifests, "file_sha256", lambda path: hashed.append(path) or file_sha256(path))

    artifacts.lookup(str(tmp_path), "corpus", "abc")
    assert hashed == []

    (directory / "part/file").touch()
    artifacts.lookup(str(tmp_path), "corpus", "abc")
    artifacts.lookup(str(tmp_path), "corpus", "abc")
    assert hashed == [directory / "part/file"]

    artifact_files.find_marker(directory).write_bytes(b"\xff\xfe")  # an unreadable record
    artifacts.lookup(str(tmp_path), "corpus", "abc")
    assert hashed == [directory / "part/file"] * 2


def test_damage_is_found_by_its_time_or_when_the_files_are_read(tmp_path):
    directory = get_or_build(tmp_path)
    (directory / "part/file").write_text("cOntent")

    with pytest.raises(DataCorrupt, match="sha256"):
        get_or_build(tmp_path)
    # Like a bit that flips on the disk, the change leaves no trace in the times of the file.
    artifact_files.record_verified(directory, artifact_files.compute_state(directory))
    assert artifacts.lookup(str(tmp_path), "corpus", "abc") == directory
    with pytest.raises(DataCorrupt, match="sha256"):
        artifacts.locate(str(directory))


def test_keys_stay_the_same_in_all_releases():
    demo = run_file.load(Path(__file__).parents[3] / "configs/demo.yaml")
    inputs_by_key = {
        "f228c8c8f7d18736": ("shards", TokenizationConfig(vocabulary_size=160), "sha256:a"),
        "903a61541685f792": ("shards", TokenizationConfig(), "a"),
        "bf690de7d8d4d13f": ("shards", TokenizationConfig(model="m.model", processes=3), "a"),
        "a11a77a28b034e93": ("corpus", demo.preparation, "a"),
    }

    for key, inputs in inputs_by_key.items():
        assert artifacts.compute_key(*inputs) == key
    assert artifacts.compute_key("shards", TokenizationConfig(prefix="query: "), "a") not in inputs_by_key


def test_key_depends_on_all_that_decides_the_result_and_on_nothing_else(monkeypatch):
    key = artifacts.compute_key("pretrained", PretrainingConfig(), "a")

    saving = PretrainingConfig(log_every=3, checkpoints={"every": 7, "resume": "pretrained-3f"})
    assert artifacts.compute_key("pretrained", saving, "a") == key
    monkeypatch.setattr(manifests, "describe_software", lambda: {"code": "sha256:other", "torch": "99"})
    assert artifacts.compute_key("pretrained", PretrainingConfig(), "a") == key

    other_keys = [
        artifacts.compute_key("pretrained", PretrainingConfig(), "b"),
        artifacts.compute_key("tuned", PretrainingConfig(), "a"),
        artifacts.compute_key("pretrained", PretrainingConfig(seed=2), "a"),
    ]
    monkeypatch.setitem(manifests.VERSIONS, "pretrained", manifests.VERSIONS["pretrained"] + 1)
    other_keys.append(artifacts.compute_key("pretrained", PretrainingConfig(), "a"))
    assert len({key, *other_keys}) == 5


# ---------------------------------------------------------------- a store on S3


@pytest.fixture
def own_cache(tmp_path, monkeypatch):
    """Use a new cache, and no pauses between attempts of the S3 client."""
    monkeypatch.setattr("botocore.retries.standard.ExponentialBackoff.delay_amount", lambda *_: 0.01)
    monkeypatch.setenv("INFOXLM_CACHE", str(tmp_path / "cache"))


def test_each_store_has_a_local_copy_that_names_the_store(own_cache):
    assert len({artifacts.local_directory(f"s3://models/{name}") for name in ("x/a", "x-a", "x_a")}) == 3
    (artifacts.local_directory("s3://models/x") / "COPY_OF").write_bytes(b"\xff")

    assert artifacts.find_uri(artifacts.local_directory("s3://models/x") / "corpus/abc") == "s3://models/x/corpus/abc"


@pytest.mark.parametrize("inner_path", ["../../outside", "/outside"])
def test_location_outside_of_its_artifact_is_refused(own_cache, bucket, inner_path):
    artifacts.get_or_build(URL, "corpus", KEY, build)

    with pytest.raises(InputError, match="the file name leads out of its directory"):
        artifacts.locate(f"{URL}/corpus/{KEY}/{inner_path}")


@pytest.mark.item("P5")
@pytest.mark.parametrize("leaves_trace", [True, False])
@pytest.mark.parametrize("file", ["part/file", manifests.NAME])
def test_damaged_copy_is_downloaded_again(own_cache, bucket, file, leaves_trace):
    directory = artifacts.get_or_build(URL, "pretrained", KEY, build)
    original = contents(directory)
    (directory / file).write_bytes(b"x" * len(original[file]))
    if not leaves_trace:
        artifact_files.record_verified(directory, artifact_files.compute_state(directory))

    assert contents(artifacts.locate(f"{URL}/pretrained/{KEY}")) == original


def test_artifact_that_could_not_be_uploaded_is_not_built_again(own_cache, bucket, faults):
    faults.inject("PUT", "corpus/abc", "503")
    builds = []

    def build_and_count(output: Path) -> dict:
        builds.append(output)
        return build(output)

    with pytest.raises(StorageUnavailable):
        artifacts.get_or_build(URL, "corpus", "abc", build_and_count)
    assert artifacts.lookup(URL, "corpus", "abc") is None
    faults.heal()

    artifacts.get_or_build(URL, "corpus", "abc", build_and_count)

    assert len(builds) == 1
    assert artifacts.lookup(URL, "corpus", "abc")


def test_first_upload_counts_if_two_machines_build_the_same(own_cache, bucket, tmp_path, monkeypatch):
    def build_after_another_machine(output: Path) -> dict:
        monkeypatch.setenv("INFOXLM_CACHE", str(tmp_path / "other machine"))
        artifacts.get_or_build(URL, "corpus", "abc", build)
        monkeypatch.setenv("INFOXLM_CACHE", str(tmp_path / "cache"))
        (output / "part").mkdir()
        (output / "part" / "file").write_text("second")
        return {}

    directory = artifacts.get_or_build(URL, "corpus", "abc", build_after_another_machine)

    assert (directory / "part" / "file").read_text() == "content"
