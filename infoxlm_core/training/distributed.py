"""What workers of one training do together. Without a process group every function is the one-worker case."""

import contextlib
import functools
import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeGuard, TypeVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from infoxlm_core import outside
from infoxlm_core.data import shards
from infoxlm_core.data.shards import Shards
from infoxlm_core.errors import ConfigError, InfoXLMError, RankDesync
from infoxlm_core.model import devices, mixed

T = TypeVar("T")
LONGEST = timedelta(days=1)  # how long the others wait for what the first worker does alone: writing may take hours


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def device() -> torch.device:
    """This worker's device: its GPU, else the CPU; InputError if there are GPUs and torch cannot use them."""
    return devices.choose()


def describe() -> dict[str, object]:
    """What a result may depend on in its last bits: threads of a worker, workers, kind of device."""
    return {"threads": torch.get_num_threads(), "workers": world_size(), "device": device().type}


def shares(virtual_shards: int) -> list[range]:
    """The contiguous range of virtual shards that each worker draws; the first ones draw one more if it does not come
    out even. Raises ConfigError if there are fewer shards than workers."""
    if virtual_shards < world_size():
        raise ConfigError(f"{world_size()} workers must not exceed batches.virtual_shards ({virtual_shards})")
    each, more = divmod(virtual_shards, world_size())
    edges = [worker * each + min(worker, more) for worker in range(world_size() + 1)]
    return list(itertools.starmap(range, itertools.pairwise(edges)))


def my_share(virtual_shards: int) -> range:
    """This worker's of the `shares`."""
    return shares(virtual_shards)[rank()]


def sum_over_workers(values: Tensor) -> Tensor:
    """The sum of a tensor over all workers, on every worker."""
    if world_size() > 1:
        dist.all_reduce(values)
    return values


def sum_numbers(values: Mapping[str, float]) -> dict[str, float]:
    """Named numbers of all workers added up in fp64, from CPU to CPU. Every worker must bring the same names."""
    if world_size() == 1:
        return dict(values)
    names = sorted(values)
    total = torch.tensor([values[name] for name in names], dtype=torch.float64, device="cpu")
    dist.all_reduce(total, group=_patient(dist.group.WORLD))
    return dict(zip(names, total.tolist(), strict=True))


def gather_rows(rows: Tensor, counts: Sequence[int] = ()) -> Tensor:
    """Rows of all workers, in the order of their ranks: (B, …) -> (sum of B, …); `counts`: B of each, if not alike."""
    if world_size() == 1:
        return rows
    missing = max(counts, default=len(rows)) - len(rows)  # all send as many as who has the most
    rows = torch.cat([rows, rows.new_zeros(missing, *rows.shape[1:])]) if missing else rows.contiguous()
    gathered = [torch.empty_like(rows) for _ in range(world_size())]
    dist.all_gather(gathered, rows)
    return torch.cat([part[:count] for part, count in zip(gathered, counts, strict=True)] if counts else gathered)


def from_first(value: T) -> T:
    """The first worker's value, on every worker, however long it takes; the others' is ignored."""
    if world_size() == 1:
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0, group=_patient(dist.group.WORLD))
    return box[0]


@functools.lru_cache(1)
def _patient(workers: dist.ProcessGroup) -> dist.ProcessGroup:  # noqa: ARG001 - the key of the cache
    """A group of all workers, on the CPU, that waits long; for gradients they wait in the group that Ray has made.

    A worker that dies ends the waiting at once; one that stops is found by Ray, which asks each how it is.
    """
    group = dist.new_group(backend="gloo", timeout=LONGEST)
    if group is None:
        raise RuntimeError("every worker belongs to the group of all")
    return group


def check_equal(tensors: Mapping[str, Tensor], step: int) -> None:
    """Raise RankDesync if tensors are not the same on all workers, by a checksum of their bits; shards never are."""
    names = sorted(name for name, tensor in tensors.items() if not mixed.is_shard(tensor))
    if world_size() == 1 or not names:
        return
    mine = torch.stack([checksum(tensors[name].to(device())) for name in names])
    theirs = gather_rows(mine[None]).cpu()  # (world size, tensors): the only place that waits for the device
    if len(wrong := (theirs != theirs[0]).nonzero()):
        rank, number = wrong[0].tolist()
        raise RankDesync(f"step {step}: {names[number]} differs on worker {rank}: run again from the last checkpoint")


