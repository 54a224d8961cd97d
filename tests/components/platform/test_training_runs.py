"""Which run a training goes on with, when what decides its result has changed since it began."""

import json
from pathlib import Path

import pytest

from components.platform import artifacts, training_runs
from infoxlm_core import manifests
from infoxlm_core.errors import ConfigError, ConfigMismatch, InputError
from tests.toys.pretraining import tiny_config


@pytest.fixture(autouse=True)
def pipeline(monkeypatch):
    monkeypatch.setenv("RUN_NAME", "toy")
    monkeypatch.setenv("RUN_ID", "toy-1")


@pytest.fixture(params=["directory", pytest.param("s3", marks=pytest.mark.slow)])
def store(request, tmp_path, monkeypatch) -> str:
    if request.param == "directory":
        return str(tmp_path / "store")
    request.getfixturevalue("bucket")
    monkeypatch.setenv("INFOXLM_CACHE", str(tmp_path / "cache"))
    return "s3://models/store"


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
        f"{store}/runs/{begun} stays unfinished; this training differs: seed was 1, is 2. "
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


def test_to_remove_the_run_is_to_start_over(tmp_path):
    store = str(tmp_path)
    begun = choose(store)
    save(store, begun)
    (Path(store) / "runs" / begun / "saved.json").unlink()

    assert choose(store, shards="sha256:b") != begun


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
