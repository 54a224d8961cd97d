"""The output layer and cross-entropy of a large vocabulary, fused to save memory.

The logits of 250,002 words are the largest tensor of a training step. This module computes them in fp32, one chunk of
rows at a time, and turns each chunk into gradients before it computes the next one. Loss and gradients equal those of
`F.cross_entropy(F.linear(hidden, weight, bias), targets)`.

In half precision, `split_logsumexp` and `logit_gradients` are compiled if the layers are. They read the logits twice
and write them once, in bf16. Gradients differ by 0.06 % from fp64. Two packages were considered in November 2026:

    cut-cross-entropy 25.1.1   has no bias; computes the logits again in the backward pass, or rounds them to bf16
                               (gradients differ by 0.45 % from fp64)
    Liger 0.8.5                rounds logits to bf16 before the softmax; splits the 4,915 rows of the base model into
                               308 chunks, each of which adds to the complete gradient of the weights
"""

import math
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

ROWS = 4096
"""Rows in a chunk of logits. Small chunks take time, as each adds to the gradient of the weights; large ones memory."""
_BLOCK_ROWS = 256  # rows that are processed at once between matrix products if nothing is compiled
_ALIGNMENT = 64  # rows of logits start at multiples of 64 values, since kernels are slow for rows of 250,002


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

    The forward pass computes the gradients too, because the scale is known. Results are in fp32, or in fp64 for fp64
    inputs. Autocast only rounds the factors of matrix products: `hidden`, `weight` and the gradients of the logits.

    Args:
        hidden: (N, d) inputs of the output layer; the sum is 0 if N is 0.
        weight: (V, d) weights of the output layer.
        bias: (V,) bias of the output layer.
        targets: (N,) target ids.
        scale: (N,) factor of each row in the sum.
        rows: number of rows in a chunk of logits.
        compiler: backend of torch.compile for the functions between matrix products; "": they are not compiled.
    """
    device_type = hidden.device.type
    matmul_dtype = hidden.dtype
    if torch.is_autocast_enabled(device_type):
        matmul_dtype = torch.get_autocast_dtype(device_type)
    with torch.autocast(device_type, enabled=False):
        return _LinearCrossEntropy.apply(hidden, weight, bias, targets, scale, rows, matmul_dtype, compiler)


@dataclass
class _Chunk:
    """R rows of the inputs and their logits."""

    logits: Tensor  # (R, V) without bias, in fp32 or fp64; may be overwritten
    states: Tensor  # (R, d) in the precision of matrix products
    targets: Tensor  # (R,)
    scale: Tensor  # (R,)


@dataclass
class _Gradients:
    """The gradients of the scaled sum, to which each chunk contributes."""

    hidden: Tensor  # (N, d)
    weight: Tensor  # (V, d)
    bias: Tensor  # (V,)
    has_one_chunk: bool  # the only chunk overwrites `weight`, which is uninitialised


class _LinearCrossEntropy(torch.autograd.Function):
    """The function of `linear_cross_entropy`, whose forward pass stores the gradients for the backward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor,
        targets: Tensor,
        scale: Tensor,
        chunk_rows: int,
        matmul_dtype: torch.dtype,
        compiler: str,
    ) -> tuple[Tensor, Tensor]:
        row_count = len(hidden)
        vocab_size = len(weight)
        accumulation_dtype = torch.promote_types(matmul_dtype, torch.float32)
        is_half_precision = matmul_dtype != accumulation_dtype
        if is_half_precision and row_count:
            # Make equal chunks, because a small last chunk takes almost as long as a full one.
            chunk_count = math.ceil(row_count / chunk_rows)
            chunk_rows = math.ceil(row_count / chunk_count)

        states = hidden.to(matmul_dtype)
        matmul_weight = weight.to(matmul_dtype)
        losses = hidden.new_empty(row_count, dtype=accumulation_dtype)
        buffer = hidden.new_empty(min(chunk_rows, row_count), _align(vocab_size), dtype=accumulation_dtype)
        gradients = None
        if any(ctx.needs_input_grad):
            gradients = _allocate_gradients(hidden, weight, bias, chunk_rows, accumulation_dtype)

        for start in range(0, row_count, chunk_rows):
            rows = slice(start, start + chunk_rows)
            logits = buffer[: len(states[rows]), :vocab_size]  # (R, V)
            _matmul(states[rows], matmul_weight.T, out=logits)
            chunk = _Chunk(logits, states[rows], targets[rows], scale[rows])
            if is_half_precision:
                losses[rows] = _process_half_precision(chunk, rows, matmul_weight, bias, gradients, compiler)
            else:
                losses[rows] = _process_full_precision(chunk, rows, matmul_weight, bias, gradients)

        if gradients:  # not in save_for_backward, which would copy them
            ctx.gradients = [gradients.hidden, gradients.weight.to(weight.dtype), gradients.bias.to(bias.dtype)]
        ctx.mark_non_differentiable(losses)
        return (losses * scale).sum(), losses

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Any, ...]:
        gradients = ctx.gradients
        ctx.gradients = None  # autograd can then free each gradient after its use
        if gradient.is_cuda or gradient != 1:  # on a GPU always, because a comparison would wait for it
            gradients = [value.mul_(gradient) for value in gradients]
        return *gradients, None, None, None, None, None


