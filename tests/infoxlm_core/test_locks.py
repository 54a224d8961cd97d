"""Locks between processes: one process holds a lock at a time, and a file left by a killed process is no lock."""

import errno
import fcntl
import subprocess
import sys
from pathlib import Path

import pytest

from infoxlm_core import locks
from infoxlm_core.errors import InputError


def test_lock_is_held_until_it_is_released(tmp_path):
    with locks.acquire(tmp_path / "lock"), pytest.raises(locks.Timeout):
        locks.acquire(tmp_path / "lock", timeout=0)

    with locks.acquire(tmp_path / "lock", timeout=0):
        assert (tmp_path / "lock").exists()


def test_file_system_without_locks_is_refused(tmp_path, monkeypatch):
    def flock(*_: int) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", flock)

    with pytest.raises(InputError, match=r"lock: this file system cannot lock files \(flock\): use a local directory"):
        locks.acquire(tmp_path / "lock", timeout=0)


@pytest.mark.item("F14")
def test_scratch_directory_of_a_killed_process_is_removed_and_that_of_a_running_one_stays(tmp_path):
    script = """
import pathlib, sys, time
from infoxlm_core import locks
with locks.scratch_directory(pathlib.Path(sys.argv[1])) as directory:
    (directory / "part").touch()
    print(directory, flush=True)
    time.sleep(600)
"""
    killed = subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    left_directory = Path(killed.stdout.readline().strip())
    killed.kill()
    killed.wait()
    assert (left_directory / "part").exists()

    with locks.scratch_directory(tmp_path) as first, locks.scratch_directory(tmp_path) as second:
        assert first != second
        assert first.is_dir()
        assert second.is_dir()
        assert not left_directory.exists()

    assert not list(tmp_path.iterdir())
