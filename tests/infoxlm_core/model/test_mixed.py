"""Rows in bf16 through weights in fp32."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from infoxlm_core.config import OptimizationConfig
from infoxlm_core.model.attention import attend, pack
from infoxlm_core.model.encoder import Encoder, EncoderSize, initialise
from infoxlm_core.model.mixed import AddNorm, Linear, refresh
from infoxlm_core.training.optimizer import make_adamw

BF16 = torch.bfloat16


class WeightsRead(TorchDispatchMode):
    """Counts the operations that turn one of some tensors into another precision."""

    def __init__(self, weights: list[torch.Tensor]) -> None:
        super().__init__()
        self.places, self.casts = {weight.data_ptr() for weight in weights}, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if "copy" in str(function):
            given = [part for part in tree_leaves((args, kwargs)) if isinstance(part, torch.Tensor)]
            self.casts += sum(part.data_ptr() in self.places for part in given)
        return function(*args, **(kwargs or {}))


@pytest.fixture
def encoder() -> Encoder:
    torch.manual_seed(1)
    found = Encoder(EncoderSize(vocabulary=50, layers=2, hidden=32, ffn=64, heads=2, positions=34))
    initialise(found, 1)
    return found


def loss(encoder: Encoder, hidden: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", BF16, enabled=hidden.dtype == torch.float32):
        return encoder.run(hidden, (7, 9), 0, 2).double().pow(3).sum()


def test_rows_of_their_own_precision_go_through_pytorch_s_maps_bit_by_bit():
    torch.manual_seed(1)
    ours, norm, rows = Linear(8, 6), AddNorm(8), torch.randn(5, 8)

    assert torch.equal(ours(rows), F.linear(rows, ours.weight, ours.bias))
    assert torch.equal(norm(rows, rows.flip(0)), nn.LayerNorm(8)(rows + rows.flip(0)))


def test_the_gradient_of_weights_in_bf16_is_summed_in_fp32_and_not_rounded():
    torch.manual_seed(1)
    linear, rows = Linear(8, 6), torch.randn(400, 8).bfloat16().requires_grad_()
    refresh([linear], BF16)
    upstream = torch.randn(400, 6).bfloat16()

    found = linear(rows)
    found.backward(upstream)

    assert found.dtype == rows.grad.dtype == BF16 and linear.weight.grad.dtype == torch.float32
    exact = upstream.double().T @ rows.detach().double()
    torch.testing.assert_close(linear.weight.grad.double(), exact, atol=1e-4, rtol=1e-5)
    torch.testing.assert_close(linear.bias.grad.double(), upstream.double().sum(0), atol=1e-4, rtol=1e-5)


def test_weights_are_copied_once_a_step_and_not_in_its_micro_batches(encoder):
    matrices = [part.weight for part in encoder.modules() if isinstance(part, Linear)]
    config = OptimizationConfig(steps=9, warmup_steps=0)
    optimizer, hidden = make_adamw(encoder.parameters(), config), torch.randn(16, 32)
    counts = []
    for _ in range(2):
        for _ in range(3):
            with WeightsRead(matrices) as read:
                loss(encoder, hidden).backward()
            counts.append(read.casts)
        optimizer.step()

    assert counts == [len(matrices), 0, 0] * 2
    refresh([encoder], BF16)
    assert all(torch.equal(p.weight_copy, p.weight.bfloat16()) for p in encoder.modules() if isinstance(p, Linear))


def test_copies_follow_weights_however_these_are_changed_in_place():
    linear, other = Linear(4, 4), Linear(4, 4)
    changes = [
        lambda: torch._foreach_lerp_([linear.weight], [other.weight], 0.5),  # as the key encoder's
        lambda: linear.load_state_dict(other.state_dict()),
        lambda: linear.bias.copy_(torch.ones(4)),
    ]
    for change in changes:
        with torch.no_grad():
            refresh([linear], BF16)
            change()
            refresh([linear], BF16)

        assert torch.equal(linear.weight_copy, linear.weight.bfloat16())
        assert torch.equal(linear.bias_copy, linear.bias.bfloat16())


def test_copies_that_a_prediction_has_made_can_be_trained_with(encoder):
    hidden = torch.randn(16, 32)
    with torch.inference_mode():
        loss(encoder, hidden)

    loss(encoder, hidden).backward()

    assert all(part.weight.grad is not None for part in encoder.modules() if isinstance(part, Linear))


class Autocast(nn.Module):
    """An encoder's layers in PyTorch's own words: norms and residuals in fp32, the rest as autocast has it."""

    def __init__(self, encoder: Encoder) -> None:
        super().__init__()
        self.encoder = encoder

    def run(self, hidden: torch.Tensor, lengths: tuple[int, ...], first: int, last: int) -> torch.Tensor:
        def linear(part: nn.Linear, rows: torch.Tensor) -> torch.Tensor:
            return F.linear(rows, part.weight, part.bias)

        def norm(part: nn.LayerNorm, rows: torch.Tensor) -> torch.Tensor:
            return F.layer_norm(rows.to(part.weight.dtype), part.normalized_shape, part.weight, part.bias, part.eps)

        for one in self.encoder.layers[first:last]:
            query, key, value = (linear(part, hidden) for part in (one.query, one.key, one.value))
            sequences, heads = pack(lengths, hidden.device), one.heads
            context = linear(one.attention_output, attend(query, key, value, sequences, sequences, heads))
            hidden = norm(one.attention_norm, hidden + context)
            hidden = norm(one.output_norm, hidden + linear(one.down, F.gelu(linear(one.up, hidden))))
        return hidden


def gradients(runs: Encoder | Autocast, rows: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    runs.zero_grad()
    rows = rows.clone().requires_grad_()
    with torch.autocast("cpu", BF16, enabled=rows.dtype == torch.float32):
        found = runs.run(rows, (40, 24), 0, 4)
    (found.to(target.dtype) * target).sum().backward()
    return torch.cat([p.grad.flatten().double() for _, p in sorted(runs.named_parameters()) if p.grad is not None])


def test_gradients_with_residuals_in_bf16_are_within_one_percent_of_fp64():
    torch.manual_seed(1)
    encoder = Encoder(EncoderSize(vocabulary=50, layers=4, hidden=64, ffn=256, heads=4, positions=66))
    initialise(encoder, 1)
    for parameter in encoder.parameters():
        parameter.data.add_(torch.randn_like(parameter) * 0.05)
    rows, target = torch.randn(64, 64), torch.randn(64, 64)
    exact = gradients(Autocast(copy.deepcopy(encoder).double()), rows.double(), target.double())

    def error(runs: Encoder | Autocast) -> float:
        return ((gradients(runs, rows, target) - exact).norm() / exact.norm()).item()

    before, now = error(Autocast(encoder)), error(encoder)
    assert now < 2 * before < 0.01  # residuals in bf16 cost as much again, and half of all bytes that a layer moves
