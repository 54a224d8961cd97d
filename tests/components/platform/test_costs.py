"""GPU and CPU hours of a run."""

from pathlib import Path

import pytest

from components.platform import costs
from infoxlm_core.errors import Preempted

HOUR = 3600.0


class Clock:
    """A clock that the test advances."""

    seconds = 1000.0

    def monotonic(self) -> float:
        return self.seconds


@pytest.fixture
def clock(monkeypatch) -> Clock:
    monkeypatch.setenv("RUN_ID", "first")
    clock = Clock()
    monkeypatch.setattr(costs, "time", clock)
    return clock


def work(store: Path, clock: Clock, hours: float, devices: int) -> None:
    """Spend hours on a number of GPUs."""
    with costs.record_duration(str(store), "pretrained", "abc", devices, costs.GPU):
        clock.seconds += hours * HOUR


def read_hours(store: Path) -> dict[str, float]:
    return costs.read_hours(str(store), "pretrained", "abc", "pretrain")


def test_cost_of_a_step_is_the_time_of_all_its_attempts_times_their_devices(tmp_path, clock, monkeypatch):
    with pytest.raises(Preempted), costs.record_duration(str(tmp_path), "pretrained", "abc", 8, costs.GPU):
        clock.seconds += HOUR
        raise Preempted("told to stop")
    work(tmp_path, clock, hours=2, devices=4)

    assert read_hours(tmp_path) == {"cost/gpu_hours/pretrain": 16.0}
    monkeypatch.setenv("RUN_ID", "second")  # a run that reuses the artifact
    assert read_hours(tmp_path) == {}


def test_totals_separate_gpu_hours_from_cpu_hours_and_ignore_earlier_totals():
    metrics = {"cost/gpu_hours/pretrain": 12.0, "cost/gpu_hours/finetune": 1.0, "cost/cpu_hours/prepare_corpus": 0.5}

    total = costs.add_up(metrics | {"loss/mlm": 3.0, "cost/gpu_hours/all": 2.0})

    assert total == {"cost/gpu_hours/all": 13.0, "cost/cpu_hours/all": 0.5}


def test_work_succeeds_although_its_cost_cannot_be_recorded(tmp_path, clock):
    (tmp_path / "cost").write_text("a file in place of the folder")

    work(tmp_path, clock, hours=1, devices=1)


def test_damaged_records_are_not_counted(tmp_path, clock):
    work(tmp_path, clock, hours=1, devices=1)
    for number, content in enumerate(("{", "[]", '{"device": "gpu"}')):
        (tmp_path / f"cost/first/pretrained/abc/{number}.json").write_text(content)

    assert read_hours(tmp_path) == {"cost/gpu_hours/pretrain": 1.0}
