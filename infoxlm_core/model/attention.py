"""Attention inside each of many sequences that stand end to end, however long each of them is.

CPU                    one sequence after the other: results, and what dropout draws, stay as they always were
CPU, compiled          all rows at once under a mask: a graph must not depend on lengths
GPU, bf16, no dropout  FlashAttention over packed rows
GPU, else              memory-efficient attention over packed rows: FlashAttention knows no fp32, and what it keeps
                       under dropout is a multiple of 1/256
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
LONGEST = 512


class Packing(NamedTuple):
    """Where N sequences lie that stand end to end. No layer is told more of their lengths: one graph serves all."""

    starts: Tensor  # (N + 1,) int32 first row of each sequence and of what follows the last
    longest: int  # none has more rows: 512, or a higher power of 2, as kernels are made for it


def pack(lengths: Sequence[int], device: torch.device) -> Packing:
    """The packing of sequences with so many rows each."""
    lengths = tuple(lengths)
    most = max(lengths, default=1)
    return Packing(starts(lengths, device), LONGEST if most <= LONGEST else 1 << (most - 1).bit_length())


@lru_cache(maxsize=16)  # several parts of a network ask for the same
def starts(lengths: tuple[int, ...], device: torch.device) -> Tensor:
    """(N + 1,) first row of each sequence and of what follows the last, int32, without waiting for the device."""
    with torch.inference_mode(False):  # it is remembered: a tensor of inference mode cannot be saved for backward
        ends = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        return devices.send(ends, device)


@cache
def choose_flash(device: torch.device) -> str:
    """Let this process train with FlashAttention 3 where GPU and package allow it, else with 2, which PyTorch brings;
    "" on CPUs. The choice stands in the log.

    Version 3 never ends in the backward pass of a sequence without a query: see `give_each_a_row`.
    """
    if device.type != "cuda":
        return ""
    chosen, why = "2", ""
    if torch.cuda.get_device_capability(device)[0] != 9:
        why = ": version 3 is for GPUs of compute capability 9.x (H100, H200)"
    elif importlib.util.find_spec("flash_attn_interface") is None:
        why = ": version 3 (package flash_attn_3) is not installed"
    else:
        try:
            torch.nn.attention.activate_flash_attention_impl("FA3")
            chosen = "3"
        except Exception as error:  # built for another version of PyTorch or CUDA, or there is no such choice yet
            why = f": version 3 cannot be used: {' '.join(str(error).split())[:300]}"
    logger.info("attention by FlashAttention %s%s", chosen, why)
    return chosen


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
    """Full attention inside each sequence, or none to what comes later (`causal`), and none across.

    `query` (Q, d) holds the rows that ask, `key` and `value` (T, d) all rows; `queries` and `keys` say which of them
    belong to sequence 1, 2, …. `dropout` is of the attention weights. Returns (Q, d).
    """
    if not len(query):
        return query
    query, key, value = (rows.unflatten(1, (heads, rows.shape[1] // heads)) for rows in (query, key, value))
    if query.is_cuda and not dropout and query.dtype in (torch.bfloat16, torch.float16):
        found = _flash(query, key, value, queries, keys, causal)
    elif query.is_cuda:
        found = _memory_efficient(query, key, value, queries, keys, dropout, causal)
    elif torch.compiler.is_compiling():
        found = attend_masked(query, key, value, queries, keys, dropout, causal)
    else:
        found = _one_by_one(query, key, value, queries, keys, dropout, causal)
    return found.flatten(1)


# All that follow take (Q, heads, head size) and (T, heads, head size) to (Q, heads, head size).


def _one_by_one(
    query: Tensor, key: Tensor, value: Tensor, queries: Packing, keys: Packing, dropout: float, causal: bool
) -> Tensor:
    # (rows, heads, size) -> (1, heads, rows, size), the layout the CPU kernel is fastest on; before they are split, as
    # views of hundreds of short sequences cost more than attention among them
    q, k, v = (rows.transpose(0, 1)[None] for rows in (query, key, value))
    asking, asked = (packing.starts.diff().tolist() for packing in (queries, keys))
    sequences = zip(asking, q.split(asking, 2), k.split(asked, 2), v.split(asked, 2), strict=True)
    found = [
        F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=causal).transpose(1, 2)
        for count, q, k, v in sequences
        if count
    ]
    return torch.cat(found, 1)[0]


def attend_masked(
    query: Tensor, key: Tensor, value: Tensor, queries: Packing, keys: Packing, dropout: float = 0.0,
    causal: bool = False,
) -> Tensor:  # fmt: skip
    """All rows at once, a mask (Q, T) in between: for sequences in thousands of tokens, not more."""

    def places(rows: Tensor, starts: Tensor) -> tuple[Tensor, Tensor]:
        """Sequence of each row, and its place there."""
        numbers = torch.arange(len(rows), device=rows.device, dtype=torch.int32)
        owner = torch.searchsorted(starts, numbers, right=True) - 1
        return owner, numbers - starts[owner]

    (asking, own), (asked, other) = places(query, queries.starts), places(key, keys.starts)
    mask = asking[:, None] == asked
    if causal:
        mask = mask & (own[:, None] >= other)
    q, k, v = (rows.transpose(0, 1)[None] for rows in (query, key, value))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout)[0].transpose(0, 1)


def _flash(query: Tensor, key: Tensor, value: Tensor, queries: Packing, keys: Packing, causal: bool) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    found: Any = varlen_attn(
        query, key, value, queries.starts, keys.starts, queries.longest, keys.longest,
        window_size=(-1, 0 if causal else -1),
    )  # fmt: skip
    return found


def _memory_efficient(
    query: Tensor, key: Tensor, value: Tensor, queries: Packing, keys: Packing, dropout: float, causal: bool
) -> Tensor:
    """As PyTorch calls this kernel for nested tensors."""
    packed = (rows[None] for rows in (query, key, value))
    found = torch.ops.aten._efficient_attention_forward(
        *packed, None, queries.starts, keys.starts, queries.longest, keys.longest, dropout, int(causal), True
    )
    return found[0][0]
