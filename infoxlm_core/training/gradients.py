"""Gradients of all workers added up while the backward pass makes others, in an order that the model alone decides.

PyTorch's DistributedDataParallel regroups its buckets after the first backward pass, so that a resumed run would add in
another order than one that was not interrupted; and it averages, where our losses are divided already.
"""

import contextlib
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from infoxlm_core.model import mixed
from infoxlm_core.training import distributed

BUCKET_BYTES = 2**25
"""Gradients that are sent together: a layer of base. Fewer cost time to begin with, more wait longer to be complete."""


@contextlib.contextmanager
def summed(parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """Around the last backward pass of a step: after it each gradient is the sum over all workers.

    A bucket is sent as soon as it and all before it are complete: all workers send the same in the same order, before
    and after a restart. Who has no gradient brings zeros. Gradients of shards are left alone: they are sums already.
    """
    waiting = buckets([p for p in parameters if not mixed.is_shard(p)])
    if distributed.world_size() == 1 or not waiting:
        yield
        return
    missing = [len(bucket) for bucket in waiting]
    number_of: dict[Tensor, int] = {parameter: number for number, bucket in enumerate(waiting) for parameter in bucket}
    sent: list[tuple[Tensor, dist.Work | None]] = []

    def made(parameter: Tensor) -> None:
        missing[number_of[parameter]] -= 1
        send_complete()

    def send_complete() -> None:
        while len(sent) < len(waiting) and not missing[len(sent)]:
            parts = [torch.zeros_like(p) if p.grad is None else p.grad for p in waiting[len(sent)]]
            flat = parts[0].flatten() if len(parts) == 1 else torch.cat([part.flatten() for part in parts])
            sent.append((flat, dist.all_reduce(flat, async_op=True)))

    hooks = [parameter.register_post_accumulate_grad_hook(made) for parameter in number_of]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
    missing = [0] * len(waiting)  # what this backward pass has not touched is complete now
    send_complete()
    for bucket, (flat, work) in zip(waiting, sent, strict=True):
        if work is not None:
            work.wait()
        for parameter, piece in zip(bucket, flat.split([p.numel() for p in bucket]), strict=True):
            parameter.grad = piece.view_as(parameter)


def buckets(parameters: Sequence[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Parameters in groups of about `BUCKET_BYTES`, the last ones first, as a backward pass reaches them."""
    found: list[list[nn.Parameter]] = []
    room = 0
    for parameter in reversed(parameters):
        if not found or parameter.nbytes > room:
            found.append([])
            room = BUCKET_BYTES
        found[-1].append(parameter)
        room -= parameter.nbytes
    return found
