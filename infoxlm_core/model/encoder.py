"""The XLM-R encoder over packed sequences: many sequences end to end, no padding.

    two sequences        <s> Hello </s>   <s> Bon jour </s>
    ids        (T = 7)     0   35     2     0  84   95    2
    positions  (T = 7)     2    3     4     2   3    4    5      restart at 2 (1 is padding's, as in XLM-R)
    lengths                3                4

Every layer works on (T, d); only attention knows where a sequence ends. The result equals that of padded sequences.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from infoxlm_core.config import ModelConfig
from infoxlm_core.data.vocabulary import FIRST_POSITION
from infoxlm_core.model import devices
from infoxlm_core.model.objectives import full_precision


@dataclass(frozen=True)
class EncoderSize:
    """Sizes of an encoder.

    `positions` counts rows of the position table, of which a sequence uses those from `first` on: 2 in XLM-R, 0 in XLM
    and BERT. `types` counts rows of a table that is added at every position too: XLM's languages, BERT's segments.
    0: none.
    """

    vocabulary: int
    layers: int
    hidden: int
    ffn: int
    heads: int
    positions: int = 514
    epsilon: float = 1e-5
    types: int = 0
    first: int = FIRST_POSITION

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence."""
        return self.positions - self.first

    @classmethod
    def of(cls, wanted: ModelConfig, vocabulary: int, **more: Any) -> "EncoderSize":
        """The sizes that a config names; positions as XLM-R counts them, if `more` does not say otherwise."""
        more = {"positions": wanted.max_tokens + FIRST_POSITION} | more
        return cls(vocabulary, wanted.layers, wanted.hidden, wanted.ffn, wanted.heads, **more)


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    queries: Sequence[int],
    keys: Sequence[int],
    heads: int,
    dropout: float = 0.0,
    causal: bool = False,
) -> Tensor:
    """Full attention inside each sequence, or none to what comes later (`causal`), and none across.

    `query` (Q, d) holds the rows that ask, `key` and `value` (T, d) all rows; `queries` and `keys` say how many of them
    belong to sequence 1, 2, …. `dropout` is of the attention weights. Returns (Q, d).
    """

    def by_head(rows: Tensor) -> Tensor:
        return rows.unflatten(1, (heads, rows.shape[1] // heads))  # (rows, heads, head size)

    if not len(query):
        return query
    query, key, value = by_head(query), by_head(key), by_head(value)
    if query.is_cuda and (dropout or query.dtype not in (torch.bfloat16, torch.float16)):
        return attend_padded(query, key, value, queries, keys, dropout, causal).flatten(1)
    if query.is_cuda:
        from torch.nn.attention.varlen import varlen_attn

        attended: Any = varlen_attn(
            query, key, value, starts(tuple(queries), query.device), starts(tuple(keys), query.device),
            max(queries), max(keys),
            window_size=(-1, 0 if causal else -1),
        )  # fmt: skip
        return attended.flatten(1)

    def one(*sequence: Tensor) -> Tensor:
        # (rows, heads, size) -> (1, heads, rows, size), the layout the CPU kernel is fastest on
        q, k, v = (rows.transpose(0, 1)[None] for rows in sequence)
        return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=causal)[0].transpose(0, 1)

    sequences = zip(query.split(list(queries)), key.split(list(keys)), value.split(list(keys)), strict=True)
    results = [one(*sequence) for sequence in sequences if len(sequence[0])]
    return torch.cat(results).flatten(1) if results else query.flatten(1)


def attend_padded(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    queries: Sequence[int],
    keys: Sequence[int],
    dropout: float = 0.0,
    causal: bool = False,
) -> Tensor:
    """The same from (Q, heads, head size) and (T, heads, head size) to (Q, heads, head size), padded, in one call.

    For GPUs where FlashAttention over packed rows does not apply: it has no dropout, and no fp32.
    """

    def pad(rows: Tensor, lengths: Sequence[int], places: Tensor) -> Tensor:  # -> (N, heads, longest, head size)
        padded = rows.new_zeros(len(lengths) * max(lengths), *rows.shape[1:]).index_copy(0, places, rows)
        return padded.unflatten(0, (len(lengths), max(lengths))).transpose(1, 2)

    asked, read = padded_places(tuple(queries), query.device), padded_places(tuple(keys), query.device)
    seen = torch.zeros(len(keys) * max(keys), dtype=torch.bool, device=query.device).index_fill(0, read, True)
    mask = seen.view(len(keys), 1, 1, max(keys))  # all queries, those of padding too, see what their sequence has
    if causal:
        mask = mask & torch.ones(max(keys), max(keys), dtype=torch.bool, device=query.device).tril()
    found = F.scaled_dot_product_attention(
        pad(query, queries, asked), pad(key, keys, read), pad(value, keys, read), attn_mask=mask, dropout_p=dropout
    )
    return found.transpose(1, 2).flatten(0, 1)[asked]


@lru_cache(maxsize=16)
def padded_places(lengths: tuple[int, ...], device: torch.device) -> Tensor:
    """(T,) where packed rows stand in (N * longest) padded ones, without waiting for the device."""
    with torch.inference_mode(False):  # as below
        counts = torch.tensor(lengths)
        first = torch.arange(len(lengths)) * max(lengths) - counts.cumsum(0) + counts
        places = torch.arange(sum(lengths)) + first.repeat_interleave(counts)
        return devices.send(places, device)


@lru_cache(maxsize=16)  # all layers of a forward pass ask for the same
def starts(lengths: tuple[int, ...], device: torch.device) -> Tensor:
    """(N + 1,) first row of each sequence and of what follows the last, int32, without waiting for the device."""
    with torch.inference_mode(False):  # it is remembered: a tensor of inference mode cannot be saved for backward
        ends = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        return devices.send(ends, device)


class Layer(nn.Module):
    """One post-LN Transformer layer."""

    def __init__(self, size: EncoderSize, dropout: float) -> None:
        super().__init__()
        d = size.hidden
        self.heads, self.dropout = size.heads, dropout
        self.query, self.key, self.value = nn.Linear(d, d), nn.Linear(d, d), nn.Linear(d, d)
        self.attention_output, self.attention_norm = nn.Linear(d, d), nn.LayerNorm(d, size.epsilon)
        self.up, self.down = nn.Linear(d, size.ffn), nn.Linear(size.ffn, d)
        self.output_norm = nn.LayerNorm(d, size.epsilon)

    def forward(
        self,
        hidden: Tensor,
        lengths: Sequence[int],
        rows: Tensor | None = None,
        row_counts: Sequence[int] | None = None,
        causal: bool = False,
    ) -> Tensor:
        """(T, d) -> (T, d), or -> (R, d) where only `rows` (R,), so many of each sequence, are read: exact, and cheaper
        for a last layer."""
        return self.feed_forward(self.look_around(hidden, lengths, rows, row_counts, causal))

    def look_around(
        self,
        hidden: Tensor,
        lengths: Sequence[int],
        rows: Tensor | None = None,
        row_counts: Sequence[int] | None = None,
        causal: bool = False,
    ) -> Tensor:
        """The first half: attention within each sequence."""
        key, value = self.key(hidden), self.value(hidden)
        if rows is not None:
            hidden = hidden[rows]
        dropout, queries = self.dropout if self.training else 0.0, lengths if row_counts is None else row_counts
        context = attend(self.query(hidden), key, value, queries, lengths, self.heads, dropout, causal)
        return self.attention_norm(hidden + F.dropout(self.attention_output(context), dropout))

    def feed_forward(self, hidden: Tensor) -> Tensor:
        """The second half, row by row."""
        change = self.down(F.gelu(self.up(hidden)))  # exact (erf) GELU
        return self.output_norm(hidden + F.dropout(change, self.dropout if self.training else 0.0))


class Encoder(nn.Module):
    """Embeddings and layers. `Encoder(size, layers=8)` builds only the first 8: a key encoder needs no more."""

    layer: type[Layer] = Layer

    def __init__(self, size: EncoderSize, dropout: float = 0.0, layers: int | None = None) -> None:
        super().__init__()
        self.size, self.dropout = size, dropout
        self.token_embedding = nn.Embedding(size.vocabulary, size.hidden)
        self.position_embedding = nn.Embedding(size.positions, size.hidden)
        if size.types:
            self.type_embedding = nn.Embedding(size.types, size.hidden)
        self.embedding_norm = nn.LayerNorm(size.hidden, size.epsilon)
        self.layers = nn.ModuleList(self.layer(size, dropout) for _ in range(size.layers if layers is None else layers))

    def embed(self, ids: Tensor, positions: Tensor, types: Tensor | None = None) -> Tensor:
        """(T,) ids, positions and, where there is a table of them, types -> (T, d): the output of layer 0."""
        hidden = self.token_embedding(ids) + self.position_embedding(positions)
        if types is not None and self.size.types:
            hidden = hidden + self.type_embedding(types)
        return F.dropout(self.embedding_norm(hidden), self.dropout if self.training else 0.0)

    def run(
        self,
        hidden: Tensor,
        lengths: Sequence[int],
        first: int,
        last: int,
        rows: Tensor | None = None,
        row_counts: Sequence[int] | None = None,
        causal: bool = False,
    ) -> Tensor:
        """Take the output of layer `first` to the output of layer `last`, there only `rows` if given."""
        if first == last:
            return hidden if rows is None else hidden[rows]
        for layer in self.layers[first : last - 1]:
            hidden = layer(hidden, lengths, causal=causal)
        if causal and rows is not None:  # a causal kernel counts its queries from the first row
            return self.layers[last - 1](hidden, lengths, causal=True)[rows]
        return self.layers[last - 1](hidden, lengths, rows, row_counts, causal)

    def forward(self, ids: Tensor, positions: Tensor, lengths: Sequence[int], last: int | None = None) -> Tensor:
        """(T,) ids and positions -> (T, d) output of layer `last` (default: the top one)."""
        return self.run(self.embed(ids, positions), lengths, 0, len(self.layers) if last is None else last)


def initialise(module: nn.Module, seed: int) -> None:
    """First weights as BERT's: N(0, 0.02²), biases 0, LayerNorm 1 and 0; a pure function of the seed."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in sorted(module.named_parameters()):
            if parameter.dim() > 1:
                parameter.copy_(torch.empty(parameter.shape).normal_(0.0, 0.02, generator=generator))
            else:
                parameter.fill_(1.0 if name.endswith("norm.weight") else 0.0)


def pool(hidden: Tensor, lengths: Sequence[int], pooling: str) -> Tensor:
    """One vector a sequence: (T, d) -> (N, d), its position 0 (`cls`) or the mean of all its rows (`mean`)."""
    edges = starts(tuple(lengths), hidden.device).long()
    if pooling == "cls":
        return hidden[edges[:-1]]
    # unsafe: on a GPU the check of the lengths would wait for the device, twice
    return torch.segment_reduce(full_precision(hidden), "mean", lengths=edges.diff(), unsafe=True)


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Without dropout for a while; then in the mode that it was in."""
    training = module.training
    module.eval()
    try:
        yield
    finally:
        module.train(training)
