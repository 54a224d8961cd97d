"""The XLM-R encoder over packed sequences: many sequences end to end, no padding.

    two sequences        <s> Hello </s>   <s> Bon jour </s>
    ids        (T = 7)     0   35     2     0  84   95    2
    positions  (T = 7)     0    1     2     0   1    2    3      restart with each sequence
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
from infoxlm_core.model.attention import Packing, attend, cumulative_lengths, pack
from infoxlm_core.model.mixed import AddNorm, Linear
from infoxlm_core.model.objectives import full_precision

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class EncoderSize:
    """Sizes of an encoder, named as in the config."""

    vocabulary: int  # rows of the word embeddings
    layers: int
    hidden: int  # width of the layers, d
    ffn: int  # inner width of the feed-forward half of a layer
    heads: int  # attention heads of a layer
    positions: int = 514  # rows of the position table
    epsilon: float = 1e-5  # of LayerNorm
    types: int = 0  # rows of the type table: XLM's languages or BERT's segments; 0: there is no such table
    first_position: int = FIRST_POSITION  # row of a sequence's first token: 2 in XLM-R, 0 in XLM and BERT

    @property
    def max_tokens(self) -> int:
        """The number of tokens of the longest sequence."""
        return self.positions - self.first_position

    @classmethod
    def of(cls, config: ModelConfig, vocabulary: int, **changes: Any) -> "EncoderSize":
        """Return the sizes of a config, with XLM-R's number of positions unless `changes` has another."""
        changes = {"positions": config.max_tokens + FIRST_POSITION} | changes
        return cls(vocabulary, config.layers, config.hidden, config.ffn, config.heads, **changes)


class Layer(nn.Module):
    """A Transformer layer with LayerNorm after each residual sum (post-LN), as in BERT."""

    def __init__(self, size: EncoderSize, dropout: float) -> None:
        super().__init__()
        d = size.hidden
        self.heads = size.heads
        self.dropout = dropout
        self.query = Linear(d, d)
        self.key = Linear(d, d)
        self.value = Linear(d, d)
        self.attention_output = Linear(d, d)
        self.attention_norm = AddNorm(d, size.epsilon)
        self.up = Linear(d, size.ffn)
        self.down = Linear(size.ffn, d)
        self.output_norm = AddNorm(d, size.epsilon)

    @property
    def active_dropout(self) -> float:
        """The probability of dropout, 0 in evaluation mode."""
        return self.dropout if self.training else 0.0

    def forward(
        self,
        hidden: Tensor,
        packing: Packing,
        query_rows: Tensor | None = None,
        query_packing: Packing | None = None,
        causal: bool = False,
    ) -> Tensor:
        """Return the layer's output (T, d), or (R, d) at `query_rows`.

        Args:
            hidden: (T, d) output of the layer below.
            packing: where the sequences of `hidden` start.
            query_rows: (R,) rows to compute; None: all.
            query_packing: where the sequences of these rows start.
            causal: whether tokens attend only to themselves and earlier tokens.
        """
        attended = self.attend(hidden, packing, query_rows, query_packing, causal)
        return self.feed_forward(attended)

    def attend(
        self,
        hidden: Tensor,
        packing: Packing,
        query_rows: Tensor | None = None,
        query_packing: Packing | None = None,
        causal: bool = False,
    ) -> Tensor:
        """Compute the first half of the layer: attention within each sequence. See `forward`."""
        key = self.key(hidden)  # (T, d)
        value = self.value(hidden)  # (T, d)
        if query_rows is not None:
            hidden = hidden[query_rows]  # (R, d)
        query = self.query(hidden)  # (T, d) or (R, d)
        context = attend(query, key, value, query_packing or packing, packing, self.heads, self.active_dropout, causal)
        change = F.dropout(self.attention_output(context), self.active_dropout)
        return self.attention_norm(hidden, change)

    def feed_forward(self, hidden: Tensor) -> Tensor:
        """Compute the second half of the layer, which maps each row by itself."""
        activations = F.gelu(self.up(hidden))  # (T, ffn); the exact (erf) GELU
        change = F.dropout(self.down(activations), self.active_dropout)  # (T, d)
        return self.output_norm(hidden, change)


@cache
def compiled(forward: Callable[..., Tensor], compiler: str) -> Callable[..., Tensor]:
    """Compile a layer's forward and backward pass into one graph for all layers and batches."""
    torch._dynamo.config.recompile_limit = 64  # graphs differ by gradient, dropout, and rows
    return torch.compile(forward, dynamic=True, fullgraph=True, backend=compiler)


@cache
def compiler_for(device: torch.device, dropout: float) -> str:
    """Return the compiler of layers on a device, or "" on CPUs and on GPUs where compiling fails."""
    return "inductor" if device.type == "cuda" and can_compile("inductor", device, dropout) else ""


def can_compile(compiler: str, device: torch.device, dropout: float) -> bool:
    """Return whether a small layer in bf16 can be compiled and trained on a device. Log the reason if not."""
    size = EncoderSize(vocabulary=8, layers=1, hidden=64, ffn=128, heads=1)
    try:
        with torch.random.fork_rng():
            layer = Layer(size, dropout).to(device)
            mixed.refresh([layer], torch.bfloat16)
            hidden = torch.ones(32, size.hidden, dtype=torch.bfloat16, device=device, requires_grad=True)
            output = compiled(Layer.forward, compiler)(layer, hidden, pack((20, 12), device))
            output.sum().backward()
    except Exception as error:  # for example without a C compiler; training is then slower, and its results are right
        logger.warning("layers are not compiled, and steps take longer: %s", " ".join(str(error).split())[:300])
        return False
    return True


