"""Checkpoints: damage, wrong clocks and a process that dies while it saves never cost more than the last checkpoint."""

import errno
import itertools
import os
import random
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from infoxlm_core import manifests
from infoxlm_core.errors import LeaseHeld, StorageUnavailable, TrainingDiverged
from infoxlm_core.training import checkpoints
from infoxlm_core.training.checkpoints import Checkpoint, Checkpoints, list_checkpoints
from infoxlm_core.training.fingerprint import Fingerprint

KEEP = 2


def open_run(run: Path, keep: int = KEEP) -> Checkpoints:
    """Open the checkpoints of a run as a new process does."""
    return Checkpoints(run, Fingerprint(), every=1, keep=keep)


def make_checkpoint(step: int) -> Checkpoint:
    """Return a checkpoint whose content depends on its step."""
    return Checkpoint(step, {"w": torch.full((9,), float(step))}, {"lr": step})


def save(run: Path, *steps: int, keep: int = KEEP) -> None:
    for step in steps:
        open_run(run, keep).save(make_checkpoint(step))


def load_newest_step(run: Path) -> int:
    """Return the step from which a run resumes, after comparing the content of its checkpoint."""
    checkpoint = open_run(run).load_newest()
    expected = make_checkpoint(checkpoint.step)
    assert torch.equal(checkpoint.tensors["w"], expected.tensors["w"])
    assert checkpoint.meta["lr"] == expected.meta["lr"]
    return checkpoint.step


def list_steps(run: Path) -> list[int]:
    """Return the steps of all checkpoints, newest first."""
    return [step for step, _ in list_checkpoints(run)]


def list_complete_steps(run: Path) -> list[int]:
    """Return the steps of the checkpoints that have a manifest, newest first."""
    return [step for step, path in list_checkpoints(run) if (path / "manifest.json").is_file()]


def flip_bit(path: Path, bit: int = 0) -> None:
    content = bytearray(path.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)


def damage(run: Path, *steps: int) -> None:
    for step in steps:
        flip_bit(run / f"step={step:010d}/state.safetensors", -1)


@pytest.mark.item("F05")
def test_each_of_two_hundred_flipped_bits_is_detected_and_the_older_checkpoint_is_used(tmp_path, record_property):
    save(tmp_path, 2, 4)
    rng = random.Random(6)
    files = sorted((tmp_path / "step=0000000004").iterdir())
    detected_bits = 0
    for file in itertools.islice(itertools.cycle(files), 200):
        bit = rng.randrange(8 * file.stat().st_size)
        flip_bit(file, bit)
        detected_bits += load_newest_step(tmp_path) == 2
        flip_bit(file, bit)

    record_property("figure", f"{detected_bits} of 200 bits found")
    assert len(files) == 3
    assert detected_bits == 200
    assert load_newest_step(tmp_path) == 4


@pytest.mark.item("F05")
@pytest.mark.parametrize("fault", ["truncated", "missing", "extra", "damaged manifest"])
def test_a_damaged_checkpoint_is_reported_and_the_older_one_is_used(tmp_path, fault, caplog):
    save(tmp_path, 2, 4)
    directory = tmp_path / "step=0000000004"
    file = directory / ("manifest.json" if fault == "damaged manifest" else "state.safetensors")
    if fault == "missing":
        file.unlink()
    elif fault == "extra":
        shutil.copy(file, directory / "another.safetensors")
    else:
        file.write_bytes(file.read_bytes()[:-7])

    assert load_newest_step(tmp_path) == 2
    assert "CheckpointCorrupt step=4" in caplog.text


@pytest.mark.item("F21")
@pytest.mark.parametrize("days", [-1, 1])
def test_wrong_clocks_and_times_of_files_do_not_change_which_checkpoint_is_used(tmp_path, monkeypatch, days):
    now = time.time() + days * 86_400
    monkeypatch.setattr(time, "time", lambda: now)
    save(tmp_path, 2, 4)
    for number, path in enumerate(sorted(tmp_path.rglob("*"), reverse=True)):
        file_time = now + number * 1e5  # the newest checkpoint gets the earliest time
        os.utime(path, (file_time, file_time))

    assert load_newest_step(tmp_path) == 4
    save(tmp_path, 6)
    assert list_steps(tmp_path) == [6, 4]


class Died(BaseException):
    """Stands for SIGKILL: every later change of the disk raises it again, so nothing else happens."""


def intercept_disk_changes(
    monkeypatch: pytest.MonkeyPatch, fail: Callable[[int], BaseException | None] = lambda _: None
) -> list[str]:
    """Return a list to which each change of the disk appends its name. A change fails with the error of `fail(number)`.

    The first change has number 1.
    """
    changes: list[str] = []

    def intercept(name: str) -> Callable[..., object]:
        original = getattr(os, name)

        def change(*args, **kwargs):
            changes.append(name)
            error = fail(len(changes))
            if error:
                raise error
            return original(*args, **kwargs)

        return change

    for name in ("unlink", "rmdir", "mkdir", "rename", "replace", "fsync", "link"):
        monkeypatch.setattr(os, name, intercept(name))
    return changes


