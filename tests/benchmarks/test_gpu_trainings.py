"""Trainings that should be alike are compared, in this process: torchrun has tests of its own."""

import os

import pytest

from benchmarks.gpu import trainings


@pytest.fixture(autouse=True)
def in_this_process(monkeypatch):
    """One worker, which is started again once when it dies."""

    class Killed(Exception):
        pass

    def die(process, number):
        assert process == os.getpid()
        raise Killed

    def run(train, workers, run, **arguments):
        try:
            train(run=run, **arguments)
        except Killed:
            train(run=run, **arguments)

    monkeypatch.setattr(trainings.os, "kill", die)
    monkeypatch.setattr(trainings.torchrun, "run", run)
    monkeypatch.setattr(trainings, "TRAININGS", trainings.TRAININGS[:3])


def test_a_training_that_is_killed_has_the_losses_of_one_that_is_not():
    rows = list(trainings.compare(cpu=True))

    assert [row["training"] for row in rows] == ["one worker", "one worker, killed and resumed", "two workers"]
    assert [row["killed"] for row in rows] == [False, True, False] and all(row["ok"] for row in rows)
    assert [row["off"] for row in rows[1:]] == [0.0, 0.0]


def test_losses_that_are_apart_are_noticed_and_two_workers_need_two_gpus(monkeypatch):
    right = trainings.tracker.read

    def read(path):
        wrong = 1.001 if "killed" in str(path) else 1.0
        return [(step, {name: wrong * value for name, value in values.items()}) for step, values in right(path)]

    monkeypatch.setattr(trainings.tracker, "read", read)
    monkeypatch.setattr(trainings.torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(trainings, "LIMITS", {"cuda": 1e-4})

    first, killed, two = trainings.compare(cpu=False)

    assert first["ok"] and not killed["ok"] and killed["off"] > 1e-4
    assert two == {"training": "two workers", "skipped": "1 GPU"}
