"""Several workers of one training on this machine: processes that talk through gloo; and numbers of theirs in fp64."""

import multiprocessing
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch

IMPORTED_ONCE = [
    "infoxlm_core.stages.finetuning",
    "infoxlm_core.stages.pretraining",
    "torch._dynamo",
    "torch.distributed.fsdp",
]
"""The last two are what an optimizer, and sharding, import when they are first used."""


def start(work: Callable[..., None], workers: int, given: Path, base: Path) -> None:
    """Run `work(rank, workers, port, given, base)` in so many processes and wait for them; what one raises is raised.

    They are forked from a process that did nothing but import: each would else spend seconds on importing torch.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    multiprocessing.set_forkserver_preload(IMPORTED_ONCE)
    torch.multiprocessing.start_processes(work, (workers, port, given, base), nprocs=workers, start_method="forkserver")


def one(work: Callable[..., None], *given: object) -> BaseProcess:
    """Start `work(*given)` in a process of its own, forked like the workers."""
    multiprocessing.set_forkserver_preload(IMPORTED_ONCE)
    process = multiprocessing.get_context("forkserver").Process(target=work, args=given)
    process.start()
    return process


def join(rank: int, size: int, port: int) -> None:
    """Be worker `rank` of `size`; computes in one thread."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank), "WORLD_SIZE": str(size)}
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")


@contextmanager
def fp64() -> Iterator[None]:
    """New tensors are fp64 meanwhile, and so are the weights, sums and moments of a training.

    For comparing two ways to the same result. They add the same numbers in other orders, so what rounds differently
    depends on the processor, and Adam makes whole steps of gradients that are 0 but for rounding. In fp32 that leaves
    5 common digits or fewer, in fp64 more than 10: a difference beyond 1e-9 is one of arithmetic on any processor.
    """
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)
