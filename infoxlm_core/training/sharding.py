"""Shard a network over workers with PyTorch's `fully_shard` (FSDP2)."""

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from infoxlm_core.model import mixed_precision
from infoxlm_core.training import distributed


def shard(module: nn.Module, layers: Iterable[nn.Module], layer_dtype: torch.dtype | None = None) -> None:
    """Shard a network over W workers: each holds 1/W of every parameter, gradient and moment. Do nothing if W is 1.

    Create the optimizer afterwards, because sharding replaces the parameters. A layer's parameters are gathered while
    the layer computes. All other parameters (embeddings, heads) are gathered from the forward to the backward pass. For
    P parameters, a worker needs 16 P / W bytes (fp32 weights, gradients and two moments) and 8 bytes per gathered
    parameter. Before a step's last micro-batch, gradients are not sharded and need 4 P more bytes.

    Args:
        module: the network.
        layers: the network's layers.
        layer_dtype: data type for gathering and computing layers. Weights and gradient sums stay in fp32.
    """
    if distributed.world_size() == 1:
        return
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

    is_trained = any(parameter.requires_grad for parameter in module.parameters())
    for submodule in (*layers, module):  # layers first, so that the module shards only the remaining parameters
        dtype = None if submodule is module else layer_dtype
        fully_shard(
            submodule,
            reshard_after_forward=None if is_trained else True,  # free parameters early if no backward pass follows
            # Sum gradients in fp32 even if the layers compute in a lower precision.
            mp_policy=MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32 if dtype else None),
        )
        if not isinstance(submodule, FSDPModule):
            raise TypeError(f"fully_shard did not convert {type(submodule).__name__}")
        submodule.set_gradient_divide_factor(1.0)  # losses are already divided by the targets of all workers
        submodule.set_force_sum_reduction_for_comms(True)  # gloo supports no averaging


def sum_gradients_in_pass(module: nn.Module, is_last: bool) -> None:
    """Set whether the next backward pass of a sharded module sums gradients: only in a step's last pass."""
    if is_sharded(module):
        module.set_requires_gradient_sync(is_last)


def is_sharded(module: nn.Module) -> TypeGuard[Any]:
    """Return whether each worker holds only a part of the module, so that all workers must call the module.

    Like `mixed_precision.is_shard`, this looks for a method, because importing the class takes a second.
    """
    return hasattr(module, "set_requires_gradient_sync")


@contextlib.contextmanager
def gathered(module: nn.Module) -> Iterator[None]:
    """Gather the parameters outside of layers, so that parts of a sharded module can be called directly."""
    if is_sharded(module):
        module.unshard()
    yield
    if is_sharded(module):
        module.reshard()


def compute_norm(gradients: Sequence[Tensor]) -> Tensor:
    """Return the Euclidean norm of all gradients. Shards on all workers are included."""
    if not any(mixed_precision.is_shard(gradient) for gradient in gradients):
        return nn.utils.get_total_norm(gradients)
    local_gradients: list[Tensor] = []
    for gradient in gradients:
        local_gradients.append(gradient.to_local() if mixed_precision.is_shard(gradient) else gradient)
    local_norm = nn.utils.get_total_norm(local_gradients)  # over this worker's parts of the gradients
    return distributed.sum_over_workers(local_norm.square()).sqrt()
