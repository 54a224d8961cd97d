"""The XLM-R encoder for packed sequences. Packed sequences are concatenated without padding.

    two sequences        <s> Hello </s>   <s> Bon jour </s>
    ids        (T = 7)     0   35     2     0  84   95    2
    positions  (T = 7)     0    1     2     0   1    2    3      restart with each sequence
    lengths                3                4

A layer processes all T rows, (T, d), at once. Only attention uses the lengths. Padded sequences give the same result.
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
from infoxlm_core.errors import one_line
from infoxlm_core.model import mixed_precision
from infoxlm_core.model.attention import Packing, attend, cumulative_lengths, pack
from infoxlm_core.model.mixed_precision import AddNorm, Linear
from infoxlm_core.model.objectives import full_precision

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class EncoderSize:
    """The sizes that determine the shapes of all parameters of an encoder."""

    vocabulary: int  # rows of the word embeddings
    layers: int
    hidden: int  # width of the layers, d
    ffn: int  # inner width of the feed-forward networks
    heads: int  # attention heads per layer
    positions: int = 514  # rows of the position table
    epsilon: float = 1e-5  # term that LayerNorm adds to the variance
    types: int = 0  # rows of the type table, for XLM's languages or BERT's segments; 0: no table
    first_position: int = FIRST_POSITION  # row of the first token in the position table: 2 in XLM-R, 0 in XLM and BERT

    @property
    def max_tokens(self) -> int:
        """The maximum sequence length in tokens."""
        return self.positions - self.first_position

    @classmethod
    def from_config(cls, config: ModelConfig, vocabulary: int, **overrides: Any) -> "EncoderSize":
        """Return the sizes that a config describes. `overrides` replace XLM-R's values for other fields."""
        overrides = {"positions": config.max_tokens + FIRST_POSITION} | overrides
        return cls(vocabulary, config.layers, config.hidden, config.ffn, config.heads, **overrides)


class Layer(nn.Module):
    """A post-LN Transformer layer, as in BERT: LayerNorm follows each residual connection."""

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
        """The dropout probability; 0 in evaluation mode."""
        return self.dropout if self.training else 0.0

    def forward(
        self,
        hidden: Tensor,
        packing: Packing,
        query_rows: Tensor | None = None,
        query_packing: Packing | None = None,
        causal: bool = False,
    ) -> Tensor:
        """Compute the layer's output for packed sequences.

        Args:
            hidden: (T, d) output of the previous layer.
            packing: boundaries of the sequences in `hidden`.
            query_rows: (R,) indices of the rows to compute; None: all.
            query_packing: boundaries of the sequences in `query_rows`; None: the same as `packing`.
            causal: whether each token attends only to itself and earlier tokens.

        Returns:
            (T, d) output of the layer, or (R, d) for `query_rows`.
        """
        hidden = self.attend(hidden, packing, query_rows, query_packing, causal)
        return self.feed_forward(hidden)

    def attend(
        self,
        hidden: Tensor,
        packing: Packing,
        query_rows: Tensor | None = None,
        query_packing: Packing | None = None,
        causal: bool = False,
    ) -> Tensor:
        """Apply self-attention, the residual connection and LayerNorm. See `forward` for the arguments."""
        key = self.key(hidden)  # (T, d)
        value = self.value(hidden)  # (T, d)
        if query_rows is not None:
            hidden = hidden[query_rows]  # (R, d)
        query = self.query(hidden)  # (T, d) or (R, d)
        context = attend(query, key, value, query_packing or packing, packing, self.heads, self.active_dropout, causal)
        sublayer_output = F.dropout(self.attention_output(context), self.active_dropout)
        return self.attention_norm(hidden, sublayer_output)  # LayerNorm of the sum

    def feed_forward(self, hidden: Tensor) -> Tensor:
        """Apply the feed-forward network, the residual connection and LayerNorm to each row of (T, d)."""
        activations = F.gelu(self.up(hidden))  # (T, ffn); exact (erf) GELU, as in XLM-R
        sublayer_output = F.dropout(self.down(activations), self.active_dropout)  # (T, d)
        return self.output_norm(hidden, sublayer_output)  # LayerNorm of the sum


