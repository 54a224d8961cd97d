"""The optimizer: XLM's schedule and the two decay filters (specification, section 5)."""

import pytest
import torch

from infoxlm_core.config import OptimizationConfig
from infoxlm_core.training.optimizer import learning_rate, make_adamw

pytestmark = pytest.mark.item("A20")


@pytest.mark.parametrize(
    ("updates", "expected"),
    [(0, 1e-7), (2_000, (1e-7 + 1e-4) / 2), (4_000, 1e-4), (16_000, 5e-5), (400_000, 1e-5)],
)
def test_xlms_rate_warms_up_from_1e_7_and_falls_with_the_square_root(updates, expected):
    config = OptimizationConfig(steps=500_000, learning_rate=1e-4, warmup_steps=4_000, schedule="inverse_sqrt")

    assert learning_rate(config, updates) == pytest.approx(expected, abs=1e-12)


def test_xlms_rate_does_not_depend_on_the_length_of_the_run():
    rates = [
        learning_rate(OptimizationConfig(steps=steps, warmup_steps=10, schedule="inverse_sqrt"), 90)
        for steps in (100, 100_000)
    ]

    assert rates[0] == rates[1]


def test_without_warm_up_the_first_rate_is_the_peak():
    config = OptimizationConfig(steps=9, learning_rate=0.5, warmup_steps=0, schedule="inverse_sqrt")

    assert [learning_rate(config, u) for u in (0, 1, 4)] == [0.5, 0.5, 0.25]


@pytest.mark.parametrize(("decay", "vector"), [("all", 1 - 0.5 * 0.01), ("no_bias_norm", 1.0)])
def test_bias_and_layer_norm_decay_only_if_all_parameters_do(decay, vector):
    network = torch.nn.Sequential(torch.nn.Embedding(3, 4), torch.nn.Linear(4, 4), torch.nn.LayerNorm(4))
    adam = make_adamw(network.parameters(), OptimizationConfig(learning_rate=0.5, decay=decay))
    for parameter in network.parameters():
        parameter.data.fill_(1.0)
        parameter.grad = torch.zeros_like(parameter)

    adam.step()

    for parameter in network.parameters():
        expected = 1 - 0.5 * 0.01 if parameter.dim() > 1 else vector
        torch.testing.assert_close(parameter, torch.full_like(parameter, expected))
