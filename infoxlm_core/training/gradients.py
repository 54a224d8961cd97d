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
def summing_over_workers(parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """Sum each gradient over all workers while the last backward pass of a step runs in this context.

    A parameter without gradient contributes zeros. Gradients of shards are already summed by FSDP2.
    """
    buckets = make_buckets([parameter for parameter in parameters if not mixed_precision.is_shard(parameter)])
    if distributed.world_size() == 1 or not buckets:
        yield
        return
    reducer = _GradientReducer(buckets)
    hooks = []
    for bucket in buckets:
        for parameter in bucket:
            hooks.append(parameter.register_post_accumulate_grad_hook(reducer.count_gradient))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
    reducer.finish()


class _GradientReducer:
    """Sums the gradients of buckets over all workers, each bucket as soon as its gradients are complete.

    A bucket also waits for all buckets before it, so that all workers send the same buckets in the same order.
    """

    def __init__(self, buckets: Sequence[Sequence[nn.Parameter]]) -> None:
        self.buckets = buckets
        self.missing_counts = [len(bucket) for bucket in buckets]  # gradients that each bucket still waits for
        self.bucket_numbers: dict[Tensor, int] = {}
        for number, bucket in enumerate(buckets):
            self.bucket_numbers.update(dict.fromkeys(bucket, number))
        self.flat_sums: list[Tensor] = []  # of the buckets that were sent
        self.requests: list[dist.Work | None] = []

    def count_gradient(self, parameter: Tensor) -> None:
        """Note that the gradient of a parameter is complete, and send the buckets that waited for it."""
        self.missing_counts[self.bucket_numbers[parameter]] -= 1
        while len(self.requests) < len(self.buckets) and self.missing_counts[len(self.requests)] <= 0:
            self._send_next_bucket()

    def finish(self) -> None:
        """Send the remaining buckets, wait for all sums, and set the gradients of the parameters."""
        while len(self.requests) < len(self.buckets):  # these have parameters that were not in the backward pass
            self._send_next_bucket()
        for bucket, flat_sum, request in zip(self.buckets, self.flat_sums, self.requests, strict=True):
            if request is not None:
                request.wait()
            _set_gradients(bucket, flat_sum)

    def _send_next_bucket(self) -> None:
        """Start to sum the next bucket over all workers."""
        flat_gradients = _flatten_gradients(self.buckets[len(self.requests)])
        self.flat_sums.append(flat_gradients)
        self.requests.append(dist.all_reduce(flat_gradients, async_op=True))


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
