"""Reading in a child process that may grow by little.

Some kernels grant any memory and kill the process that uses it (`vm.overcommit_memory=1`, as on Kubernetes nodes).
"""

import multiprocessing
import resource
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

ADDRESS_SPACE = 4 << 30
"""Bytes by which the address space may grow: what asks for more at once fails."""
MAX_GROWTH = 200 << 20
"""Bytes by which resident memory may grow."""


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def report_error(read: Callable[[], Any], out: Connection) -> None:
    """Read with little memory; send the error's class, its message, and the bytes by which the process has grown."""
    torch.set_num_threads(1)  # the threads of a parent do not exist in its fork
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + ADDRESS_SPACE, resource.RLIM_INFINITY))
    before = resident_bytes()
    try:
        read()
        error = None
    except Exception as failure:
        error = failure
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    out.send((type(error), str(error), peak - before))


def read_with_little_memory(read: Callable[[], Any]) -> tuple[type, str, int]:
    """Return the class of the error, its message, and the bytes by which the child grew."""
    fork = multiprocessing.get_context("fork")
    ours, theirs = fork.Pipe(duplex=False)
    child = fork.Process(target=report_error, args=(read, theirs))
    child.start()
    theirs.close()
    try:
        return ours.recv()
    finally:
        child.join()
