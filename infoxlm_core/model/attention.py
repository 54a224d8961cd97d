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
MIN_LONGEST = 512  # smallest value of `Packing.longest`


class Packing(NamedTuple):
    """Where N packed sequences start. Layers do not see the lengths themselves, so that one graph fits all batches."""

    starts: Tensor  # (N + 1,) int32: first row of each sequence, then the total number of rows
    longest: int  # upper bound on the rows of a sequence: 512, or a higher power of 2


def pack(lengths: Sequence[int], device: torch.device) -> Packing:
    """Return the packing of sequences with these numbers of rows."""
    lengths = tuple(lengths)
    longest = max(lengths, default=1)
    bound = MIN_LONGEST if longest <= MIN_LONGEST else 1 << (longest - 1).bit_length()
    return Packing(starts(lengths, device), bound)


@lru_cache(maxsize=16)  # several parts of a network call it with the same lengths
def starts(lengths: tuple[int, ...], device: torch.device) -> Tensor:
    """Return each sequence's first row, then the number of rows: (N + 1,) int32, without waiting for the device."""
    with torch.inference_mode(False):  # inference tensors in the cache could not be saved for the backward pass
        ends = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        return devices.send(ends, device)


@cache
def choose_flash(device: torch.device) -> str:
    """Activate FlashAttention 3 if GPU and package allow it, else PyTorch's version 2; log and return the version.

    Version 3 hangs in the backward pass of a sequence without a query: see `give_each_a_row`. Returns "" on CPUs.
    """
    if device.type != "cuda":
        return ""
    version, reason = "2", ""
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
    queries: Packing,
    keys: Packing,
    heads: int,
    dropout: float = 0.0,
    causal: bool = False,
) -> Tensor:
    """Return the attention (Q, d) of queries to the keys of their own sequence.

    Args:
        query: (Q, d).
        key: (T, d).
        value: (T, d).
        queries: packing of the query rows.
        keys: packing of the key rows, with the same number of sequences.
        heads: number of attention heads.
        dropout: probability with which attention weights are dropped.
        causal: whether rows attend only to themselves and earlier rows.
    """
    if not len(query):
        return query
    query, key, value = (rows.unflatten(1, (heads, rows.shape[1] // heads)) for rows in (query, key, value))
    if query.is_cuda and not dropout and query.dtype in (torch.bfloat16, torch.float16):
        output = _flash(query, key, value, queries, keys, causal)
    elif query.is_cuda:
        output = _memory_efficient(query, key, value, queries, keys, dropout, causal)
    elif torch.compiler.is_compiling():
        output = attend_masked(query, key, value, queries, keys, dropout, causal)
    else:
        output = _one_by_one(query, key, value, queries, keys, dropout, causal)
    return output.flatten(1)


# The functions below map (Q, heads, head size) and (T, heads, head size) to (Q, heads, head size).


def _one_by_one(
    query: Tensor, key: Tensor, value: Tensor, queries: Packing, keys: Packing, dropout: float, causal: bool
) -> Tensor:
    # (rows, heads, size) -> (1, heads, rows, size), the fastest layout of the CPU kernel. Transpose before the split:
    # views of hundreds of short sequences cost more than their attention.
    q, k, v = (rows.transpose(0, 1)[None] for rows in (query, key, value))
    query_counts, key_counts = queries.starts.diff().tolist(), keys.starts.diff().tolist()
    sequences = zip(query_counts, q.split(query_counts, 2), k.split(key_counts, 2), v.split(key_counts, 2), strict=True)
    outputs = [
        F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=causal).transpose(1, 2)
        for count, q, k, v in sequences
        if count
    ]
    return torch.cat(outputs, 1)[0]


def attend_masked(
    query: Tensor, key: Tensor, value: Tensor, queries: Packing, keys: Packing, dropout: float = 0.0,
    causal: bool = False,
) -> Tensor:  # fmt: skip
    """Compute all rows at once with a (Q, T) mask, which fits into memory for a few thousand tokens."""

    def locate(rows: Tensor, starts: Tensor) -> tuple[Tensor, Tensor]:
        """Return the sequence number of each row, and its position in that sequence."""
        numbers = torch.arange(len(rows), device=rows.device, dtype=torch.int32)
        sequence = torch.searchsorted(starts, numbers, right=True) - 1
        return sequence, numbers - starts[sequence]

    query_sequence, query_position = locate(query, queries.starts)
    key_sequence, key_position = locate(key, keys.starts)
    mask = query_sequence[:, None] == key_sequence
    if causal:
        mask = mask & (query_position[:, None] >= key_position)
    q, k, v = (rows.transpose(0, 1)[None] for rows in (query, key, value))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout)[0].transpose(0, 1)


def _flash(query: Tensor, key: Tensor, value: Tensor, queries: Packing, keys: Packing, causal: bool) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    output: Any = varlen_attn(
        query, key, value, queries.starts, keys.starts, queries.longest, keys.longest,
        window_size=(-1, 0 if causal else -1),
    )  # fmt: skip
    return output


def _memory_efficient(
    query: Tensor, key: Tensor, value: Tensor, queries: Packing, keys: Packing, dropout: float, causal: bool
) -> Tensor:
    """Call the kernel in the way in which PyTorch calls it for nested tensors."""
    packed = (rows[None] for rows in (query, key, value))
    outputs = torch.ops.aten._efficient_attention_forward(
        *packed, None, queries.starts, keys.starts, queries.longest, keys.longest, dropout, int(causal), True
    )
    return outputs[0][0]