@cache
def compile_forward(forward: Callable[..., Tensor], compiler: str) -> Callable[..., Tensor]:
    """Compile the forward and backward pass of a layer into one graph for all layers and batches."""
    torch._dynamo.config.recompile_limit = 64  # one graph per combination of gradients, dropout and query rows
    return torch.compile(forward, dynamic=True, fullgraph=True, backend=compiler)


@cache
def choose_compiler(device: torch.device, dropout: float) -> str:
    """Return the torch.compile backend for a device: `inductor` on a GPU that can compile layers, else ""."""
    return "inductor" if device.type == "cuda" and can_compile("inductor", device, dropout) else ""


def can_compile(compiler: str, device: torch.device, dropout: float) -> bool:
    """Try to compile and train a small layer on a device. Return whether it works; if not, log the reason."""
    size = EncoderSize(vocabulary=8, layers=1, hidden=64, ffn=128, heads=1)
    try:
        with torch.random.fork_rng():  # so that the results of training do not depend on this attempt
            layer = Layer(size, dropout).to(device)
            mixed_precision.refresh_copies([layer], torch.bfloat16)
            hidden = torch.ones(32, size.hidden, dtype=torch.bfloat16, device=device, requires_grad=True)
            forward = compile_forward(Layer.forward, compiler)
            forward(layer, hidden, pack((20, 12), device)).sum().backward()  # two sequences with 32 tokens in total
    except Exception as error:  # for example, no C compiler; training works, but more slowly
        logger.warning("layers are not compiled, and steps take longer: %s", one_line(error))
        return False
    return True


