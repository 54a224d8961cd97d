"""What workers of one training do together. Without a process group every function is the one-worker case."""

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from infoxlm_core import manifests
from infoxlm_core.errors import InfoXLMError, RankDesync, StorageFull

T = TypeVar("T")


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def device() -> torch.device:
    """This worker's device: the visible GPU, else the CPU."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def sum_over_workers(values: Tensor) -> Tensor:
    """The sum of a tensor over all workers, on every worker."""
    if world_size() > 1:
        dist.all_reduce(values)
    return values


def sum_gradients(parameters: Sequence[nn.Parameter]) -> None:
    """Add the gradients of all workers in one flat all-reduce: in the same order before and after a restart."""
    if world_size() == 1:
        return
    gradients = [p.grad if p.grad is not None else torch.zeros_like(p) for p in parameters]
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    dist.all_reduce(flat)
    pieces = flat.split([gradient.numel() for gradient in gradients])
    for parameter, piece in zip(parameters, pieces, strict=True):
        parameter.grad = piece.view_as(parameter)


def gather_rows(rows: Tensor) -> Tensor:
    """Rows of all workers, in the order of their ranks: (B, …) -> (world size * B, …)."""
    if world_size() == 1:
        return rows
    gathered = [torch.empty_like(rows) for _ in range(world_size())]
    dist.all_gather(gathered, rows.contiguous())
    return torch.cat(gathered)


def from_first(value: T) -> T:
    """The first worker's value, on every worker; the others' is ignored."""
    if world_size() == 1:
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0, device=device())
    return box[0]


def check_equal(tensors: Mapping[str, Tensor], step: int) -> None:
    """Compare tensors that should be the same on all workers, by a checksum of their bits.

    Raises:
        RankDesync: they are not.
    """
    if world_size() == 1:
        return
    names = sorted(tensors)
    mine = torch.stack([_checksum(tensors[name].to(device())) for name in names])
    theirs = gather_rows(mine[None])  # (world size, tensors)
    for name, column in zip(names, theirs.T, strict=True):
        if wrong := [rank for rank, value in enumerate(column.tolist()) if value != column[0].item()]:
            raise RankDesync(f"step {step}: {name} differs on worker {wrong[0]}: run again from the last checkpoint")


def _checksum(tensor: Tensor) -> Tensor:
    """A 64-bit number that changes with any bit and with the order of the values."""
    bits = tensor.detach().contiguous().flatten().view(torch.uint8)
    bits = F.pad(bits, (0, -len(bits) % 4)).view(torch.int32).long()
    return (bits * (torch.arange(len(bits), device=bits.device) % 65_521 + 1)).sum()


def on_first(action: Callable[[], T]) -> T | None:
    """Let the first worker do something and wait for it; what it raises of ours, all workers raise.

    Returns:
        what `action` returned, on the first worker; None on the others.
    """
    result: T | None = None
    failure: InfoXLMError | None = None
    if rank() == 0:
        try:
            result = action()
        except InfoXLMError as error:
            failure = error
        except Exception as error:
            if not manifests.is_full(error):
                raise
            failure = StorageFull(f"no space left ({error}): free some, then run again")
    failure = from_first(failure)
    if failure is not None:
        raise failure
    return result


def tensors_from_first(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The first worker's tensors, on every worker, on its device."""
    if world_size() == 1:
        return tensors
    shapes = from_first({name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()})
    received = {}
    for name, (shape, dtype) in shapes.items():
        mine = tensors[name].to(device()) if rank() == 0 else torch.empty(shape, dtype=dtype, device=device())
        dist.broadcast(mine, src=0)
        received[name] = mine
    return received
