"""Collective operations of a training run's workers. Without a process group, the run has one worker."""

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from infoxlm_core import user_files
from infoxlm_core.errors import ConfigError, InfoXLMError, RankDesync
from infoxlm_core.model import devices, mixed_precision

T = TypeVar("T")
PATIENCE = timedelta(days=1)  # timeout while the first worker works alone, because writing may take hours
LARGEST_16_BIT_PRIME = 65_521
CHECKSUM_CHUNK = 2**22  # number of values that a checksum converts to 64 bits at a time, to save memory


def rank() -> int:
    """Return this worker's zero-based number."""
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    """Return the number of workers."""
    return dist.get_world_size() if dist.is_initialized() else 1


def device() -> torch.device:
    """Return this worker's GPU, or the CPU. Raise InputError if torch cannot use the machine's GPUs."""
    return devices.choose()


def describe() -> dict[str, object]:
    """Return the settings that may change the last bits of a result: threads, workers and device type."""
    return {"threads": torch.get_num_threads(), "workers": world_size(), "device": device().type}


def shares(virtual_shards: int) -> list[range]:
    """Return each worker's range of virtual shards. The first workers may have one more shard than the last.

    Raises:
        ConfigError: there are fewer virtual shards than workers.
    """
    workers = world_size()
    if virtual_shards < workers:
        raise ConfigError(f"{workers} workers must not exceed batches.virtual_shards ({virtual_shards})")
    shards_per_worker, remainder = divmod(virtual_shards, workers)
    starts = [worker * shards_per_worker + min(worker, remainder) for worker in range(workers + 1)]
    return [range(start, end) for start, end in itertools.pairwise(starts)]


def my_share(virtual_shards: int) -> range:
    """Return this worker's range of virtual shards."""
    return shares(virtual_shards)[rank()]


def sum_over_workers(values: Tensor) -> Tensor:
    """Sum a tensor over all workers, on every worker. The tensor may be changed in place."""
    if world_size() > 1:
        dist.all_reduce(values)
    return values


def sum_numbers(values: Mapping[str, float]) -> dict[str, float]:
    """Sum numbers over all workers in fp64, without using GPUs. Every worker must pass the same names."""
    if world_size() == 1:
        return dict(values)
    names = sorted(values)  # the same order on all workers
    total = torch.tensor([values[name] for name in names], dtype=torch.float64, device="cpu")
    dist.all_reduce(total, group=_get_cpu_group(dist.group.WORLD))
    return dict(zip(names, total.tolist(), strict=True))


def gather_rows(rows: Tensor, counts: Sequence[int] = ()) -> Tensor:
    """Gather the rows (B, …) of all workers in rank order.

    Args:
        rows: this worker's rows.
        counts: number of rows on each worker; may be empty if all workers have equally many.
    """
    if world_size() == 1:
        return rows
    padding = max(counts, default=len(rows)) - len(rows)
    if padding:  # all_gather needs equal shapes
        rows = torch.cat([rows, rows.new_zeros(padding, *rows.shape[1:])])
    rows = rows.contiguous()
    gathered = [torch.empty_like(rows) for _ in range(world_size())]
    dist.all_gather(gathered, rows)
    if counts:
        gathered = [worker_rows[:count] for worker_rows, count in zip(gathered, counts, strict=True)]
    return torch.cat(gathered)


def from_first(value: T) -> T:
    """Return the first worker's value on every worker."""
    if world_size() == 1:
        return value
    values = [value]
    dist.broadcast_object_list(values, src=0, group=_get_cpu_group(dist.group.WORLD))
    return values[0]


@functools.lru_cache(1)
def _get_cpu_group(workers: dist.ProcessGroup) -> dist.ProcessGroup:  # noqa: ARG001 - the key of the cache
    """Return a CPU process group of all workers with the timeout `PATIENCE`. The first call creates it.

    Despite the long timeout, a dead worker is noticed at once, and Ray's health checks detect a hanging worker.
    """
    group = dist.new_group(backend="gloo", timeout=PATIENCE)
    if group is None:
        raise RuntimeError("this worker is not a member of the group of all workers")
    return group


def check_equal_on_workers(tensors: Mapping[str, Tensor], step: int) -> None:
    """Compare the checksums of tensors on all workers. Raise RankDesync if any checksums differ.

    Shards are skipped, because they differ between workers.
    """
    names = sorted(name for name, tensor in tensors.items() if not mixed_precision.is_shard(tensor))
    if world_size() == 1 or not names:
        return
    local_checksums = torch.stack([checksum(tensors[name].to(device())) for name in names])  # (tensors,)
    checksums = gather_rows(local_checksums[None]).cpu()  # (world size, tensors)
    differences = (checksums != checksums[0]).nonzero()
    if len(differences):
        worker, tensor_index = differences[0].tolist()
        raise RankDesync(
            f"step {step}: {names[tensor_index]} differs on worker {worker}: run again from the last checkpoint"
        )


