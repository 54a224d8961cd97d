"""Linear layers and LayerNorm for mixed precision: weights in fp32, activations in bf16.

In bf16, a matrix product reads a bf16 copy of its weights and returns the weights' gradient in fp32. The copy is
refreshed once per optimizer step. `torch.compile` fuses the operations between two products into one kernel that
computes in fp32, but reads and writes bf16. In fp32, the layers call PyTorch's functions.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import TypeIs

from infoxlm_core.model.objectives import full_precision

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def is_shard(tensor: Tensor) -> TypeIs["DTensor"]:
    """Return whether a tensor is a DTensor: each worker holds only a shard of its values."""
    return hasattr(tensor, "full_tensor")  # no isinstance, because importing DTensor takes a second


class Linear(nn.Linear):
    """A linear layer that accepts inputs in bf16 or in the precision of its weights."""

    weight_copy: Tensor | None
    bias_copy: Tensor | None

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.register_buffer("weight_copy", None, persistent=False)
        self.register_buffer("bias_copy", None, persistent=False)
        self.copied_state: tuple[Any, ...] = ()  # `parameter_state` when the copies were last refreshed

    def forward(self, hidden: Tensor) -> Tensor:
        """Compute the layer in the precision of its input, with converted copies of the parameters if necessary."""
        if hidden.dtype == self.weight.dtype:
            return F.linear(hidden, self.weight, self.bias)
        weight_copy = self.weight_copy
        bias_copy = self.bias_copy
        if weight_copy is None or bias_copy is None:  # sharded weights are gathered and converted in each pass
            weight_copy = self.weight.detach().to(hidden.dtype)
            bias_copy = self.bias.detach().to(hidden.dtype)
        output: Tensor = _LinearWithCopies.apply(hidden, self.weight, self.bias, weight_copy, bias_copy)
        return output

    def parameter_state(self, dtype: torch.dtype) -> tuple[Any, ...]:
        """Return a value that changes whenever a parameter or `dtype`, the copies' type, changes."""
        # A new tensor has a different address. A change in place increments the tensor's version.
        weight_state = (self.weight.data_ptr(), self.weight._version)
        bias_state = (self.bias.data_ptr(), self.bias._version)
        return (dtype, *weight_state, *bias_state)

    def allocate_copies(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return the tensors that hold the copies of weight and bias. Reallocate them if type or device has changed."""
        weight_copy = self.weight_copy
        bias_copy = self.bias_copy
        device = self.weight.device
        if weight_copy is None or bias_copy is None or weight_copy.dtype != dtype or weight_copy.device != device:
            self.weight_copy = weight_copy = torch.empty_like(self.weight, dtype=dtype)
            self.bias_copy = bias_copy = torch.empty_like(self.bias, dtype=dtype)
        return weight_copy, bias_copy

    def discard_copies(self) -> None:
        """Free the memory of the copies."""
        self.weight_copy = None
        self.bias_copy = None


class AddNorm(nn.LayerNorm):
    """A residual connection and LayerNorm, computed in fp32."""

    def forward(self, hidden: Tensor, sublayer_output: Tensor) -> Tensor:  # type: ignore[override]
        if hidden.dtype in (torch.float32, torch.float64):
            return super().forward(hidden + sublayer_output)
        total = full_precision(hidden) + full_precision(sublayer_output)
        weight = full_precision(self.weight)  # FSDP gathers shards in half precision
        bias = full_precision(self.bias)
        return F.layer_norm(total, self.normalized_shape, weight, bias, self.eps).to(hidden.dtype)


def refresh_copies(modules: Iterable[nn.Module], dtype: torch.dtype) -> None:
    """Refresh the `dtype` copies of all linear layers whose parameters have changed since the last call."""
    linear_layers = [child for module in modules for child in module.modules() if isinstance(child, Linear)]
    copies: list[Tensor] = []
    changed_parameters: list[Tensor] = []
    with torch.inference_mode(False), torch.no_grad():  # training cannot use inference tensors
        for layer in linear_layers:
            if is_shard(layer.weight):  # `forward` converts the gathered weight instead
                layer.discard_copies()
                continue
            state = layer.parameter_state(dtype)
            if layer.copied_state == state:
                continue
            layer.copied_state = state
            copies.extend(layer.allocate_copies(dtype))
            changed_parameters.extend([layer.weight, layer.bias])
        if copies:  # one kernel for all tensors, because each kernel launch takes time
            torch._foreach_copy_(copies, changed_parameters)


class _LinearWithCopies(torch.autograd.Function):
    """A linear layer that computes with bf16 copies of its parameters, but returns fp32 gradients for the originals."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,  # noqa: ARG004 - receives a gradient
        bias: Tensor,  # noqa: ARG004 - receives a gradient
        weight_copy: Tensor,
        bias_copy: Tensor,
    ) -> Tensor:
        """Return hidden @ weight.T + bias in half precision."""
        ctx.save_for_backward(hidden, weight_copy)
        return F.linear(hidden, weight_copy, bias_copy)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Return the input's gradient in half precision, and the parameters' gradients in fp32."""
        hidden, weight_copy = ctx.saved_tensors
        hidden_gradient = gradient @ weight_copy
        if gradient.is_cuda:
            weight_gradient = torch.mm(gradient.T, hidden, out_dtype=torch.float32)
        else:  # no CPU kernel returns fp32 from half-precision factors
            weight_gradient = gradient.T.float() @ hidden.float()
        bias_gradient = gradient.sum(0, dtype=torch.float32)
        return hidden_gradient, weight_gradient, bias_gradient, None, None
