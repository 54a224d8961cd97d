"""A signal lets a training save and stop, whenever it comes; an error that all workers share travels as a result."""

import errno
import os
import signal
from pathlib import Path

import pytest

from infoxlm_core.errors import InputError, Preempted
from infoxlm_core.stages.pretraining import pretrain
from infoxlm_core.training import checkpoints, distributed, tracker, workers
from tests.toys.pretraining import tiny_config


@pytest.mark.item("F19")
def test_sigterm_before_the_first_step_is_not_lost_and_a_second_one_during_the_save_changes_nothing(
    tiny_shards, tmp_path, monkeypatch
):
    places = {"shards_path": tiny_shards, "output": tmp_path / "out", "run": tmp_path / "run"}
    (tmp_path / "run").mkdir()
    write, again = checkpoints.save_file, []

    def interrupted(tensors, path):
        again.append(path.parent.name)
        os.kill(os.getpid(), signal.SIGTERM)
        write(tensors, path)

    with monkeypatch.context() as during, workers.stopping_on_signals(tmp_path / "run"):
        during.setattr(checkpoints, "save_file", interrupted)
        os.kill(os.getpid(), signal.SIGTERM)  # while shards are read and the queue is filled
        with pytest.raises(Preempted, match="after step 1"):
            pretrain(config=tiny_config(), **places)
    assert again == [".step=0000000001"] and not (tmp_path / "run/stop").exists()
    pretrain(config=tiny_config(), **places)

    assert len(tracker.read(tmp_path / "run" / tracker.METRICS)) == 6


def test_an_error_of_ours_is_a_result_that_is_raised_where_it_arrives():
    def refuse(run: Path) -> dict:
        raise InputError(f"{run}: no shards")

    outcome = workers.attempt(refuse, {"run": Path("here")})

    assert outcome == {"error": "InputError", "message": "here: no shards"}
    with pytest.raises(InputError, match="here: no shards"):
        workers.figures(outcome)


@pytest.mark.parametrize("number", [1, 2])
def test_what_the_system_says_to_one_of_several_workers_ends_it_so_that_the_others_do_not_wait(number, monkeypatch):
    def fail() -> dict:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), "shards/0.bin")

    monkeypatch.setattr(distributed, "world_size", lambda: number)

    if number == 1:
        assert workers.attempt(fail, {})["error"] == "StorageUnavailable"
    else:
        with pytest.raises(OSError, match=r"shards/0\.bin"):
            workers.attempt(fail, {})


@pytest.mark.parametrize(("wanted", "gpus", "train"), [(2, 1, 1), (2, 2, 2), (1, 8, 1), (8, 5, 5)])
def test_where_gpus_are_few_one_worker_trains_on_each(wanted, gpus, train):
    assert workers.limit_to_gpus(wanted, gpus) == train
