"""The training loop: exact resume, faults of the disk, requests to stop, bad steps."""

import contextlib
import os
import shutil
import signal
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from infoxlm_core.errors import (
    ConfigError,
    ConfigMismatch,
    NoValidCheckpoint,
    Preempted,
    StorageFull,
    TrainingDiverged,
)
from infoxlm_core.stages import pretraining
from infoxlm_core.stages.pretraining import pretrain
from infoxlm_core.systems.infoxlm.learner import InfoXLMLearner
from infoxlm_core.training import checkpoints, tracker
from infoxlm_core.training.checkpoints import Checkpoints, list_checkpoints
from infoxlm_core.training.run import run_directory
from tests.helpers import workers
from tests.helpers.curves import losses, state_of
from tests.toys.pretraining import tiny_config


@pytest.fixture(scope="module")
def undisturbed(tiny_shards, tmp_path_factory) -> Path:
    """Return a run of six steps with checkpoints of steps 2, 4 and 6."""
    base = tmp_path_factory.mktemp("undisturbed")
    pretrain(tiny_config(), tiny_shards, base / "out", base / "run")
    return base / "run"


@pytest.fixture
def run(undisturbed, tmp_path) -> Path:
    """Return a copy of the undisturbed run."""
    return shutil.copytree(undisturbed, tmp_path / "run")


def delete_checkpoints(run: Path, *steps: int) -> None:
    for step in steps:
        shutil.rmtree(run / f"step={step:010d}")


