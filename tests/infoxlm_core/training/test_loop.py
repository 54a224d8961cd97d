"""The training loop: exact resume, faults, requests to stop, bad steps."""

import contextlib
import os
import shutil
import signal
import subprocess
import threading
import time
from pathlib import Path

import pytest
import torch

from infoxlm_core import manifests
from infoxlm_core.errors import (
    ConfigMismatch,
    NoValidCheckpoint,
    Preempted,
    StorageFull,
    TrainingDiverged,
)
from infoxlm_core.stages import pretraining
from infoxlm_core.stages.pretraining import pretrain
from infoxlm_core.systems.infoxlm.learner import InfoXLMLearner
from infoxlm_core.training import checkpoints as saving
from infoxlm_core.training import tracker
from infoxlm_core.training.run import run_directory
from tests.helpers import workers
from tests.helpers.curves import losses, state_of
from tests.toys.pretraining import tiny_config


@pytest.fixture(scope="module")
def undisturbed(tiny_shards, tmp_path_factory) -> Path:
    base = tmp_path_factory.mktemp("undisturbed")
    pretrain(tiny_config(), tiny_shards, base / "out", base / "run")
    return base / "run"


@pytest.mark.item("A14", "F27")
def test_the_ten_steps_after_a_resume_are_those_of_the_undisturbed_run_bit_by_bit(tiny_shards, tmp_path):
    config = tiny_config(optimization={"steps": 16}, checkpoints={"every": 6})
    pretrain(config, tiny_shards, tmp_path / "a", tmp_path / "run")
    expected = losses(tmp_path / "run")
    expected_targets = targets_of_corpora(tmp_path / "run")
    for step in (12, 16):
        shutil.rmtree(tmp_path / "run" / f"step={step:010d}")

    pretrain(config, tiny_shards, tmp_path / "b", tmp_path / "run")

    assert len(expected) == 16 and losses(tmp_path / "run") == expected
    assert targets_of_corpora(tmp_path / "run") == expected_targets
    assert (tmp_path / "b/encoder/metrics.jsonl").read_text() == (tmp_path / "a/encoder/metrics.jsonl").read_text()
    for _, values in tracker.read(tmp_path / "a/encoder/metrics.jsonl"):
        assert list(values) == sorted(values)  # a checkpoint does not keep another order
    assert sum(expected_targets[-1].values()) > 10 * sum(expected_targets[0].values())  # totals of all steps


def targets_of_corpora(run: Path) -> list[dict[str, float]]:
    points = tracker.read(run / tracker.METRICS)
    return [{name: value for name, value in values.items() if name.startswith("targets/")} for _, values in points]


STEPS = 100


def _in_the_background(*given):
    """`run_directory` as on a GPU, where training goes on while a checkpoint is written."""
    return run_directory(*given[:5], True, *given[6:])


def _long_run(shards: Path, base: Path, background: bool = False) -> None:
    torch.set_num_threads(1)
    if background:
        pretraining.run_directory = _in_the_background
    config = tiny_config(optimization={"steps": STEPS}, checkpoints={"every": 10})
    pretrain(config, shards, base / "out", base / "run")


@pytest.fixture(scope="module")
def undisturbed_long_run(tiny_shards, tmp_path_factory) -> Path:
    base = tmp_path_factory.mktemp("long")
    _long_run(tiny_shards, base)
    return base / "run"


@pytest.mark.item("F04")
@pytest.mark.slow
@pytest.mark.parametrize("background", [False, True])
def test_a_run_killed_at_any_moment_ends_like_an_undisturbed_one(
    undisturbed_long_run, tiny_shards, tmp_path, background, record_property
):
    run, killed = tmp_path / "b/run", 0
    for wait in (0.01, 0.1, 0.05, None):  # anywhere: seconds after the first checkpoint of this attempt
        process = workers.start_one(_long_run, tiny_shards, tmp_path / "b", background)
        if wait is not None:
            seen = _newest(run)
            while process.is_alive() and _newest(run) == seen:
                time.sleep(0.002)
            time.sleep(wait)
            process.kill()
        process.join()
        killed += process.exitcode == -signal.SIGKILL

    assert process.exitcode == 0
    assert killed >= 1, "the fault never fired"
    assert losses(run) == losses(undisturbed_long_run)
    assert state_of(run, STEPS) == state_of(undisturbed_long_run, STEPS)
    record_property("figure", f"{killed} kills, equal bit for bit")


def _newest(run: Path) -> int:
    return max((int(path.parent.name[5:]) for path in run.glob("step=*/manifest.json")), default=0)