def _allocate_gradients(
    hidden: Tensor, weight: Tensor, bias: Tensor, chunk_rows: int, dtype: torch.dtype
) -> _Gradients:
    """Return tensors for the gradients. Those to which chunks add are zeros; the others are uninitialised."""
    has_one_chunk = 0 < len(hidden) <= chunk_rows
    weight_gradient = torch.empty_like(weight, dtype=dtype)
    if not has_one_chunk:
        weight_gradient.zero_()
    return _Gradients(torch.empty_like(hidden), weight_gradient, torch.zeros_like(bias, dtype=dtype), has_one_chunk)


def _process_half_precision(
    chunk: _Chunk, rows: slice, weight: Tensor, bias: Tensor, gradients: _Gradients | None, compiler: str
) -> Tensor:
    """Return the losses (R,) of a chunk, and add its contribution to the gradients if there are any."""
    if compiler:
        split = _compile(split_logsumexp, compiler)
        differentiate = _compile(logit_gradients, compiler)
    else:
        split = _split_logsumexp_by_block
        differentiate = _logit_gradients_by_block
    others_logsumexp, target_logits = split(chunk.logits, bias, chunk.targets)  # (R,), (R,)
    logsumexp = torch.logaddexp(others_logsumexp, target_logits)  # (R,) over the whole vocabulary
    if gradients:
        scale = chunk.scale.to(chunk.logits.dtype)
        d_logits = differentiate(
            chunk.logits, bias, chunk.targets, others_logsumexp, logsumexp, scale, chunk.states
        )  # (R, V) in half precision
        _matmul(d_logits, weight, out=gradients.hidden[rows])
        _add_matmul(gradients.weight, d_logits.T, chunk.states, overwrite=gradients.has_one_chunk)
        ones = torch.ones_like(chunk.states[:, :1])  # (R, 1)
        _add_matmul(gradients.bias[:, None], d_logits.T, ones, overwrite=False)
    return logsumexp - target_logits


def _process_full_precision(
    chunk: _Chunk, rows: slice, weight: Tensor, bias: Tensor, gradients: _Gradients | None
) -> Tensor:
    """Do the same as `_process_half_precision` in the precision of the logits, which are overwritten."""
    states = chunk.states
    targets = chunk.targets
    logits = chunk.logits.add_(bias)  # (R, V)
    target_logits = logits.gather(1, targets[:, None]).squeeze(1)  # (R,)
    largest_logits = logits.amax(dim=1)  # (R,)
    exponentials = logits.sub_(largest_logits[:, None]).exp_()  # (R, V), in the memory of the logits
    normalizer = exponentials.sum(dim=1)  # (R,)
    if gradients:
        # d loss / d logits = scale * (exponentials / normalizer - onehot). The factors of the rows are applied to
        # tensors (R, d), which are smaller than (R, V).
        target_scale = chunk.scale.to(logits.dtype)  # (R,)
        softmax_scale = (chunk.scale / normalizer).to(logits.dtype)  # (R,)
        softmax_part = (exponentials @ weight) * softmax_scale[:, None]  # (R, d)
        gradients.hidden[rows] = softmax_part - weight[targets] * target_scale[:, None]
        scaled_states = states * softmax_scale[:, None]  # (R, d)
        _add_matmul(gradients.weight, exponentials.T, scaled_states, overwrite=gradients.has_one_chunk)
        gradients.weight.index_add_(0, targets, states * -target_scale[:, None])
        gradients.bias += exponentials.T @ softmax_scale
        gradients.bias.index_add_(0, targets, -target_scale)
    return normalizer.log() + largest_logits - target_logits


