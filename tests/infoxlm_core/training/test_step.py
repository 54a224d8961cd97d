"""One optimizer step: its losses, gradients and metrics, and that a bad step changes nothing."""

import pytest
import torch
from torch import nn

from infoxlm_core.config import OptimizationConfig, PretrainingConfig
from infoxlm_core.data.shards import open_shards
from infoxlm_core.systems.infoxlm.learner import InfoXLMLearner
from infoxlm_core.systems.infoxlm.system import build
from infoxlm_core.training.learner import Learner, LossWeights
from infoxlm_core.training.optimizer import make_adamw
from infoxlm_core.training.state import Progress, named_tensors
from infoxlm_core.training.step import count_targets, train_step
from tests.toys.pretraining import tiny_config


class NumberBatch:
    """A micro-batch of numbers."""

    def __init__(self, *values: float) -> None:
        self.values = torch.tensor(values)
        self.counts = {"square": len(values), "tokens": len(values)}


class Regression(Learner):
    """A minimal learner: one weight w = 1 and the loss sum((w * x)^2)."""

    weights = LossWeights({"square": 1.0})

    def __init__(self) -> None:
        self.module = nn.Linear(1, 1, bias=False)
        nn.init.ones_(self.module.weight)

    def losses(self, batch, scales):
        loss = self.module(batch.values[:, None]).square().sum()
        return loss * scales["square"], {"square": loss.detach(), "by_number": batch.values}

    def statistics(self, sums, counts):
        return {"first": sums["by_number"][0] / counts["square"]}

    def train_step(self, *batches: NumberBatch) -> tuple[dict[str, float], bool]:
        config = OptimizationConfig(warmup_steps=0, clip_norm=100.0)
        return train_step(self, make_adamw(self.module.parameters(), config), config, Progress(), batches)


def make_learner(shards_path, config: PretrainingConfig) -> InfoXLMLearner:
    """Return a learner of InfoXLM before its first step, with a filled queue."""
    shards = open_shards(shards_path)
    learner = InfoXLMLearner(config, build(config, shards), shards)
    learner.after_step(0)
    return learner


def take_first_step(shards_path, config: PretrainingConfig) -> tuple[InfoXLMLearner, dict[str, float], torch.Tensor]:
    """Return the learner after its first step, the metrics and the gradient with which the optimizer was called."""
    learner = make_learner(shards_path, config)
    adam = make_adamw(learner.module.parameters(), config.optimization)
    gradients = []
    adam.register_step_pre_hook(lambda *_: gradients.append(flatten_gradient(learner)))
    metrics, _ = train_step(learner, adam, config.optimization, Progress(), learner.batches(0))
    return learner, metrics, gradients[0]


def flatten_gradient(learner: Learner) -> torch.Tensor:
    return torch.cat([parameter.grad.flatten() for parameter in learner.module.parameters()])


def test_a_step_waits_for_the_device_once_however_many_micro_batches_it_has(monkeypatch):
    reads: list[str] = []
    cpu = torch.Tensor.cpu

    def record_cpu(self):
        reads.append("cpu")
        return cpu(self)

    for name in ("item", "tolist", "__float__", "__int__", "__bool__"):
        monkeypatch.setattr(torch.Tensor, name, lambda self, name=name: reads.append(name))
    monkeypatch.setattr(torch.Tensor, "cpu", record_cpu)

    Regression().train_step(*[NumberBatch(1.0, 2.0)] * 3)

    assert reads == ["cpu"]


def test_a_loss_is_the_sum_over_all_micro_batches_divided_once_by_all_targets():
    metrics, is_stopping = Regression().train_step(NumberBatch(1.0, 2.0, 3.0), NumberBatch(4.0, 0.0, 0.0))

    assert metrics["loss/square"] == (1 + 4 + 9 + 16) / 6
    assert metrics["gradient_norm"] == 2 * (1 + 4 + 9 + 16) / 6
    assert metrics["first"] == (1 + 4) / 6
    assert (metrics["tokens"], metrics["skipped"], is_stopping) == (6, 0.0, False)


def test_a_loss_without_a_count_of_targets_is_refused():
    batch = NumberBatch(1.0, 2.0)
    del batch.counts["square"]

    with pytest.raises(ValueError, match=r"Regression\.counts lacks the targets of square"):
        Regression().train_step(batch)


