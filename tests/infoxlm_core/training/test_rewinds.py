"""Data that spoils a training: bad steps change nothing, it goes back, and every bit of that is repeatable."""

import json
import random
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from infoxlm_core.config import PretrainingConfig
from infoxlm_core.errors import Preempted, TrainingDiverged
from infoxlm_core.stages.pretraining import pretrain
from infoxlm_core.systems.infoxlm.learner import InfoXLMLearner
from infoxlm_core.training import checkpoints as saving
from infoxlm_core.training import guard, tracker
from tests.helpers.curves import losses, numbers, state_of
from tests.helpers.workers import fp64, join, start
from tests.toys.pretraining import tiny_config

STEPS, CUT = 24, 18
SPOILED = {3: float("nan"), 13: 100.0, 14: 100.0, 15: 100.0, 31: 100.0}
"""Positions in the data whose losses are multiplied.

The 4th step is not finite. The 14th to 16th are spikes: the training goes back to the checkpoint of step 6 and leaves
out the data of ten steps. The 22nd, which sees position 31, is a single spike.
"""


@contextmanager
def spoil() -> Iterator[list[int]]:
    """Spoil the data of all trainings of this process, and let the guard work on short ones. Gives the positions of
    their steps, as they are prepared."""
    plain, prepare, positions = InfoXLMLearner.losses, InfoXLMLearner.batches, []

    def batches(self, step, skipped=0):
        positions.append(step + skipped)
        factor = SPOILED.get(step + skipped, 1.0)
        return [replace(batch, rng_key=(*batch.rng_key, factor)) for batch in prepare(self, step, skipped)]

    def multiplied(self, batch, scales):
        loss, sums = plain(self, batch, scales)
        factor = batch.rng_key[-1]
        return loss * factor, sums | {name: sums[name] * factor for name in scales}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(InfoXLMLearner, "batches", batches)
        patch.setattr(InfoXLMLearner, "losses", multiplied)
        patch.setattr(guard, "MIN_WINDOW", 5)
        patch.setattr(guard, "DISTANCE", 6)
        yield positions


@pytest.fixture(scope="module", autouse=True)
def spoiled() -> Iterator[list[int]]:
    with spoil() as positions:
        yield positions


def config(**changes) -> PretrainingConfig:
    return tiny_config(**({"optimization": {"steps": STEPS}, "checkpoints": {"every": 2, "keep": 12}} | changes))


@pytest.fixture(scope="module")
def troubled(tiny_shards, tmp_path_factory, spoiled) -> Path:
    base = tmp_path_factory.mktemp("troubled")
    pretrain(config(), tiny_shards, base / "out", base / "run")
    return base / "run"


def same(run: Path, other: Path) -> bool:
    return losses(run) == losses(other) and state_of(run, STEPS) == state_of(other, STEPS)


def meta(run: Path, step: int) -> dict:
    return json.loads((run / f"step={step:010d}" / "meta.json").read_text())


@pytest.mark.item("A14", "F23")
def test_three_spikes_take_a_run_back_once_and_their_data_is_left_out(troubled, tiny_shards, tmp_path, monkeypatch):
    points = tracker.read(troubled / tracker.METRICS)

    assert [step for step, _ in points] == list(range(1, STEPS + 1))
    assert [step for step, values in points if values["skipped"]] == [4, 22]
    assert [values.get("skipped_steps") for _, values in points] == [None] * 3 + [1.0] * 18 + [2.0] * 3
    assert [step for step, values in points if "repeated" in values] == list(range(7, 17))
    assert [values.get("rewinds") for _, values in points] == [None] * 6 + [1.0] * 18
    found = meta(troubled, STEPS)
    assert found["updates"] == STEPS - 2
    guard_state = {name: value for name, value in found["guard"].items() if name != "recent"}
    assert guard_state == {"skips": [[6, 10]], "rewinds": 1, "furthest": 16}
    # A run that never had those data, nor a guard, only the two steps that are not finite, is the same to the last bit.
    batches = InfoXLMLearner.batches
    monkeypatch.setitem(SPOILED, 31, float("nan"))
    monkeypatch.setattr(InfoXLMLearner, "batches", lambda self, step, _: batches(self, step, 10 if step >= 6 else 0))
    pretrain(config(guard={"deviations": 0, "rewinds": 0}), tiny_shards, tmp_path / "out", tmp_path / "run")
    assert state_of(tmp_path / "run", STEPS) == state_of(troubled, STEPS)
    assert [row[1] for row in losses(tmp_path / "run")][:21] == [row[1] for row in losses(troubled)][:21]


@pytest.mark.item("F23")
def test_two_such_runs_are_equal_and_so_are_those_that_are_stopped_anywhere(
    troubled, tiny_shards, tmp_path, monkeypatch
):
    now, at, after_step = [0], [0], InfoXLMLearner.after_step

    def counted(self, step, good=True):
        now[0] = step
        after_step(self, step, good)

    monkeypatch.setattr(InfoXLMLearner, "after_step", counted)
    monkeypatch.setattr(saving.Checkpoints, "is_stop_requested", lambda self: now[0] + 1 == at[0])
    stopped = []
    for at[0] in (5, 13, 16, 18, STEPS + 9):  # before the trouble, within it, where it goes back, after it
        try:
            pretrain(config(), tiny_shards, tmp_path / "out", tmp_path / "run")
        except Preempted as said:
            stopped.append(str(said).partition(":")[0])

    assert stopped == [f"asked to stop after step {step}" for step in (5, 13, 16, 18)]
    assert same(tmp_path / "run", troubled)


