"""Attention within each of many packed sequences.

CPU                    one sequence after another; changing this would change the order in which dropout is drawn
CPU, compiled          all rows at once with a mask, since a graph must not depend on lengths
GPU, bf16, no dropout  FlashAttention over packed rows
GPU, otherwise         memory-efficient attention over packed rows: FlashAttention does not support fp32, and rounds
                       the dropout probability to 1/256
"""

import importlib.util
import logging
from collections.abc import Sequence
from functools import cache, lru_cache
from typing import Any, NamedTuple

import torch
import torch.nn.attention
import torch.nn.functional as F
from torch import Tensor

from infoxlm_core.model import devices

logger = logging.getLogger(__name__)
MIN_MAX_SEQLEN = 512  # smallest value of `Packing.max_seqlen`


class Packing(NamedTuple):
    """Where N packed sequences start. Layers do not see the lengths themselves, so that one graph fits all batches."""

    cu_seqlens: Tensor  # (N + 1,) int32: first row of each sequence, then the total number of rows
    max_seqlen: int  # upper bound on the rows of a sequence: 512, or a higher power of 2


def pack(lengths: Sequence[int], device: torch.device) -> Packing:
    """Return the packing of sequences with these numbers of rows."""
    lengths = tuple(lengths)
    max_seqlen = MIN_MAX_SEQLEN
    while max_seqlen < max(lengths, default=1):
        max_seqlen *= 2
    return Packing(cumulative_lengths(lengths, device), max_seqlen)


@lru_cache(maxsize=16)  # several modules of a network call it with the same lengths
def cumulative_lengths(lengths: tuple[int, ...], device: torch.device) -> Tensor:
    """Return each sequence's first row, then the number of rows: (N + 1,) int32, without waiting for the device."""
    with torch.inference_mode(False):  # inference tensors in the cache could not be saved for the backward pass
        cu_seqlens = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        return devices.send(cu_seqlens, device)


@cache
def choose_flash(device: torch.device) -> str:
    """Activate FlashAttention 3 if GPU and package allow it, else PyTorch's version 2. Log and return the version.

    Version 3 hangs in the backward pass of a sequence without a query: see `add_missing_rows`. Returns "" on CPUs.
    """
    if device.type != "cuda":
        return ""
    version = "2"
    reason = ""
    if torch.cuda.get_device_capability(device)[0] != 9:
        reason = ": version 3 is for GPUs of compute capability 9.x (H100, H200)"
    elif importlib.util.find_spec("flash_attn_interface") is None:
        reason = ": version 3 (package flash_attn_3) is not installed"
    else:
        try:
            torch.nn.attention.activate_flash_attention_impl("FA3")
            version = "3"
        except Exception as error:  # such as a build for another version of PyTorch or CUDA
            reason = f": version 3 cannot be used: {' '.join(str(error).split())[:300]}"
    logger.info("attention by FlashAttention %s%s", version, reason)
    return version


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_packing: Packing,
    key_packing: Packing,
    heads: int,
    dropout: float = 0.0,
    causal: bool = False,
) -> Tensor:
    """Return the attention (Q, d) of queries to the keys of their own sequence.

    Args:
        query: (Q, d).
        key: (T, d).
        value: (T, d).
        query_packing: packing of the query rows.
        key_packing: packing of the key rows, with the same number of sequences.
        heads: number of attention heads.
        dropout: probability with which attention weights are dropped.
        causal: whether rows attend only to themselves and earlier rows.
    """
    if not len(query):
        return query
    head_size = query.shape[1] // heads
    query = query.unflatten(1, (heads, head_size))  # (Q, heads, head size)
    key = key.unflatten(1, (heads, head_size))  # (T, heads, head size)
    value = value.unflatten(1, (heads, head_size))  # (T, heads, head size)
    if query.is_cuda and not dropout and query.dtype in (torch.bfloat16, torch.float16):
        output = _attend_flash(query, key, value, query_packing, key_packing, causal)
    elif query.is_cuda:
        output = _attend_memory_efficient(query, key, value, query_packing, key_packing, dropout, causal)
    elif torch.compiler.is_compiling():
        output = attend_masked(query, key, value, query_packing, key_packing, dropout, causal)
    else:
        output = _attend_by_sequence(query, key, value, query_packing, key_packing, dropout, causal)
    return output.flatten(1)  # (Q, d)


