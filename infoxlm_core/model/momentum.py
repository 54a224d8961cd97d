"""Momentum contrast (He et al. 2020) as in InfoXLM: a slowly changing fp32 key encoder and a queue of its keys."""

import torch
from torch import Tensor, nn

from infoxlm_core.config import ContrastConfig
from infoxlm_core.model.encoder import Encoder, pool
from infoxlm_core.model.heads import InfoXLM, project


class KeyEncoder(nn.Module):
    """A copy of the query encoder up to the universal layer, with its projection, that follows it without gradients.

    The weights are always in fp32, because the small updates would be rounded away in bf16.
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
        """Find the parameters of the query encoder that each update reads. Call it again if sharding replaces them."""
        query_parameters = dict(model.named_parameters())
        self._key_parameters: list[Tensor] = []
        self._query_parameters: list[Tensor] = []
        for name, parameter in self.named_parameters():
            self._key_parameters.append(parameter)
            self._query_parameters.append(query_parameters[name])

    @torch.no_grad()
    def forward(self, ids: Tensor, positions: Tensor, lengths: tuple[int, ...]) -> Tensor:
        """Return the keys (B, d) of B packed views in fp32, given their token ids and positions (T,)."""
        hidden = self.encoder(ids, positions, lengths)  # (T, d)
        return project(pool(hidden, lengths, self.pooling), self.projection, self.normalise)

    @torch.no_grad()
    def update(self, momentum: float) -> None:
        """Set key = momentum * key + (1 - momentum) * query for all parameters. Momentum 0 copies the query encoder."""
        if momentum == 0.0:
            for key, query in zip(self._key_parameters, self._query_parameters, strict=True):
                key.copy_(query)  # sharded tensors have no _foreach_copy_
        else:
            torch._foreach_lerp_(self._key_parameters, self._query_parameters, 1.0 - momentum)


class Queue:
    """A ring buffer of the K newest keys, the negatives of the contrast, with the ids of their sentences."""

    def __init__(self, size: int, hidden: int, device: torch.device | str = "cpu") -> None:
        self.rows = torch.zeros(size, hidden, device=device)  # (K, d) fp32
        # (K, 2) ids of the two translation pairs of a mixup pair; without mixup, both are the same
        self.sentence_ids = torch.zeros(size, 2, dtype=torch.long, device=device)
        # These two are on the CPU, because reading them from a GPU would wait for it.
        self.added_at_step = torch.zeros(size, dtype=torch.long, device="cpu")  # (K,) optimizer step that added the row
        self.pointer = torch.zeros((), dtype=torch.long, device="cpu")  # the row that the next key replaces

    def push(self, keys: Tensor, sentence_ids: Tensor, step: int) -> None:
        """Replace the oldest rows by keys (B, d) with sentence ids (B, 2). Of more than K keys, keep the last K."""
        capacity = len(self.rows)
        skipped_count = max(0, len(keys) - capacity)
        keys = keys[skipped_count:]
        sentence_ids = sentence_ids[skipped_count:]
        first_row = int(self.pointer) + skipped_count
        # Compute the row numbers on both devices, because a copy between them would wait for the GPU.
        cpu_rows = (first_row + torch.arange(len(keys), device="cpu")) % capacity  # (B,)
        device_rows = (first_row + torch.arange(len(keys), device=self.rows.device)) % capacity  # (B,)
        self.rows[device_rows] = keys.detach()
        self.sentence_ids[device_rows] = sentence_ids
        self.added_at_step[cpu_rows] = step
        self.pointer.fill_((first_row + len(keys)) % capacity)

    def state_dict(self) -> dict[str, Tensor]:
        """Return the tensors of the queue themselves, not copies, by their names in checkpoints."""
        # Sentence ids are called "meanings", as in the checkpoints of earlier versions.
        return {"rows": self.rows, "meanings": self.sentence_ids, "born": self.added_at_step, "pointer": self.pointer}

    @property
    def mean_age(self) -> float:
        """The mean age of the keys, in optimizer steps since the newest key."""
        return float(self.added_at_step.max() - self.added_at_step.double().mean())


def compute_momentum(config: ContrastConfig, step: int, total_steps: int) -> float:
    """Return the momentum with which the key encoder is updated after an optimizer step. The first step is 0."""
    if config.momentum_schedule == "linear":
        progress = step / max(1, total_steps - 1)
        return config.momentum + (1 - config.momentum) * progress
    if config.momentum_schedule == "exponential":
        return min(config.momentum, 1 - float(step + 1) ** -config.momentum_alpha)
    if config.momentum_schedule == "refresh":
        is_refresh = (step + 1) % config.refresh_every == 0
        return 0.0 if is_refresh else config.momentum
    return config.momentum
