"""Locks between processes: one process holds a lock at a time, and a file left by a killed process is no lock."""

import errno
import fcntl

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