@pytest.mark.usefixtures("in_fp64")
@pytest.mark.item("A3", "A13")
@pytest.mark.parametrize("size", [1, 3, 8])
@pytest.mark.parametrize("weighting", ["mean", "count"])
def test_the_size_of_micro_batches_does_not_change_a_step(tiny_shards, size, weighting):
    def take_step(micro_batch_size: int):
        config = tiny_config(
            batches={"micro_batch_size": micro_batch_size},
            objectives={"weighting": weighting},
            optimization={"clip_norm": 1e9},
        )
        return take_first_step(tiny_shards, config)

    expected_learner, expected_metrics, expected_gradient = take_step(4)
    learner, metrics, gradient = take_step(size)

    assert (gradient - expected_gradient).norm() <= 1e-9 * expected_gradient.norm()
    assert select_losses(metrics) == pytest.approx(select_losses(expected_metrics), rel=1e-9)
    torch.testing.assert_close(learner.xlco.queue.rows, expected_learner.xlco.queue.rows, rtol=1e-9, atol=1e-9)


def select_losses(metrics: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if name.startswith("loss")}


@pytest.mark.usefixtures("in_fp64")
@pytest.mark.item("A20")
def test_the_gradient_of_the_mean_losses_is_clipped(tiny_shards):
    config = tiny_config(optimization={"clip_norm": 1e-3})
    learner = make_learner(tiny_shards, config)
    batches = learner.batches(0)
    counts = count_targets(map(learner.counts, batches), learner.weights.by_name)
    for batch in batches:
        loss, _ = learner.losses(batch, {name: 1 / counts[name] for name in learner.weights.by_name})
        loss.backward()
    expected_norm = flatten_gradient(learner).norm().item()

    _, metrics, clipped_gradient = take_first_step(tiny_shards, config)

    assert expected_norm > 1e-3
    assert metrics["gradient_norm"] == pytest.approx(expected_norm, rel=1e-9)
    assert clipped_gradient.norm().item() == pytest.approx(1e-3, rel=1e-3)


@pytest.mark.item("A3")
def test_count_weighting_divides_by_the_targets_of_all_objectives():
    weights = LossWeights({"mlm": 1.0, "tlm": 1.0, "xlco": 1.0}, divide="count")

    divisors = weights.divisors({"mlm": 76.0, "tlm": 10.0, "xlco": 1.0})

    assert divisors == {"mlm": 87.0, "tlm": 87.0, "xlco": 87.0}


@pytest.mark.usefixtures("in_fp64")
def test_with_count_weighting_curves_show_the_mean_over_the_targets_of_each_objective(tiny_shards):
    _, mean_metrics, _ = take_first_step(tiny_shards, tiny_config(objectives={"weighting": "mean"}))
    _, count_metrics, _ = take_first_step(tiny_shards, tiny_config(objectives={"weighting": "count"}))

    assert select_losses(count_metrics) == pytest.approx(select_losses(mean_metrics), rel=1e-12)
    assert "loss/xlco" in count_metrics
    assert count_metrics["gradient_norm"] < 0.9 * mean_metrics["gradient_norm"]


@pytest.mark.item("A8", "F22")
@pytest.mark.parametrize("fault", ["loss", "key"])
def test_a_bad_step_changes_neither_weights_nor_key_encoder_nor_queue(tiny_shards, monkeypatch, fault):
    config = tiny_config(optimization={"warmup_steps": 0})
    learner = make_learner(tiny_shards, config)
    adam = make_adamw(learner.module.parameters(), config.optimization)
    progress = Progress()
    train_step(learner, adam, config.optimization, progress, learner.batches(0))
    before = {name: tensor.clone() for name, tensor in named_tensors(learner, adam).items()}
    losses_of = learner.losses

    def make_loss_nan(batch, scales):
        loss, sums = losses_of(batch, scales)
        return loss * float("nan"), sums

    if fault == "loss":
        monkeypatch.setattr(learner, "losses", make_loss_nan)
    else:
        learner.xlco.key_encoder.register_forward_hook(lambda module, inputs, keys: keys * float("nan"))
    for step in (1, 2):
        metrics, _ = train_step(learner, adam, config.optimization, progress, learner.batches(step))
        assert metrics["skipped"] == 1.0

    after = named_tensors(learner, adam)
    for name, tensor in before.items():
        assert torch.equal(after[name], tensor), name
    assert (progress.step, progress.updates, progress.guard.consecutive_diverged_steps) == (3, 1, 2)
