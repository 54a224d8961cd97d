"""Sentence objectives: one class is enough to add one to the loss, its divisor and the curves."""

import pytest
import torch
import torch.nn.functional as F

from infoxlm_core.config import ObjectivesConfig
from infoxlm_core.data.shards import open_shards
from infoxlm_core.errors import ConfigError
from infoxlm_core.systems.infoxlm import learner as infoxlm
from infoxlm_core.systems.infoxlm.learner import InfoXLMLearner
from infoxlm_core.systems.infoxlm.sentence_objectives import XLCO, SentenceObjective
from infoxlm_core.systems.infoxlm.system import build
from infoxlm_core.training import distributed
from infoxlm_core.training.optimizer import make_adamw
from infoxlm_core.training.state import Progress
from infoxlm_core.training.step import train_step
from tests.toys.pretraining import tiny_config


class Spread(SentenceObjective):
    """The example of docs/extending.md."""

    name = "spread"

    def count(self, batch):
        return len(batch.view_group_ids)

    def loss(self, batch, queries, group_totals):
        loss = F.cosine_similarity(queries, queries.mean(dim=0, keepdim=True)).sum()
        return loss, {self.name: loss.detach()}


@pytest.mark.usefixtures("in_fp64")
def test_added_objective_is_weighted_divided_by_its_count_and_logged(tiny_shards, monkeypatch):
    monkeypatch.setattr(infoxlm, "SENTENCE_OBJECTIVES", (XLCO, Spread))
    config = tiny_config(batches={"micro_batch_size": 8}, objectives={"mlm": 0, "tlm": 0})
    shards = open_shards(tiny_shards)
    monkeypatch.setattr(ObjectivesConfig, "weights", lambda self: {"xlco": 1e-12, "spread": 2.0})
    learner = InfoXLMLearner(config, build(config, shards), shards)
    learner.after_step(0)
    (batch,) = learner.batches(0)
    queries = learner.module(batch).queries
    mean = F.cosine_similarity(queries, queries.mean(dim=0, keepdim=True)).mean()
    gradients = torch.autograd.grad(2.0 * mean, list(learner.module.parameters()), materialize_grads=True)
    expected_norm = torch.cat([gradient.flatten() for gradient in gradients]).norm().item()
    adam = make_adamw(learner.module.parameters(), config.optimization)

    metrics, _ = train_step(learner, adam, config.optimization, Progress(), [batch])

    assert metrics["loss/spread"] == pytest.approx(mean.item(), rel=1e-9)
    assert metrics["gradient_norm"] == pytest.approx(expected_norm, rel=1e-6)


def test_enqueueing_by_micro_batch_needs_workers_that_divide_the_virtual_shards(monkeypatch, tiny_shards):
    monkeypatch.setattr(distributed, "world_size", lambda: 3)
    config = tiny_config(contrast={"enqueue": "micro_batch"})
    shards = open_shards(tiny_shards)

    with pytest.raises(ConfigError, match=r"number of workers \(3\) must divide batches.virtual_shards \(4\)"):
        InfoXLMLearner(config, build(config, shards), shards)
