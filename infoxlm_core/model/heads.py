"""The masked-LM head, the contrast projection, and the whole network of InfoXLM."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from infoxlm_core.data.batches import PackedBatch
from infoxlm_core.model.encoder import Encoder, EncoderSize, pool
from infoxlm_core.model.linear_cross_entropy import linear_cross_entropy
from infoxlm_core.model.objectives import full_precision


class MaskedLMHead(nn.Module):
    """Dense, GELU, LayerNorm, then the product with the word embeddings (tied) plus a free bias."""

    compiler = ""  # as in `Encoder`

    def __init__(self, size: EncoderSize) -> None:
        super().__init__()
        self.dense = nn.Linear(size.hidden, size.hidden)
        self.norm = nn.LayerNorm(size.hidden, size.epsilon)
        self.bias = nn.Parameter(torch.zeros(size.vocabulary))

    def states(self, hidden: Tensor) -> Tensor:
        """Return the states (N, d) that are multiplied with the word embeddings, from (N, d) at masked positions."""
        return self.norm(F.gelu(self.dense(hidden)))

    def forward(self, hidden: Tensor, embedding: Tensor) -> Tensor:
        """Return (N, V) logits from (N, d) at masked positions and the (V, d) word embeddings."""
        return F.linear(self.states(hidden), embedding, self.bias)

    def loss(self, hidden: Tensor, embedding: Tensor, targets: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        """Return the scaled loss to differentiate and the losses (N,); see `linear_cross_entropy`."""
        return linear_cross_entropy(self.states(hidden), embedding, self.bias, targets, scale, compiler=self.compiler)


@dataclass
class Outputs:
    """The outputs of InfoXLM's forward pass."""

    loss: Tensor | None  # scaled sum of the MLM and TLM losses, to differentiate
    losses: Tensor | None  # (N,) losses of the MLM and TLM targets in order, in nats, without gradient
    queries: Tensor | None  # (B, d) in fp32


class InfoXLM(nn.Module):
    """The query encoder with its heads: the network that is trained.

    All sequences of a micro-batch run together up to the universal layer, which is the last one for contrast views.
    The last layer of all computes only the rows with a target.
    """

    def __init__(
        self, size: EncoderSize, contrast_layer: int, pooling: str, normalise: bool, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.encoder = Encoder(size, dropout)
        self.head = MaskedLMHead(size)
        self.projection = nn.Parameter(torch.empty(size.hidden, size.hidden))  # z = h @ projection
        self.contrast_layer, self.pooling, self.normalise = contrast_layer, pooling, normalise

    def forward(self, batch: PackedBatch, scale: Tensor | None = None) -> Outputs:
        """Compute all objectives of a packed micro-batch; `scale` (N,): each target's factor in the loss (None: 1)."""
        contrast, top = self.contrast_layer, self.encoder.size.layers
        lm, views = batch.lengths[: batch.lm_sequences], batch.lengths[batch.lm_sequences :]
        hidden = self.encoder.embed(batch.ids, batch.positions)  # (T, d)
        queries = None
        if views:
            hidden = self.encoder.run(hidden, batch.lengths, 0, contrast)
            hidden, contrasted = hidden.split([sum(lm), sum(views)])
            pooled = pool(contrasted, views, self.pooling)
            if len(views) > len(batch.view_groups):  # the last one is padding
                pooled = pooled[:-1]
            queries = project(pooled, self.projection, self.normalise)
        if not lm:
            return Outputs(None, None, queries)
        first = contrast if views else 0
        hidden = self.encoder.run(hidden, lm, first, top, batch.target_rows, batch.target_counts)  # (N, d)
        if batch.answered is not None:
            hidden = hidden[batch.answered]
        if scale is None:
            scale = torch.ones(len(batch.target_ids), device=hidden.device)
        return Outputs(*self.head.loss(hidden, self.encoder.token_embedding.weight, batch.target_ids, scale), queries)


def project(pooled: Tensor, projection: Tensor, normalise: bool) -> Tensor:
    """Return queries or keys (B, d) from pooled vectors (B, d), in fp32 even under autocast."""
    with torch.autocast(pooled.device.type, enabled=False):
        pooled = full_precision(pooled)
        projected = pooled @ projection.to(pooled.dtype)
    return F.normalize(projected, dim=1) if normalise else projected
