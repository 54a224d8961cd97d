"""Sum gradients over workers during the backward pass, in an order that depends only on the model.

PyTorch's DistributedDataParallel is not used for two reasons. It regroups its buckets after the first backward pass, so
that resumed and uninterrupted runs would add in different orders. It also averages gradients, but our losses are
already divided.
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
"""Bytes of gradients per all-reduce: about a layer of a base model. Small buckets add latency, and large buckets start
late."""


@contextlib.contextmanager
def summing_over_workers(parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """Sum gradients over all workers during the backward pass in this context.

    This must be the step's last pass, because the sums include the accumulated gradients of earlier passes. Missing
    gradients count as zeros. Shards are skipped, because FSDP2 sums their gradients.
    """
    buckets = make_buckets([parameter for parameter in parameters if not mixed_precision.is_shard(parameter)])
    if distributed.world_size() == 1 or not buckets:
        yield
        return
    reducer = _GradientReducer(buckets)
    hooks = [p.register_post_accumulate_grad_hook(reducer.count_gradient) for bucket in buckets for p in bucket]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
    reducer.finish()


class _GradientReducer:
    """Sums each bucket's gradients over all workers as soon as they are complete.

    Buckets are sent in order, so that all workers send the same bucket at the same time.
    """

    def __init__(self, buckets: Sequence[Sequence[nn.Parameter]]) -> None:
        self.buckets = buckets
        self.missing_counts = [len(bucket) for bucket in buckets]  # number of incomplete gradients in each bucket
        self.bucket_numbers: dict[Tensor, int] = {}
        for number, bucket in enumerate(buckets):
            self.bucket_numbers.update(dict.fromkeys(bucket, number))
        self.sent: list[tuple[Tensor, dist.Work | None]] = []  # flat gradients and request of each sent bucket

    def count_gradient(self, parameter: Tensor) -> None:
        """Count a parameter's gradient as complete, and send the buckets that are ready."""
        self.missing_counts[self.bucket_numbers[parameter]] -= 1
        # Buckets are sent in order, so a complete bucket may wait for an earlier one.
        while len(self.sent) < len(self.buckets) and self.missing_counts[len(self.sent)] <= 0:
            self._send_next_bucket()

    def finish(self) -> None:
        """Send the remaining buckets, wait for all sums, and set the parameters' gradients."""
        while len(self.sent) < len(self.buckets):  # buckets with parameters that the loss does not depend on
            self._send_next_bucket()
        for bucket, (flat_sum, request) in zip(self.buckets, self.sent, strict=True):
            if request is not None:
                request.wait()
            _set_gradients(bucket, flat_sum)

    def _send_next_bucket(self) -> None:
        """Start summing the next bucket over all workers."""
        flat_gradients = _flatten_gradients(self.buckets[len(self.sent)])
        self.sent.append((flat_gradients, dist.all_reduce(flat_gradients, async_op=True)))


def _set_gradients(parameters: Sequence[nn.Parameter], flat_gradients: Tensor) -> None:
    """Set the parameters' gradients to views of a flat tensor."""
    gradients = _unflatten_dense_tensors(flat_gradients, parameters)
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient


def _flatten_gradients(parameters: Sequence[nn.Parameter]) -> Tensor:
    """Concatenate the parameters' gradients in a flat tensor. Missing gradients count as zeros."""
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
    return _flatten_dense_tensors(gradients)  # does not copy a single gradient


def make_buckets(parameters: Sequence[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Group parameters in buckets of about `BUCKET_BYTES`, in reverse order.

    A backward pass completes gradients in about this order, so the first buckets can be sent early.
    """
    buckets: list[list[nn.Parameter]] = []
    free_bytes = 0  # space left in the last bucket
    for parameter in reversed(parameters):
        if not buckets or parameter.nbytes > free_bytes:
            buckets.append([])
            free_bytes = BUCKET_BYTES
        buckets[-1].append(parameter)
        free_bytes -= parameter.nbytes
    return buckets
