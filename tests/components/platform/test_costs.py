"""Hours of a run's attempts; the test advances the clock."""

from pathlib import Path

import pytest

from components.platform import costs
from infoxlm_core.errors import Preempted

HOUR = 3600.0


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch) -> Clock:
    monkeypatch.setenv("RUN_ID", "first")
    return Clock()


def work(store: Path, clock: Clock, hours: float, devices: int, device: str = costs.GPU) -> None:
    with costs.measured(str(store), "pretrained", "abc", devices, device, clock):
        clock.now += hours * HOUR


def hours_of(store: Path) -> dict[str, float]:
    return costs.hours_of(str(store), "pretrained", "abc", "pretrain")


def test_a_step_costs_the_time_of_all_attempts_of_its_run_times_their_devices(tmp_path, clock, monkeypatch):
    with pytest.raises(Preempted), costs.measured(str(tmp_path), "pretrained", "abc", 8, costs.GPU, clock):
        clock.now += HOUR
        raise Preempted("told to stop")
    work(tmp_path, clock, hours=2, devices=4)

    assert hours_of(tmp_path) == {"cost/gpu_hours/pretrain": 16.0}
    monkeypatch.setenv("RUN_ID", "second")  # which finds the artifact
    assert hours_of(tmp_path) == {}


def test_hours_of_gpus_and_of_processes_are_summed_apart():
    metrics = {"cost/gpu_hours/pretrain": 12.0, "cost/gpu_hours/finetune": 1.0, "cost/cpu_hours/prepare_corpus": 0.5}

    total = costs.sum_up(metrics | {"loss/mlm": 3.0, "cost/gpu_hours/all": 2.0})  # `all` is of an earlier attempt

    assert total == {"cost/gpu_hours/all": 13.0, "cost/cpu_hours/all": 0.5}


def test_a_store_that_cannot_be_written_stops_no_work(tmp_path, clock):
    (tmp_path / "cost").write_text("in the way")

    work(tmp_path, clock, hours=1, devices=1)  # nothing is raised


def test_a_damaged_record_is_not_counted(tmp_path, clock):
    work(tmp_path, clock, hours=1, devices=1)
    for number, content in enumerate(("{", "[]", '{"device": "gpu"}')):
        (tmp_path / f"cost/first/pretrained/abc/{number}.json").write_text(content)

    assert hours_of(tmp_path) == {"cost/gpu_hours/pretrain": 1.0}
