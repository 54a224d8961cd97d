"""Artifacts: built whole, found by content, verified."""

import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from components.platform import artifact_files, artifacts
from infoxlm_core import manifests, run_file
from infoxlm_core.config import EvaluationConfig, PretrainingConfig, TokenizationConfig
from infoxlm_core.errors import DataCorrupt, InputError, StorageUnavailable

URL = "s3://models/store"
KEY = "0123456789abcdef"


def build(output: Path) -> dict:
    (output / "part").mkdir()
    (output / "part" / "file").write_text("content")
    return {"lines": 3}


def test_an_artifact_is_made_once_and_found_again(tmp_path):
    first = artifacts.get_or_build(str(tmp_path), "corpus", "abc", build)

    again = artifacts.get_or_build(str(tmp_path), "corpus", "abc", lambda output: pytest.fail("made twice"))

    assert again == first and manifests.read(first, "corpus", "x")["facts"] == {"lines": 3}


@pytest.mark.item("F14")
def test_a_stage_that_fails_leaves_nothing_behind(tmp_path):
    def fail(output: Path) -> dict:
        build(output)
        raise InputError("no")

    with pytest.raises(InputError):
        artifacts.get_or_build(str(tmp_path), "corpus", "abc", fail)

    assert list((tmp_path / "corpus").iterdir()) == []


@pytest.mark.item("F14")
def test_what_a_dead_process_left_half_made_is_swept(tmp_path):
    (tmp_path / "corpus" / ".making-xyz").mkdir(parents=True)
    (tmp_path / "corpus" / ".making-xyz.lock").touch()

    artifacts.get_or_build(str(tmp_path), "corpus", "abc", build)

    assert [path.name for path in (tmp_path / "corpus").iterdir()] == ["abc"]


def test_what_a_living_process_is_making_stays(tmp_path):
    def look(output: Path) -> dict:
        artifacts.get_or_build(str(tmp_path), "corpus", "other", build)
        assert output.is_dir()
        return build(output)

    artifacts.get_or_build(str(tmp_path), "corpus", "abc", look)

    assert {path.name for path in (tmp_path / "corpus").iterdir()} == {"abc", "other"}


