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


def report_error(read: Callable[[], Any], connection: Connection) -> None:
    """Call `read` with little memory, and send the class and message of its error and the growth of the process."""
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
    connection.send((type(error), str(error), peak - before))


def read_with_little_memory(read: Callable[[], Any]) -> tuple[type, str, int]:
    """Return the class of the error, its message, and the bytes by which the child grew."""
    fork = multiprocessing.get_context("fork")
    receiver, sender = fork.Pipe(duplex=False)
    child = fork.Process(target=report_error, args=(read, sender))
    child.start()
    sender.close()  # so that recv() fails, instead of waiting forever, if the child is killed
    try:
        return receiver.recv()
    finally:
        child.join()