def checksum(tensor: Tensor, at_once: int = 2**22) -> Tensor:
    """A 64-bit number that changes with any bit and with the order of the values; so many are made 64 bits wide."""
    bits = tensor.detach().contiguous().flatten().view(torch.uint8)
    if len(bits) % 4:
        bits = F.pad(bits, (0, -len(bits) % 4))
    bits = bits.view(torch.int32)
    total = torch.zeros((), dtype=torch.long, device=bits.device)
    for start in range(0, len(bits), at_once):
        part = bits[start : start + at_once]
        places = torch.arange(start, start + len(part), device=bits.device) % 65_521 + 1
        total += (part * places).sum()
    return total


def on_first(action: Callable[[], T]) -> T | None:
    """Let the first worker do something and wait for it, up to a day; what it raises of ours, all workers raise. What
    `action` returns is there on the first worker alone; the others get None."""
    if world_size() > 1:
        _patient(dist.group.WORLD)  # made together, before the others have to wait
    result, failure = _attempt(action) if rank() == 0 else (None, None)
    failure = from_first(failure)
    if failure is not None:
        raise failure
    return result


def _attempt(action: Callable[[], T]) -> tuple[T | None, InfoXLMError | None]:
    """What an action returns, or what it raises of ours, a full disk included, for the other workers to be told."""
    try:
        return action(), None
    except InfoXLMError as error:
        return None, error
    except Exception as error:
        if said := outside.translate(error):
            return None, said
        raise


def on_each_machine(action: Callable[[], object]) -> None:
    """Let one worker of each machine do something while all others wait; what one of them raises of ours, all raise."""
    group = _patient(dist.group.WORLD) if world_size() > 1 else None  # made together, before the others have to wait
    first = group is None or os.environ.get("LOCAL_RANK", "0") == "0"  # set by torchrun and by Ray Train
    _, failure = _attempt(action) if first else (None, None)
    failures = [failure]
    if group is not None:
        failures *= world_size()
        dist.all_gather_object(failures, failure, group=group)
    for found in failures:
        if found is not None:
            raise found


def open_shards(directory: Path) -> Shards:
    """Open token shards on every worker; their bytes, terabytes perhaps, are hashed by one worker of each machine."""
    if world_size() == 1:
        return shards.open_shards(directory)
    on_each_machine(lambda: shards.read_manifest(directory))
    return shards.open_shards(directory, hashed=False)


@torch.no_grad()
def copy_from_first(source: Mapping[str, Tensor], targets: Mapping[str, Tensor]) -> None:
    """Copy the first worker's tensors into those of the same names on all workers, into shards what belongs there."""
    for name, target in targets.items():
        if world_size() == 1:
            target.copy_(source[name])
            continue
        whole = torch.empty(target.shape, dtype=target.dtype, device=device())
        if rank() == 0:
            whole.copy_(source[name])
        dist.broadcast(whole, src=0)
        if mixed.is_shard(target):
            from torch.distributed.tensor import distribute_tensor

            target.copy_(distribute_tensor(whole, target.device_mesh, target.placements, src_data_rank=None))
        else:
            target.copy_(whole)


def tensors_on_first(tensors: Mapping[str, Tensor], own: bool = False) -> dict[str, Tensor]:
    """Whole tensors in the first worker's memory (on the CPU), one after the other; nothing on the other workers.

    All workers call this: each sends its shards. `own`: copies, of tensors that are on the CPU already, too.
    """
    gathered = {}
    for name, tensor in tensors.items():
        tensor = tensor.detach()
        whole = tensor.full_tensor() if mixed.is_shard(tensor) else tensor
        if rank() == 0 and whole.is_cuda:  # into pinned memory, which torch keeps for the next time: no copy waits
            try:
                pinned = torch.empty(whole.shape, dtype=whole.dtype, pin_memory=True)
            except RuntimeError:  # the host allows no more of it: slower, and no reason to lose the run
                gathered[name] = whole.cpu().contiguous()
            else:
                gathered[name] = pinned.copy_(whole, non_blocking=True)
        elif rank() == 0:
            gathered[name] = whole.clone(memory_format=torch.contiguous_format) if own else whole.contiguous()
    if gathered and torch.cuda.is_available():
        torch.cuda.synchronize()
    return gathered


