"""Which run a training goes on with, when what decides its result has changed since it began."""

import json
from pathlib import Path

import pytest

from components.adapters import lease
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
    name = artifacts.key_of("pretrained", config, shards)
    return training_runs.choose_run(store, "pretrained", name, config, {"shards": shards}, trial)


def save(store: str, run: str) -> None:
    """Let a run have a checkpoint."""
    artifacts.write(store, f"runs/{run}/saved.json", json.dumps({"step": 4}))


@pytest.mark.item("P13")
def test_a_pipeline_run_whose_data_changed_under_an_unfinished_training_is_refused_and_told_what_to_do(store):
    begun = choose(store)
    save(store, begun)

    with pytest.raises(ConfigMismatch) as refused:
        choose(store, shards="sha256:b")

    assert str(refused.value) == (
        f"{store}/runs/{begun} was started with other data or settings: shards was 'sha256:a', is 'sha256:b'. Change "
        f"them back, accept the changes with checkpoints.resume: {begun}, or delete {store}/runs/{begun} to start over"
    )
    assert choose(store) == begun
    assert choose(store, shards="sha256:b", checkpoints={"resume": begun}) == begun


@pytest.mark.item("P6")
def test_a_training_whose_stage_has_a_new_version_is_not_silently_started_over(store, monkeypatch):
    begun = choose(store)
    save(store, begun)
    monkeypatch.setitem(manifests.VERSIONS, "pretrained", 99)

    with pytest.raises(ConfigMismatch, match="version was 1, is 99"):
        choose(store)


def test_another_run_of_the_pipeline_with_other_settings_is_another_training_and_says_which_stays_unfinished(
    store, monkeypatch, caplog
):
    begun = choose(store)
    save(store, begun)
    monkeypatch.setenv("RUN_ID", "toy-2")

    other = choose(store, seed=2)

    assert other != begun
    (told,) = caplog.messages
    assert told == (
        f"{store}/runs/{begun} is not continued, because this training differs: seed was 1, is 2. "
        f"To continue it anyway, set checkpoints.resume: {begun}"
    )


def test_a_training_that_never_saved_or_is_finished_stands_in_nobodys_way(tmp_path, caplog):
    store = str(tmp_path)
    first = choose(store)
    second = choose(store, shards="sha256:b")
    save(store, second)
    artifacts.get_or_build(store, "pretrained", second.removeprefix("pretrained-"), lambda made: {"steps": 1})

    third = choose(store, shards="sha256:c")

    assert len({first, second, third}) == 3 and not caplog.messages


def test_trials_do_not_stand_in_each_others_way(tmp_path, caplog):
    store = str(tmp_path)
    runs = set()
    for seed in (1, 2):
        runs.add(choose(store, trial={"variant": "full", "seed": seed}, seed=seed))
        for run in runs:
            save(store, run)

    assert len(runs) == 2 and not caplog.messages


def test_a_run_to_resume_must_exist_and_be_one(tmp_path):
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
    monkeypatch.setattr(lease, "BEAT", 0.5)
    monkeypatch.setattr(lease, "_POLL", 0.1)
    return RemoteRun(f"{URL}/runs/r", "job")


def checkpoint(folder: Path, step: int) -> Path:
    directory = folder / f"step={step:010d}"
    directory.mkdir(parents=True)
    (directory / "state.safetensors").write_text(f"weights {step}")
    manifests.write(directory, "checkpoint", {"step": step})
    return directory


@pytest.mark.item("F04")
def test_the_newest_checkpoints_stay_and_a_torn_one_is_swept(bucket, remote, tmp_path):
    bucket.put_object(Key="store/runs/r/step=0000000009/state.safetensors", Body=b"torn")

    with remote.held():
        for step in (1, 2, 3):
            remote.send(checkpoint(tmp_path, step), keep=2)

    assert remote.names() == ["step=0000000002", "step=0000000003"] and remote.has_saved()
    assert not [item.key for item in bucket.objects.all() if "step=0000000009" in item.key]


@pytest.mark.item("F26")
def test_checkpoints_known_to_be_bad_go_and_do_not_count_among_those_that_stay(remote, tmp_path):
    with remote.held():
        for step in (2, 4, 6):
            remote.send(checkpoint(tmp_path, step), keep=3)

        remote.send(checkpoint(tmp_path, 3), keep=2, bad={"step=0000000004", "step=0000000006"})

    assert remote.names() == ["step=0000000002", "step=0000000003"]


@pytest.mark.item("F13")
def test_a_checkpoint_of_a_fenced_worker_never_exists(remote, tmp_path):
    successor = RemoteRun(remote.url, "job")
    with remote.held(), successor.held():
        successor.send(checkpoint(tmp_path / "new", 2), keep=3)

        with pytest.raises(Fenced):
            remote.send(checkpoint(tmp_path / "old", 3), keep=3)
        with pytest.raises(Fenced):  # nor does it delete the checkpoints of its successor
            remote.drop("step=0000000002")

        assert successor.names() == ["step=0000000002"]


def test_a_request_to_stop_is_seen_within_moments(remote):
    with remote.held():
        assert not remote.is_stop_requested()
        artifacts.write(URL, "runs/r/stop", "")
        until(remote.is_stop_requested)
        remote.delete_stop_request()
        assert not remote.is_stop_requested()


@pytest.mark.parametrize(("request_", "stops"), [(b"\xff", False), (b"another's job", False), (b"job", True)])
def test_a_request_stops_only_the_holder_that_it_names(bucket, remote, request_, stops):
    with remote.held():
        bucket.put_object(Key="store/runs/r/stop", Body=request_)
        remote._check_for_stop()

        assert remote.is_stop_requested() is stops
