"""The networks of XLM and BERT: the same encoder, other heads.

Positions count from 0 here. XLM's language and BERT's segment embedding are the encoder's `types`.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from infoxlm_core.model.encoder import Encoder, EncoderSize, initialise, pool
from infoxlm_core.model.heads import MaskedLMHead
from infoxlm_core.systems.baseline_samples import TextBatch

EPSILON = 1e-12
"""Of LayerNorm, in XLM and BERT."""


class XLM(nn.Module):
    """XLM's encoder, and the product with its word embeddings (tied) plus a free bias: no other head."""

    def __init__(self, size: EncoderSize, dropout: float = 0.0) -> None:
        super().__init__()
        self.encoder = Encoder(size, dropout)
        self.bias = nn.Parameter(torch.zeros(size.vocabulary))

    def forward(self, batch: TextBatch) -> tuple[Tensor, None]:
        """(N, V) logits at the batch's rows; each row of a CLM batch sees only what stands before it, and itself."""
        hidden = self.encoder.embed(batch.ids, batch.positions, batch.types)
        top, causal = self.encoder.size.layers, batch.objective == "clm"
        hidden = self.encoder.run(hidden, batch.lengths, 0, top, batch.rows, batch.row_counts, causal)  # (N, d)
        return F.linear(hidden, self.encoder.token_embedding.weight, self.bias), None


class BERT(nn.Module):
    """BERT's encoder, masked-LM head, and pooler with the two-way question whether part two follows part one."""

    def __init__(self, size: EncoderSize, dropout: float = 0.0) -> None:
        super().__init__()
        self.encoder = Encoder(size, dropout)
        self.head = MaskedLMHead(size)
        self.pooler = nn.Linear(size.hidden, size.hidden)
        self.follows = nn.Linear(size.hidden, 2)

    def forward(self, batch: TextBatch) -> tuple[Tensor, Tensor]:
        """(N, V) logits at the batch's rows, and (sequences, 2) whether the second part follows (0) or not (1)."""
        hidden = self.encoder.embed(batch.ids, batch.positions, batch.types)
        hidden = self.encoder.run(hidden, batch.lengths, 0, self.encoder.size.layers)  # (T, d)
        pooled = torch.tanh(self.pooler(pool(hidden, batch.lengths, "cls")))
        return self.head(hidden[batch.rows], self.encoder.token_embedding.weight), self.follows(pooled)


def first_weights(model: nn.Module, seed: int) -> None:
    """As BERT's; XLM draws its embeddings with a standard deviation of d^-0.5."""
    initialise(model, seed)
    if not isinstance(model, BERT):
        with torch.no_grad():
            for module in model.modules():
                if isinstance(module, nn.Embedding):
                    module.weight.mul_(module.embedding_dim**-0.5 / 0.02)