def save_in_background(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let training continue while a checkpoint is written, as on a GPU."""
    monkeypatch.setattr(pretraining, "run_directory", lambda *args: run_directory(*args[:5], True, *args[6:]))


@pytest.mark.item("A14", "F27")
def test_the_ten_steps_after_a_resume_are_those_of_an_undisturbed_run_bit_by_bit(tiny_shards, tmp_path):
    config = tiny_config(optimization={"steps": 16}, checkpoints={"every": 6})
    run = tmp_path / "run"
    pretrain(config, tiny_shards, tmp_path / "undisturbed", run)
    delete_checkpoints(run, 12, 16)

    pretrain(config, tiny_shards, tmp_path / "resumed", run)

    undisturbed_curves = tmp_path / "undisturbed/encoder/metrics.jsonl"  # all metrics but those of the machine
    resumed_curves = tmp_path / "resumed/encoder/metrics.jsonl"
    assert resumed_curves.read_bytes() == undisturbed_curves.read_bytes()
    points = tracker.read(resumed_curves)
    assert [step for step, _ in points] == list(range(1, 17))
    assert sum_targets(points[-1][1]) > 10 * sum_targets(points[0][1])  # totals of all steps


def sum_targets(metrics: dict[str, float]) -> float:
    return sum(value for name, value in metrics.items() if name.startswith("targets/"))


def train_until_killed(shards: Path, base: Path, is_background: bool) -> None:
    """Train, and kill this process when half of the checkpoint of step 4 is written."""
    save_file = checkpoints.save_file

    def save_half_and_die(tensors, path):
        save_file(tensors, path)
        if "step=0000000004" in str(path):
            os.truncate(path, path.stat().st_size // 2)
            os.kill(os.getpid(), signal.SIGKILL)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoints, "save_file", save_half_and_die)
        if is_background:
            save_in_background(patch)
        pretrain(tiny_config(), shards, base / "out", base / "run")


@pytest.mark.item("F04")
@pytest.mark.slow
@pytest.mark.parametrize("is_background", [False, True])
def test_a_run_killed_during_a_save_ends_like_an_undisturbed_one(undisturbed, tiny_shards, tmp_path, is_background):
    process = workers.start_one(train_until_killed, tiny_shards, tmp_path, is_background)
    process.join()
    run = tmp_path / "run"
    assert process.exitcode == -signal.SIGKILL
    assert [step for step, _ in list_checkpoints(run)] == [2]
    assert list(run.glob(".step=*"))  # the partial checkpoint

    pretrain(tiny_config(), tiny_shards, tmp_path / "out", run)

    assert not list(run.glob(".step=*"))
    assert losses(run) == losses(undisturbed)
    assert state_of(run, 6) == state_of(undisturbed, 6)


@pytest.mark.item("F05")
def test_a_truncated_checkpoint_changes_no_loss_of_a_run(run, undisturbed, tiny_shards, tmp_path, caplog):
    weights = run / "step=0000000006/state.safetensors"
    os.truncate(weights, weights.stat().st_size // 2)

    pretrain(tiny_config(), tiny_shards, tmp_path / "out", run)

    assert "CheckpointCorrupt step=6" in caplog.text
    assert losses(run) == losses(undisturbed)
    assert state_of(run, 6) == state_of(undisturbed, 6)


@pytest.mark.item("F06")
def test_a_run_without_a_valid_checkpoint_never_starts_over(run, tiny_shards, tmp_path):
    for _, path in list_checkpoints(run):
        (path / "meta.json").unlink()

    with pytest.raises(NoValidCheckpoint, match=r"step 6: .*meta\.json is missing.*restore a checkpoint") as failure:
        pretrain(tiny_config(), tiny_shards, tmp_path / "out", run)
    assert failure.value.exit_code == 4

    delete_checkpoints(run, 2, 4, 6)
    with pytest.raises(NoValidCheckpoint, match="none is left"):
        pretrain(tiny_config(), tiny_shards, tmp_path / "out", run)


def test_a_run_that_the_config_names_resumes_with_other_settings(run, undisturbed, tiny_shards, tmp_path, caplog):
    changes = {"optimization": {"learning_rate": 0.02, "steps": 8}}

    with pytest.raises(ConfigMismatch, match=r"checkpoints\.resume: run"):
        pretrain(tiny_config(**changes, checkpoints={"resume": "another"}), tiny_shards, tmp_path / "out", run)
    pretrain(tiny_config(**changes, checkpoints={"resume": "run"}), tiny_shards, tmp_path / "out", run)

    [message] = [message for message in caplog.messages if "resumes with changes" in message]
    assert "optimization.learning_rate was 0.01, is 0.02; optimization.steps was 6, is 8" in message
    assert [row[0] for row in losses(run)] == list(range(1, 9))
    assert losses(run)[:6] == losses(undisturbed)
    pretrain(tiny_config(**changes), tiny_shards, tmp_path / "again", run)  # its checkpoints have the new settings


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        (
            {"optimization": {"steps": 5}},
            ConfigError,
            r"6 steps, more than optimization.steps \(5\): raise it to at least 6",
        ),
        (
            {"contrast": {"queue_size": 64}},
            NoValidCheckpoint,
            r"queue/born needs shape \(64,\), but .* has shape \(32,\)",
        ),
        ({"model": {"layers": 3}}, NoValidCheckpoint, r"has no such tensor: resume with the settings and the version"),
    ],
    ids=["steps", "queue", "layers"],
)
def test_a_run_that_the_config_names_is_refused_if_its_checkpoint_does_not_fit(
    run, tiny_shards, tmp_path, changes, error, message
):
    with pytest.raises(error, match=message):
        pretrain(tiny_config(**changes, checkpoints={"resume": "run"}), tiny_shards, tmp_path / "out", run)

    assert not (tmp_path / "out").exists()


def fail_to_save(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    """Let the disk be full when the checkpoint of a step is written."""
    save_file = checkpoints.save_file

    def save_unless_full(tensors, path):
        if f"step={step:010d}" in str(path):
            raise OSError(28, "No space left on device")
        save_file(tensors, path)

    monkeypatch.setattr(checkpoints, "save_file", save_unless_full)


@pytest.mark.item("F10")
def test_a_full_disk_leaves_the_older_checkpoint_and_no_partial_files(run, tiny_shards, tmp_path, monkeypatch):
    delete_checkpoints(run, 4, 6)
    fail_to_save(monkeypatch, step=4)

    with pytest.raises(StorageFull, match="step=0000000004: no space") as failure:
        pretrain(tiny_config(), tiny_shards, tmp_path / "out", run)

    assert failure.value.exit_code == 75
    assert [path.name for path in run.glob("*step=*")] == ["step=0000000002"]


@pytest.mark.item("F10")
@pytest.mark.parametrize("steps", [3, 6])
def test_a_full_disk_during_a_save_in_the_background_ends_the_training(tiny_shards, tmp_path, monkeypatch, steps):
    fail_to_save(monkeypatch, step=2)
    save_in_background(monkeypatch)

    with pytest.raises(StorageFull, match=r"step=0000000002.*no space"):
        pretrain(tiny_config(optimization={"steps": steps}), tiny_shards, tmp_path / "out", tmp_path / "run")

    assert not list((tmp_path / "run").glob("*step=*"))


@pytest.mark.item("F10")
@pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount a small file system")
def test_a_file_system_that_is_really_full_is_reported(tiny_shards, tmp_path):
    small = tmp_path / "small"
    small.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=96k", "tmpfs", str(small)], capture_output=True).returncode:
        pytest.skip("this machine does not let tests mount a file system")
    try:
        with pytest.raises(StorageFull, match="no space"):
            pretrain(tiny_config(), tiny_shards, small / "out", small / "run")
        with pytest.raises(StorageFull, match="no space"):  # checkpoints fit on the other disk, the model does not
            pretrain(tiny_config(model={"hidden": 64}), tiny_shards, small / "out", tmp_path / "run")
        assert not list((small / "run").glob("*step=*"))
    finally:
        subprocess.run(["umount", str(small)], check=True)


def test_steps_during_a_save_in_the_background_do_not_change_the_checkpoint(
    undisturbed, tiny_shards, tmp_path, monkeypatch
):
    log = tracker.FileTracker.log
    save_file = checkpoints.save_file
    third_step_is_taken = threading.Event()
    waits: list[bool] = []

    def signal_third_step(self, step, metrics):
        log(self, step, metrics)
        if step == 3:
            third_step_is_taken.set()

    def save_after_third_step(tensors, path):
        waits.append(third_step_is_taken.wait(60))  # the first checkpoint is that of step 2
        save_file(tensors, path)

    monkeypatch.setattr(tracker.FileTracker, "log", signal_third_step)
    monkeypatch.setattr(checkpoints, "save_file", save_after_third_step)
    save_in_background(monkeypatch)

    pretrain(tiny_config(), tiny_shards, tmp_path / "out", tmp_path / "run")

    assert waits == [True] * 3
    for step in (2, 4, 6):
        assert state_of(tmp_path / "run", step) == state_of(undisturbed, step)


def test_a_finished_run_that_is_started_again_returns_its_figures(run, undisturbed, tiny_shards, tmp_path):
    figures = pretrain(tiny_config(), tiny_shards, tmp_path / "out", run)

    assert figures["loss/xlco"].hex() == losses(undisturbed)[-1][3]


def make_losses_infinite(monkeypatch: pytest.MonkeyPatch, is_bad: Callable[[], bool] = lambda: True) -> None:
    original = InfoXLMLearner.losses

    def multiply(self, batch, scales):
        loss, sums = original(self, batch, scales)
        return loss * (float("inf") if is_bad() else 1.0), sums

    monkeypatch.setattr(InfoXLMLearner, "losses", multiply)


@pytest.mark.item("F22")
@pytest.mark.parametrize(("is_asked_to_stop", "saved_steps"), [(False, [1, 2, 5, 6]), (True, [1, 2, 5])])
def test_no_checkpoint_is_saved_among_bad_steps_even_if_the_run_is_asked_to_stop(
    tiny_shards, tmp_path, monkeypatch, is_asked_to_stop, saved_steps
):
    steps_taken = 0
    saved: list[int] = []
    after_step = InfoXLMLearner.after_step
    save = Checkpoints.save

    def count_steps(self, step, good=True):
        nonlocal steps_taken
        steps_taken = step
        after_step(self, step, good)

    def record_step(self, checkpoint, is_last):
        saved.append(checkpoint.step)
        save(self, checkpoint, is_last)

    make_losses_infinite(monkeypatch, lambda: steps_taken in (2, 3))  # in steps 3 and 4
    monkeypatch.setattr(InfoXLMLearner, "after_step", count_steps)
    monkeypatch.setattr(Checkpoints, "is_stop_requested", lambda self: is_asked_to_stop and steps_taken >= 2)
    monkeypatch.setattr(Checkpoints, "save", record_step)

    with pytest.raises(Preempted, match="after step 5") if is_asked_to_stop else contextlib.nullcontext():
        pretrain(tiny_config(checkpoints={"every": 1}), tiny_shards, tmp_path / "out", tmp_path / "run")

    assert saved == saved_steps


@pytest.mark.item("F22")
def test_three_bad_steps_in_a_row_end_a_run_that_cannot_rewind(tiny_shards, tmp_path, monkeypatch):
    make_losses_infinite(monkeypatch)

    with pytest.raises(TrainingDiverged, match="3 steps in a row up to step 3") as failure:
        pretrain(tiny_config(), tiny_shards, tmp_path / "out", tmp_path / "run")

    assert failure.value.exit_code == 5
