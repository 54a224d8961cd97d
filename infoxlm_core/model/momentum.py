"""Momentum contrast (He et al. 2020) as in InfoXLM: a slow fp32 key encoder and a queue of its keys."""

import torch
from torch import Tensor, nn

from infoxlm_core.config import ContrastConfig
from infoxlm_core.model.encoder import Encoder, pool
from infoxlm_core.model.heads import InfoXLM, project


class KeyEncoder(nn.Module):
    """The slow copy of the query encoder up to the universal layer, with its projection, without gradient.

    Weights stay in fp32 whatever the training precision: in bf16 the small moves of momentum would round to nothing.
    """

    def __init__(self, model: InfoXLM) -> None:
        super().__init__()
        self.pooling, self.normalise, self.last = model.pooling, model.normalise, model.contrast_layer
        self.encoder = Encoder(model.encoder.size, layers=self.last)
        self.encoder.compiler = model.encoder.compiler
        self.projection = nn.Parameter(torch.empty_like(model.projection))
        self.requires_grad_(False).eval()
        self.pair_with(model)
        self.follow(0.0)

    def pair_with(self, model: InfoXLM) -> None:
        """Pair each parameter with the model's parameter of the same name; again after sharding replaced them."""
        queries = dict(model.named_parameters())
        self._keys: list[Tensor] = [key for _, key in self.named_parameters()]
        self._queries: list[Tensor] = [queries[name] for name, _ in self.named_parameters()]

    @torch.no_grad()
    def forward(self, ids: Tensor, positions: Tensor, lengths: tuple[int, ...]) -> Tensor:
        """Return the keys (B, d) in fp32 of B packed views, given as ids and positions (T,)."""
        pooled = pool(self.encoder(ids, positions, lengths), lengths, self.pooling)
        return project(pooled, self.projection, self.normalise)

    @torch.no_grad()
    def follow(self, momentum: float) -> None:
        """Set key <- momentum * key + (1 - momentum) * query, once an optimizer step; momentum 0 copies."""
        if momentum == 0.0:
            for key, query in zip(self._keys, self._queries, strict=True):  # shards have no _foreach_copy_
                key.copy_(query)
        else:
            torch._foreach_lerp_(self._keys, self._queries, 1.0 - momentum)


class Queue:
    """K keys of earlier steps, first in, first out, with the ids of their sentences and the step of their arrival."""

    def __init__(self, size: int, hidden: int, device: torch.device | str = "cpu") -> None:
        self.rows = torch.zeros(size, hidden, device=device)  # (K, d) fp32
        # (K, 2) ids of the translation pairs joined in a row; twice the same without mixup
        self.sentence_ids = torch.zeros(size, 2, dtype=torch.long, device=device)
        # on the CPU: the optimizer step that enqueued each row, and the row that the next key replaces
        self.born = torch.zeros(size, dtype=torch.long, device="cpu")
        self.pointer = torch.zeros((), dtype=torch.long, device="cpu")

    def push(self, keys: Tensor, sentence_ids: Tensor, step: int) -> None:
        """Replace the oldest rows by keys (B, d) with sentence ids (B, 2); if B > K the last K keys stay."""
        size = len(self.rows)
        start = int(self.pointer) + max(0, len(keys) - size)
        keys, sentence_ids = keys[-size:], sentence_ids[-size:]
        at = (start + torch.arange(len(keys), device=self.rows.device)) % size
        self.rows[at], self.sentence_ids[at] = keys.detach(), sentence_ids
        self.born[(start + torch.arange(len(keys), device="cpu")) % size] = step
        self.pointer.fill_((start + len(keys)) % size)

    def state(self) -> dict[str, Tensor]:
        """Return the live tensors of the queue by their names in checkpoints."""
        # Checkpoints of earlier versions call the sentence ids "meanings".
        return {"rows": self.rows, "meanings": self.sentence_ids, "born": self.born, "pointer": self.pointer}

    @property
    def age(self) -> float:
        """The mean age of the keys, in optimizer steps before the newest."""
        return float(self.born.max() - self.born.double().mean())


def momentum_at(config: ContrastConfig, step: int, steps: int) -> float:
    """Return the momentum of the key encoder after a step, counted from 0, of `steps` steps."""
    if config.momentum_schedule == "linear":
        return config.momentum + (1 - config.momentum) * step / max(1, steps - 1)
    if config.momentum_schedule == "exponential":
        return min(config.momentum, 1 - float(step + 1) ** -config.momentum_alpha)
    if config.momentum_schedule == "refresh":
        return 0.0 if (step + 1) % config.refresh_every == 0 else config.momentum
    return config.momentum