@pytest.mark.item("F06")
def test_a_run_without_a_valid_checkpoint_never_starts_over_by_itself(undisturbed, tiny_shards, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(undisturbed, run)
    for path in run.glob("step=*"):
        (path / "meta.json").unlink()

    with pytest.raises(NoValidCheckpoint, match=r"step 6: .*meta\.json is missing.*restore a checkpoint") as caught:
        pretrain(tiny_config(), tiny_shards, tmp_path / "out", run)
    assert caught.value.exit_code == 4

    for path in run.glob("step=*"):
        shutil.rmtree(path)
    with pytest.raises(NoValidCheckpoint, match="none is left"):
        pretrain(tiny_config(), tiny_shards, tmp_path / "out", run)


def test_a_run_that_its_config_names_goes_on_with_other_settings_and_says_which(
    undisturbed, tiny_shards, tmp_path, caplog
):
    run = tmp_path / "run"
    shutil.copytree(undisturbed, run)
    changed = {"optimization": {"learning_rate": 0.02, "steps": 8}}

    with pytest.raises(ConfigMismatch, match=r"checkpoints\.resume: run"):
        pretrain(tiny_config(**changed, checkpoints={"resume": "another"}), tiny_shards, tmp_path / "out", run)
    pretrain(tiny_config(**changed, checkpoints={"resume": "run"}), tiny_shards, tmp_path / "out", run)

    (told,) = [message for message in caplog.messages if "resumes with changes" in message]
    assert "optimization.learning_rate was 0.01, is 0.02; optimization.steps was 6, is 8" in told
    assert [row[0] for row in losses(run)] == list(range(1, 9)) and losses(run)[:6] == losses(undisturbed)
    pretrain(tiny_config(**changed), tiny_shards, tmp_path / "again", run)  # what it saved since is of these settings


def test_a_run_goes_on_with_other_code_and_libraries_and_says_which(
    undisturbed, tiny_shards, tmp_path, caplog, monkeypatch
):
    run = tmp_path / "run"
    shutil.copytree(undisturbed, run)
    for step in (4, 6):
        shutil.rmtree(run / f"step={step:010d}")
    now = manifests.describe_software()
    monkeypatch.setattr(manifests, "describe_software", lambda: now | {"code": "sha256:mended", "pyarrow": "99.0"})

    pretrain(tiny_config(), tiny_shards, tmp_path / "out", run)

    (told,) = [message for message in caplog.messages if "resumes with changes" in message]
    assert f"code was {now['code']!r}, is 'sha256:mended'; pyarrow was {now['pyarrow']!r}, is '99.0'" in told
    assert losses(run) == losses(undisturbed)


@pytest.mark.item("F10")
def test_a_full_disk_leaves_the_older_checkpoint_and_nothing_half_written(
    undisturbed, tiny_shards, tmp_path, monkeypatch
):
    run = tmp_path / "run"
    shutil.copytree(undisturbed, run)
    for step in (4, 6):
        shutil.rmtree(run / f"step={step:010d}")

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(saving, "save_file", full)

    with pytest.raises(StorageFull, match="step=0000000004: no space") as caught:
        pretrain(tiny_config(), tiny_shards, tmp_path / "out", run)
    assert caught.value.exit_code == 75
    assert [path.name for path in run.iterdir() if "step=" in path.name] == ["step=0000000002"]


def test_training_goes_on_while_a_checkpoint_is_written_and_changes_nothing_in_it(
    undisturbed, tiny_shards, tmp_path, monkeypatch
):
    plain, write, after, seen = tracker.FileTracker.log, saving.save_file, threading.Event(), []

    def log(self, step, figures):
        plain(self, step, figures)
        if step == 3:
            after.set()

    def slowly(tensors, path):
        seen.append(after.wait(60))  # the first checkpoint is that of step 2
        write(tensors, path)

    monkeypatch.setattr(tracker.FileTracker, "log", log)
    monkeypatch.setattr(saving, "save_file", slowly)
    monkeypatch.setattr(pretraining, "run_directory", _in_the_background)

    pretrain(tiny_config(), tiny_shards, tmp_path / "out", tmp_path / "run")

    assert seen == [True] * 3
    for step in (2, 4, 6):
        assert state_of(tmp_path / "run", step) == state_of(undisturbed, step)


@pytest.mark.item("F10")
@pytest.mark.parametrize("steps", [3, 6])
def test_a_full_disk_behind_the_training_ends_it_too(tiny_shards, tmp_path, monkeypatch, steps):
    write = saving.save_file

    def full(tensors, path):
        if "step=0000000002" in str(path):
            raise OSError(28, "No space left on device")
        write(tensors, path)

    monkeypatch.setattr(saving, "save_file", full)
    monkeypatch.setattr(pretraining, "run_directory", _in_the_background)

    with pytest.raises(StorageFull, match=r"step=0000000002.*no space"):
        pretrain(tiny_config(optimization={"steps": steps}), tiny_shards, tmp_path / "out", tmp_path / "run")

    assert not list((tmp_path / "run").glob("*step=*"))


@pytest.mark.item("F10")
@pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount a small file system")
def test_a_really_full_disk_is_said_in_one_line(tiny_shards, tmp_path):
    (tmp_path / "small").mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=96k", "tmpfs", str(tmp_path / "small")]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("this machine does not let tests mount a file system")
    try:
        with pytest.raises(StorageFull, match="no space"):
            pretrain(tiny_config(), tiny_shards, tmp_path / "small/out", tmp_path / "small/run")
        with pytest.raises(StorageFull, match="no space"):  # checkpoints fit elsewhere, the model does not fit here
            pretrain(tiny_config(model={"hidden": 64}), tiny_shards, tmp_path / "small/out", tmp_path / "run")
        assert not list((tmp_path / "small/run").glob("*step=*"))
    finally:
        subprocess.run(["umount", str(tmp_path / "small")], check=True)


def test_a_finished_run_started_again_tells_its_figures(undisturbed, tiny_shards, tmp_path):
    shutil.copytree(undisturbed, tmp_path / "run")

    figures = pretrain(tiny_config(), tiny_shards, tmp_path / "out", tmp_path / "run")

    assert figures["loss/xlco"].hex() == losses(undisturbed)[-1][3]


@pytest.mark.item("F19")
def test_asked_to_stop_it_saves_and_the_next_start_goes_on(undisturbed, tiny_shards, tmp_path, monkeypatch):
    asked = iter([False, False, False, True])
    monkeypatch.setattr(saving.Checkpoints, "is_stop_requested", lambda self: next(asked, False))

    with pytest.raises(Preempted, match="after step 4"):
        pretrain(tiny_config(checkpoints={"every": 100}), tiny_shards, tmp_path / "out", tmp_path / "run")

    pretrain(tiny_config(), tiny_shards, tmp_path / "out", tmp_path / "run")
    assert losses(tmp_path / "run") == losses(undisturbed)


@pytest.mark.item("F22")
@pytest.mark.parametrize("asked", [False, True])
def test_among_bad_steps_nothing_is_saved_and_a_request_to_stop_waits_for_a_good_one(
    tiny_shards, tmp_path, monkeypatch, asked
):
    plain, seen, saved = InfoXLMLearner.losses, InfoXLMLearner.after_step, []
    now = [0]

    def spoiled(self, batch, scales):
        loss, sums = plain(self, batch, scales)
        return loss * (float("inf") if now[0] in (2, 3) else 1.0), sums

    def counted(self, step, good=True):
        seen(self, step, good)
        now[0] = step

    save = saving.Checkpoints.save
    monkeypatch.setattr(InfoXLMLearner, "losses", spoiled)
    monkeypatch.setattr(InfoXLMLearner, "after_step", counted)
    monkeypatch.setattr(saving.Checkpoints, "is_stop_requested", lambda self: asked and now[0] >= 2)
    monkeypatch.setattr(
        saving.Checkpoints, "save", lambda self, found, last: (saved.append(found.step), save(self, found, last))
    )

    with pytest.raises(Preempted, match="after step 5") if asked else contextlib.nullcontext():
        pretrain(tiny_config(checkpoints={"every": 1}), tiny_shards, tmp_path / "out", tmp_path / "run")

    assert saved == ([1, 2, 5] if asked else [1, 2, 5, 6])  # the 3rd and 4th step are bad


@pytest.mark.item("F22")
def test_too_many_bad_steps_end_the_run(tiny_shards, tmp_path, monkeypatch):
    plain = InfoXLMLearner.losses

    def spoiled(self, batch, scales):
        loss, sums = plain(self, batch, scales)
        return loss * float("inf"), sums

    monkeypatch.setattr(InfoXLMLearner, "losses", spoiled)

    with pytest.raises(TrainingDiverged, match="3 steps in a row up to step 3") as caught:
        pretrain(tiny_config(), tiny_shards, tmp_path / "out", tmp_path / "run")
    assert caught.value.exit_code == 5