def shard(module: nn.Module, layers: Iterable[nn.Module], half: torch.dtype | None = None) -> None:
    """Give each worker 1/W of every parameter, and so of its gradient and of Adam's moments; alone do nothing.

    Parameters are replaced by others of the same names: make the optimizer afterwards. Only `module(...)` makes them
    whole for a while: a layer's while it computes, those of no layer (embeddings, heads) from forward to backward.

    P parameters cost 16 P bytes (weight, gradient, two moments in fp32) on every worker, sharded 16 P / W and 8 bytes
    for each parameter that is whole at the time. XLM-R XL (3.5 billion, half of its layers in the key encoder) on 8
    workers: 8 GB and 7 GB instead of 64 GB. A step of several micro-batches adds 4 P bytes: see `sum_shards`.

    `half`: what layers are gathered and computed in, their gradients summed in fp32 all the same; weights stay in fp32
    where they are kept, and so does everything of no layer.

    Source: PyTorch's `fully_shard` (FSDP2).
    """
    if world_size() == 1:
        return
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

    trained = any(parameter.requires_grad for parameter in module.parameters())
    parts = [*layers, module]
    for part in parts:
        kind = half if part is not module else None
        fully_shard(
            part,
            # What has no backward pass must let go after the forward pass.
            reshard_after_forward=None if trained else True,
            mp_policy=MixedPrecisionPolicy(param_dtype=kind, reduce_dtype=kind and torch.float32),
        )
    for part in parts:
        if not isinstance(part, FSDPModule):
            raise TypeError(f"fully_shard left {type(part).__name__} as it was")
        part.set_gradient_divide_factor(1.0)  # losses are divided by the targets of all workers already
        part.set_force_sum_reduction_for_comms(True)  # and gloo knows no other
    least_memory()  # all workers are here: a later first call need not be one of all of them


def sum_shards(module: nn.Module, last: bool) -> None:
    """Before the backward pass of a micro-batch: gradients of a sharded module are summed over workers once a step.

    Until its `last` micro-batch each worker adds up whole ones, 4 bytes for each of P parameters. Where these would
    take more than a quarter of a device's memory they are summed, and cut, after each micro-batch instead.
    """
    if is_sharded(module):
        whole = sum(4 * parameter.numel() for parameter in module.parameters())
        module.set_requires_gradient_sync(last or whole > least_memory() / 4)


@functools.cache
def least_memory() -> int:
    """Bytes of the smallest of all workers' devices, which may differ: what follows from it, all decide alike.

    The first call must be one of all workers.
    """
    found = torch.tensor(devices.memory(device()), device=device())
    dist.all_reduce(found, dist.ReduceOp.MIN)
    return int(found)


def is_sharded(module: nn.Module) -> TypeGuard[Any]:
    """Whether the workers hold parts of this module: then all of them must call it.

    Told by a method, as in `mixed.is_shard`.
    """
    return hasattr(module, "set_requires_gradient_sync")


@contextlib.contextmanager
def gathered(module: nn.Module) -> Iterator[None]:
    """What belongs to no layer is whole on every worker, so that a part of a sharded module can be called alone."""
    if is_sharded(module):
        module.unshard()
    yield
    if is_sharded(module):
        module.reshard()


def norm_of(gradients: Sequence[Tensor]) -> Tensor:
    """Euclidean norm of all gradients together; of shards, over all workers."""
    if not any(mixed.is_shard(gradient) for gradient in gradients):
        return nn.utils.get_total_norm(gradients)
    mine = nn.utils.get_total_norm([g.to_local() if mixed.is_shard(g) else g for g in gradients])
    return sum_over_workers(mine.square()).sqrt()
