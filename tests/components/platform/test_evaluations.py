"""The process in which a trial of a suite is measured."""

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from components.platform import evaluations
from infoxlm_core.errors import Preempted
from tests.helpers.commands import environment
from tests.servers.processes import until

SUITE = """
import os
import time
from pathlib import Path

from components.platform import evaluations


def measure(planned, store, num_workers):
    Path(store, "trial").write_text(str(os.getpid()))
    while not Path(store, "finish").exists():
        time.sleep(0.05)


evaluations.measure = measure
if __name__ == "__main__":
    trials = [{"point": {"name": name}} for name in ("first", "second")]
    evaluations.measure_all(trials, os.environ["STORE"], num_workers=0)
"""


def is_running(process_id: int) -> bool:
    status = Path(f"/proc/{process_id}/stat")
    return status.exists() and status.read_text().rpartition(")")[2].split()[0] != "Z"


def test_process_of_a_trial_ends_with_its_trial_if_its_parent_was_killed(tmp_path):
    script = tmp_path / "suite.py"
    script.write_text(SUITE)
    variables = environment() | {"STORE": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, str(script)]
    parent = subprocess.Popen(command, env=variables, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    trial = tmp_path / "trial"
    until(lambda: trial.exists() and trial.read_text())
    process_id = int(trial.read_text())

    parent.kill()
    parent.wait()
    (tmp_path / "finish").touch()

    try:
        until(lambda: not is_running(process_id))
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process_id, signal.SIGKILL)


def test_step_that_is_stopped_between_two_trials_does_not_pass_without_the_second(monkeypatch):
    measured = []

    def measure_in_child(planned_trial, store, num_workers, stop_requested):
        if stop_requested.is_set():
            raise SystemExit(Preempted.exit_code)
        measured.append(planned_trial["point"]["name"])
        os.kill(os.getpid(), signal.SIGTERM)  # arrives when the trial has its result

    monkeypatch.setattr(evaluations, "_measure_in_child", measure_in_child)
    trials = [{"point": {"name": name}} for name in ("first", "second")]

    with pytest.raises(SystemExit) as stopped:
        evaluations.measure_all(trials, "store", num_workers=0)

    assert stopped.value.code == Preempted.exit_code
    assert measured == ["first"]
