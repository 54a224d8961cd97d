"""Linear layers and LayerNorm with fp32 weights and bf16 activations."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from infoxlm_core.config import OptimizationConfig
from infoxlm_core.model.encoder import Encoder, EncoderSize, initialise
from infoxlm_core.model.mixed_precision import AddNorm, Linear, refresh_copies
from infoxlm_core.training.optimizer import make_adamw

BF16 = torch.bfloat16


@pytest.fixture
def encoder() -> Encoder:
    torch.manual_seed(1)
    encoder = Encoder(EncoderSize(vocabulary=50, layers=4, hidden=64, ffn=256, heads=4, positions=66))
    initialise(encoder, 1)
    for parameter in encoder.parameters():
        parameter.data.add_(torch.randn_like(parameter) * 0.05)
    return encoder


def compute_output(encoder: Encoder, hidden: torch.Tensor) -> torch.Tensor:
    """Return the output of the encoder for two sequences, in bf16 unless the rows are in fp64."""
    with torch.autocast("cpu", BF16, enabled=hidden.dtype == torch.float32):
        return encoder.run_layers(hidden, (40, 24), 0, 4)


def test_layers_in_the_precision_of_their_weights_equal_pytorch_bit_by_bit():
    torch.manual_seed(1)
    linear, norm, rows = Linear(8, 6), AddNorm(8), torch.randn(5, 8)

    assert torch.equal(linear(rows), F.linear(rows, linear.weight, linear.bias))
    assert torch.equal(norm(rows, rows.flip(0)), nn.LayerNorm(8)(rows + rows.flip(0)))


def test_gradients_of_parameters_are_summed_in_fp32():
    torch.manual_seed(1)
    linear, rows = Linear(8, 6), torch.randn(400, 8).bfloat16().requires_grad_()
    refresh_copies([linear], BF16)
    output_gradient = torch.randn(400, 6).bfloat16()

    output = linear(rows)
    output.backward(output_gradient)

    assert output.dtype == rows.grad.dtype == BF16
    assert linear.weight.grad.dtype == torch.float32
    exact = output_gradient.double().T @ rows.detach().double()
    torch.testing.assert_close(linear.weight.grad.double(), exact, atol=1e-4, rtol=1e-5)
    torch.testing.assert_close(linear.bias.grad.double(), output_gradient.double().sum(0), atol=1e-4, rtol=1e-5)


def test_weights_are_copied_once_per_optimizer_step(encoder, monkeypatch):
    copied_tensor_counts = []
    copy_tensors = torch._foreach_copy_

    def copy_and_count(copies: list[torch.Tensor], parameters: list[torch.Tensor]) -> None:
        copied_tensor_counts.append(len(parameters))
        copy_tensors(copies, parameters)

    monkeypatch.setattr(torch, "_foreach_copy_", copy_and_count)
    optimizer = make_adamw(encoder.parameters(), OptimizationConfig(steps=9, warmup_steps=0))
    linears = [module for module in encoder.modules() if isinstance(module, Linear)]

    for _ in range(2):
        for _ in range(3):
            compute_output(encoder, torch.randn(64, 64)).float().pow(3).sum().backward()
        optimizer.step()

    assert copied_tensor_counts == [2 * len(linears)] * 2  # weights and biases
    refresh_copies([encoder], BF16)
    assert all(torch.equal(linear.weight_copy, linear.weight.bfloat16()) for linear in linears)


@pytest.mark.parametrize(
    "change",
    [
        lambda linear, other: torch._foreach_lerp_([linear.weight], [other.weight], 0.5),  # as the key encoder's
        lambda linear, other: linear.load_state_dict(other.state_dict()),
        lambda linear, _: linear.bias.copy_(torch.ones(4)),
    ],
    ids=["lerp", "load", "bias"],
)
def test_copies_follow_every_change_of_the_parameters(change):
    linear, other = Linear(4, 4), Linear(4, 4)
    with torch.no_grad():
        refresh_copies([linear], BF16)
        change(linear, other)
        refresh_copies([linear], BF16)

    assert torch.equal(linear.weight_copy, linear.weight.bfloat16())
    assert torch.equal(linear.bias_copy, linear.bias.bfloat16())


def test_copies_made_by_a_prediction_can_be_used_in_training(encoder):
    hidden = torch.randn(64, 64)
    with torch.inference_mode():
        compute_output(encoder, hidden)

    compute_output(encoder, hidden).sum().backward()

    assert all(module.weight.grad is not None for module in encoder.modules() if isinstance(module, Linear))


def test_bf16_gradients_of_an_encoder_are_within_one_percent_of_fp64(encoder):
    hidden, target = torch.randn(64, 64), torch.randn(64, 64).double()
    exact_encoder = copy.deepcopy(encoder).double()

    (compute_output(encoder, hidden).double() * target).sum().backward()
    (compute_output(exact_encoder, hidden.double()) * target).sum().backward()

    gradient, exact = (
        torch.cat([parameter.grad.flatten().double() for parameter in module.layers.parameters()])
        for module in (encoder, exact_encoder)
    )
    assert (gradient - exact).norm() / exact.norm() < 0.01
