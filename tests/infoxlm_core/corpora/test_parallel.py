"""Chunks go out and results come back in order, whoever works, and never many at a time."""

import itertools
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pyarrow as pa
import pytest

from infoxlm_core.corpora import parallel
from infoxlm_core.errors import InputError, WorkerLost


def numbers(count: int) -> list[pa.Table]:
    return [pa.table({"number": [number]}) for number in range(count)]


def who(chunk: pa.Table) -> pa.Table:
    return chunk.append_column("who", pa.array([os.getpid()]))


def refusing(chunk: pa.Table) -> pa.Table:
    raise InputError("x.tsv:7: no such thing: mend it")


@pytest.mark.slow
def test_processes_of_this_machine_give_results_in_order_and_read_chunks_as_they_need_them():
    read = itertools.count()

    results = parallel.in_processes(2)(who, (table for table in numbers(40) if next(read) >= 0))
    first = next(results)
    ahead = next(read)
    found = [first, *results]

    assert [table["number"].to_pylist() for table in found] == [[number] for number in range(40)]
    assert ahead < 12
    assert os.getpid() not in {table["who"][0].as_py() for table in found}


@pytest.mark.slow
def test_an_error_of_ours_comes_back_from_another_process():
    with pytest.raises(InputError, match="mend it"):
        list(parallel.in_processes(1)(refusing, numbers(2)))


def dying_once(path: Path) -> str:
    if path.suffix == ".deadly" and not path.exists():
        path.write_text(str(os.getpid()))
        os.kill(os.getpid(), signal.SIGKILL)
    return path.name


@pytest.mark.slow
def test_the_item_of_a_killed_process_is_processed_again(tmp_path):
    paths = [tmp_path / "one", tmp_path / "two.deadly", tmp_path / "three"]

    assert list(parallel.in_processes(1)(dying_once, paths)) == ["one", "two.deadly", "three"]
    assert int((tmp_path / "two.deadly").read_text()) != os.getpid()


def dying(chunk: pa.Table) -> pa.Table:
    os.kill(os.getpid(), signal.SIGKILL)
    return chunk


@pytest.mark.slow
def test_a_process_that_is_killed_ends_the_work_in_one_line():
    with pytest.raises(WorkerLost, match="run again"):
        list(parallel.in_processes(1)(dying, numbers(2)))


ENDLESS = """
import os, time
import pyarrow as pa
from infoxlm_core.corpora import parallel

def work(chunk):
    print(os.getpid(), flush=True)
    time.sleep(600 * chunk["busy"][0].as_py())
    return chunk

def chunks():
    yield pa.table({"busy": [BUSY]})
    time.sleep(600)

if __name__ == "__main__":
    list(parallel.in_processes(1)(work, chunks()))
"""


@pytest.mark.item("F02")
@pytest.mark.slow
@pytest.mark.parametrize("busy", [0, 1])
def test_a_process_ends_with_the_command_that_is_killed_at_work_or_waiting_for_more(tmp_path, busy):
    script = tmp_path / "endless.py"
    script.write_text(ENDLESS.replace("BUSY", str(busy)))
    with subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, text=True) as command:
        worker = Path("/proc", command.stdout.readline().strip())
        command.kill()
        # it ends within milliseconds; without its own doing it never does
        deadline = time.monotonic() + 120
        while worker.exists() and "Z" not in (worker / "stat").read_text().rpartition(")")[2][:3]:
            assert time.monotonic() < deadline
            time.sleep(0.05)
