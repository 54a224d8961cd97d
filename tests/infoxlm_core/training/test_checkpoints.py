"""Checkpoints: which of them is chosen, whatever the clock says, a bit does, or the moment at which a process dies."""

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
from infoxlm_core.errors import (
    LeaseHeld,
    StorageUnavailable,
    TrainingDiverged,
)
from infoxlm_core.training import checkpoints as saving
from infoxlm_core.training.checkpoints import Checkpoint, Checkpoints
from infoxlm_core.training.fingerprint import Fingerprint

KEEP = 2


def save(run: Path, step: int) -> None:
    Checkpoints(run, Fingerprint(), 1, KEEP).save(Checkpoint(step, {"w": torch.full((9,), float(step))}, {"lr": step}))


def newest(run: Path) -> int:
    """The step of the checkpoint that a resume would take; its content is that of this step."""
    found = Checkpoints(run, Fingerprint(), 1, KEEP).load_newest()
    assert torch.equal(found.tensors["w"], torch.full((9,), float(found.step))) and found.meta["lr"] == found.step
    return found.step


@pytest.mark.item("F05")
def test_each_of_two_hundred_flipped_bits_is_found_and_the_older_checkpoint_used(tmp_path, record_property):
    rng, run = random.Random(6), tmp_path
    for step in (2, 4):
        save(run, step)
    files = sorted(path for path in (run / "step=0000000004").iterdir())
    found = 0
    for file in itertools.islice(itertools.cycle(files), 200):
        content = file.read_bytes()
        bit = rng.randrange(8 * len(content))
        file.write_bytes(content[: bit // 8] + bytes([content[bit // 8] ^ 1 << bit % 8]) + content[bit // 8 + 1 :])
        found += newest(run) == 2
        file.write_bytes(content)
    record_property("figure", f"{found} of 200 bits found")
    assert found == 200 and newest(run) == 4 and len(files) == 3


@pytest.mark.item("F05")
@pytest.mark.parametrize("damage", ["truncated", "missing", "damaged manifest"])
def test_a_damaged_checkpoint_is_found_and_the_older_one_used(tmp_path, damage, caplog):
    for step in (2, 4):
        save(tmp_path, step)
    file = tmp_path / "step=0000000004" / ("manifest.json" if damage == "damaged manifest" else "state.safetensors")
    if damage == "missing":
        file.unlink()
    else:
        file.write_bytes(file.read_bytes()[:-7])

    assert newest(tmp_path) == 2 and "CheckpointCorrupt step=4" in caplog.text


@pytest.mark.item("F21")
@pytest.mark.parametrize("days", [-1, 1])
def test_clocks_and_times_of_files_do_not_choose(tmp_path, monkeypatch, days):
    now = time.time() + days * 86_400
    monkeypatch.setattr(time, "time", lambda: now)
    for step in (2, 4):
        save(tmp_path, step)
    for number, path in enumerate(sorted(tmp_path.rglob("*"), reverse=True)):
        os.utime(path, (now + number * 1e5,) * 2)  # the oldest is the newest, and most are in the future

    assert newest(tmp_path) == 4
    save(tmp_path, 6)
    assert [step for step, _ in saving.list_checkpoints(tmp_path)] == [6, 4]


class Died(BaseException):
    """What a killed process raises; nothing that it would do afterwards happens."""


CHANGES = ("unlink", "rmdir", "mkdir", "rename", "replace", "fsync", "link")


def failing(monkeypatch: pytest.MonkeyPatch, fails: Callable[[int], BaseException | None]) -> list[str]:
    """Let changes of the disk fail: `fails` of the number of the change, from 1. Returns their names, as they come."""
    done: list[str] = []

    def wrapped(name: str) -> Callable[..., object]:
        plain = getattr(os, name)

        def change(*given, **more):
            done.append(name)
            if error := fails(len(done)):
                raise error
            return plain(*given, **more)

        return change

    for name in CHANGES:
        monkeypatch.setattr(os, name, wrapped(name))
    return done


def valid(run: Path) -> list[int]:
    return [step for step, path in saving.list_checkpoints(run) if (path / "manifest.json").is_file()]


@pytest.mark.item("F26")
def test_a_process_may_die_at_any_change_of_the_disk_while_it_saves_and_deletes(tmp_path, monkeypatch):
    """The checkpoints of steps 1 and 2 are there, one of which goes when that of step 3 has come."""
    for step in (1, 2):
        save(tmp_path / "before", step)
    shutil.copytree(tmp_path / "before", tmp_path / "whole")
    with monkeypatch.context() as during:
        done = failing(during, lambda _: None)
        save(tmp_path / "whole", 3)
    died = 0
    rng = random.Random(26)
    for trial in range(100):
        last, run = rng.randrange(1, len(done) + 1), tmp_path / str(trial)
        shutil.copytree(tmp_path / "before", run)
        with monkeypatch.context() as during, pytest.raises(Died):
            failing(during, lambda number, last=last: Died() if number >= last else None)
            save(run, 3)
        died += 1
        assert newest(run) in (2, 3) and 1 <= len(valid(run)) <= KEEP + 1, f"died at {last}, {done[last - 1]}"
        with Checkpoints(run, Fingerprint(), 1, KEEP).locked():
            save(run, 4)  # the next start goes on
        assert newest(run) == 4 and len(valid(run)) == KEEP and not list(run.glob(".step=*"))
        shutil.rmtree(run)
    assert died == 100 and len(done) > 15 and {"unlink", "rmdir", "fsync"} <= set(done)


@pytest.mark.item("F26")
def test_what_cannot_be_deleted_is_deleted_with_the_next_checkpoint(tmp_path, monkeypatch):
    for step in (1, 2):
        save(tmp_path, step)
    with monkeypatch.context() as during:
        plain = os.rmdir

        def rmdir(path, *given, **more):
            if "0000000001" in str(path):
                raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
            plain(path, *given, **more)

        during.setattr(os, "rmdir", rmdir)
        save(tmp_path, 3)
        assert valid(tmp_path) == [3, 2] and len(saving.list_checkpoints(tmp_path)) == KEEP + 1

    save(tmp_path, 4)

    assert valid(tmp_path) == [4, 3] and len(saving.list_checkpoints(tmp_path)) == KEEP


def _save_steps(run: Path, *steps: int, keep: int = 3) -> None:
    for step in steps:
        saving.Checkpoints(run, Fingerprint(), 1, keep).save(
            saving.Checkpoint(step, {"w": torch.full((9,), float(step))}, {})
        )


def _flip(state: Path) -> None:
    content = bytearray(state.read_bytes())
    content[-1] ^= 1
    state.write_bytes(content)


@pytest.mark.item("F26")
@pytest.mark.parametrize(("keep", "left"), [(1, [3]), (2, [2, 3]), (3, [1, 2, 3])])
def test_damaged_checkpoints_do_not_push_out_valid_ones(tmp_path, keep, left):
    _save_steps(tmp_path, 1, 2, 4, 6, keep=4)
    for step in (4, 6):
        _flip(tmp_path / f"step={step:010d}/state.safetensors")
    resumed = saving.Checkpoints(tmp_path, Fingerprint(), 1, keep)
    found = resumed.load_newest()
    assert found.step == 2
    assert len(saving.list_checkpoints(tmp_path)) == 4  # nothing goes before there is a newer one

    resumed.save(saving.Checkpoint(3, found.tensors, {}))

    assert [step for step, _ in saving.list_checkpoints(tmp_path)] == left[::-1]
    assert saving.Checkpoints(tmp_path, Fingerprint(), 1, keep).load_newest().step == 3


@pytest.mark.item("F10")
@pytest.mark.parametrize("broken", [(manifests, "file_sha256"), (saving, "load_file"), (Path, "read_bytes")])
def test_a_disk_that_fails_for_a_while_does_not_make_a_checkpoint_damaged(tmp_path, monkeypatch, broken):
    _save_steps(tmp_path, 2, 4)

    def fail(path: Path) -> None:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(path))

    with monkeypatch.context() as during, pytest.raises(StorageUnavailable, match="step=0000000004"):
        during.setattr(*broken, fail)
        saving.Checkpoints(tmp_path, Fingerprint(), 1, 3).load_newest()

    assert saving.Checkpoints(tmp_path, Fingerprint(), 1, 3).load_newest().step == 4


@pytest.mark.item("P7")
@pytest.mark.parametrize("waited", [False, True])
def test_a_checkpoint_lost_in_the_background_is_told_where_another_error_ends_the_training(tmp_path, caplog, waited):
    checkpoints = saving.Checkpoints(tmp_path, Fingerprint(), 1, 3, background=True)
    lost = saving.Checkpoint(2, {"w": torch.zeros(1)}, {"not": object()})  # no JSON

    with pytest.raises(TypeError if waited else TrainingDiverged), checkpoints.locked():
        checkpoints.begin_save(lost)
        if waited:
            checkpoints.finish_save()
        raise TrainingDiverged("two steps in a row")

    assert [message for message in caplog.messages if "could not be saved" in message] == (
        [] if waited else ["a checkpoint could not be saved: Object of type object is not JSON serializable"]
    )


@pytest.mark.item("F26")
def test_a_damaged_checkpoint_that_was_trained_past_goes_too_and_one_trained_again_stays(tmp_path):
    _save_steps(tmp_path, 2, 4, 5)
    for step in (4, 5):
        _flip(tmp_path / f"step={step:010d}/state.safetensors")
    resumed = saving.Checkpoints(tmp_path, Fingerprint(), 1, 3)
    found = resumed.load_newest()

    for step in (5, 7):
        resumed.save(saving.Checkpoint(step, found.tensors, {}))

    assert [step for step, _ in saving.list_checkpoints(tmp_path)] == [7, 5, 2]


@pytest.mark.item("F26")
def test_a_half_deleted_checkpoint_does_not_count_among_those_that_stay(tmp_path):
    _save_steps(tmp_path, 1, 2, 3)
    (tmp_path / "step=0000000002/manifest.json").unlink()

    _save_steps(tmp_path, 4)

    assert [step for step, _ in saving.list_checkpoints(tmp_path)] == [4, 3, 1]


@pytest.mark.item("F13")
def test_a_second_trainer_of_the_same_run_is_refused(tmp_path):
    held = saving.Checkpoints(tmp_path, Fingerprint(), every=1, keep=1)

    with (
        held.locked(),
        pytest.raises(LeaseHeld),
        saving.Checkpoints(tmp_path, Fingerprint(), 1, 1).locked(patience=0.6),
    ):
        pass
    with saving.Checkpoints(tmp_path, Fingerprint(), 1, 1).locked(patience=0.1):
        pass
