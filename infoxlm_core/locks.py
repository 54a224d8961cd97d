"""File locks between processes. The operating system releases a lock when its process ends."""

import contextlib
import errno
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path

from filelock import AcquireReturnProxy, FileLock, Timeout

from infoxlm_core.errors import InputError

__all__ = ["Timeout", "acquire", "scratch_directory"]

_SCRATCH_PREFIX = ".making-"


def acquire(path: Path | str, timeout: float = -1, poll_interval: float = 0.05) -> AcquireReturnProxy[FileLock]:
    """Lock a file. Use the result in a `with` block, which releases the lock at its end.

    Args:
        path: lock file, created if missing.
        timeout: number of seconds to wait for another process; negative: no limit.
        poll_interval: number of seconds between attempts.

    Raises:
        Timeout: another process holds the lock.
        InputError: the file system does not support locks.
    """
    try:
        # filelock would fall back to a lock file that exists while the lock is held. After a process is killed, its
        # file would remain, and processes on other machines would wait for it forever.
        return FileLock(path, fallback_to_soft=False).acquire(timeout=timeout, poll_interval=poll_interval)
    except OSError as error:
        if error.errno != errno.ENOSYS:
            raise
        raise InputError(f"{path}: this file system cannot lock files (flock): use a local directory") from error


@contextlib.contextmanager
def scratch_directory(parent: Path) -> Iterator[Path]:
    """Create a temporary directory for the block, in which it can prepare files that it then moves to `parent`.

    The directory is deleted at the end of the block. The directories of killed processes are deleted first.
    """
    for lock_path in parent.glob(f"{_SCRATCH_PREFIX}*.lock"):
        # Timeout: the process is still running. OSError: the directory belongs to another user.
        with contextlib.suppress(Timeout, OSError), acquire(lock_path, timeout=0):
            _delete_scratch_directory(lock_path)
    # Each directory has a lock beside it. Hold the lock before the directory exists, so that nobody else deletes it.
    lock_path = parent / f"{_SCRATCH_PREFIX}{uuid.uuid4().hex}.lock"
    with acquire(lock_path):
        try:
            directory = lock_path.with_suffix("")
            directory.mkdir()
            yield directory
        finally:
            _delete_scratch_directory(lock_path)


def _delete_scratch_directory(lock_path: Path) -> None:
    """Delete a scratch directory and its lock file."""
    shutil.rmtree(lock_path.with_suffix(""), ignore_errors=True)
    lock_path.unlink(missing_ok=True)
