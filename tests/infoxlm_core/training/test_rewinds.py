"""Data that makes a training diverge: bad steps change nothing, the run rewinds, and all of that is repeatable."""

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
from infoxlm_core.training import guard, tracker
from infoxlm_core.training.checkpoints import Checkpoint, Checkpoints, list_checkpoints
from tests.helpers import workers
from tests.helpers.curves import losses, numbers, state_of
from tests.toys.pretraining import tiny_config

STEPS = 24
RESUMED_STEP = 18
LOSS_FACTORS = {3: float("nan"), 13: 100.0, 14: 100.0, 15: 100.0, 31: 100.0}
"""Position in the data -> factor of its loss.

Step 4 is not finite. Steps 14 to 16 are spikes: the run rewinds to the checkpoint of step 6 and skips the data of ten
steps. Step 22, which uses position 31, is a single spike.
"""


@contextmanager
def bad_data() -> Iterator[list[int]]:
    """Apply `LOSS_FACTORS` to all trainings of this process, and let the guard work on short trainings.

    Yields the list of the positions of all steps, in the order in which they are prepared.
    """
    losses_of = InfoXLMLearner.losses
    prepare = InfoXLMLearner.batches
    positions: list[int] = []

    def prepare_with_factor(self, step, skipped=0):
        positions.append(step + skipped)
        factor = LOSS_FACTORS.get(step + skipped, 1.0)
        return [replace(batch, rng_key=(*batch.rng_key, factor)) for batch in prepare(self, step, skipped)]

    def multiply_losses(self, batch, scales):
        loss, sums = losses_of(self, batch, scales)
        factor = batch.rng_key[-1]
        return loss * factor, sums | {name: sums[name] * factor for name in scales}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(InfoXLMLearner, "batches", prepare_with_factor)
        patch.setattr(InfoXLMLearner, "losses", multiply_losses)
        patch.setattr(guard, "MIN_WINDOW", 5)
        patch.setattr(guard, "REWIND_DISTANCE", 6)
        yield positions


@pytest.fixture(scope="module", autouse=True)
def positions() -> Iterator[list[int]]:
    with bad_data() as positions:
        yield positions


def make_config(**changes) -> PretrainingConfig:
    return tiny_config(**({"optimization": {"steps": STEPS}, "checkpoints": {"every": 2, "keep": 12}} | changes))


@pytest.fixture(scope="module")
def rewound_run(tiny_shards, tmp_path_factory, positions) -> Path:
    base = tmp_path_factory.mktemp("rewound")
    pretrain(make_config(), tiny_shards, base / "out", base / "run")
    return base / "run"


def are_equal(run: Path, other: Path) -> bool:
    """Return whether two runs have the same losses and the same last checkpoint, bit by bit."""
    return losses(run) == losses(other) and state_of(run, STEPS) == state_of(other, STEPS)


def read_meta(run: Path) -> dict:
    """Return the JSON values of the last checkpoint."""
    return json.loads((run / f"step={STEPS:010d}" / "meta.json").read_text())


@pytest.mark.item("A14", "F23")
def test_three_spikes_rewind_a_run_once_and_their_data_is_skipped(rewound_run, tiny_shards, tmp_path, monkeypatch):
    points = tracker.read(rewound_run / tracker.METRICS)

    assert [step for step, _ in points] == list(range(1, STEPS + 1))
    assert [step for step, values in points if values["skipped"]] == [4, 22]
    assert [values.get("skipped_steps") for _, values in points] == [None] * 3 + [1.0] * 18 + [2.0] * 3
    assert [step for step, values in points if "repeated" in values] == list(range(7, 17))
    assert [values.get("rewinds") for _, values in points] == [None] * 6 + [1.0] * 18
    meta = read_meta(rewound_run)
    assert meta["updates"] == STEPS - 2
    del meta["guard"]["recent"]
    assert meta["guard"] == {"skips": [[6, 10]], "rewinds": 1, "furthest": 16}
    # A run without this data and without a guard, in which the same two steps are bad, is equal to the last bit.
    prepare = InfoXLMLearner.batches
    monkeypatch.setitem(LOSS_FACTORS, 31, float("nan"))
    monkeypatch.setattr(InfoXLMLearner, "batches", lambda self, step, _: prepare(self, step, 10 if step >= 6 else 0))
    pretrain(make_config(guard={"deviations": 0, "rewinds": 0}), tiny_shards, tmp_path / "out", tmp_path / "run")
    assert state_of(tmp_path / "run", STEPS) == state_of(rewound_run, STEPS)
    assert [row[1] for row in losses(tmp_path / "run")][:21] == [row[1] for row in losses(rewound_run)][:21]


@pytest.mark.item("F23")
def test_a_run_that_is_stopped_before_during_and_after_a_rewind_is_equal(
    rewound_run, tiny_shards, tmp_path, monkeypatch
):
    steps_taken = 0
    stop_step = 0
    after_step = InfoXLMLearner.after_step

    def count_steps(self, step, good=True):
        nonlocal steps_taken
        steps_taken = step
        after_step(self, step, good)

    monkeypatch.setattr(InfoXLMLearner, "after_step", count_steps)
    monkeypatch.setattr(Checkpoints, "is_stop_requested", lambda self: steps_taken + 1 == stop_step)
    for stop_step in (5, 13, 16, 18):  # before the spikes, among them, when the run would rewind, after it
        with pytest.raises(Preempted, match=f"asked to stop after step {stop_step}:"):
            pretrain(make_config(), tiny_shards, tmp_path / "out", tmp_path / "run")
    stop_step = 0
    pretrain(make_config(), tiny_shards, tmp_path / "out", tmp_path / "run")

    assert are_equal(tmp_path / "run", rewound_run)


