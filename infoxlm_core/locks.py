"""File locks between processes. The operating system releases a lock when its process ends."""

import errno
from pathlib import Path

from filelock import AcquireReturnProxy, FileLock, Timeout

from infoxlm_core.errors import InputError

__all__ = ["Timeout", "acquire"]


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
