"""Linear maps and norms of mixed precision: weights in fp32, rows in bf16; rows in fp32 go through PyTorch's own.

In bf16 a product reads a copy of its weights that is made once an optimizer step, and its weights' gradient comes out
in fp32 as it was summed. All else is written for `torch.compile`: what stands between two products becomes one kernel,
which computes in fp32 and reads and writes bf16.
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
    """Whether a worker holds a part of it alone.

    Told by a method: to import the class takes a second, which every process would pay that shards nothing.
    """
    return hasattr(tensor, "full_tensor")


class Linear(nn.Linear):
    """A linear map of rows in its own precision, or in bf16."""

    weight_copy: Tensor | None
    bias_copy: Tensor | None

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.register_buffer("weight_copy", None, persistent=False)
        self.register_buffer("bias_copy", None, persistent=False)
        self.copied: tuple[Any, ...] = ()  # what the copies are of

    def forward(self, rows: Tensor) -> Tensor:
        if rows.dtype == self.weight.dtype:
            return F.linear(rows, self.weight, self.bias)
        weight, bias = self.weight_copy, self.bias_copy
        if weight is None or bias is None:  # shards, which are whole only now
            weight, bias = self.weight.detach().to(rows.dtype), self.bias.detach().to(rows.dtype)
        found: Tensor = _Product.apply(rows, self.weight, self.bias, weight, bias)
        return found

    def refresh(self, kind: torch.dtype) -> list[tuple[Tensor, Tensor]]:
        """Copies in precision `kind`, with what has to be copied into them: nothing if they are of these weights."""
        if is_shard(self.weight):
            self.weight_copy = self.bias_copy = None
            return []
        state = (kind, *((part.data_ptr(), part._version) for part in (self.weight, self.bias)))
        if self.copied == state:
            return []
        self.copied = state
        weight, bias = self.weight_copy, self.bias_copy
        if weight is None or bias is None or weight.dtype != kind or weight.device != self.weight.device:
            weight, bias = torch.empty_like(self.weight, dtype=kind), torch.empty_like(self.bias, dtype=kind)
            self.weight_copy, self.bias_copy = weight, bias
        return [(weight, self.weight), (bias, self.bias)]


class AddNorm(nn.LayerNorm):
    """LayerNorm of a sum, computed in fp32 whatever its terms are."""

    def forward(self, rows: Tensor, change: Tensor) -> Tensor:  # type: ignore[override]
        if rows.dtype in (torch.float32, torch.float64):
            return super().forward(rows + change)
        summed = full_precision(rows) + full_precision(change)
        weight, bias = full_precision(self.weight), full_precision(self.bias)  # shards are whole in half precision
        return F.layer_norm(summed, self.normalized_shape, weight, bias, self.eps).to(rows.dtype)


def refresh(modules: Iterable[nn.Module], kind: torch.dtype) -> None:
    """Copy the weights that have changed since they were copied last into precision `kind`, all at once."""
    linears = [part for module in modules for part in module.modules() if isinstance(part, Linear)]
    with torch.inference_mode(False), torch.no_grad():  # copies of inference mode could not be trained with
        pairs = [pair for linear in linears for pair in linear.refresh(kind)]
        if pairs:
            torch._foreach_copy_([copy for copy, _ in pairs], [weight for _, weight in pairs])


def product(left: Tensor, right: Tensor) -> Tensor:
    """left @ right, whose sums are in fp32, in fp32."""
    if left.is_cuda:
        return torch.mm(left, right, out_dtype=torch.float32)
    return left.float() @ right.float()


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor, weight_copy: Tensor, bias_copy: Tensor) -> Tensor:  # noqa: ARG004 - gradients go to them
        ctx.save_for_backward(rows, weight_copy)
        return F.linear(rows, weight_copy, bias_copy)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight = ctx.saved_tensors
        return gradient @ weight, product(gradient.T, rows), gradient.sum(0, dtype=torch.float32), None, None
