"""Run the workers of a training as processes that communicate by gloo, and compute in fp64."""

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
"""An optimizer and sharding import the last two when they are first used."""


def start(work: Callable[..., None], workers: int, inputs: object, base: Path) -> None:
    """Run `work(rank, workers, port, inputs, base)` in `workers` processes, wait for them, and raise the first error.

    The processes are forked from one that has imported torch, because importing takes seconds.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    multiprocessing.set_forkserver_preload(IMPORTED_ONCE)
    torch.multiprocessing.start_processes(
        work, (workers, port, inputs, base), nprocs=workers, start_method="forkserver"
    )


def start_one(work: Callable[..., None], *arguments: object) -> BaseProcess:
    """Start `work(*arguments)` in its own process, forked like the workers."""
    multiprocessing.set_forkserver_preload(IMPORTED_ONCE)
    process = multiprocessing.get_context("forkserver").Process(target=work, args=arguments)
    process.start()
    return process


def join(rank: int, size: int, port: int) -> None:
    """Join the group as worker `rank` of `size`, with one thread."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank), "WORLD_SIZE": str(size)}
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")


@contextmanager
def fp64() -> Iterator[None]:
    """Create new tensors in fp64, including the weights, sums and moments of a training.

    Use it to compare two ways to the same result. They add the same numbers in different orders, so rounding depends on
    the processor, and Adam takes whole steps for gradients that are zero but for rounding. In fp32 at most 5 digits
    agree, in fp64 more than 10: a difference above 1e-9 is an error on any processor.
    """
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)