# The functions below map (Q, heads, head size) and (T, heads, head size) to (Q, heads, head size).


def _attend_by_sequence(
    query: Tensor, key: Tensor, value: Tensor, query_packing: Packing, key_packing: Packing, dropout: float,
    causal: bool,
) -> Tensor:  # fmt: skip
    """Compute one sequence after another. Sequences without queries are skipped."""
    query_lengths = query_packing.cu_seqlens.diff().tolist()
    key_lengths = key_packing.cu_seqlens.diff().tolist()
    # Transpose before the split: views of hundreds of short sequences cost more than their attention.
    queries = _batch_of_one(query).split(query_lengths, dim=2)
    keys = _batch_of_one(key).split(key_lengths, dim=2)
    values = _batch_of_one(value).split(key_lengths, dim=2)
    outputs = []
    for length, q, k, v in zip(query_lengths, queries, keys, values, strict=True):
        if length:
            output = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=causal)
            outputs.append(output.transpose(1, 2))  # (1, length, heads, head size)
    return torch.cat(outputs, dim=1)[0]  # (Q, heads, head size)


def attend_masked(
    query: Tensor, key: Tensor, value: Tensor, query_packing: Packing, key_packing: Packing, dropout: float = 0.0,
    causal: bool = False,
) -> Tensor:  # fmt: skip
    """Compute all rows at once with a (Q, T) mask, which fits into memory for a few thousand tokens."""
    query_sequence, query_position = _locate_rows(query, query_packing)
    key_sequence, key_position = _locate_rows(key, key_packing)
    mask = query_sequence[:, None] == key_sequence  # (Q, T)
    if causal:
        mask = mask & (query_position[:, None] >= key_position)
    output = F.scaled_dot_product_attention(
        _batch_of_one(query), _batch_of_one(key), _batch_of_one(value), attn_mask=mask, dropout_p=dropout
    )  # (1, heads, Q, head size)
    return output[0].transpose(0, 1)


def _batch_of_one(rows: Tensor) -> Tensor:
    """Return a view (1, heads, rows, head size), the layout in which the CPU kernel is fastest."""
    return rows.transpose(0, 1)[None]


def _locate_rows(rows: Tensor, packing: Packing) -> tuple[Tensor, Tensor]:
    """Return the sequence number of each row, and its position in that sequence."""
    row_numbers = torch.arange(len(rows), device=rows.device, dtype=torch.int32)
    sequence = torch.searchsorted(packing.cu_seqlens, row_numbers, right=True) - 1
    return sequence, row_numbers - packing.cu_seqlens[sequence]


def _attend_flash(
    query: Tensor, key: Tensor, value: Tensor, query_packing: Packing, key_packing: Packing, causal: bool
) -> Tensor:
    """Call PyTorch's FlashAttention, the fastest kernel on GPUs, which has no dropout and needs half precision."""
    from torch.nn.attention.varlen import varlen_attn

    output: Any = varlen_attn(
        query,
        key,
        value,
        query_packing.cu_seqlens,
        key_packing.cu_seqlens,
        query_packing.max_seqlen,
        key_packing.max_seqlen,
        window_size=(-1, 0 if causal else -1),  # keys before and after the query; -1: all
    )
    return output


def _attend_memory_efficient(
    query: Tensor, key: Tensor, value: Tensor, query_packing: Packing, key_packing: Packing, dropout: float,
    causal: bool,
) -> Tensor:  # fmt: skip
    """Call the kernel as PyTorch calls it for nested tensors, since it has no public function for packed rows."""
    outputs = torch.ops.aten._efficient_attention_forward(
        query[None],
        key[None],
        value[None],
        bias=None,
        cu_seqlens_q=query_packing.cu_seqlens,
        cu_seqlens_k=key_packing.cu_seqlens,
        max_seqlen_q=query_packing.max_seqlen,
        max_seqlen_k=key_packing.max_seqlen,
        dropout_p=dropout,
        custom_mask_type=int(causal),
        compute_log_sumexp=True,  # the backward pass reads it
    )
    return outputs[0][0]
