"""A training continues a run only if everything that decides its result is unchanged, or if the user asks for it."""

import json
from pathlib import Path

import pytest

from components.adapters import lease
from components.adapters.s3.store import S3Store
from components.platform import artifacts, training_runs
from components.platform.training_runs import RemoteRun
from infoxlm_core import manifests
from infoxlm_core.errors import ConfigError, ConfigMismatch, Fenced, InputError
from tests.servers.processes import until
from tests.toys.pretraining import tiny_config

URL = "s3://models/store"


@pytest.fixture(autouse=True)
def pipeline(monkeypatch):
    monkeypatch.setenv("RUN_NAME", "toy")
    monkeypatch.setenv("RUN_ID", "toy-1")


@pytest.fixture
def store(anywhere, tmp_path, monkeypatch) -> str:
    monkeypatch.setenv("INFOXLM_CACHE", str(tmp_path / "cache"))
    return anywhere


def choose(store: str, shards: str = "sha256:a", trial=None, **changes) -> str:
    config = tiny_config(**changes)
    name = artifacts.compute_key("pretrained", config, shards)
    return training_runs.choose_run(store, "pretrained", name, config, {"shards": shards}, trial)


def save(store: str, run: str) -> None:
    """Record that a run has a checkpoint."""
    artifacts.write(store, f"runs/{run}/saved.json", json.dumps({"step": 4}))


@pytest.mark.item("P13")
def test_unfinished_training_with_changed_data_is_refused_in_the_same_pipeline_run(store):
    run = choose(store)
    save(store, run)

    with pytest.raises(ConfigMismatch) as error:
        choose(store, shards="sha256:b")

    assert str(error.value) == (
        f"{store}/runs/{run} was started with other data or settings: shards was 'sha256:a', is 'sha256:b'. Change "
        f"them back, accept the changes with pretraining.checkpoints.resume: {run}, or delete {store}/runs/{run} to "
        "start over"
    )
    assert choose(store) == run
    assert choose(store, shards="sha256:b", checkpoints={"resume": run}) == run


@pytest.mark.item("P6")
def test_unfinished_training_of_an_older_version_is_refused(tmp_path, monkeypatch):
    store = str(tmp_path)
    save(store, choose(store))
    monkeypatch.setitem(manifests.VERSIONS, "pretrained", 99)

    with pytest.raises(ConfigMismatch, match="version was 1, is 99"):
        choose(store)


def test_next_pipeline_run_with_other_settings_starts_a_training_and_warns(tmp_path, monkeypatch, caplog):
    store = str(tmp_path)
    run = choose(store)
    save(store, run)
    monkeypatch.setenv("RUN_ID", "toy-2")

    assert choose(store, seed=2) != run

    assert caplog.messages == [
        f"{store}/runs/{run} is not continued, because this training differs: seed was 1, is 2. "
        f"To continue it anyway, set pretraining.checkpoints.resume: {run}"
    ]


def test_training_that_never_saved_or_is_finished_does_not_matter(tmp_path, caplog):
    store = str(tmp_path)
    unsaved = choose(store)
    finished = choose(store, shards="sha256:b")
    save(store, finished)
    artifacts.get_or_build(store, "pretrained", finished.removeprefix("pretrained-"), lambda output: {"steps": 1})

    third = choose(store, shards="sha256:c")

    assert len({unsaved, finished, third}) == 3
    assert not caplog.messages


def test_trials_of_an_ablation_are_separate_trainings(tmp_path, caplog):
    store = str(tmp_path)
    runs = set()
    for seed in (1, 2):
        run = choose(store, trial={"variant": "full", "seed": seed}, seed=seed)
        save(store, run)
        runs.add(run)

    assert len(runs) == 2
    assert not caplog.messages


def test_run_to_resume_must_exist_and_be_a_single_one(tmp_path):
    with pytest.raises(InputError, match="has no run pretrained-3f with a checkpoint"):
        choose(str(tmp_path), checkpoints={"resume": "pretrained-3f"})
    with pytest.raises(ConfigError, match="an ablation has a run for each trial"):
        choose(str(tmp_path), checkpoints={"resume": "pretrained-3f"}, trial={"variant": "full", "seed": 1})
    with pytest.raises(ConfigError, match=r"checkpoints\.resume"):
        tiny_config(checkpoints={"resume": "../elsewhere"})


