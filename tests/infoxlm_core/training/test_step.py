"""One optimizer step: what it reads from the device, and how often."""

import pytest
import torch
from torch import nn

from infoxlm_core.config import OptimizationConfig
from infoxlm_core.data.shards import open_shards
from infoxlm_core.systems.infoxlm.learner import InfoXLMLearner
from infoxlm_core.systems.infoxlm.system import build
from infoxlm_core.training import optimizer
from infoxlm_core.training.learner import Learner, LossWeights
from infoxlm_core.training.optimizer import make_adamw
from infoxlm_core.training.state import Progress, named_tensors
from infoxlm_core.training.step import count_targets, train_step
from tests.helpers import workers
from tests.toys.pretraining import tiny_config


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


@pytest.mark.item("A3", "A13")
@pytest.mark.parametrize("micro", [1, 3, 8])
@pytest.mark.parametrize("weighting", ["mean", "count"])
def test_the_micro_batch_does_not_change_the_step(tiny_shards, micro, weighting):
    def gradients(size: int) -> tuple[dict, torch.Tensor, torch.Tensor]:
        config = tiny_config(batches={"micro_batch_size": size}, objectives={"weighting": weighting})
        shards = open_shards(tiny_shards)
        learner = InfoXLMLearner(config, build(config, shards), shards)
        learner.after_step(0)
        parameters = list(learner.module.parameters())
        recorded = torch.optim.SGD(parameters, lr=0.0)
        recorded.step = lambda: grads.append(torch.cat([p.grad.flatten() for p in parameters]))
        grads: list[torch.Tensor] = []
        figures, _ = train_step(
            learner,
            recorded,
            config.optimization.model_copy(update={"clip_norm": 1e9}),
            Progress(),
            learner.batches(0),
        )
        return figures, grads[0], learner.xlco.queue.rows

    with workers.fp64():
        (expected, gradient, queue), (figures, other, other_queue) = gradients(4), gradients(micro)

    assert (other - gradient).norm() <= 1e-9 * gradient.norm()
    assert {k: v for k, v in figures.items() if "loss" in k} == pytest.approx(
        {k: v for k, v in expected.items() if "loss" in k}, rel=1e-9
    )
    torch.testing.assert_close(other_queue, queue, rtol=1e-9, atol=1e-9)


@pytest.mark.usefixtures("in_fp64")
@pytest.mark.item("A20")
def test_clipping_sees_the_gradient_of_the_mean_losses(tiny_shards):
    config, shards = tiny_config(optimization={"clip_norm": 1e-3}), open_shards(tiny_shards)
    learner = InfoXLMLearner(config, build(config, shards), shards)
    learner.after_step(0)
    batches = learner.batches(0)
    counts = count_targets(map(learner.counts, batches), learner.weights.by_name)
    for batch in batches:  # by hand: the gradient of the sum of mean losses
        learner.losses(batch, {name: 1 / counts[name] for name in learner.weights.by_name})[0].backward()
    expected = torch.cat([p.grad.flatten() for p in learner.module.parameters()]).norm().item()
    learner.module.zero_grad()
    learner.xlco.new_keys.clear()
    clipped = []
    adam = optimizer.make_adamw(learner.module.parameters(), config.optimization)
    adam.step = lambda: clipped.append(torch.cat([p.grad.flatten() for p in learner.module.parameters()]).norm().item())

    figures, _ = train_step(learner, adam, config.optimization, Progress(), batches)

    assert figures["gradient_norm"] == pytest.approx(expected, rel=1e-9)
    assert clipped == [pytest.approx(1e-3, rel=1e-3)] and expected > 1e-3


@pytest.mark.item("A3")
def test_count_weighting_divides_by_all_targets():
    weights = LossWeights({"mlm": 1.0, "tlm": 1.0, "xlco": 1.0}, divide="count")

    divisors = weights.divisors({"mlm": 76.0, "tlm": 10.0, "xlco": 1.0})

    assert divisors == {"mlm": 87.0, "tlm": 87.0, "xlco": 87.0}


@pytest.mark.usefixtures("in_fp64")
def test_with_count_weighting_curves_show_the_mean_over_the_targets_of_each_objective(tiny_shards):
    def first_step(weighting: str) -> tuple[dict[str, float], float]:
        config, shards = tiny_config(objectives={"weighting": weighting}), open_shards(tiny_shards)
        learner = InfoXLMLearner(config, build(config, shards), shards)
        learner.after_step(0)
        adam = optimizer.make_adamw(learner.module.parameters(), config.optimization)
        figures, _ = train_step(learner, adam, config.optimization, Progress(), learner.batches(0))
        return {name: value for name, value in figures.items() if name.startswith("loss")}, figures["gradient_norm"]

    (by_mean, norm_of_mean), (by_count, norm_of_count) = first_step("mean"), first_step("count")

    assert by_count == pytest.approx(by_mean, rel=1e-12) and "loss/xlco" in by_count
    assert norm_of_count < 0.9 * norm_of_mean  # the weighting itself is another


@pytest.mark.item("A8", "F22")
def test_a_bad_step_touches_neither_weights_nor_key_encoder_nor_queue(tiny_shards, monkeypatch):
    config = tiny_config(optimization={"warmup_steps": 0})
    shards = open_shards(tiny_shards)
    learner = InfoXLMLearner(config, build(config, shards), shards)
    learner.after_step(0)
    adam = optimizer.make_adamw(learner.module.parameters(), config.optimization)
    progress = Progress()
    train_step(learner, adam, config.optimization, progress, learner.batches(progress.step))
    before = {name: tensor.clone() for name, tensor in named_tensors(learner, adam).items()}
    plain = learner.losses

    def spoiled(batch, scales):
        loss, sums = plain(batch, scales)
        return loss * float("nan"), sums

    monkeypatch.setattr(learner, "losses", spoiled)

    for _ in range(2):
        figures, _ = train_step(learner, adam, config.optimization, progress, learner.batches(progress.step))

    assert figures["skipped"] == 1.0
    after = named_tensors(learner, adam)
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    assert (progress.step, progress.updates, progress.guard.bad_in_a_row) == (3, 1, 2)