def _with_half_a_model(rank: int, size: int, port: int, shards: Path, base: Path) -> None:
    join(rank, size, port)
    with fp64(), spoil() as positions:
        pretrain(config(model={"sharded": True}), shards, base / "out", base / "run")
    (base / f"{rank}.json").write_text(json.dumps(sorted(set(positions))))
    torch.distributed.destroy_process_group()


@pytest.mark.item("F23")
@pytest.mark.slow
def test_two_workers_that_hold_half_a_model_each_go_back_together(tiny_shards, tmp_path, spoiled, in_fp64):
    spoiled.clear()
    pretrain(config(), tiny_shards, tmp_path / "alone out", tmp_path / "alone")

    start(_with_half_a_model, 2, tiny_shards, tmp_path)

    assert numbers(tmp_path / "run") == pytest.approx(numbers(tmp_path / "alone"), rel=1e-9, nan_ok=True)
    for run in ("alone", "run"):
        assert meta(tmp_path / run, STEPS)["guard"]["skips"] == [[6, 10]]
    for rank in range(2):
        assert json.loads((tmp_path / f"{rank}.json").read_text()) == sorted(set(spoiled))


@pytest.mark.item("F23")
def test_a_run_that_dies_while_it_goes_back_does_so_again(troubled, tiny_shards, tmp_path, monkeypatch):
    drop = saving.Checkpoints._delete

    def dies(self, directory):
        drop(self, directory)
        if directory.name.endswith("10"):  # of those of steps 8, 10 and 12, which it goes back from
            raise KeyboardInterrupt

    with monkeypatch.context() as during, pytest.raises(KeyboardInterrupt):
        during.setattr(saving.Checkpoints, "_delete", dies)
        pretrain(config(), tiny_shards, tmp_path / "out", tmp_path / "run")
    pretrain(config(), tiny_shards, tmp_path / "out", tmp_path / "run")

    assert same(tmp_path / "run", troubled) and meta(tmp_path / "run", STEPS)["guard"]["rewinds"] == 1


@pytest.mark.item("F22", "F23")
def test_after_two_rewinds_a_run_ends_and_so_does_one_with_nothing_to_go_back_to(tiny_shards, tmp_path, monkeypatch):
    for position in range(22, 99):
        monkeypatch.setitem(SPOILED, position, 100.0)

    with pytest.raises(TrainingDiverged, match=r"3 steps in a row up to step 9 .* after 2 rewinds") as caught:
        pretrain(config(), tiny_shards, tmp_path / "out", tmp_path / "run")
    assert caught.value.exit_code == 5
    with pytest.raises(TrainingDiverged, match=r"3 steps in a row up to step 16 .* after 0 rewinds"):
        pretrain(config(checkpoints={"every": 50}), tiny_shards, tmp_path / "out", tmp_path / "other")


LEFT_OUT = {
    "query encoder": lambda name: name.startswith("model/"),
    "key encoder": lambda name: name.startswith("learner/key_encoder"),
    "queue": lambda name: name == "learner/queue/rows",
    "pair ids": lambda name: name == "learner/queue/meanings",
    "pointer": lambda name: name == "learner/queue/pointer",
    "first moments": lambda name: name.startswith("adam/") and name.endswith("/exp_avg"),
    "second moments": lambda name: name.startswith("adam/") and name.endswith("/exp_avg_sq"),
    "Adam's step": lambda name: name.startswith("adam/") and name.endswith("/step"),
}


@pytest.mark.item("A14", "F27")
@pytest.mark.parametrize("lost", [*LEFT_OUT, "schedule", "step", "guard's window", "skips", None])
def test_state_left_out_of_a_checkpoint_would_be_noticed(troubled, tiny_shards, tmp_path, lost, monkeypatch):
    run = tmp_path / "run"
    shutil.copytree(troubled, run)
    for step, path in saving.list_checkpoints(run):
        if step > CUT:
            shutil.rmtree(path)
    load, after_step = saving.Checkpoints.load_newest, InfoXLMLearner.after_step

    def forgetful(self):
        found = load(self)
        gone = LEFT_OUT.get(lost, lambda _: False)
        tensors = {name: torch.zeros_like(value) if gone(name) else value for name, value in found.tensors.items()}
        remembered = dict(found.meta["guard"])
        remembered |= {"recent": {}} if lost == "guard's window" else {"skips": []} if lost == "skips" else {}
        facts = found.meta | ({"updates": 0} if lost == "schedule" else {}) | {"guard": remembered}
        return saving.Checkpoint(found.step - 2 * (lost == "step"), tensors, facts)

    def scrambled(self, step, good=True):
        torch.manual_seed(random.randrange(99)), np.random.seed(random.randrange(99))
        after_step(self, step, good)

    monkeypatch.setattr(saving.Checkpoints, "load_newest", forgetful)
    monkeypatch.setattr(InfoXLMLearner, "after_step", scrambled)  # global generators must not matter

    pretrain(config(), tiny_shards, tmp_path / "out", run)

    assert same(run, troubled) == (lost is None)