def checksum(tensor: Tensor, chunk: int = CHECKSUM_CHUNK) -> Tensor:
    """Return a 64-bit checksum that depends on every bit and on the order of the values.

    The checksum is the sum of the tensor's 32-bit integers, each weighted by its index modulo a prime.
    """
    tensor_bytes = tensor.detach().contiguous().flatten().view(torch.uint8)
    if len(tensor_bytes) % 4:
        tensor_bytes = F.pad(tensor_bytes, (0, -len(tensor_bytes) % 4))
    integers = tensor_bytes.view(torch.int32)
    total = torch.zeros((), dtype=torch.long, device=integers.device)
    for start in range(0, len(integers), chunk):
        chunk_integers = integers[start : start + chunk]
        indices = torch.arange(start, start + len(chunk_integers), device=integers.device)
        weights = indices % LARGEST_16_BIT_PRIME + 1  # never 0, so that every value counts
        total += (chunk_integers * weights).sum()
    return total


def on_first(action: Callable[[], T]) -> T | None:
    """Run an action on the first worker while the others wait. The others return None.

    If the action fails with an InfoXLMError, or an error known to `translate_error`, all workers raise the error.
    """
    with sharing_errors():
        if rank() != 0:
            return None
        try:
            return action()
        except InfoXLMError:
            raise
        except Exception as error:
            known_error = user_files.translate_error(error)
            if known_error is None:
                raise  # a bug: the launcher stops the other workers when this worker dies
            raise known_error from error


@contextlib.contextmanager
def sharing_errors() -> Iterator[None]:
    """Raise an InfoXLMError that any worker raises in this context on all workers. All workers must enter the context.

    Use it for actions that may fail on one machine only, such as reading text. The failed worker returns its error to
    the launcher and stays alive, so the other workers would otherwise wait for it.
    """
    if world_size() == 1:
        yield
        return
    _get_cpu_group(dist.group.WORLD)  # created now, because all workers must take part, and one may be busy for long
    local_failure: InfoXLMError | None = None
    try:
        yield
    except InfoXLMError as error:
        local_failure = error
    # Count the failures first, because gathering errors takes several times as long.
    if sum_numbers({"failures": float(local_failure is not None)})["failures"]:
        failures: list[InfoXLMError | None] = [None] * world_size()
        dist.all_gather_object(failures, local_failure, group=_get_cpu_group(dist.group.WORLD))
        raise next(failure for failure in failures if failure is not None)


@torch.no_grad()
def copy_from_first(sources: Mapping[str, Tensor], targets: Mapping[str, Tensor]) -> None:
    """Copy the first worker's tensors into the same-named targets of all workers. Targets may be shards."""
    for name, target in targets.items():
        if world_size() == 1:
            target.copy_(sources[name])
            continue
        complete_tensor = torch.empty(target.shape, dtype=target.dtype, device=device())
        if rank() == 0:
            complete_tensor.copy_(sources[name])
        dist.broadcast(complete_tensor, src=0)
        if mixed_precision.is_shard(target):
            from torch.distributed.tensor import distribute_tensor

            # Every worker has the complete tensor and extracts its own shard without communication.
            complete_tensor = distribute_tensor(
                complete_tensor, target.device_mesh, target.placements, src_data_rank=None
            )
        target.copy_(complete_tensor)


def tensors_on_first(tensors: Mapping[str, Tensor], copy: bool = False) -> dict[str, Tensor]:
    """Gather complete tensors on the first worker's CPU. The others return no tensors. All workers must call this.

    Args:
        tensors: tensors or shards by name.
        copy: whether to copy even tensors that are already on the CPU.
    """
    gathered = {}
    for name, tensor in tensors.items():
        complete_tensor = tensor.detach()
        if mixed_precision.is_shard(complete_tensor):
            complete_tensor = complete_tensor.full_tensor()  # all workers must call this
        if rank() > 0:
            continue
        if complete_tensor.is_cuda:
            gathered[name] = _to_pinned(complete_tensor)
        elif copy:
            gathered[name] = complete_tensor.clone(memory_format=torch.contiguous_format)
        else:
            gathered[name] = complete_tensor.contiguous()
    # The copies from the GPU are asynchronous, so that they overlap. Wait for all copies.
    if gathered and torch.cuda.is_available():
        torch.cuda.synchronize()
    return gathered


def _to_pinned(tensor: Tensor) -> Tensor:
    """Copy a GPU tensor to the CPU asynchronously, or synchronously if the host has no pinned memory."""
    try:
        pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    except RuntimeError:
        return tensor.cpu().contiguous()
    return pinned.copy_(tensor, non_blocking=True)
