"""Locks between processes that end with the process that holds them, however it ends."""

import errno
from pathlib import Path

from filelock import AcquireReturnProxy, FileLock, Timeout

from infoxlm_core.errors import InputError

__all__ = ["Timeout", "acquire"]


def acquire(path: Path | str, timeout: float = -1, poll_interval: float = 0.05) -> AcquireReturnProxy[FileLock]:
    """Lock a file, which is made if it is missing; `with` releases it.

    Args:
        path: the file.
        timeout: seconds to wait for another process; negative: for as long as it takes.
        poll_interval: seconds between two tries.

    Raises:
        Timeout: another process holds it.
        InputError: the file system has no locks. Without this filelock would go by whether the file exists, and a
            killed process would hold it for ever.
    """
    try:
        return FileLock(path, fallback_to_soft=False).acquire(timeout=timeout, poll_interval=poll_interval)
    except OSError as error:
        if error.errno != errno.ENOSYS:
            raise
        raise InputError(f"{path}: this file system cannot lock files (flock): use a directory on another") from error
