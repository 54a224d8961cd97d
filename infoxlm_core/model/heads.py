"""The masked-LM head, the contrast projection, and the InfoXLM network with both."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from infoxlm_core.config import PretrainingConfig
from infoxlm_core.data.batches import PackedBatch
from infoxlm_core.model.encoder import Encoder, EncoderSize, pool
from infoxlm_core.model.linear_cross_entropy import linear_cross_entropy
from infoxlm_core.model.objectives import full_precision


class MaskedLMHead(nn.Module):
    """The masked-LM head: dense layer, GELU, LayerNorm, and an output layer tied to the word embeddings."""

    compiler = ""  # see `Encoder`

    def __init__(self, size: EncoderSize) -> None:
        super().__init__()
        self.dense = nn.Linear(size.hidden, size.hidden)
        self.norm = nn.LayerNorm(size.hidden, size.epsilon)
        self.bias = nn.Parameter(torch.zeros(size.vocabulary))

    def transform(self, hidden: Tensor) -> Tensor:
        """Return the (N, d) inputs of the output layer for (N, d) hidden states at masked positions."""
        return self.norm(F.gelu(self.dense(hidden)))

    def forward(self, hidden: Tensor, embedding: Tensor) -> Tensor:
        """Return (N, V) logits for (N, d) hidden states at masked positions and (V, d) word embeddings."""
        return F.linear(self.transform(hidden), embedding, self.bias)

    def loss(self, hidden: Tensor, embedding: Tensor, targets: Tensor, loss_weights: Tensor) -> tuple[Tensor, Tensor]:
        """Return the weighted sum of the losses, and the (N,) losses. See `linear_cross_entropy` for the arguments."""
        transformed = self.transform(hidden)
        return linear_cross_entropy(transformed, embedding, self.bias, targets, loss_weights, compiler=self.compiler)


@dataclass
class Outputs:
    """The outputs of InfoXLM's forward pass."""

    loss: Tensor | None  # differentiable weighted sum of the MLM and TLM losses; None without MLM and TLM
    losses: Tensor | None  # (N,) losses of the MLM and TLM targets in nats, without gradient; None if `loss` is
    queries: Tensor | None  # (B, d) fp32 queries; None without contrast views


class InfoXLM(nn.Module):
    """The trained network: the query encoder with its heads.

    All sequences of a micro-batch run together up to layer `contrast_layer`, where contrast views end. MLM and TLM
    sequences continue to the top layer, which computes only masked positions.
    """

    def __init__(
        self,
        size: EncoderSize,
        contrast_layer: int,
        pooling: str,
        normalise: bool,
        dropout: float = 0.0,
        has_head: bool = True,
        has_projection: bool = True,
    ) -> None:
        super().__init__()
        self.encoder = Encoder(size, dropout)
        self.head = MaskedLMHead(size) if has_head else None
        self.projection = nn.Parameter(torch.empty(size.hidden, size.hidden)) if has_projection else None
        self.contrast_layer = contrast_layer
        self.pooling = pooling
        self.normalise = normalise

    @classmethod
    def from_config(cls, config: PretrainingConfig, size: EncoderSize) -> Self:
        """Build the network that a config describes, with uninitialized weights."""
        contrast = config.contrast
        model = cls(
            size,
            contrast.resolve_layer(size.layers),
            contrast.pooling,
            contrast.normalise,
            dropout=config.model.dropout,
            has_head=bool(config.objectives.mlm or config.objectives.tlm),  # contrast needs no head
            has_projection=contrast.projection == "linear",
        )
        frozen = config.model.frozen  # "none", "embeddings", or the number of layers to freeze with the embeddings
        if frozen != "none":
            model.freeze(layer_count=0 if frozen == "embeddings" else frozen)
        return model

    def freeze(self, layer_count: int) -> None:
        """Freeze the embeddings and the lowest `layer_count` layers."""
        for name, module in self.encoder.named_children():
            if name != "layers":
                module.requires_grad_(False)
        self.encoder.layers[:layer_count].requires_grad_(False)

    def forward(self, batch: PackedBatch, loss_weights: Tensor | None = None) -> Outputs:
        """Compute the MLM and TLM losses and the contrast queries of a packed micro-batch.

        Args:
            batch: MLM and TLM sequences, followed by contrast views.
            loss_weights: (N,) weight of each masked token's loss in the sum; None: 1 for all tokens.
        """
        lm_lengths = batch.lengths[: batch.lm_sequences]
        view_lengths = batch.lengths[batch.lm_sequences :]
        hidden = self.encoder.embed(batch.ids, batch.positions)  # (T, d)
        queries = None
        first_layer = 0
        if view_lengths:  # run all sequences together up to the contrast layer, where the contrast views end
            hidden = self.encoder.run_layers(hidden, batch.lengths, 0, self.contrast_layer)
            hidden, view_hidden = hidden.split([sum(lm_lengths), sum(view_lengths)])
            queries = self._compute_queries(batch, view_hidden, view_lengths)
            first_layer = self.contrast_layer
        if not lm_lengths or self.head is None:
            return Outputs(loss=None, losses=None, queries=queries)
        last_layer = self.encoder.size.layers
        hidden = self.encoder.run_layers(
            hidden, lm_lengths, first_layer, last_layer, batch.target_rows, batch.target_counts
        )  # one row for each of the `target_rows`
        # FlashAttention 3 needs a row of every sequence, so on GPUs `target_rows` may include rows without a target.
        if batch.rows_with_target is not None:
            hidden = hidden[batch.rows_with_target]  # (N, d)
        if loss_weights is None:
            loss_weights = torch.ones(len(batch.target_ids), device=hidden.device)
        loss, losses = self.head.loss(hidden, self.encoder.token_embedding.weight, batch.target_ids, loss_weights)
        return Outputs(loss, losses, queries)

    def _compute_queries(self, batch: PackedBatch, hidden: Tensor, lengths: Sequence[int]) -> Tensor:
        """Return the (B, d) queries of the contrast views, given the contrast layer's output."""
        pooled = pool(hidden, lengths, self.pooling)
        if len(lengths) > len(batch.view_group_ids):  # `pad_for_gpu` has added a sequence of padding
            pooled = pooled[:-1]
        return project(pooled, self.projection, self.normalise)


def project(pooled: Tensor, projection: Tensor | None, normalise: bool) -> Tensor:
    """Project (B, d) pooled vectors to (B, d) queries or keys, in fp32 even under autocast."""
    with torch.autocast(pooled.device.type, enabled=False):
        vectors = full_precision(pooled)
        if projection is not None:
            vectors = vectors @ projection.to(vectors.dtype)
    return F.normalize(vectors, dim=1) if normalise else vectors
