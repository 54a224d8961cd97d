"""Sharding of a network over workers by PyTorch's `fully_shard` (FSDP2)."""

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from infoxlm_core.model import mixed_precision
from infoxlm_core.training import distributed


def shard(module: nn.Module, layers: Iterable[nn.Module], layer_dtype: torch.dtype | None = None) -> None:
    """Shard a network over W workers: each has 1/W of every parameter, gradient and moment. Do nothing if W is 1.

    Create the optimizer afterwards, because the parameters are replaced by others of the same names. The parameters of
    a layer are gathered while it computes, those outside of layers (embeddings, heads) from forward to backward. A
    worker needs 16 P / W bytes for P parameters (weight, gradient, two moments in fp32), 8 bytes for each gathered
    parameter, and 4 P bytes for gradients between micro-batches.

    Args:
        module: the network.
        layers: the layers of the network.
        layer_dtype: type in which layers are gathered and computed; weights and sums of gradients stay in fp32.
    """
    if distributed.world_size() == 1:
        return
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

    is_trained = any(parameter.requires_grad for parameter in module.parameters())
    for submodule in (*layers, module):  # layers first, so that the module shards only the other parameters
        dtype = None if submodule is module else layer_dtype
        fully_shard(
            submodule,
            reshard_after_forward=None if is_trained else True,  # release parameters early if no backward pass follows
            mp_policy=MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=dtype and torch.float32),
        )
        if not isinstance(submodule, FSDPModule):
            raise TypeError(f"fully_shard did not convert {type(submodule).__name__}")
        submodule.set_gradient_divide_factor(1.0)  # losses are divided by the targets of all workers already
        submodule.set_force_sum_reduction_for_comms(True)  # gloo has no other reduction


def sum_gradients_in_pass(module: nn.Module, is_last: bool) -> None:
    """Let a sharded module sum gradients over workers only in the last backward pass of a step. Call it before each."""
    if is_sharded(module):
        module.set_requires_gradient_sync(is_last)


def is_sharded(module: nn.Module) -> TypeGuard[Any]:
    """Return whether each worker holds a part of the module, so that all workers must call it.

    Tests for a method, as `mixed_precision.is_shard`, since importing the class takes a second.
    """
    return hasattr(module, "set_requires_gradient_sync")


@contextlib.contextmanager
def gathered(module: nn.Module) -> Iterator[None]:
    """Gather the parameters outside of layers, so that a part of a sharded module can be called alone."""
    if is_sharded(module):
        module.unshard()
    yield
    if is_sharded(module):
        module.reshard()


def compute_norm(gradients: Sequence[Tensor]) -> Tensor:
    """Return the Euclidean norm of all gradients together. The norm of shards is over all workers."""
    if not any(mixed_precision.is_shard(gradient) for gradient in gradients):
        return nn.utils.get_total_norm(gradients)
    local_gradients: list[Tensor] = []
    for gradient in gradients:
        local_gradients.append(gradient.to_local() if mixed_precision.is_shard(gradient) else gradient)
    local_norm = nn.utils.get_total_norm(local_gradients)
    return distributed.sum_over_workers(local_norm.square()).sqrt()
