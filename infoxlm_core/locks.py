"""File locks between processes, which the operating system releases when their process ends."""

import errno
from pathlib import Path

from filelock import AcquireReturnProxy, FileLock, Timeout

from infoxlm_core.errors import InputError

__all__ = ["Timeout", "acquire"]


def acquire(path: Path | str, timeout: float = -1, poll_interval: float = 0.05) -> AcquireReturnProxy[FileLock]:
    """Lock a file until the end of the `with` block in which the result is used.

    Args:
        path: the file, which is created if it is missing.
        timeout: seconds to wait for another process; negative: no limit.
        poll_interval: seconds between two attempts.

    Raises:
        Timeout: another process holds the lock.
        InputError: the file system has no locks.
    """
    try:
        # The fallback of filelock is a file that exists while the lock is held. A killed process would leave it behind.
        return FileLock(path, fallback_to_soft=False).acquire(timeout=timeout, poll_interval=poll_interval)
    except OSError as error:
        if error.errno != errno.ENOSYS:
            raise
        raise InputError(f"{path}: this file system cannot lock files (flock): use a local directory") from error
