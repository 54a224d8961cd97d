"""Sum gradients over workers during the backward pass, in an order that depends only on the model.

PyTorch's DistributedDataParallel regroups its buckets after the first backward pass, so that a resumed run would add in
another order than an uninterrupted one. It also averages, while our losses are divided before.
"""

import contextlib
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from infoxlm_core.model import mixed_precision
from infoxlm_core.training import distributed

BUCKET_BYTES = 2**25
"""Bytes of gradients that are sent together, about one layer of base: small buckets add latency, large buckets wait."""


@contextlib.contextmanager
def summed(parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """Wrap the last backward pass of a step: each gradient is then the sum over all workers.

    A bucket is sent once it and all buckets before it are complete, so that all workers send the same buckets in the
    same order. A parameter without gradient contributes zeros. Gradients of shards are already summed by FSDP2.
    """
    buckets = make_buckets([parameter for parameter in parameters if not mixed_precision.is_shard(parameter)])
    if distributed.world_size() == 1 or not buckets:
        yield
        return
    missing_counts = [len(bucket) for bucket in buckets]  # gradients that each bucket still waits for
    bucket_by_parameter: dict[Tensor, int] = {}
    for number, bucket in enumerate(buckets):
        bucket_by_parameter.update(dict.fromkeys(bucket, number))
    sent_buckets: list[tuple[Tensor, dist.Work | None]] = []

    def send_next_bucket() -> None:
        flat = _flatten_gradients(buckets[len(sent_buckets)])
        sent_buckets.append((flat, dist.all_reduce(flat, async_op=True)))

    def on_gradient(parameter: Tensor) -> None:
        missing_counts[bucket_by_parameter[parameter]] -= 1
        while len(sent_buckets) < len(buckets) and missing_counts[len(sent_buckets)] <= 0:
            send_next_bucket()

    hooks = [parameter.register_post_accumulate_grad_hook(on_gradient) for parameter in bucket_by_parameter]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
    while len(sent_buckets) < len(buckets):  # these buckets have parameters that were not part of the backward pass
        send_next_bucket()
    for bucket, (flat, work) in zip(buckets, sent_buckets, strict=True):
        if work is not None:
            work.wait()
        _set_gradients(bucket, flat)


def _set_gradients(parameters: Sequence[nn.Parameter], flat_gradients: Tensor) -> None:
    """Set the gradients of parameters to views of their gradients end to end."""
    gradients = _unflatten_dense_tensors(flat_gradients, parameters)
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient


def _flatten_gradients(parameters: Sequence[nn.Parameter]) -> Tensor:
    """Return the gradients of parameters end to end. A missing gradient counts as zeros."""
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
    return _flatten_dense_tensors(gradients)  # a single gradient is not copied


def make_buckets(parameters: Sequence[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Return parameters in groups of about `BUCKET_BYTES`, in reverse order, as a backward pass reaches them."""
    buckets: list[list[nn.Parameter]] = []
    free_bytes = 0  # of the last bucket
    for parameter in reversed(parameters):
        if not buckets or parameter.nbytes > free_bytes:
            buckets.append([])
            free_bytes = BUCKET_BYTES
        buckets[-1].append(parameter)
        free_bytes -= parameter.nbytes
    return buckets
