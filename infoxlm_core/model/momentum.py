"""Momentum contrast (He et al. 2020) as in InfoXLM: a slow fp32 key encoder and a queue of its keys."""

import torch
from torch import Tensor, nn

from infoxlm_core.config import ContrastConfig
from infoxlm_core.model.encoder import Encoder, pool
from infoxlm_core.model.heads import InfoXLM, project


class KeyEncoder(nn.Module):
    """A slowly moving copy of the query encoder up to the universal layer, with its projection, without gradient.

    Weights stay in fp32 whatever the training precision: in bf16 the small updates would round to nothing.
    """

    def __init__(self, model: InfoXLM) -> None:
        super().__init__()
        self.pooling = model.pooling
        self.normalise = model.normalise
        self.encoder = Encoder(model.encoder.size, layers=model.contrast_layer)
        self.encoder.compiler = model.encoder.compiler
        self.projection = None if model.projection is None else nn.Parameter(torch.empty_like(model.projection))
        self.requires_grad_(False).eval()
        self.pair_with(model)
        self.update(0.0)

    def pair_with(self, model: InfoXLM) -> None:
        """Pair each parameter with the model's parameter of the same name. Repeat it after sharding replaces them."""
        query_parameters = dict(model.named_parameters())
        self._key_parameters: list[Tensor] = []
        self._query_parameters: list[Tensor] = []
        for name, parameter in self.named_parameters():
            self._key_parameters.append(parameter)
            self._query_parameters.append(query_parameters[name])

    @torch.no_grad()
    def forward(self, ids: Tensor, positions: Tensor, lengths: tuple[int, ...]) -> Tensor:
        """Return the keys (B, d) in fp32 of B packed views, given as ids and positions (T,)."""
        hidden = self.encoder(ids, positions, lengths)  # (T, d)
        return project(pool(hidden, lengths, self.pooling), self.projection, self.normalise)

    @torch.no_grad()
    def update(self, momentum: float) -> None:
        """Set key <- momentum * key + (1 - momentum) * query once per optimizer step. Momentum 0 copies the query."""
        if momentum == 0.0:
            for key, query in zip(self._key_parameters, self._query_parameters, strict=True):
                key.copy_(query)  # sharded tensors have no _foreach_copy_
        else:
            torch._foreach_lerp_(self._key_parameters, self._query_parameters, 1.0 - momentum)


class Queue:
    """A ring buffer of the K newest keys, with the ids of their sentences and the step that added them."""

    def __init__(self, size: int, hidden: int, device: torch.device | str = "cpu") -> None:
        self.rows = torch.zeros(size, hidden, device=device)  # (K, d) fp32
        # (K, 2) ids of the two translation pairs of a row's mixup; twice the same id without mixup
        self.sentence_ids = torch.zeros(size, 2, dtype=torch.long, device=device)
        # These two stay on the CPU, where reading them does not wait for the GPU.
        self.added_at_step = torch.zeros(size, dtype=torch.long, device="cpu")  # (K,) optimizer step that added the row
        self.pointer = torch.zeros((), dtype=torch.long, device="cpu")  # the row that the next key replaces

    def push(self, keys: Tensor, sentence_ids: Tensor, step: int) -> None:
        """Replace the oldest rows by keys (B, d) with sentence ids (B, 2).

        If there are more keys than rows in the queue (K), only the last K keys are stored.
        """
        size = len(self.rows)
        skipped_count = max(0, len(keys) - size)
        keys = keys[skipped_count:]
        sentence_ids = sentence_ids[skipped_count:]
        start = int(self.pointer) + skipped_count
        indices = (start + torch.arange(len(keys), device="cpu")) % size  # (B,)
        device_indices = (start + torch.arange(len(keys), device=self.rows.device)) % size
        self.rows[device_indices] = keys.detach()
        self.sentence_ids[device_indices] = sentence_ids
        self.added_at_step[indices] = step
        self.pointer.fill_((start + len(keys)) % size)

    def state(self) -> dict[str, Tensor]:
        """Return the tensors of the queue, not copies, by their names in checkpoints."""
        # Sentence ids are called "meanings", as in the checkpoints of earlier versions.
        return {"rows": self.rows, "meanings": self.sentence_ids, "born": self.added_at_step, "pointer": self.pointer}

    @property
    def mean_age(self) -> float:
        """The mean age of the keys, in optimizer steps before the newest."""
        return float(self.added_at_step.max() - self.added_at_step.double().mean())


def momentum_at(config: ContrastConfig, step: int, total_steps: int) -> float:
    """Return the momentum of the key encoder after a step, counted from 0."""
    if config.momentum_schedule == "linear":
        progress = step / max(1, total_steps - 1)
        return config.momentum + (1 - config.momentum) * progress
    if config.momentum_schedule == "exponential":
        return min(config.momentum, 1 - float(step + 1) ** -config.momentum_alpha)
    if config.momentum_schedule == "refresh":
        is_refresh = (step + 1) % config.refresh_every == 0
        return 0.0 if is_refresh else config.momentum
    return config.momentum