def split_logsumexp(logits: Tensor, bias: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return the log-sum-exp over all words except the target, and the logit of the target, (R,) each.

    Args:
        logits: (R, V) without the bias.
        bias: (V,).
        targets: (R,).
    """
    words = torch.arange(logits.shape[1], device=logits.device)
    other_logits = torch.where(words == targets[:, None], -torch.inf, logits + bias)  # (R, V)
    largest_logits = other_logits.amax(dim=1)
    normalizer = (other_logits - largest_logits[:, None]).exp().sum(dim=1)
    target_logits = logits.gather(1, targets[:, None]).squeeze(1) + bias[targets]
    return normalizer.log() + largest_logits, target_logits


def logit_gradients(
    logits: Tensor,
    bias: Tensor,
    targets: Tensor,
    others_logsumexp: Tensor,
    logsumexp: Tensor,
    scale: Tensor,
    states: Tensor,
) -> Tensor:
    """Return the gradient of the loss, scale * (softmax - onehot), (R, V), in the precision of `states`.

    At the target, softmax - 1 is computed as minus the probability of all other words, which is precise even if the
    softmax is almost 1. The rows of the result are aligned.
    """
    vocab_size = logits.shape[1]
    words = torch.arange(vocab_size, device=logits.device)
    probabilities = (logits + bias - logsumexp[:, None]).exp()  # (R, V)
    others_probability = (others_logsumexp - logsumexp).exp()  # (R,)
    is_target = words == targets[:, None]  # (R, V)
    gradient = torch.where(is_target, -others_probability[:, None], probabilities) * scale[:, None]
    padding = _align(vocab_size) - vocab_size
    return F.pad(gradient.to(states.dtype), (0, padding))[:, :vocab_size]


@cache
def _compile(function: Any, compiler: str) -> Any:
    return torch.compile(function, backend=compiler, fullgraph=True)


def _split_logsumexp_by_block(logits: Tensor, bias: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Call `split_logsumexp` for a block of rows at a time, to limit the memory of intermediate tensors."""
    blocks = zip(logits.split(_BLOCK_ROWS), targets.split(_BLOCK_ROWS), strict=True)
    others_logsumexps = []
    target_logits = []
    for block_logits, block_targets in blocks:
        block_others_logsumexp, block_target_logits = split_logsumexp(block_logits, bias, block_targets)
        others_logsumexps.append(block_others_logsumexp)
        target_logits.append(block_target_logits)
    return torch.cat(others_logsumexps), torch.cat(target_logits)


def _logit_gradients_by_block(logits: Tensor, bias: Tensor, *inputs_by_row: Tensor) -> Tensor:
    """Call `logit_gradients` for a block of rows at a time, and return a result with aligned rows."""
    row_count, vocab_size = logits.shape
    states = inputs_by_row[-1]
    gradients = states.new_empty(row_count, _align(vocab_size))[:, :vocab_size]  # rows of torch.cat are not aligned
    for start in range(0, row_count, _BLOCK_ROWS):
        rows = slice(start, start + _BLOCK_ROWS)
        block_inputs = [values[rows] for values in inputs_by_row]
        gradients[rows] = logit_gradients(logits[rows], bias, *block_inputs)
    return gradients


def _align(width: int) -> int:
    """Round the width of a row up to a multiple of the alignment."""
    return math.ceil(width / _ALIGNMENT) * _ALIGNMENT


def _matmul(left: Tensor, right: Tensor, out: Tensor) -> Tensor:
    """Set out = left @ right in the precision of `out`, which may exceed that of the factors."""
    if left.dtype == out.dtype:
        return torch.mm(left, right, out=out)
    if left.is_cuda:
        return torch.mm(left, right, out_dtype=out.dtype, out=out)
    # CPUs have no kernel whose output is wider than its factors. Converting the factors first gives the same result.
    return torch.mm(left.to(out.dtype), right.to(out.dtype), out=out)


def _add_matmul(total: Tensor, left: Tensor, right: Tensor, overwrite: bool) -> None:
    """Set total += left @ right, or with `overwrite` total = left @ right, in the precision of `total`."""
    if left.dtype == total.dtype:
        torch.addmm(total, left, right, beta=0 if overwrite else 1, out=total)
    elif overwrite:
        _matmul(left, right, out=total)
    elif left.is_cuda:
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    else:
        total += _matmul(left, right, out=torch.empty_like(total))
