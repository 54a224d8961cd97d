"""The XLM-R encoder over packed sequences: many sequences end to end, no padding.

    two sequences        <s> Hello </s>   <s> Bon jour </s>
    ids        (T = 7)     0   35     2     0  84   95    2
    positions  (T = 7)     2    3     4     2   3    4    5      restart at 2 (1 is padding's, as in XLM-R)
    lengths                3                4

Layers work on (T, d); only attention uses the lengths. The result equals that of padded sequences.
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

    `positions` counts rows of the position table; sequences use those from `first` on, 2 in XLM-R, 0 in XLM and BERT.
    `types` counts rows of the type table, XLM's languages or BERT's segments; 0: there is none.
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
        """The number of tokens of the longest sequence."""
        return self.positions - self.first

    @classmethod
    def of(cls, config: ModelConfig, vocabulary: int, **changes: Any) -> "EncoderSize":
        """Return the sizes of a config, with XLM-R's number of positions unless `changes` has another."""
        changes = {"positions": config.max_tokens + FIRST_POSITION} | changes
        return cls(vocabulary, config.layers, config.hidden, config.ffn, config.heads, **changes)


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
        row_sequences: Packing | None = None,
        causal: bool = False,
    ) -> Tensor:
        """Map (T, d) to (T, d), or to (R, d) if only `rows` (R,), packed as `row_sequences`, are needed."""
        return self.feed_forward(self.attend(hidden, sequences, rows, row_sequences, causal))

    def attend(
        self,
        hidden: Tensor,
        sequences: Packing,
        rows: Tensor | None = None,
        row_sequences: Packing | None = None,
        causal: bool = False,
    ) -> Tensor:
        """Compute the first half: attention within each sequence."""
        key, value = self.key(hidden), self.value(hidden)
        if rows is not None:
            hidden = hidden[rows]
        dropout = self.dropout if self.training else 0.0
        queries = row_sequences or sequences
        context = attend(self.query(hidden), key, value, queries, sequences, self.heads, dropout, causal)
        return self.attention_norm(hidden, F.dropout(self.attention_output(context), dropout))

    def feed_forward(self, hidden: Tensor) -> Tensor:
        """Compute the second half, row by row."""
        change = self.down(F.gelu(self.up(hidden)))  # exact (erf) GELU
        return self.output_norm(hidden, F.dropout(change, self.dropout if self.training else 0.0))


@cache
def compiled(forward: Callable[..., Tensor], compiler: str) -> Callable[..., Tensor]:
    """Compile a layer's forward and backward pass into one graph for all layers and batches."""
    torch._dynamo.config.recompile_limit = 64  # graphs differ by gradient, dropout, and rows
    return torch.compile(forward, dynamic=True, fullgraph=True, backend=compiler)


@cache
def compiler_for(device: torch.device, dropout: float) -> str:
    """Return the compiler of layers on a device; "" on CPUs, and where compiling fails, which is logged."""
    return "inductor" if device.type == "cuda" and can_compile("inductor", device, dropout) else ""


def can_compile(compiler: str, device: torch.device, dropout: float) -> bool:
    """Return whether a small layer in bf16 can be compiled and trained here; log the reason if not."""
    try:
        with torch.random.fork_rng():
            layer = Layer(EncoderSize(8, 1, 64, 128, 1), dropout).to(device)
            mixed.refresh([layer], torch.bfloat16)
            rows = torch.ones(32, 64, dtype=torch.bfloat16, device=device, requires_grad=True)
            compiled(Layer.forward, compiler)(layer, rows, pack((20, 12), device)).sum().backward()
    except Exception as error:  # such as no C compiler: training is slower without, not wrong
        logger.warning("layers are not compiled, and steps take longer: %s", " ".join(str(error).split())[:300])
        return False
    return True


class Encoder(nn.Module):
    """Embeddings and layers; `Encoder(size, layers=8)` has only the first 8, as a key encoder."""

    layer: type[Layer] = Layer
    compiler = ""  # of layers (`inductor` on GPUs); "": layers are not compiled
    recompute = False  # layers store only their input and compute the rest again in the backward pass

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
        """Compile the layers as modules, so that hooks of sharding around them run uncompiled."""
        if self.compiler:
            for layer in self.layers:
                layer.forward = partial(compiled(self.layer.forward, self.compiler), layer)
        self.compiler = ""

    def embed(self, ids: Tensor, positions: Tensor, types: Tensor | None = None) -> Tensor:
        """Return the output (T, d) of layer 0 from ids, positions and, if there is a type table, types (T,)."""
        hidden = self.token_embedding(ids) + self.position_embedding(positions)
        if types is not None and self.size.types:
            hidden = hidden + self.type_embedding(types)
        return F.dropout(self.embedding_norm(hidden), self.dropout if self.training else 0.0)

    def prepare(self, hidden: Tensor, layers: Iterable[nn.Module]) -> Tensor:
        """Return rows in the precision of autocast, if it is on, and refresh the layers' weight copies in it.

        The layers then compute without autocast.
        """
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
        """Return the output of layer `last` from that of layer `first`; only its `rows` if given."""
        if first == last:
            return hidden if rows is None else hidden[rows]
        device, sequences = hidden.device, pack(lengths, hidden.device)
        layers = list(self.layers[first:last])
        hidden = self.prepare(hidden, layers)
        layer: Callable[..., Tensor] = (
            compiled(self.layer.forward, self.compiler) if self.compiler else self.layer.__call__
        )
        if self.recompute and torch.is_grad_enabled():
            draws = self.training and self.dropout > 0.0
            layer = partial(checkpoint, layer, use_reentrant=False, preserve_rng_state=draws)
        with torch.autocast(device.type, enabled=False):  # layers handle bf16 themselves
            for module in layers[:-1]:
                hidden = layer(module, hidden, sequences, causal=causal)
            if rows is None or row_counts is None:
                return layer(layers[-1], hidden, sequences, causal=causal)
            if causal:  # causal kernels assume that queries start at the first row
                return layer(layers[-1], hidden, sequences, causal=True)[rows]
            return layer(layers[-1], hidden, sequences, rows, pack(row_counts, device))

    def forward(self, ids: Tensor, positions: Tensor, lengths: Sequence[int], last: int | None = None) -> Tensor:
        """Return the output (T, d) of layer `last` (default: the top one) from ids and positions (T,)."""
        return self.run(self.embed(ids, positions), lengths, 0, len(self.layers) if last is None else last)


def initialise(module: nn.Module, seed: int) -> None:
    """Initialise as BERT: weights N(0, 0.02²), biases 0, LayerNorm 1 and 0; a pure function of the seed."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in sorted(module.named_parameters()):
            if parameter.dim() > 1:
                parameter.copy_(torch.empty(parameter.shape).normal_(0.0, 0.02, generator=generator))
            else:
                parameter.fill_(1.0 if name.endswith("norm.weight") else 0.0)


def pool(hidden: Tensor, lengths: Sequence[int], pooling: str) -> Tensor:
    """Return one vector a sequence, (T, d) -> (N, d): its first row (`cls`) or the mean of its rows (`mean`)."""
    edges = starts(tuple(lengths), hidden.device).long()
    if pooling == "cls":
        return hidden[edges[:-1]]
    # unsafe: on a GPU the check of lengths would wait for the device
    return torch.segment_reduce(full_precision(hidden), "mean", lengths=edges.diff(), unsafe=True)


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Switch to evaluation mode, and back to the previous mode."""
    training = module.training
    module.eval()
    try:
        yield
    finally:
        module.train(training)
