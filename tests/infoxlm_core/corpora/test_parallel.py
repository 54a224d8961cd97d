"""Work in several processes: results are in order, and killed processes are replaced."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from infoxlm_core.corpora import parallel
from infoxlm_core.errors import WorkerLost


def add_process_id(number: int) -> tuple[int, int]:
    return number, os.getpid()


@pytest.mark.slow
def test_results_are_in_order_and_items_are_read_a_few_ahead():
    items = iter(range(40))

    results = parallel.ProcessPoolMap(2)(add_process_id, items)
    first_result = next(results)
    next_item = next(items)
    numbers, process_ids = zip(first_result, *results, strict=True)

    assert next_item < 12
    assert list(numbers) == [number for number in range(40) if number != next_item]
    assert os.getpid() not in process_ids


def die_once(path: Path) -> str:
    """Kill the process that works on a file named .deadly, unless the file exists."""
    if path.suffix == ".deadly" and not path.exists():
        path.write_text(str(os.getpid()))
        os.kill(os.getpid(), signal.SIGKILL)
    return path.name


@pytest.mark.slow
def test_item_of_a_killed_process_is_processed_again(tmp_path):
    paths = [tmp_path / "one", tmp_path / "two.deadly", tmp_path / "three"]

    assert list(parallel.ProcessPoolMap(1)(die_once, paths)) == ["one", "two.deadly", "three"]
    assert int((tmp_path / "two.deadly").read_text()) != os.getpid()


def die(item: int) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.slow
def test_processes_that_are_killed_repeatedly_end_the_work():
    with pytest.raises(WorkerLost, match="run again"):
        list(parallel.ProcessPoolMap(1)(die, range(2)))


ENDLESS = """
import os, time
from infoxlm_core.corpora import parallel

def work(seconds):
    print(os.getpid(), flush=True)
    time.sleep(seconds)

def list_items():
    yield SECONDS
    time.sleep(600)

if __name__ == "__main__":
    list(parallel.ProcessPoolMap(1)(work, list_items()))
"""


@pytest.mark.item("F02")
@pytest.mark.slow
@pytest.mark.parametrize("seconds", [0, 600], ids=["waiting", "working"])
def test_process_ends_when_its_parent_is_killed(tmp_path, seconds):
    script = tmp_path / "endless.py"
    script.write_text(ENDLESS.replace("SECONDS", str(seconds)))
    with subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, text=True) as command:
        worker = Path("/proc", command.stdout.readline().strip())
        command.kill()
        # It ends within milliseconds. If it did not watch its parent, it would never end.
        deadline = time.monotonic() + 120
        while worker.exists() and "Z" not in (worker / "stat").read_text().rpartition(")")[2][:3]:
            assert time.monotonic() < deadline
            time.sleep(0.05)
