"""Attention over packed sequences. Each token attends only to tokens of its own sequence.

The kernel depends on the device, the precision and dropout:

    CPU                    one sequence after another, an order that determines which values dropout drops
    CPU, compiled          all rows at once with a mask, because the graph must not depend on sequence lengths
    GPU, bf16, no dropout  FlashAttention, the fastest kernel
    GPU, otherwise         memory-efficient attention, because FlashAttention does not support fp32 and rounds the
                           dropout probability to a multiple of 1/256
"""

import logging
from collections.abc import Sequence
from functools import cache, lru_cache
from typing import Any, NamedTuple

import torch
import torch.nn.attention
import torch.nn.functional as F
from torch import Tensor

from infoxlm_core.errors import one_line
from infoxlm_core.model import devices

logger = logging.getLogger(__name__)


class Packing(NamedTuple):
    """The boundaries of N packed sequences, as attention kernels expect them."""

    cu_seqlens: Tensor  # (N + 1,) int32: first row of each sequence, then the total row count
    max_seqlen: int  # upper bound on the sequence length: 512, or a higher power of 2


def pack(lengths: Sequence[int], device: torch.device) -> Packing:
    """Return the boundaries of packed sequences, given their lengths."""
    max_seqlen = 512  # rounded up, so that almost all batches share one compiled graph
    while max_seqlen < max(lengths, default=1):
        max_seqlen *= 2
    return Packing(cumulative_lengths(tuple(lengths), device), max_seqlen)


@lru_cache(maxsize=16)  # several modules of a network ask for the same lengths
def cumulative_lengths(lengths: tuple[int, ...], device: torch.device) -> Tensor:
    """Compute `Packing.cu_seqlens` for these lengths without waiting for the device."""
    with torch.inference_mode(False):  # autograd could not save a tensor cached by inference
        cu_seqlens = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        return devices.send(cu_seqlens, device)


@cache
def activate_flash_attention(device: torch.device) -> str:
    """Activate the newest FlashAttention that a device supports. Return its version: "3", "2", or "" on a CPU."""
    if device.type != "cuda":
        return ""
    if torch.cuda.get_device_capability(device)[0] != 9:  # 9 is the Hopper generation
        logger.info("attention by FlashAttention 2: version 3 requires a GPU of compute capability 9.x (H100, H200)")
        return "2"
    # Version 3 hangs in the backward pass if a sequence has no query, so `add_missing_rows` adds one to such sequences.
    try:
        torch.nn.attention.activate_flash_attention_impl("FA3")
    except Exception as error:  # flash_attn_3 is missing, or was built for a different version of PyTorch or CUDA
        logger.info("attention by FlashAttention 2: version 3 (flash_attn_3) cannot be used: %s", one_line(error))
        return "2"
    logger.info("attention by FlashAttention 3")
    return "3"


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
    """Compute multi-head attention. Each query attends to the keys of its own sequence.

    Args:
        query: (Q, d) queries.
        key: (T, d) keys.
        value: (T, d) values.
        query_packing: boundaries of the sequences in `query`.
        key_packing: boundaries of the same sequences in `key` and `value`.
        heads: number of attention heads.
        dropout: dropout probability of the attention weights.
        causal: whether each query attends only to its own position and earlier positions.

    Returns:
        (Q, d) context vectors.
    """
    if len(query) == 0:  # for example, in a micro-batch without targets
        # Keys and values need gradients, too, because sharding sums the same gradients on all workers.
        return query + key.sum() + value.sum()
    head_size = query.shape[1] // heads
    query = query.unflatten(1, (heads, head_size))  # (Q, heads, head size)
    key = key.unflatten(1, (heads, head_size))  # (T, heads, head size)
    value = value.unflatten(1, (heads, head_size))  # (T, heads, head size)
    if query.is_cuda and not dropout and query.dtype in (torch.bfloat16, torch.float16):
        output = _attend_flash(query, key, value, query_packing, key_packing, causal)
    elif query.is_cuda:  # PyTorch's FlashAttention (varlen_attn) has neither dropout nor fp32
        output = _attend_memory_efficient(query, key, value, query_packing, key_packing, dropout, causal)
    elif torch.compiler.is_compiling():  # the graph must not depend on the lengths of sequences
        output = attend_masked(query, key, value, query_packing, key_packing, dropout, causal)
    else:
        output = _attend_by_sequence(query, key, value, query_packing, key_packing, dropout, causal)
    return output.flatten(1)  # (Q, d)


