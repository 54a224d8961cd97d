"""A signal lets a training save and stop at any time; an error that all workers share is returned as a result."""

import errno
import os
import signal

import pytest

from infoxlm_core.errors import Preempted
from infoxlm_core.stages.pretraining import pretrain
from infoxlm_core.training import checkpoints, distributed, workers
from tests.helpers.curves import losses, state_of
from tests.toys.pretraining import tiny_config


@pytest.mark.item("F19")
def test_sigterm_is_obeyed_after_the_first_step_and_a_second_one_during_the_save_changes_nothing(
    tiny_shards, tmp_path, monkeypatch
):
    run = tmp_path / "run"
    run.mkdir()
    save_file = checkpoints.save_file
    saved_directories: list[str] = []

    def interrupt_and_save(tensors, path):
        saved_directories.append(path.parent.name)
        os.kill(os.getpid(), signal.SIGTERM)
        save_file(tensors, path)

    with monkeypatch.context() as patch, workers.stop_training_on_signals(run):
        patch.setattr(checkpoints, "save_file", interrupt_and_save)
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(Preempted, match="after step 1"):
            pretrain(tiny_config(), tiny_shards, tmp_path / "out", run)
    assert saved_directories == [".step=0000000001"]
    assert not (run / "stop").exists()

    pretrain(tiny_config(), tiny_shards, tmp_path / "out", run)

    pretrain(tiny_config(), tiny_shards, tmp_path / "undisturbed out", tmp_path / "undisturbed")
    assert losses(run) == losses(tmp_path / "undisturbed")
    assert state_of(run, 6) == state_of(tmp_path / "undisturbed", 6)


def test_an_error_of_the_system_is_raised_in_one_of_several_workers_so_that_all_are_stopped(monkeypatch):
    def fail() -> dict:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), "shards/0.bin")

    assert workers.attempt_training(fail, {})["error"] == "StorageUnavailable"
    monkeypatch.setattr(distributed, "world_size", lambda: 2)
    with pytest.raises(OSError, match=r"shards/0\.bin"):
        workers.attempt_training(fail, {})


@pytest.mark.parametrize(("requested", "gpus", "expected"), [(2, 1, 1), (2, 2, 2), (1, 8, 1)])
def test_at_most_one_worker_trains_on_each_gpu(requested, gpus, expected):
    assert workers.limit_to_gpus(requested, gpus) == expected