@pytest.mark.item("F26")
def test_a_process_may_die_at_any_change_of_the_disk_during_a_save_or_a_deletion(tmp_path, monkeypatch):
    save(tmp_path / "before", 1, 2)  # step 1 is deleted when step 3 is saved
    shutil.copytree(tmp_path / "before", tmp_path / "complete")
    with monkeypatch.context() as patch:
        changes = intercept_disk_changes(patch)
        save(tmp_path / "complete", 3)
    assert len(changes) > 15
    assert {"unlink", "rmdir", "fsync"} <= set(changes)
    for last_change in range(1, len(changes) + 1):
        run = tmp_path / str(last_change)
        shutil.copytree(tmp_path / "before", run)

        with monkeypatch.context() as patch, pytest.raises(Died):
            intercept_disk_changes(patch, lambda number, last=last_change: Died() if number >= last else None)
            save(run, 3)

        context = f"died at change {last_change}, {changes[last_change - 1]}"
        assert load_newest_step(run) in (2, 3), context
        assert 1 <= len(list_complete_steps(run)) <= KEEP + 1, context
        with open_run(run).locked():
            save(run, 4)  # the next process continues
        assert load_newest_step(run) == 4
        assert len(list_complete_steps(run)) == KEEP
        assert not list(run.glob(".step=*"))


@pytest.mark.item("F26")
def test_a_checkpoint_that_cannot_be_deleted_is_deleted_with_the_next_save(tmp_path, monkeypatch):
    save(tmp_path, 1, 2)
    with monkeypatch.context() as patch:
        rmdir = os.rmdir

        def fail_for_step_1(path, *args, **kwargs):
            if "0000000001" in str(path):
                raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
            rmdir(path, *args, **kwargs)

        patch.setattr(os, "rmdir", fail_for_step_1)
        save(tmp_path, 3)
        assert list_steps(tmp_path) == [3, 2, 1]
        assert list_complete_steps(tmp_path) == [3, 2]

    save(tmp_path, 4)

    assert list_steps(tmp_path) == list_complete_steps(tmp_path) == [4, 3]


@pytest.mark.item("F26")
def test_an_incomplete_checkpoint_does_not_count_as_kept(tmp_path):
    save(tmp_path, 1, 2, 3, keep=3)
    (tmp_path / "step=0000000002/manifest.json").unlink()  # a deletion removes the manifest first

    save(tmp_path, 4, keep=3)

    assert list_steps(tmp_path) == [4, 3, 1]


@pytest.mark.item("F26")
@pytest.mark.parametrize(("keep", "remaining_steps"), [(1, [3]), (2, [3, 2]), (3, [3, 2, 1])])
def test_damaged_checkpoints_do_not_replace_valid_ones(tmp_path, keep, remaining_steps):
    save(tmp_path, 1, 2, 4, 6, keep=4)
    damage(tmp_path, 4, 6)
    resumed = open_run(tmp_path, keep)
    assert resumed.load_newest().step == 2
    assert len(list_steps(tmp_path)) == 4  # nothing is deleted before the next valid checkpoint exists

    resumed.save(make_checkpoint(3))

    assert list_steps(tmp_path) == remaining_steps
    assert load_newest_step(tmp_path) == 3


@pytest.mark.item("F26")
def test_a_damaged_checkpoint_stays_deleted_if_its_step_is_saved_again(tmp_path):
    save(tmp_path, 2, 4, 5, keep=3)
    damage(tmp_path, 4, 5)
    resumed = open_run(tmp_path, keep=3)
    resumed.load_newest()

    for step in (5, 7):
        resumed.save(make_checkpoint(step))

    assert list_steps(tmp_path) == [7, 5, 2]
    assert load_newest_step(tmp_path) == 7


@pytest.mark.item("F10")
@pytest.mark.parametrize("function", [(manifests, "file_sha256"), (checkpoints, "load_file"), (Path, "read_bytes")])
def test_a_disk_that_fails_temporarily_does_not_count_as_damage(tmp_path, monkeypatch, function):
    save(tmp_path, 2, 4)

    def fail(path: Path) -> None:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(path))

    with monkeypatch.context() as patch, pytest.raises(StorageUnavailable, match="step=0000000004"):
        patch.setattr(*function, fail)
        open_run(tmp_path).load_newest()

    assert load_newest_step(tmp_path) == 4


@pytest.mark.item("P7")
def test_a_failed_background_save_is_logged_if_another_error_ends_the_training(tmp_path, caplog):
    run = open_run(tmp_path)
    not_json = Checkpoint(2, {"w": torch.zeros(1)}, {"value": object()})

    with pytest.raises(TrainingDiverged), run.locked():
        run.begin_save(not_json)
        raise TrainingDiverged("two steps in a row")

    assert "a checkpoint could not be saved: Object of type object is not JSON serializable" in caplog.messages


@pytest.mark.item("F13")
def test_a_second_trainer_of_a_run_is_refused_until_the_first_one_ends(tmp_path):
    first = open_run(tmp_path)
    second = open_run(tmp_path)

    with first.locked(), pytest.raises(LeaseHeld), second.locked(timeout_seconds=0.6):
        pass
    with second.locked(timeout_seconds=0.1):
        pass
