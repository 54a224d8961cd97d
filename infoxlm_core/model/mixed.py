"""Linear layers and norms in mixed precision: fp32 weights and bf16 rows. For fp32 rows they call PyTorch's functions.

In bf16 a matrix product reads a bf16 copy of its weights, which is refreshed once per optimizer step, and returns the
weights' gradient in fp32. The operations between two products are written so that `torch.compile` fuses them into one
kernel, which computes in fp32 and reads and writes bf16.
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
    """Return whether a tensor is a DTensor, of which each worker holds only a shard."""
    return hasattr(tensor, "full_tensor")  # not isinstance, since importing DTensor takes a second


class Linear(nn.Linear):
    """A linear layer for rows in the precision of its weights, or in bf16."""

    weight_copy: Tensor | None
    bias_copy: Tensor | None

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.register_buffer("weight_copy", None, persistent=False)
        self.register_buffer("bias_copy", None, persistent=False)
        self.copied_state: tuple[Any, ...] = ()  # what `_parameter_state` returned when the copies were made

    def forward(self, rows: Tensor) -> Tensor:
        if rows.dtype == self.weight.dtype:
            return F.linear(rows, self.weight, self.bias)
        weight_copy = self.weight_copy
        bias_copy = self.bias_copy
        if weight_copy is None or bias_copy is None:  # sharded weights, which are gathered for each pass
            weight_copy = self.weight.detach().to(rows.dtype)
            bias_copy = self.bias.detach().to(rows.dtype)
        output: Tensor = _LinearWithCopies.apply(rows, self.weight, self.bias, weight_copy, bias_copy)
        return output

    def refresh(self, dtype: torch.dtype) -> list[tuple[Tensor, Tensor]]:
        """Return the pairs (copy, weight) to update so that the copies have type `dtype`."""
        if is_shard(self.weight):
            self.weight_copy = None
            self.bias_copy = None
            return []
        state = self._parameter_state(dtype)
        if self.copied_state == state:
            return []
        self.copied_state = state
        weight_copy = self.weight_copy
        bias_copy = self.bias_copy
        if weight_copy is None or bias_copy is None or not self._can_hold_copy(weight_copy, dtype):
            weight_copy = torch.empty_like(self.weight, dtype=dtype)
            bias_copy = torch.empty_like(self.bias, dtype=dtype)
            self.weight_copy = weight_copy
            self.bias_copy = bias_copy
        return [(weight_copy, self.weight), (bias_copy, self.bias)]

    def _parameter_state(self, dtype: torch.dtype) -> tuple[Any, ...]:
        """Return a value that changes when the parameters or the type of their copies change."""
        weight_state = (self.weight.data_ptr(), self.weight._version)  # torch counts changes in place as versions
        bias_state = (self.bias.data_ptr(), self.bias._version)
        return (dtype, *weight_state, *bias_state)

    def _can_hold_copy(self, buffer: Tensor, dtype: torch.dtype) -> bool:
        return buffer.dtype == dtype and buffer.device == self.weight.device


class AddNorm(nn.LayerNorm):
    """LayerNorm of a sum, computed in fp32."""

    def forward(self, rows: Tensor, change: Tensor) -> Tensor:  # type: ignore[override]
        if rows.dtype in (torch.float32, torch.float64):
            return super().forward(rows + change)
        total = full_precision(rows) + full_precision(change)
        weight = full_precision(self.weight)  # gathered shards are in half precision
        bias = full_precision(self.bias)
        return F.layer_norm(total, self.normalized_shape, weight, bias, self.eps).to(rows.dtype)


def refresh(modules: Iterable[nn.Module], dtype: torch.dtype) -> None:
    """Convert all weights that changed since the last call to type `dtype`, in one kernel."""
    copies = []
    weights = []
    with torch.inference_mode(False), torch.no_grad():  # inference tensors cannot be used in training
        for module in modules:
            for child in module.modules():
                if isinstance(child, Linear):
                    for copy, weight in child.refresh(dtype):
                        copies.append(copy)
                        weights.append(weight)
        if copies:
            torch._foreach_copy_(copies, weights)


def matmul_fp32(left: Tensor, right: Tensor) -> Tensor:
    """Return left @ right in fp32, also for bf16 factors."""
    if left.is_cuda:
        return torch.mm(left, right, out_dtype=torch.float32)
    return left.float() @ right.float()


class _LinearWithCopies(torch.autograd.Function):
    """A linear map computed with the copies of the parameters, whose gradients go to the parameters."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor, weight_copy: Tensor, bias_copy: Tensor) -> Tensor:  # noqa: ARG004 - they receive the gradients
        ctx.save_for_backward(rows, weight_copy)
        return F.linear(rows, weight_copy, bias_copy)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight_copy = ctx.saved_tensors
        rows_gradient = gradient @ weight_copy
        weight_gradient = matmul_fp32(gradient.T, rows)
        bias_gradient = gradient.sum(0, dtype=torch.float32)
        return rows_gradient, weight_gradient, bias_gradient, None, None
