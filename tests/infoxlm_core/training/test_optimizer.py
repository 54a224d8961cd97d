"""The optimizer: the schedules and the two decay filters (specification, section 5)."""

import pytest
import torch

from infoxlm_core.config import OptimizationConfig
from infoxlm_core.training.optimizer import learning_rate, make_adamw


@pytest.mark.item("A20")
@pytest.mark.parametrize(
    ("steps", "peak", "updates", "expected"),
    [(200_000, 2e-4, 0, 0.0), (200_000, 2e-4, 10_000, 2e-4), (200_000, 2e-4, 105_000, 1e-4),
     (200_000, 2e-4, 200_000, 0.0), (150_000, 2e-4, 80_000, 1e-4), (200_000, 1e-4, 5_000, 5e-5)],
)  # fmt: skip
def test_the_learning_rate_is_the_papers_at_every_step(steps, peak, updates, expected):
    config = OptimizationConfig(steps=steps, learning_rate=peak, warmup_steps=10_000)

    assert learning_rate(config, updates) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(
    ("updates", "expected"),
    [(0, 1e-7), (2_000, (1e-7 + 1e-4) / 2), (4_000, 1e-4), (16_000, 5e-5), (400_000, 1e-5)],
)
def test_the_rate_of_xlm_warms_up_from_1e_7_and_falls_with_the_square_root(updates, expected):
    config = OptimizationConfig(steps=500_000, learning_rate=1e-4, warmup_steps=4_000, schedule="inverse_sqrt")

    assert learning_rate(config, updates) == pytest.approx(expected, abs=1e-12)


@pytest.mark.item("A20")
@pytest.mark.parametrize(("decay", "factor_of_vectors"), [("all", 1 - 0.5 * 0.01), ("no_bias_norm", 1.0)])
def test_biases_and_layer_norms_decay_only_if_all_parameters_do(decay, factor_of_vectors):
    network = torch.nn.Sequential(torch.nn.Embedding(3, 4), torch.nn.Linear(4, 4), torch.nn.LayerNorm(4))
    adam = make_adamw(network.parameters(), OptimizationConfig(learning_rate=0.5, decay=decay))
    for parameter in network.parameters():
        parameter.data.fill_(1.0)
        parameter.grad = torch.zeros_like(parameter)

    adam.step()

    for parameter in network.parameters():
        expected = 1 - 0.5 * 0.01 if parameter.dim() > 1 else factor_of_vectors
        torch.testing.assert_close(parameter, torch.full_like(parameter, expected))
