"""Locks between processes: held by one at a time, and never by a file that a dead process has left."""

import errno
import fcntl

import pytest

from infoxlm_core import locks
from infoxlm_core.errors import InputError


def test_a_lock_is_held_until_it_is_released_and_its_file_may_stay(tmp_path):
    with locks.acquire(tmp_path / "lock"), pytest.raises(locks.Timeout):
        locks.acquire(tmp_path / "lock", timeout=0)

    with locks.acquire(tmp_path / "lock", timeout=0):
        assert (tmp_path / "lock").exists()


def test_a_file_system_without_locks_is_refused_instead_of_trusting_that_a_file_exists(tmp_path, monkeypatch):
    def flock(*_: int) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", flock)

    with pytest.raises(InputError, match=r"lock: this file system cannot lock files \(flock\): use a local directory"):
        locks.acquire(tmp_path / "lock", timeout=0)
