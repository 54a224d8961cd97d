"""Cross-entropy against a large vocabulary with one buffer for the logits instead of four.

The logits of 250,002 words are the largest tensor of a step. They are computed in fp32, one chunk of rows at a time,
and then turned into the factors of the gradients: in place, or in a half-precision copy of the chunk. Loss and
gradients equal those of `F.cross_entropy(F.linear(hidden, weight, bias), targets)`.

In half precision `totals` and `derivatives` are compiled if layers are. They read the logits twice and write them once
more, in bf16. Gradients differ by 0.06 % from fp64. Two packages were considered in November 2026:

    cut-cross-entropy 25.1.1   has no bias; computes the logits again in the backward pass, or rounds them to bf16
                               (gradients differ by 0.45 % from fp64)
    Liger 0.8.5                rounds logits to bf16 before the softmax; splits the base model's 4,915 rows into 308
                               chunks, each of which adds to the whole gradient of the weights
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

ROWS = 4096
"""Rows of a chunk of logits. Small chunks cost time, since each adds to the weights' gradient; large ones memory."""
_ALIGNED = 64  # the buffer is wider than the logits, so that rows are aligned for a vocabulary of 250,002


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor,
    targets: Tensor,
    scale: Tensor,
    rows: int = ROWS,
    compiler: str = "",
) -> tuple[Tensor, Tensor]:
    """Return the scaled sum of cross-entropies, to differentiate, and the cross-entropies (N,) in nats.

    The forward pass computes the gradients, since the scale is known. Results are fp32, or fp64 for fp64 inputs.
    Autocast only rounds the factors of matrix products: `hidden`, `weight`, and softmax - onehot.

    Args:
        hidden: (N, d); the sum is 0 if N is 0.
        weight: (V, d) of the output layer.
        bias: (V,) of the output layer.
        targets: (N,) target ids.
        scale: (N,) factor of each row in the sum.
        rows: number of rows in a chunk of logits.
        compiler: compiler of the functions between matrix products, as in `Encoder`.
    """
    device = hidden.device.type
    if torch.is_autocast_enabled(device):
        kind = torch.get_autocast_dtype(device)
        with torch.autocast(device, enabled=False):
            return _LinearCrossEntropy.apply(hidden, weight, bias, targets, scale, rows, kind, compiler)
    return _LinearCrossEntropy.apply(hidden, weight, bias, targets, scale, rows, hidden.dtype, compiler)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor,
        targets: Tensor,
        scale: Tensor,
        rows: int,
        kind: torch.dtype,
        compiler: str,
    ) -> tuple[Tensor, Tensor]:
        vocabulary, wanted = len(weight), any(ctx.needs_input_grad)
        full = torch.promote_types(kind, torch.float32)
        half = kind != full
        if half and len(hidden):  # equal chunks: a small last one costs as much
            rows = -(-len(hidden) // -(-len(hidden) // rows))
        states_of_all, table = hidden.to(kind), weight.to(kind)
        losses = hidden.new_empty(len(hidden), dtype=full)
        width = -(-vocabulary // _ALIGNED) * _ALIGNED
        buffer = hidden.new_empty(min(rows, len(hidden)), width, dtype=full)
        if wanted:
            d_hidden = torch.empty_like(hidden)
            d_weight = (torch.zeros_like if len(hidden) > rows or not len(hidden) else torch.empty_like)(
                weight, dtype=full
            )
            d_bias = torch.zeros_like(bias, dtype=full)
        for start in range(0, len(hidden), rows):
            part, first = slice(start, start + rows), len(hidden) <= rows
            states, answers = states_of_all[part], targets[part, None]
            logits = _multiply(states, table.T, out=buffer[: len(states), :vocabulary])
            if half:
                others, right = _by_rows(totals, compiler)(logits, bias, targets[part])
                everything = torch.logaddexp(others, right)
                losses[part] = everything - right
                if wanted:
                    scales = scale[part].to(full)
                    d_logits = _by_rows(derivatives, compiler)(
                        logits, bias, targets[part], others, everything, scales, states
                    )
                    _multiply(d_logits, table, out=d_hidden[part])
                    _add_product(d_weight, d_logits.T, states, first)
                    _add_product(d_bias[:, None], d_logits.T, torch.ones_like(states[:, :1]), first=False)
                continue
            logits = logits.add_(bias)
            right = logits.gather(1, answers).squeeze(1)
            top = logits.amax(dim=1)
            odds = logits.sub_(top[:, None]).exp_()  # in place: the logits are overwritten
            total = odds.sum(dim=1)
            losses[part] = total.log() + top - right
            if not wanted:
                continue
            # d loss / d logits = scale * (odds / total - onehot). The factor is multiplied with the smaller matrix.
            factor, scales = (scale[part] / total).to(full), scale[part].to(full)
            d_hidden[part] = (odds @ table) * factor[:, None] - table[targets[part]] * scales[:, None]
            _add_product(d_weight, odds.T, states * factor[:, None], first)
            d_weight.index_add_(0, targets[part], states * -scales[:, None])
            d_bias += odds.T @ factor
            d_bias.index_add_(0, targets[part], -scales)
        if wanted:  # not save_for_backward: it would copy them
            ctx.gradients = [d_hidden, d_weight.to(weight.dtype), d_bias.to(bias.dtype)]
        ctx.mark_non_differentiable(losses)
        return (losses * scale).sum(), losses

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Any, ...]:
        gradients, ctx.gradients = ctx.gradients, None
        if gradient.is_cuda or gradient != 1:
            gradients = [value.mul_(gradient) for value in gradients]
        return *gradients, None, None, None, None, None


def totals(logits: Tensor, bias: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return the log-sum-exp over all words except the target, and the logit of the target, (R,) each.

    `logits` (R, V) do not contain the bias.
    """
    words = torch.arange(logits.shape[1], device=logits.device)
    others = torch.where(words == targets[:, None], -torch.inf, logits + bias)
    top = others.amax(dim=1)
    total = (others - top[:, None]).exp().sum(dim=1)
    return total.log() + top, logits.gather(1, targets[:, None]).squeeze(1) + bias[targets]


def derivatives(
    logits: Tensor, bias: Tensor, targets: Tensor, others: Tensor, everything: Tensor, scales: Tensor, states: Tensor
) -> Tensor:
    """Return scale * (softmax - onehot), (R, V) with aligned rows, rounded once to the precision of `states`.

    At the target, softmax - 1 is computed as minus the probability of all `others`, which stays exact near softmax 1.
    """
    vocabulary = logits.shape[1]
    words = torch.arange(vocabulary, device=logits.device)
    odds = (logits + bias - everything[:, None]).exp()
    rest = -(others - everything).exp()
    gradient = torch.where(words == targets[:, None], rest[:, None], odds) * scales[:, None]
    return F.pad(gradient.to(states.dtype), (0, -vocabulary % _ALIGNED))[:, :vocabulary]


@cache
def _by_rows(function: Callable[..., Any], compiler: str) -> Callable[..., Any]:
    """Return `totals` or `derivatives` compiled, or applied to 256 rows at a time to limit memory."""
    if compiler:
        return torch.compile(function, backend=compiler, fullgraph=True)

    def in_parts(logits: Tensor, bias: Tensor, *by_row: Tensor) -> Any:
        pieces = zip(*(values.split(256) for values in (logits, *by_row)), strict=True)
        parts = (function(rows[0], bias, *rows[1:]) for rows in pieces)
        if function is not derivatives:
            return tuple(map(torch.cat, zip(*parts, strict=True)))
        number, vocabulary = logits.shape  # torch.cat would lose the alignment
        whole = by_row[-1].new_empty(number, vocabulary + -vocabulary % _ALIGNED)[:, :vocabulary]
        for target, part in zip(whole.split(256), parts, strict=True):
            target.copy_(part)
        return whole

    return in_parts


def _multiply(left: Tensor, right: Tensor, out: Tensor) -> Tensor:
    """Set out = left @ right in the precision of `out`, which may exceed that of the factors."""
    if left.dtype == out.dtype:
        return torch.mm(left, right, out=out)
    if left.is_cuda:
        return torch.mm(left, right, out_dtype=out.dtype, out=out)
    return torch.mm(left.to(out.dtype), right.to(out.dtype), out=out)  # as GPUs do


def _add_product(total: Tensor, left: Tensor, right: Tensor, first: bool) -> None:
    """Set total += left @ right, or total = left @ right if `first`, in the precision of `total`."""
    if left.dtype == total.dtype:
        torch.addmm(total, left, right, beta=0 if first else 1, out=total)
    elif first:
        _multiply(left, right, out=total)
    elif left.is_cuda:
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    else:
        total += _multiply(left, right, out=torch.empty_like(total))
