"""Cross-entropy against a large vocabulary with one buffer for the logits instead of four.

Logits of 250,002 words are the largest thing in a step. Here they are written once, in fp32, and turned into what the
gradients need, rows in chunks: in place, or in half precision into one copy of a chunk. The loss and its gradients are
those of `F.cross_entropy(F.linear(hidden, weight, bias), targets)`.
"""

from typing import Any

import torch
from torch import Tensor

ROWS = 4096
"""Rows of logits held at once: fewer cost time (each chunk adds into the weight's gradient), more cost memory."""
_ALIGNED = 64  # a vocabulary of 250,002 leaves rows unaligned: the buffer is a little wider than the logits


def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, bias: Tensor, targets: Tensor, scale: Tensor, rows: int = ROWS
) -> tuple[Tensor, Tensor]:
    """Scaled sum of the cross-entropies, to differentiate; and each of them (N,), in nats and without gradient.

    `weight` (V, d) and `bias` (V,) are of the output layer, `scale` (N,) is the factor of each row in the sum: known
    before, which is why gradients can be made at once. Of `hidden` (N, d) so many `rows` become logits at once; if N is
    0, so is the sum. Results are fp32 (fp64 for fp64 inputs). Under autocast only the factors of products are of its
    type: `hidden`, `weight`, and softmax - onehot, which is subtracted in fp32 and rounded once.
    """
    device = hidden.device.type
    if torch.is_autocast_enabled(device):
        kind = torch.get_autocast_dtype(device)
        with torch.autocast(device, enabled=False):
            return _LinearCrossEntropy.apply(hidden, weight, bias, targets, scale, rows, kind)
    return _LinearCrossEntropy.apply(hidden, weight, bias, targets, scale, rows, hidden.dtype)


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
    ) -> tuple[Tensor, Tensor]:
        vocabulary, wanted = len(weight), any(ctx.needs_input_grad)
        full = torch.promote_types(kind, torch.float32)
        half = kind != full
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
            halved = torch.empty_like(buffer, dtype=kind) if half else buffer
        for start in range(0, len(hidden), rows):
            part = slice(start, start + rows)
            states, answers = states_of_all[part], targets[part, None]
            logits = _multiply(states, table.T, out=buffer[: len(states), :vocabulary]).add_(bias)
            right = logits.gather(1, answers).squeeze(1)
            top = logits.amax(dim=1)
            odds = logits.sub_(top[:, None]).exp_()  # in place: the logits are overwritten
            if half:  # the target's apart: softmax - 1 there is minus the rest, however near to 1 the softmax is
                target_odds = odds.gather(1, answers).squeeze(1)
                rest = odds.scatter_(1, answers, 0.0).sum(dim=1)
                total = rest + target_odds
            else:
                total = odds.sum(dim=1)
            losses[part] = total.log() + top - right
            if not wanted:
                continue
            # d loss / d logits = scale * (odds / total - onehot)
            factor, first = (scale[part] / total).to(full), len(hidden) <= rows
            if half:
                d_logits = torch.mul(odds, factor[:, None], out=halved[: len(states), :vocabulary])
                d_targets = -rest * factor
                d_logits.scatter_(1, answers, d_targets.to(kind)[:, None])
                _multiply(d_logits, table, out=d_hidden[part])
                _add_product(d_weight, d_logits.T, states, first)
                d_bias += odds.T @ factor
                d_bias.index_add_(0, targets[part], d_targets)
            else:  # one pass less: the factor goes to the smaller side of the products
                scales = scale[part].to(full)
                d_hidden[part] = (odds @ table) * factor[:, None] - table[targets[part]] * scales[:, None]
                _add_product(d_weight, odds.T, states * factor[:, None], first)
                d_weight.index_add_(0, targets[part], states * -scales[:, None])
                d_bias += odds.T @ factor
                d_bias.index_add_(0, targets[part], -scales)
        if wanted:  # not by save_for_backward: autograd would have to copy what somebody else still holds
            ctx.gradients = [d_hidden, d_weight.to(weight.dtype), d_bias.to(bias.dtype)]
        ctx.mark_non_differentiable(losses)
        return (losses * scale).sum(), losses

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Any, ...]:
        gradients, ctx.gradients = ctx.gradients, None
        if gradient.is_cuda or gradient != 1:
            gradients = [value.mul_(gradient) for value in gradients]
        return *gradients, None, None, None, None


def _multiply(left: Tensor, right: Tensor, out: Tensor) -> Tensor:
    """out = left @ right, in out's precision also where the factors have less."""
    if left.dtype == out.dtype:
        return torch.mm(left, right, out=out)
    if left.is_cuda:
        return torch.mm(left, right, out_dtype=out.dtype, out=out)
    return torch.mm(left.to(out.dtype), right.to(out.dtype), out=out)  # as GPUs do: sums lose nothing


def _add_product(total: Tensor, left: Tensor, right: Tensor, first: bool) -> None:
    """total += left @ right (total = left @ right at first), the sum in full precision."""
    if left.dtype == total.dtype:
        torch.addmm(total, left, right, beta=0 if first else 1, out=total)
    elif first:
        _multiply(left, right, out=total)
    else:
        total += _multiply(left, right, out=torch.empty_like(total))