# Below, queries and outputs have shape (Q, heads, head size); keys and values have shape (T, heads, head size).


def _attend_by_sequence(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_packing: Packing,
    key_packing: Packing,
    dropout: float,
    causal: bool,
) -> Tensor:
    """Compute attention for one packed sequence at a time."""
    query_lengths = query_packing.cu_seqlens.diff().tolist()
    key_lengths = key_packing.cu_seqlens.diff().tolist()
    # Transpose before the split: transposing hundreds of sequences would take longer than the attention itself.
    queries = _add_batch_dimension(query).split(query_lengths, dim=2)
    keys = _add_batch_dimension(key).split(key_lengths, dim=2)
    values = _add_batch_dimension(value).split(key_lengths, dim=2)
    outputs = []
    for sequence_queries, sequence_keys, sequence_values in zip(queries, keys, values, strict=True):
        if sequence_queries.shape[2] == 0:  # for example, a sequence without masked positions
            continue
        output = F.scaled_dot_product_attention(
            sequence_queries, sequence_keys, sequence_values, dropout_p=dropout, is_causal=causal
        )
        outputs.append(output.transpose(1, 2))  # (1, queries, heads, head size)
    return torch.cat(outputs, dim=1).squeeze(0)  # (Q, heads, head size)


def attend_masked(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_packing: Packing,
    key_packing: Packing,
    dropout: float = 0.0,
    causal: bool = False,
) -> Tensor:
    """Compute attention for all packed sequences at once. For large batches, the (Q, T) mask would be too large."""
    query_sequences, query_positions = _locate_rows(query, query_packing)  # (Q,), (Q,)
    key_sequences, key_positions = _locate_rows(key, key_packing)  # (T,), (T,)
    mask = query_sequences[:, None] == key_sequences  # (Q, T)
    if causal:
        mask = mask & (query_positions[:, None] >= key_positions)
    output = F.scaled_dot_product_attention(
        _add_batch_dimension(query), _add_batch_dimension(key), _add_batch_dimension(value), mask, dropout
    )  # (1, heads, Q, head size)
    return output.squeeze(0).transpose(0, 1)


def _add_batch_dimension(rows: Tensor) -> Tensor:
    """View (R, heads, head size) rows as (1, heads, R, head size), the layout that the fastest CPU kernel requires."""
    return rows.transpose(0, 1)[None]


def _locate_rows(rows: Tensor, packing: Packing) -> tuple[Tensor, Tensor]:
    """Return the sequence index of each row, and the row's position in the sequence."""
    row_numbers = torch.arange(len(rows), device=rows.device, dtype=torch.int32)
    # With right=True, the first row of a sequence does not belong to the sequence before it.
    sequences = torch.searchsorted(packing.cu_seqlens, row_numbers, right=True) - 1
    return sequences, row_numbers - packing.cu_seqlens[sequences]


def _attend_flash(
    query: Tensor, key: Tensor, value: Tensor, query_packing: Packing, key_packing: Packing, causal: bool
) -> Tensor:
    """Compute attention with PyTorch's FlashAttention, in half precision without dropout."""
    from torch.nn.attention.varlen import varlen_attn

    output: Any = varlen_attn(
        query,
        key,
        value,
        query_packing.cu_seqlens,
        key_packing.cu_seqlens,
        query_packing.max_seqlen,
        key_packing.max_seqlen,
        window_size=(-1, 0 if causal else -1),  # number of keys before and after the query; -1: all
    )
    return output


def _attend_memory_efficient(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_packing: Packing,
    key_packing: Packing,
    dropout: float,
    causal: bool,
) -> Tensor:
    """Compute attention with PyTorch's memory-efficient kernel."""
    # Call a private operator, because PyTorch has no public function that runs this kernel on packed sequences.
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
        custom_mask_type=int(causal),  # 0: no mask, 1: causal
        compute_log_sumexp=True,  # required by the backward pass
    )
    attended_values: Tensor = outputs[0]  # (1, Q, heads, head size)
    return attended_values.squeeze(0)