def pretrain_sharded(rank: int, size: int, port: int, shards: Path, base: Path) -> None:
    workers.join(rank, size, port)
    with workers.fp64(), bad_data() as positions:
        pretrain(make_config(model={"sharded": True}), shards, base / "sharded out", base / "sharded")
    (base / f"{rank}.json").write_text(json.dumps(sorted(set(positions))))
    torch.distributed.destroy_process_group()


@pytest.mark.item("F23")
@pytest.mark.slow
def test_two_workers_with_a_sharded_model_rewind_together(tiny_shards, tmp_path, positions, in_fp64):
    positions.clear()
    pretrain(make_config(), tiny_shards, tmp_path / "single out", tmp_path / "single")

    workers.start(pretrain_sharded, 2, tiny_shards, tmp_path)

    expected = pytest.approx(numbers(tmp_path / "single"), rel=1e-9, nan_ok=True)
    assert numbers(tmp_path / "sharded") == expected
    for run in ("single", "sharded"):
        assert read_meta(tmp_path / run)["guard"]["skips"] == [[6, 10]]
    for rank in range(2):
        assert json.loads((tmp_path / f"{rank}.json").read_text()) == sorted(set(positions))


@pytest.mark.item("F23")
def test_a_run_that_dies_during_a_rewind_repeats_it(rewound_run, tiny_shards, tmp_path, monkeypatch):
    delete = Checkpoints._delete

    def die_after_step_10(self, directory):
        delete(self, directory)
        if directory.name.endswith("10"):  # the rewind deletes the checkpoints of steps 12, 10 and 8
            raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Checkpoints, "_delete", die_after_step_10)
        pretrain(make_config(), tiny_shards, tmp_path / "out", tmp_path / "run")
    pretrain(make_config(), tiny_shards, tmp_path / "out", tmp_path / "run")

    assert are_equal(tmp_path / "run", rewound_run)
    assert read_meta(tmp_path / "run")["guard"]["rewinds"] == 1


@pytest.mark.item("F22", "F23")
@pytest.mark.parametrize(
    ("checkpoint_interval", "message"),
    [(2, r"3 steps in a row up to step 9 .* after 2 rewinds"), (50, r"in a row up to step 16 .* after 0 rewinds")],
    ids=["after two rewinds", "without a rewind target"],
)
def test_a_run_that_cannot_rewind_again_ends(tiny_shards, tmp_path, monkeypatch, checkpoint_interval, message):
    for position in range(22, 99):
        monkeypatch.setitem(LOSS_FACTORS, position, 100.0)
    config = make_config(checkpoints={"every": checkpoint_interval, "keep": 12})

    with pytest.raises(TrainingDiverged, match=message) as failure:
        pretrain(config, tiny_shards, tmp_path / "out", tmp_path / "run")

    assert failure.value.exit_code == 5


STATE = {
    "query encoder": "model/",
    "key encoder": "learner/key_encoder",
    "queue": "learner/queue/rows",
    "sentence ids": "learner/queue/meanings",
    "pointer": "learner/queue/pointer",
    "first moments": "/exp_avg",
    "second moments": "/exp_avg_sq",
    "Adam's steps": "/step",
}
"""Part of the state -> the start of the names of its tensors, or the end if it begins with a slash."""


def remove_state(checkpoint: Checkpoint, part: str | None) -> Checkpoint:
    """Return a checkpoint in which a part of the state has its initial value."""
    tensors = dict(checkpoint.tensors)
    affix = STATE.get(part, "nothing")
    for name, value in tensors.items():
        if name.startswith(affix) or (affix.startswith("/") and name.endswith(affix)):
            tensors[name] = torch.zeros_like(value)
    meta = checkpoint.meta | {"guard": dict(checkpoint.meta["guard"])}
    step = checkpoint.step
    if part == "schedule":
        meta["updates"] = 0
    elif part == "step":
        step -= 2
    elif part == "guard's window":
        meta["guard"]["recent"] = {}
    elif part == "skips":
        meta["guard"]["skips"] = []
    return Checkpoint(step, tensors, meta)


@pytest.mark.item("A14", "F27")
@pytest.mark.parametrize("part", [*STATE, "schedule", "step", "guard's window", "skips", None])
def test_a_resumed_run_is_equal_unless_a_part_of_the_state_is_missing(
    rewound_run, tiny_shards, tmp_path, part, monkeypatch
):
    run = shutil.copytree(rewound_run, tmp_path / "run")
    for step, path in list_checkpoints(run):
        if step > RESUMED_STEP:
            shutil.rmtree(path)
    load_newest = Checkpoints.load_newest
    after_step = InfoXLMLearner.after_step

    def seed_global_generators(self, step, good=True):  # they must not matter
        torch.manual_seed(random.randrange(99))
        np.random.seed(random.randrange(99))
        after_step(self, step, good)

    monkeypatch.setattr(Checkpoints, "load_newest", lambda self: remove_state(load_newest(self), part))
    monkeypatch.setattr(InfoXLMLearner, "after_step", seed_global_generators)

    pretrain(make_config(), tiny_shards, tmp_path / "out", run)

    assert are_equal(run, rewound_run) == (part is None)