class Encoder(nn.Module):
    """Embeddings and layers. `Encoder(size, layers=8)` has only the first 8 layers, as a key encoder."""

    layer: type[Layer] = Layer  # the class of the layers
    compiler = ""  # of layers (`inductor` on GPUs); "": layers are not compiled
    recompute = False  # layers store only their input and compute the rest again in the backward pass

    def __init__(self, size: EncoderSize, dropout: float = 0.0, layers: int | None = None) -> None:
        super().__init__()
        self.size = size
        self.dropout = dropout
        self.token_embedding = nn.Embedding(size.vocabulary, size.hidden)
        self.position_embedding = nn.Embedding(size.positions, size.hidden)
        if size.types:
            self.type_embedding = nn.Embedding(size.types, size.hidden)
        self.embedding_norm = nn.LayerNorm(size.hidden, size.epsilon)
        layer_count = size.layers if layers is None else layers
        self.layers = nn.ModuleList(self.layer(size, dropout) for _ in range(layer_count))

    def compile_in_place(self) -> None:
        """Compile the layers as modules, so that hooks of sharding around them run uncompiled."""
        if self.compiler:
            for layer in self.layers:
                layer.forward = partial(compiled(self.layer.forward, self.compiler), layer)
        self.compiler = ""

    def embed(self, ids: Tensor, positions: Tensor, types: Tensor | None = None) -> Tensor:
        """Return the embeddings (T, d), the input of the first layer.

        Args:
            ids: (T,) token ids.
            positions: (T,) positions in the sequences, counted from 0.
            types: (T,) rows of the type table, by default the first; ignored if the encoder has no such table.
        """
        hidden = self.token_embedding(ids) + self.position_embedding(positions + self.size.first_position)
        if self.size.types:
            type_rows = self.type_embedding.weight[0] if types is None else self.type_embedding(types)
            hidden = hidden + type_rows
        return F.dropout(self.embedding_norm(hidden), self.dropout if self.training else 0.0)

    def apply_autocast(self, hidden: Tensor, layers: Iterable[nn.Module]) -> Tensor:
        """Convert rows to the precision of autocast, if it is on, and refresh the layers' weight copies.

        Callers then run the layers without autocast.
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
        """Return the output (T, d) of layer `last`, or only (R, d) at `rows`, from the output of layer `first`.

        Args:
            hidden: (T, d) output of layer `first`; layer 0 is the embeddings.
            lengths: number of tokens of each sequence.
            first: number of a layer.
            last: number of a layer, not below `first`.
            rows: (R,) rows to return, in ascending order.
            row_counts: how many of these rows each sequence has; without it, all rows are computed before the choice.
            causal: whether tokens attend only to themselves and earlier tokens.
        """
        if first == last:
            return hidden if rows is None else hidden[rows]
        packing = pack(lengths, hidden.device)
        layers = list(self.layers[first:last])
        hidden = self.apply_autocast(hidden, layers)
        call_layer = self._choose_call()
        with torch.autocast(hidden.device.type, enabled=False):  # layers handle bf16 themselves
            for layer in layers[:-1]:
                hidden = call_layer(layer, hidden, packing, causal=causal)
            if rows is None:
                return call_layer(layers[-1], hidden, packing, causal=causal)
            if causal or row_counts is None:  # causal kernels assume that the queries start at the first row
                return call_layer(layers[-1], hidden, packing, causal=causal)[rows]
            return call_layer(layers[-1], hidden, packing, rows, pack(row_counts, hidden.device))

    def _choose_call(self) -> Callable[..., Tensor]:
        """Return the function that calls a layer: plain or compiled, with or without recomputation."""
        call_layer: Callable[..., Tensor] = self.layer.__call__
        if self.compiler:
            call_layer = compiled(self.layer.forward, self.compiler)
        if self.recompute and torch.is_grad_enabled():
            draws_random_numbers = self.training and self.dropout > 0.0
            return partial(checkpoint, call_layer, use_reentrant=False, preserve_rng_state=draws_random_numbers)
        return call_layer

    def forward(self, ids: Tensor, positions: Tensor, lengths: Sequence[int], last: int | None = None) -> Tensor:
        """Return the output (T, d) of layer `last` (default: the top one) from ids and positions (T,)."""
        last = len(self.layers) if last is None else last
        return self.run(self.embed(ids, positions), lengths, 0, last)


def initialise(module: nn.Module, seed: int) -> None:
    """Initialise the parameters as BERT does: weights from N(0, 0.02²), biases with 0, LayerNorm weights with 1.

    The values depend on the seed and the names of the parameters alone.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in sorted(module.named_parameters()):
            if parameter.dim() > 1:
                weights = torch.empty(parameter.shape)  # on the CPU, so that the numbers do not depend on the device
                parameter.copy_(weights.normal_(0.0, 0.02, generator=generator))
            else:
                parameter.fill_(1.0 if name.endswith("norm.weight") else 0.0)


def pool(hidden: Tensor, lengths: Sequence[int], pooling: str) -> Tensor:
    """Return one vector per sequence, (T, d) -> (N, d): its first row (`cls`) or the mean of its rows (`mean`)."""
    cu_seqlens = cumulative_lengths(tuple(lengths), hidden.device).long()
    if pooling == "cls":
        return hidden[cu_seqlens[:-1]]
    # unsafe: on a GPU the check of lengths would wait for the device
    return torch.segment_reduce(full_precision(hidden), "mean", lengths=cu_seqlens.diff(), unsafe=True)


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Switch to evaluation mode, and back to the previous mode."""
    training = module.training
    module.eval()
    try:
        yield
    finally:
        module.train(training)
