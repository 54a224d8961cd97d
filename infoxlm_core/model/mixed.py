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
    """Return whether each worker holds only a part of a tensor.

    It looks for a method of DTensor, since importing that class takes a second.
    """
    return hasattr(tensor, "full_tensor")


class Linear(nn.Linear):
    """A linear layer for rows in the precision of its weights, or in bf16."""

    weight_copy: Tensor | None
    bias_copy: Tensor | None

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.register_buffer("weight_copy", None, persistent=False)
        self.register_buffer("bias_copy", None, persistent=False)
        self.copied: tuple[Any, ...] = ()  # dtype of the copies; addresses and versions of the copied weights

    def forward(self, rows: Tensor) -> Tensor:
        if rows.dtype == self.weight.dtype:
            return F.linear(rows, self.weight, self.bias)
        weight, bias = self.weight_copy, self.bias_copy
        if weight is None or bias is None:  # gathered shards have no copies
            weight, bias = self.weight.detach().to(rows.dtype), self.bias.detach().to(rows.dtype)
        output: Tensor = _Product.apply(rows, self.weight, self.bias, weight, bias)
        return output

    def refresh(self, dtype: torch.dtype) -> list[tuple[Tensor, Tensor]]:
        """Return the pairs (copy, weight) to update so that the copies have type `dtype`; none if they are current."""
        if is_shard(self.weight):
            self.weight_copy = self.bias_copy = None
            return []
        state = (dtype, *((part.data_ptr(), part._version) for part in (self.weight, self.bias)))
        if self.copied == state:
            return []
        self.copied = state
        weight, bias = self.weight_copy, self.bias_copy
        if weight is None or bias is None or weight.dtype != dtype or weight.device != self.weight.device:
            weight, bias = torch.empty_like(self.weight, dtype=dtype), torch.empty_like(self.bias, dtype=dtype)
            self.weight_copy, self.bias_copy = weight, bias
        return [(weight, self.weight), (bias, self.bias)]


class AddNorm(nn.LayerNorm):
    """LayerNorm of a sum, computed in fp32."""

    def forward(self, rows: Tensor, change: Tensor) -> Tensor:  # type: ignore[override]
        if rows.dtype in (torch.float32, torch.float64):
            return super().forward(rows + change)
        summed = full_precision(rows) + full_precision(change)
        weight, bias = full_precision(self.weight), full_precision(self.bias)  # gathered shards are in half precision
        return F.layer_norm(summed, self.normalized_shape, weight, bias, self.eps).to(rows.dtype)


def refresh(modules: Iterable[nn.Module], dtype: torch.dtype) -> None:
    """Convert all weights that changed since the last call to type `dtype`, in one kernel."""
    linears = [part for module in modules for part in module.modules() if isinstance(part, Linear)]
    with torch.inference_mode(False), torch.no_grad():  # inference tensors cannot be used in training
        pairs = [pair for linear in linears for pair in linear.refresh(dtype)]
        if pairs:
            torch._foreach_copy_([copy for copy, _ in pairs], [weight for _, weight in pairs])


def product(left: Tensor, right: Tensor) -> Tensor:
    """Return left @ right in fp32, even if the factors are bf16."""
    if left.is_cuda:
        return torch.mm(left, right, out_dtype=torch.float32)
    return left.float() @ right.float()


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor, weight_copy: Tensor, bias_copy: Tensor) -> Tensor:  # noqa: ARG004 - they receive the gradients
        ctx.save_for_backward(rows, weight_copy)
        return F.linear(rows, weight_copy, bias_copy)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight = ctx.saved_tensors
        return gradient @ weight, product(gradient.T, rows), gradient.sum(0, dtype=torch.float32), None, None
