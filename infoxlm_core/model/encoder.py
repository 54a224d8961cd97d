"""The XLM-R encoder over packed sequences: many sequences end to end, no padding.

    two sequences        <s> Hello </s>   <s> Bon jour </s>
    ids        (T = 7)     0   35     2     0  84   95    2
    positions  (T = 7)     2    3     4     2   3    4    5      restart at 2 (1 is padding's, as in XLM-R)
    lengths                3                4

Every layer works on (T, d); only attention knows where a sequence ends. The result equals that of padded sequences.
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from infoxlm_core.config import ModelConfig
from infoxlm_core.data.vocabulary import FIRST_POSITION
from infoxlm_core.model import mixed
from infoxlm_core.model.attention import Packing, attend, pack, starts
from infoxlm_core.model.mixed import AddNorm, Linear
from infoxlm_core.model.objectives import full_precision

logger = logging.getLogger(__name__)


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


class Layer(nn.Module):
    """One post-LN Transformer layer."""

    def __init__(self, size: EncoderSize, dropout: float) -> None:
        super().__init__()
        d = size.hidden
        self.heads, self.dropout = size.heads, dropout
        self.query, self.key, self.value = Linear(d, d), Linear(d, d), Linear(d, d)
        self.attention_output, self.attention_norm = Linear(d, d), AddNorm(d, size.epsilon)
        self.up, self.down = Linear(d, size.ffn), Linear(size.ffn, d)
        self.output_norm = AddNorm(d, size.epsilon)

    def forward(
        self,
        hidden: Tensor,
        sequences: Packing,
        rows: Tensor | None = None,
        asking: Packing | None = None,
        causal: bool = False,
    ) -> Tensor:
        """(T, d) -> (T, d), or -> (R, d) where only `rows` (R,), packed as `asking` says, are read: exact, and cheaper
        for a last layer."""
        return self.feed_forward(self.look_around(hidden, sequences, rows, asking, causal))

    def look_around(
        self,
        hidden: Tensor,
        sequences: Packing,
        rows: Tensor | None = None,
        asking: Packing | None = None,
        causal: bool = False,
    ) -> Tensor:
        """The first half: attention within each sequence."""
        key, value = self.key(hidden), self.value(hidden)
        if rows is not None:
            hidden = hidden[rows]
        dropout = self.dropout if self.training else 0.0
        context = attend(self.query(hidden), key, value, asking or sequences, sequences, self.heads, dropout, causal)
        return self.attention_norm(hidden, F.dropout(self.attention_output(context), dropout))

    def feed_forward(self, hidden: Tensor) -> Tensor:
        """The second half, row by row."""
        change = self.down(F.gelu(self.up(hidden)))  # exact (erf) GELU
        return self.output_norm(hidden, F.dropout(change, self.dropout if self.training else 0.0))


@cache
def compiled(forward: Callable[..., Tensor], compiler: str) -> Callable[..., Tensor]:
    """A layer's forward pass, and its backward pass, as one graph for all layers and batches."""
    torch._dynamo.config.recompile_limit = 64  # graphs: with gradient or not, dropout or not, all rows or some
    return torch.compile(forward, dynamic=True, fullgraph=True, backend=compiler)


@cache
def compiler_for(device: torch.device, dropout: float) -> str:
    """What to compile layers with on a device: nothing on CPUs, nor where it fails, which is logged."""
    return "inductor" if device.type == "cuda" and can_compile("inductor", device, dropout) else ""


def can_compile(compiler: str, device: torch.device, dropout: float) -> bool:
    """Whether a small layer in bf16 can be compiled and trained here; why not stands in the log."""
    try:
        with torch.random.fork_rng():
            layer = Layer(EncoderSize(8, 1, 64, 128, 1), dropout).to(device)
            mixed.refresh([layer], torch.bfloat16)
            rows = torch.ones(32, 64, dtype=torch.bfloat16, device=device, requires_grad=True)
            compiled(Layer.forward, compiler)(layer, rows, pack((20, 12), device)).sum().backward()
    except Exception as error:  # no C compiler, no room for its files, …: all of it is slower without, none wrong
        logger.warning("layers are not compiled, and steps take longer: %s", " ".join(str(error).split())[:300])
        return False
    return True


class Encoder(nn.Module):
    """Embeddings and layers. `Encoder(size, layers=8)` builds only the first 8: a key encoder needs no more."""

    layer: type[Layer] = Layer
    compiler = ""  # what layers are compiled with (`inductor` on GPUs); nothing: they run as they are
    recompute = False  # whether layers keep their input alone, and compute again for the backward pass

    def __init__(self, size: EncoderSize, dropout: float = 0.0, layers: int | None = None) -> None:
        super().__init__()
        self.size, self.dropout = size, dropout
        self.token_embedding = nn.Embedding(size.vocabulary, size.hidden)
        self.position_embedding = nn.Embedding(size.positions, size.hidden)
        if size.types:
            self.type_embedding = nn.Embedding(size.types, size.hidden)
        self.embedding_norm = nn.LayerNorm(size.hidden, size.epsilon)
        self.layers = nn.ModuleList(self.layer(size, dropout) for _ in range(size.layers if layers is None else layers))

    def compile_in_place(self) -> None:
        """Compile layers that are called as modules: what stands around them, hooks of shards, runs as it is."""
        if self.compiler:
            for layer in self.layers:
                layer.forward = partial(compiled(self.layer.forward, self.compiler), layer)
        self.compiler = ""

    def embed(self, ids: Tensor, positions: Tensor, types: Tensor | None = None) -> Tensor:
        """(T,) ids, positions and, where there is a table of them, types -> (T, d): the output of layer 0."""
        hidden = self.token_embedding(ids) + self.position_embedding(positions)
        if types is not None and self.size.types:
            hidden = hidden + self.type_embedding(types)
        return F.dropout(self.embedding_norm(hidden), self.dropout if self.training else 0.0)

    def prepare(self, hidden: Tensor, layers: Iterable[nn.Module]) -> Tensor:
        """Rows in the precision of autocast, where it is on, and copies of the layers' weights in it, which these then
        read without autocast."""
        if torch.is_autocast_enabled(hidden.device.type):
            hidden = hidden.to(torch.get_autocast_dtype(hidden.device.type))
            mixed.refresh(layers, hidden.dtype)
        return hidden

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
        device, sequences = hidden.device, pack(lengths, hidden.device)
        layers = list(self.layers[first:last])
        hidden = self.prepare(hidden, layers)
        layer: Callable[..., Tensor] = (
            compiled(self.layer.forward, self.compiler) if self.compiler else self.layer.__call__
        )
        if self.recompute and torch.is_grad_enabled():
            draws = self.training and self.dropout > 0.0  # the same once more
            layer = partial(checkpoint, layer, use_reentrant=False, preserve_rng_state=draws)
        with torch.autocast(device.type, enabled=False):  # layers know what to do with bf16
            for one in layers[:-1]:
                hidden = layer(one, hidden, sequences, causal=causal)
            if rows is None or row_counts is None:
                return layer(layers[-1], hidden, sequences, causal=causal)
            if causal:  # a causal kernel counts its queries from the first row
                return layer(layers[-1], hidden, sequences, causal=True)[rows]
            return layer(layers[-1], hidden, sequences, rows, pack(row_counts, device))

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