@pytest.mark.item("F14")
def test_two_who_need_the_same_make_it_one_after_the_other_and_once(tmp_path):
    made, inside, most = [], [], []

    def need(number: int) -> None:
        with artifacts.exclusive(str(tmp_path), "tuned", "abc"):
            inside.append(number)
            most.append(len(inside))
            artifacts.get_or_build(str(tmp_path), "tuned", "abc", lambda output: made.append(number) or time.sleep(0.2))
            inside.remove(number)

    threads = [threading.Thread(target=need, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert len(made) == 1 and most == [1, 1, 1]


def test_a_found_artifact_is_verified(tmp_path):
    made = artifacts.get_or_build(str(tmp_path), "corpus", "abc", build)
    (made / "part/file").write_text("cOntent")

    with pytest.raises(DataCorrupt, match="sha256"):
        artifacts.get_or_build(str(tmp_path), "corpus", "abc", build)


def test_a_found_artifact_is_hashed_again_only_if_a_file_was_touched(tmp_path, monkeypatch):
    made = artifacts.get_or_build(str(tmp_path), "pretrained", "abc", build)
    hashed: list[Path] = []
    hash_of = manifests.file_sha256
    monkeypatch.setattr(manifests, "file_sha256", lambda path: hashed.append(path) or hash_of(path))

    artifacts.lookup(str(tmp_path), "pretrained", "abc")
    assert hashed == []

    (made / "part/file").touch()
    artifacts.lookup(str(tmp_path), "pretrained", "abc")
    artifacts.lookup(str(tmp_path), "pretrained", "abc")
    assert hashed == [made / "part/file"]


def test_a_mark_of_what_was_compared_that_cannot_be_read_says_nothing(tmp_path):
    made = artifacts.get_or_build(str(tmp_path), "pretrained", "abc", build)
    artifact_files.marker_of(made).write_bytes(b"\xff\xfe")

    assert artifacts.lookup(str(tmp_path), "pretrained", "abc") == made
    assert artifact_files.marker_of(made).read_text() == artifact_files.file_state(made)


def test_what_is_damaged_without_a_trace_is_found_when_it_is_read(tmp_path):
    made = artifacts.get_or_build(str(tmp_path), "pretrained", "abc", build)
    (made / "part/file").write_text("cOntent")
    # as if a disk had flipped a bit: no time changes
    artifact_files.record_verified(made, artifact_files.file_state(made))

    assert artifacts.lookup(str(tmp_path), "pretrained", "abc") == artifacts.locate(str(made), hashed=False) == made
    with pytest.raises(DataCorrupt, match="sha256"):
        artifacts.locate(str(made))


def test_the_key_of_an_artifact_stays_the_same_from_release_to_release():
    demo = run_file.load(Path(__file__).parents[3] / "configs/demo.yaml")
    keys = {
        "f228c8c8f7d18736": ("shards", TokenizationConfig(vocabulary_size=160), "sha256:a"),
        "903a61541685f792": ("shards", TokenizationConfig(), "a"),
        "bf690de7d8d4d13f": ("shards", TokenizationConfig(model="m.model", processes=3), "a"),
        "d47e838644711a42": ("corpus", demo.preparation, "a"),
    }

    for key, inputs in keys.items():
        assert artifacts.key_of(*inputs) == key
    assert artifacts.key_of("shards", TokenizationConfig(prefix="query: "), "a") not in keys


def test_the_key_changes_with_config_and_inputs_but_not_with_how_often_to_save():
    config = PretrainingConfig()
    saving = PretrainingConfig(log_every=3, checkpoints={"every": 7, "resume": "pretrained-3f"})

    assert artifacts.key_of("pretrained", config, "a") == artifacts.key_of("pretrained", saving, "a")
    others = [
        artifacts.key_of("pretrained", config, "b"),
        artifacts.key_of("tuned", config, "a"),
        artifacts.key_of("pretrained", PretrainingConfig(seed=2), "a"),
    ]
    assert len({artifacts.key_of("pretrained", config, "a"), *others}) == 4


def test_the_key_changes_with_the_version_of_its_stage_and_not_with_code_or_libraries(monkeypatch):
    before = artifacts.key_of("corpus", EvaluationConfig(), "a")

    monkeypatch.setattr(manifests, "describe_software", lambda: {"code": "sha256:other", "torch": "99"})
    assert artifacts.key_of("corpus", EvaluationConfig(), "a") == before

    monkeypatch.setitem(manifests.VERSIONS, "corpus", manifests.VERSIONS["corpus"] + 1)
    assert artifacts.key_of("corpus", EvaluationConfig(), "a") != before


def test_a_published_artifact_is_found_by_the_next_stage(tmp_path):
    made = artifacts.get_or_build(str(tmp_path), "corpus", "abc", build)
    artifact = SimpleNamespace(path=str(tmp_path / "kfp" / "corpus"), metadata={})

    artifacts.publish(artifact, made)

    location, digest = artifacts.resolve(artifact)
    assert location == made and digest == manifests.read(made, "corpus", "x")["digest"] == artifact.metadata["digest"]
    assert artifacts.key_of("scores", EvaluationConfig(), digest)


# ---------------------------------------------------------------- a store on S3


@pytest.fixture
def own_cache(tmp_path, monkeypatch):
    """A cache of this test's, and no pauses between attempts of the S3 client."""
    monkeypatch.setattr("botocore.retries.standard.ExponentialBackoff.delay_amount", lambda *_: 0.01)
    monkeypatch.setenv("INFOXLM_CACHE", str(tmp_path / "cache"))


def tree(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def write_file(output: Path) -> dict:
    (output / "file").write_text("content")
    return {"lines": 1}


def test_each_store_has_a_local_copy_of_its_own_that_says_of_which_store_it_is(own_cache):
    assert len({artifacts.local_directory(f"s3://models/{name}") for name in ("x/a", "x-a", "x_a")}) == 3
    (artifacts.local_directory("s3://models/x") / "COPY_OF").write_bytes(b"\xff")

    assert artifacts.url_of(artifacts.local_directory("s3://models/x") / "corpus/abc") == "s3://models/x/corpus/abc"


@pytest.mark.parametrize("inner", ["../../outside", "/outside"])
def test_a_location_that_leads_out_of_its_artifact_is_refused(own_cache, bucket, inner):
    artifacts.get_or_build(URL, "corpus", KEY, write_file)

    with pytest.raises(InputError, match="the file name leads out of its folder"):
        artifacts.locate(f"{URL}/corpus/{KEY}/{inner}")


@pytest.mark.item("P5")
@pytest.mark.parametrize("unnoticed", [False, True])
@pytest.mark.parametrize("file", ["file", manifests.NAME])
def test_a_damaged_copy_of_an_artifact_is_fetched_again(own_cache, bucket, file, unnoticed):
    made = artifacts.get_or_build(URL, "pretrained", KEY, write_file)
    whole = tree(made)
    (made / file).write_bytes(b"x" * len(whole[file]))
    if unnoticed:
        artifact_files.record_verified(made, artifact_files.file_state(made))

    assert tree(artifacts.locate(f"{URL}/pretrained/{KEY}")) == whole


def test_an_artifact_that_was_made_but_not_uploaded_is_uploaded_and_not_made_again(own_cache, bucket, faults):
    faults.inject("PUT", "corpus/abc", "503")
    builds = []

    def build(output: Path) -> dict:
        builds.append(output)
        return write_file(output)

    with pytest.raises(StorageUnavailable):
        artifacts.get_or_build(URL, "corpus", "abc", build)
    assert artifacts.lookup(URL, "corpus", "abc") is None
    faults.heal()

    artifacts.get_or_build(URL, "corpus", "abc", build)

    assert len(builds) == 1 and artifacts.lookup(URL, "corpus", "abc")


def test_of_two_machines_that_made_the_same_the_first_to_upload_counts(own_cache, bucket, tmp_path, monkeypatch):
    def build_second(output: Path) -> dict:
        monkeypatch.setenv("INFOXLM_CACHE", str(tmp_path / "other machine"))
        artifacts.get_or_build(URL, "corpus", "abc", write_file)
        monkeypatch.setenv("INFOXLM_CACHE", str(tmp_path / "cache"))
        (output / "file").write_text("second")
        return {}

    found = artifacts.get_or_build(URL, "corpus", "abc", build_second)

    assert (found / "file").read_text() == "content"
