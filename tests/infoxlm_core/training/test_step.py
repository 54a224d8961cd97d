"""One optimizer step: what it reads from the device, and how often."""

import pytest
import torch
from torch import nn

from infoxlm_core.config import OptimizationConfig
from infoxlm_core.training.learner import Learner, LossWeights
from infoxlm_core.training.optimizer import make_adamw
from infoxlm_core.training.state import Progress
from infoxlm_core.training.step import train_step


class Numbers:
    """A micro-batch of numbers."""

    def __init__(self, *values: float) -> None:
        self.values = torch.tensor(values)
        self.counts = {"square": len(values), "tokens": len(values)}


class Regression(Learner):
    """A weight w, and sum((w * x)^2) as its loss: a learner of no more than it must have."""

    weights = LossWeights({"square": 1.0})

    def __init__(self) -> None:
        self.module = nn.Linear(1, 1, bias=False)
        nn.init.ones_(self.module.weight)

    def losses(self, batch, scales):
        loss = self.module(batch.values[:, None]).square().sum()
        return loss * scales["square"], {"square": loss.detach(), "by_number": batch.values}

    def statistics(self, sums, counts):
        return {"first": sums["by_number"][0] / counts["square"]}


def test_a_step_waits_for_the_device_once_however_many_micro_batches_it_has(monkeypatch):
    learner, read = Regression(), []
    plain = torch.Tensor.cpu
    for name in ("item", "tolist", "__float__", "__int__", "__bool__"):
        monkeypatch.setattr(torch.Tensor, name, lambda self, name=name: read.append(name))
    monkeypatch.setattr(torch.Tensor, "cpu", lambda self: (read.append("cpu"), plain(self))[1])
    config = OptimizationConfig(warmup_steps=0)

    train_step(learner, make_adamw(learner.module.parameters(), config), config, Progress(), [Numbers(1.0, 2.0)] * 3)

    assert read == ["cpu"]


def test_a_loss_is_the_sum_over_all_micro_batches_divided_once_by_all_targets():
    learner, config = Regression(), OptimizationConfig(warmup_steps=0, clip_norm=100.0)
    adam = make_adamw(learner.module.parameters(), config)

    figures, stopping = train_step(learner, adam, config, Progress(), [Numbers(1.0, 2.0, 3.0), Numbers(4.0, 0.0, 0.0)])

    assert figures["loss/square"] == (1 + 4 + 9 + 16) / 6
    assert figures["gradient_norm"] == 2 * (1 + 4 + 9 + 16) / 6
    assert (figures["first"], figures["tokens"], figures["skipped"], stopping) == ((1 + 4) / 6, 6, 0.0, False)


def test_a_loss_whose_targets_nobody_counts_is_refused():
    learner, config = Regression(), OptimizationConfig(warmup_steps=0)
    adam, batch = make_adamw(learner.module.parameters(), config), Numbers(1.0, 2.0)
    del batch.counts["square"]

    with pytest.raises(ValueError, match=r"Regression\.counts lacks the targets of square"):
        train_step(learner, adam, config, Progress(), [batch])