class Encoder(nn.Module):
    """The embeddings and layers of a Transformer encoder. `layers` limits their number, as in a key encoder."""

    layer_class: type[Layer] = Layer
    compiler = ""  # torch.compile backend for the layers, such as `inductor`; "": not compiled
    recompute = False  # activation checkpointing: store only each layer's input for the backward pass

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
        self.layers = nn.ModuleList(self.layer_class(size, dropout) for _ in range(layer_count))

    def compile_layers(self) -> None:
        """Compile the forward function of each layer, but not the hooks that sharding adds around the function."""
        if self.compiler:
            forward = compile_forward(self.layer_class.forward, self.compiler)
            for layer in self.layers:
                layer.forward = partial(forward, layer)
        self.compiler = ""  # so that `_call_layer` calls the layers, with their hooks

    def embed(self, ids: Tensor, positions: Tensor, types: Tensor | None = None) -> Tensor:
        """Return the (T, d) embeddings, the input of the first layer.

        Args:
            ids: (T,) token ids.
            positions: (T,) positions of the tokens in their sequences, counted from 0.
            types: (T,) token types, ignored if the encoder has no type table; None: type 0 for all tokens.
        """
        hidden = self.token_embedding(ids) + self.position_embedding(positions + self.size.first_position)
        if self.size.types:
            hidden = hidden + (self.type_embedding.weight[0] if types is None else self.type_embedding(types))
        return F.dropout(self.embedding_norm(hidden), self.dropout, training=self.training)

    def apply_autocast(self, hidden: Tensor, layers: Iterable[nn.Module]) -> Tensor:
        """Return `hidden` in the precision of autocast, and refresh the layers' weight copies in this precision.

        Without autocast, return `hidden` unchanged. With it, the caller disables autocast for the layers, because
        otherwise autocast would convert the weights again in every forward pass.
        """
        if torch.is_autocast_enabled(hidden.device.type):
            hidden = hidden.to(torch.get_autocast_dtype(hidden.device.type))
            mixed_precision.refresh_copies(layers, hidden.dtype)
        return hidden

    def run_layers(
        self,
        hidden: Tensor,
        lengths: Sequence[int],
        first_layer: int,
        last_layer: int,
        rows: Tensor | None = None,
        row_counts: Sequence[int] | None = None,
        causal: bool = False,
    ) -> Tensor:
        """Run the layers from `first_layer + 1` to `last_layer`. Layer 0 is the embeddings.

        Args:
            hidden: (T, d) output of layer `first_layer`.
            lengths: number of tokens in each sequence.
            first_layer: number of the layer that produced `hidden`.
            last_layer: number of the layer whose output is returned; at least `first_layer`.
            rows: (R,) indices of the rows to return, in ascending order; None: all.
            row_counts: number of `rows` in each sequence. With it, the last layer computes only `rows` unless `causal`.
            causal: whether each token attends only to itself and earlier tokens.

        Returns:
            (T, d) output of the last layer, or (R, d) for `rows`.
        """
        if first_layer == last_layer:
            return hidden if rows is None else hidden[rows]
        packing = pack(lengths, hidden.device)
        *lower_layers, top_layer = self.layers[first_layer:last_layer]
        hidden = self.apply_autocast(hidden, [*lower_layers, top_layer])
        with torch.autocast(hidden.device.type, enabled=False):  # `hidden` and the weights are already converted
            for layer in lower_layers:
                hidden = self._call_layer(layer, hidden, packing, causal=causal)
            if rows is None:
                return self._call_layer(top_layer, hidden, packing, causal=causal)
            if causal or row_counts is None:  # causal kernels expect the queries of all rows
                return self._call_layer(top_layer, hidden, packing, causal=causal)[rows]
            return self._call_layer(top_layer, hidden, packing, rows, pack(row_counts, hidden.device))

    def _call_layer(
        self,
        layer: nn.Module,
        hidden: Tensor,
        packing: Packing,
        query_rows: Tensor | None = None,
        query_packing: Packing | None = None,
        causal: bool = False,
    ) -> Tensor:
        """Call `Layer.forward`, with compilation and activation checkpointing if enabled."""
        forward: Callable[..., Tensor] = self.layer_class.__call__  # runs the hooks of sharding, unlike `forward`
        if self.compiler:  # not sharded, so without hooks: `compile_layers` clears `compiler` after sharding
            forward = compile_forward(self.layer_class.forward, self.compiler)
        inputs = (layer, hidden, packing, query_rows, query_packing, causal)
        if not self.recompute or not torch.is_grad_enabled():
            return forward(*inputs)
        # Recomputation must draw the same dropout masks. Without dropout, saving the random state would only cost time.
        draws_random_numbers = self.training and self.dropout > 0.0
        output: Tensor = checkpoint(forward, *inputs, use_reentrant=False, preserve_rng_state=draws_random_numbers)
        return output

    def forward(self, ids: Tensor, positions: Tensor, lengths: Sequence[int], last_layer: int | None = None) -> Tensor:
        """Return the (T, d) output of layer `last_layer` (default: the top layer) for (T,) ids and positions."""
        if last_layer is None:
            last_layer = len(self.layers)
        return self.run_layers(self.embed(ids, positions), lengths, 0, last_layer)


def initialise(module: nn.Module, seed: int) -> None:
    """Initialize parameters as in BERT: weights from N(0, 0.02²), biases with 0, LayerNorm weights with 1.

    The values depend only on the seed and on the parameters' names and shapes.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in sorted(module.named_parameters()):
            if parameter.dim() > 1:
                weights = torch.empty(parameter.shape)  # on the CPU, so that values do not depend on the device
                parameter.copy_(weights.normal_(0.0, 0.02, generator=generator))
            else:
                parameter.fill_(1.0 if name.endswith("norm.weight") else 0.0)


def pool(hidden: Tensor, lengths: Sequence[int], pooling: str) -> Tensor:
    """Pool the rows of packed sequences to one vector per sequence, (N, d).

    Args:
        hidden: (T, d) output of a layer.
        lengths: number of rows in each sequence.
        pooling: `cls` for the first row of each sequence, or `mean` for the mean of its rows.
    """
    cu_seqlens = cumulative_lengths(tuple(lengths), hidden.device).long()
    if pooling == "cls":
        return hidden[cu_seqlens[:-1]]
    # unsafe=True skips a check of the lengths that would wait for the GPU.
    return torch.segment_reduce(full_precision(hidden), "mean", lengths=cu_seqlens.diff(), unsafe=True)


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Switch a module to evaluation mode within the context, and then restore its mode."""
    was_training = module.training
    module.eval()
    try:
        yield
    finally:
        module.train(was_training)
