"""What is written down of attempts, and what a run says of it; the clock is one that the test turns."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from components.platform import costs
from infoxlm_core.errors import Preempted
from infoxlm_core.results.cost import StepCost

HOUR = 3600.0


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def begin(monkeypatch, run: str) -> None:
    monkeypatch.setenv("RUN_ID", run)


def make(store: Path, clock: Clock, hours: float, devices: int = 1, device: str = costs.GPU, name: str = "abc") -> None:
    with costs.measured(str(store), "pretrained", name, devices, device, clock):
        clock.now += hours * HOUR


def report(store: Path, step: str = "pretrain", trial: dict | None = None, name: str = "abc") -> StepCost:
    return costs.report(str(store), trial, step, "pretrained", name)


def test_a_step_costs_its_time_times_its_devices(tmp_path, clock, monkeypatch):
    begin(monkeypatch, "first")
    make(tmp_path, clock, hours=1.5, devices=8)

    found = report(tmp_path)

    assert found == StepCost("pretrain", "GPU", 12.0, 1, 0.0)
    assert costs.metrics(found) == {"cost/gpu_hours/pretrain": 12.0}


def test_attempts_of_a_run_add_up_whatever_ended_them(tmp_path, clock, monkeypatch):
    begin(monkeypatch, "first")
    with pytest.raises(Preempted), costs.measured(str(tmp_path), "pretrained", "abc", 8, costs.GPU, clock):
        clock.now += HOUR
        raise Preempted("told to stop")
    make(tmp_path, clock, hours=2, devices=4)

    assert report(tmp_path) == StepCost("pretrain", "GPU", 16.0, 2, 0.0)


def test_what_is_found_costs_nothing_and_says_what_other_runs_have_spent(tmp_path, clock, monkeypatch):
    begin(monkeypatch, "first")
    make(tmp_path, clock, hours=3)
    begin(monkeypatch, "second")

    found = report(tmp_path)

    assert found == StepCost("pretrain", "GPU", 0.0, 0, 3.0)
    assert costs.metrics(found) == {"cost/gpu_hours/pretrain": 0.0}
    assert str(found) == "0 hours, it was found, and 3 GPU-hours by other runs"


def test_of_what_was_made_before_anybody_measured_nothing_is_made_up(tmp_path, monkeypatch):
    begin(monkeypatch, "first")

    found = report(tmp_path)

    assert (found, costs.metrics(found)) == (StepCost("pretrain", "", 0.0, 0, 0.0), {})


def test_a_run_has_its_steps_in_order_and_a_trial_its_own(tmp_path, clock, monkeypatch):
    begin(monkeypatch, "first")
    for hours, step in ((2, "pretrain"), (1, "prepare_corpus")):
        make(tmp_path, clock, hours, device=costs.CPU, name=step)
        report(tmp_path, step, name=step)
    trial = {"variant": "MLM + TLM", "seed": 1}
    make(tmp_path, clock, 4, name="of a trial")
    report(tmp_path, "pretrain", trial, name="of a trial")
    begin(monkeypatch, "another")
    make(tmp_path, clock, 5)
    report(tmp_path)

    begin(monkeypatch, "first")
    assert [(one.step, one.hours) for one in costs.of_run(str(tmp_path))] == [
        ("prepare_corpus", 1.0),
        ("pretrain", 2.0),
    ]
    assert [(one.step, one.hours, one.device) for one in costs.of_run(str(tmp_path), trial)] == [
        ("pretrain", 4.0, "GPU")
    ]


def test_a_store_that_cannot_be_written_stops_no_work(tmp_path, clock, monkeypatch):
    begin(monkeypatch, "first")
    (tmp_path / "cost").write_text("in the way")

    make(tmp_path, clock, hours=1)  # nothing is raised


def test_a_note_that_is_damaged_is_not_counted(tmp_path, clock, monkeypatch):
    begin(monkeypatch, "first")
    make(tmp_path, clock, hours=1)
    for number, content in enumerate(("{", "[]", '{"run": "first"}')):
        (tmp_path / f"cost/pretrained/abc/first.{number}.json").write_text(content)

    assert report(tmp_path) == StepCost("pretrain", "GPU", 1.0, 1, 0.0)


_KILLED = """
import sys, time
from components.platform import costs

costs._NOTE_SECONDS = 0.01
with costs.measured(sys.argv[1], "pretrained", "abc", 2, "GPU"):
    print("begun", flush=True)
    time.sleep(600)
"""


@pytest.mark.slow
def test_of_a_killed_attempt_all_but_the_last_minute_is_known(tmp_path, monkeypatch):
    begin(monkeypatch, "first")
    with subprocess.Popen([sys.executable, "-c", _KILLED, tmp_path], stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        while not (noted := list(tmp_path.glob("cost/pretrained/abc/first.*.json"))):
            assert process.poll() is None
        os.kill(process.pid, signal.SIGKILL)

    [said] = [json.loads(path.read_bytes()) for path in noted]
    assert (said["run"], said["devices"], said["device"]) == ("first", 2, "GPU") and said["seconds"] > 0
    assert report(tmp_path).attempts == 1