# ---------------------------------------------------------------- checkpoints in a storage


@pytest.fixture
def remote(bucket, tmp_path, monkeypatch) -> RemoteRun:
    monkeypatch.setenv("INFOXLM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(lease, "HEARTBEAT_SECONDS", 0.5)
    monkeypatch.setattr(lease, "_POLL_SECONDS", 0.1)
    return RemoteRun(f"{URL}/runs/r", "job")


def make_checkpoint(folder: Path, step: int) -> Path:
    directory = folder / f"step={step:010d}"
    directory.mkdir(parents=True)
    (directory / "state.safetensors").write_text(f"weights {step}")
    manifests.write(directory, "checkpoint", {"step": step})
    return directory


@pytest.mark.item("F04")
def test_newest_checkpoints_are_kept_and_an_incomplete_one_is_removed(bucket, remote, tmp_path):
    bucket.put_object(Key="store/runs/r/step=0000000009/state.safetensors", Body=b"a part")

    with remote.held():
        for step in (1, 2, 3):
            remote.send(make_checkpoint(tmp_path, step), keep=2)

    assert remote.names() == ["step=0000000002", "step=0000000003"]
    assert remote.has_saved()
    assert not [item.key for item in bucket.objects.all() if "step=0000000009" in item.key]


@pytest.mark.item("F26")
def test_bad_checkpoints_are_deleted_and_do_not_count_as_kept(remote, tmp_path):
    with remote.held():
        for step in (2, 4, 6):
            remote.send(make_checkpoint(tmp_path, step), keep=3)

        remote.send(make_checkpoint(tmp_path, 3), keep=2, damaged_names={"step=0000000004", "step=0000000006"})

    assert remote.names() == ["step=0000000002", "step=0000000003"]


@pytest.mark.item("F13")
@pytest.mark.parametrize("step", [2, 3])
def test_fenced_worker_neither_saves_nor_deletes_checkpoints(remote, tmp_path, step):
    successor = RemoteRun(remote.url, "job")
    with remote.held(), successor.held():
        successor.send(make_checkpoint(tmp_path / "new", 2), keep=3)

        with pytest.raises(Fenced):
            remote.send(make_checkpoint(tmp_path / "old", step), keep=3)
        with pytest.raises(Fenced):
            remote.drop("step=0000000002")

        assert successor.names() == ["step=0000000002"]


@pytest.mark.item("F13")
def test_worker_whose_upload_a_successor_has_aborted_is_fenced(remote, tmp_path, monkeypatch):
    successor = RemoteRun(remote.url, "job")

    def upload(store: S3Store, path: Path, name: str, sha256: str) -> None:
        """Upload a file in parts. Between two requests, the successor takes over and aborts all uploads."""
        with store._open_client(name) as client:
            target = {"Bucket": store.bucket, "Key": store._key(name)}
            upload_id = client.create_multipart_upload(**target)["UploadId"]
            with successor.held():
                client.upload_part(**target, UploadId=upload_id, PartNumber=1, Body=path.read_bytes())

    monkeypatch.setattr(S3Store, "upload", upload)
    with remote.held(), pytest.raises(Fenced):
        remote.send(make_checkpoint(tmp_path, 2), keep=3)


def test_stop_request_is_noticed_and_can_be_deleted(remote):
    with remote.held():
        assert not remote.is_stop_requested()
        artifacts.write(URL, "runs/r/stop", "")
        until(remote.is_stop_requested)
        remote.delete_stop_request()
        assert not remote.is_stop_requested()


@pytest.mark.parametrize(("holder", "is_stopped"), [(b"\xff", False), (b"another job", False), (b"job", True)])
def test_stop_request_concerns_only_the_holder_that_it_names(bucket, remote, holder, is_stopped):
    with remote.held():
        bucket.put_object(Key="store/runs/r/stop", Body=holder)
        remote._check_for_stop()

        assert remote.is_stop_requested() is is_stopped
