"""Momentum contrast (He et al. 2020) as in InfoXLM: a slowly changing fp32 key encoder, and a queue of its keys."""

import torch
from torch import Tensor, nn

from infoxlm_core.config import ContrastConfig
from infoxlm_core.model.encoder import Encoder, pool
from infoxlm_core.model.heads import InfoXLM, project


class KeyEncoder(nn.Module):
    """A copy of the query encoder, up to the contrast layer, that follows the query encoder without gradients.

    The copy includes the projection. Its weights are always in fp32, because bf16 would round small updates away.
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
        self.update(momentum=0.0)

    def pair_with(self, model: InfoXLM) -> None:
        """Pair each parameter with that of the query encoder. Call again if sharding has replaced the parameters."""
        key_parameters = dict(self.named_parameters())
        query_parameters = dict(model.named_parameters())
        self._key_parameters: list[Tensor] = list(key_parameters.values())
        self._query_parameters: list[Tensor] = [query_parameters[name] for name in key_parameters]

    @torch.no_grad()
    def forward(self, ids: Tensor, positions: Tensor, lengths: tuple[int, ...]) -> Tensor:
        """Return the (B, d) fp32 keys of B packed views, given their (T,) token ids and positions."""
        hidden = self.encoder(ids, positions, lengths)  # (T, d)
        return project(pool(hidden, lengths, self.pooling), self.projection, self.normalise)

    @torch.no_grad()
    def update(self, momentum: float) -> None:
        """Set key = momentum * key + (1 - momentum) * query for all parameters. Momentum 0 copies the query encoder."""
        if momentum == 0.0:
            for key, query in zip(self._key_parameters, self._query_parameters, strict=True):
                key.copy_(query)  # one by one, because sharded tensors have no _foreach_copy_
        else:
            torch._foreach_lerp_(self._key_parameters, self._query_parameters, 1.0 - momentum)


class Queue:
    """A ring buffer of the K newest keys and their sentence ids. The keys are the negatives of the contrast."""

    def __init__(self, size: int, hidden: int, device: torch.device | str = "cpu") -> None:
        self.rows = torch.zeros(size, hidden, device=device)  # (K, d) fp32
        # (K, 2) ids of the two translation pairs in each mixup pair; without mixup, both ids are the same
        self.sentence_ids = torch.zeros(size, 2, dtype=torch.long, device=device)
        # The other two tensors stay on the CPU, because reading a value from a GPU would wait for the GPU.
        self.added_at_step = torch.zeros(size, dtype=torch.long, device="cpu")  # (K,) step that added each row
        self.pointer = torch.zeros((), dtype=torch.long, device="cpu")  # row that the next key replaces

    def push(self, keys: Tensor, sentence_ids: Tensor, step: int) -> None:
        """Replace the oldest rows with (B, d) keys and (B, 2) sentence ids. If B > `capacity`, keep the last keys."""
        capacity = len(self.rows)
        skipped_count = max(0, len(keys) - capacity)  # so that no row is written twice, in an undefined order
        keys = keys[skipped_count:]
        sentence_ids = sentence_ids[skipped_count:]
        first_row = int(self.pointer) + skipped_count
        # Compute the row numbers on both devices, because a copy between devices would wait for the GPU.
        cpu_rows = (first_row + torch.arange(len(keys), device="cpu")) % capacity  # (B,)
        device_rows = (first_row + torch.arange(len(keys), device=self.rows.device)) % capacity  # (B,)
        self.rows[device_rows] = keys.detach()
        self.sentence_ids[device_rows] = sentence_ids
        self.added_at_step[cpu_rows] = step
        self.pointer.fill_((first_row + len(keys)) % capacity)

    def state_dict(self) -> dict[str, Tensor]:
        """Return the queue's tensors (not copies) by their names in checkpoints."""
        # The names "meanings" and "born" keep checkpoints of earlier versions readable.
        return {"rows": self.rows, "meanings": self.sentence_ids, "born": self.added_at_step, "pointer": self.pointer}

    @property
    def mean_age(self) -> float:
        """The keys' mean age: optimizer steps between each key and the newest key."""
        return float(self.added_at_step.max() - self.added_at_step.double().mean())


def compute_momentum(config: ContrastConfig, step: int, total_steps: int) -> float:
    """Return the momentum for the key encoder's update after an optimizer step. The first step is number 0."""
    if config.momentum_schedule == "linear":
        progress = step / max(1, total_steps - 1)
        return config.momentum + (1 - config.momentum) * progress
    if config.momentum_schedule == "exponential":
        # A low momentum at first forgets inaccurate early weights quickly (Tarvainen and Valpola 2017).
        return min(config.momentum, 1 - float(step + 1) ** -config.momentum_alpha)
    if config.momentum_schedule == "refresh":  # momentum 0 copies the query encoder
        return 0.0 if (step + 1) % config.refresh_every == 0 else config.momentum
    return config.momentum
