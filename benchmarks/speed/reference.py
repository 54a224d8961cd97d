"""The step of the released InfoXLM code, reimplemented on fairseq.

Like the released code, this step pads every batch and runs a forward and a backward pass per objective. For contrast,
both encoders run to the last layer, although only an earlier layer is used; a masked-LM output times zero is added to
the loss; and the queue is cloned before each product. The key encoder is updated tensor by tensor. The optimizer is
fairseq's Adam.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.speed.harness import gradient_of
from benchmarks.speed.inputs import pad, padded_targets, split
from benchmarks.speed.peers import fairseq_mlm, gradients_of_fairseq, load_fairseq, make_fairseq, weights_of
from infoxlm_core.config import PretrainingConfig
from infoxlm_core.data.batches import PackedBatch
from infoxlm_core.model.heads import InfoXLM
from infoxlm_core.model.momentum import KeyEncoder, Queue


class Reference:
    """Query and key models, projections, queue and optimizer, initialised with our weights."""

    about = (
        "the released algorithm on fairseq (ve-fairseq 0.12.3): padded, a backward for each objective, both encoders "
        "to the last layer, queue cloned, EMA tensor by tensor, fairseq's Adam"
    )

    def __init__(self, config: PretrainingConfig, model: InfoXLM, keys: KeyEncoder, queue: Queue) -> None:
        from fairseq.optim.adam import Adam

        weights = weights_of(model)
        self.config = config
        self.query = make_fairseq(model.encoder.size)
        self.key = make_fairseq(model.encoder.size)
        load_fairseq(self.query, weights)
        self.names = list(weights)
        load_fairseq(self.key, weights | weights_of(keys))  # upper layers and head come from the query model
        assert model.projection is not None and keys.projection is not None
        self.projection = nn.Parameter(model.projection.detach().clone())
        self.key_projection = keys.projection.detach().clone()
        self.queue = queue.rows.clone()
        self.pointer = int(queue.pointer)
        adam = config.optimization
        self.optimizer = Adam(
            self.parameters(), lr=0.0, betas=adam.betas, eps=adam.epsilon, weight_decay=adam.weight_decay
        )

    def parameters(self) -> list[nn.Parameter]:
        """Return the trained parameters, without those of the key model."""
        return [*self.query.parameters(), self.projection]

    def inputs(self, batch: PackedBatch) -> dict[str, Tensor]:
        """Return the MLM and TLM sequences and the query and key views, each padded to its longest sequence."""
        lengths = split(batch)
        lm_ids, query_ids = batch.ids.split([sum(lengths["lm"]), sum(lengths["query"])])
        lm_inputs = pad(lm_ids, lengths["lm"])
        lm_targets = padded_targets(batch)
        padded = {"query": pad(query_ids, lengths["query"]), "key": pad(batch.key_ids, lengths["key"])}
        mlm_count = batch.lm_sequences // 2  # the first half of the sequences is for MLM, the second half for TLM
        for name, rows in (("mlm", slice(mlm_count)), ("tlm", slice(mlm_count, None))):
            longest = max(lengths["lm"][rows])
            padded[name] = lm_inputs[rows, :longest]
            padded[f"{name} targets"] = lm_targets[rows, :longest]
        return padded

    def losses(self, inputs: dict[str, Tensor]) -> float:
        """Run a backward pass per objective. Return the sum of the objectives' mean losses."""
        total = 0.0
        for name in ("mlm", "tlm"):
            loss = fairseq_mlm(self.query, inputs[name], inputs[f"{name} targets"])
            loss.backward()
            total += loss.item()
        loss = self.contrast(inputs) / len(inputs["query"])
        loss.backward()
        return total + loss.item()

    def contrast(self, inputs: dict[str, Tensor]) -> Tensor:
        """Return the summed contrast loss of a batch. Each query should match its key, not the keys in the queue."""
        layer = self.config.contrast.layer
        temperature = self.config.contrast.temperature
        with torch.no_grad():
            _, extra = self.key(inputs["key"], features_only=True, return_all_hiddens=True)
            self.keys = extra["inner_states"][layer][0] @ self.key_projection  # positions come first: 0 is [CLS]
        features, extra = self.query(inputs["query"], features_only=True, return_all_hiddens=True)
        query = extra["inner_states"][layer][0] @ self.projection
        positive = (query * self.keys).sum(dim=1, keepdim=True)
        negative = query @ self.queue.clone().detach().T
        logits = torch.cat([positive, negative], dim=1).float() / temperature
        targets = torch.zeros(len(logits), dtype=torch.long)
        log_probabilities = F.log_softmax(logits, dim=-1, dtype=torch.float32)
        # Like the released code, add a masked-LM output times zero.
        unused_head = self.query.get_submodule("encoder.lm_head")(features[:1, 0]).sum() * 0.0
        return F.nll_loss(log_probabilities, targets, reduction="sum") + unused_head

    def take_step(self, inputs: dict[str, Tensor]) -> None:
        """Take an optimizer step, update the key model, and replace the oldest keys of the queue."""
        self.optimizer.zero_grad()
        self.losses(inputs)
        nn.utils.clip_grad_norm_(self.parameters(), self.config.optimization.clip_norm)
        self.optimizer.step()
        self.update_key_encoder()
        rows = (self.pointer + torch.arange(len(self.keys))) % len(self.queue)
        self.queue[rows] = self.keys
        self.pointer = (self.pointer + len(self.keys)) % len(self.queue)

    @torch.no_grad()
    def update_key_encoder(self) -> None:
        """Move the key model towards the query model, with the formula of the paper."""
        m = self.config.contrast.momentum
        pairs = [*zip(self.key.parameters(), self.query.parameters(), strict=True)]
        for key, query in [*pairs, (self.key_projection, self.projection)]:
            key.copy_(key * m + query * (1.0 - m))

    def gradients(self) -> dict[str, Tensor]:
        """Return the gradients by Hugging Face's parameter names. The projection keeps its own name."""
        return gradients_of_fairseq(self.query, self.names) | {"projection": gradient_of(self.projection).clone()}
