"""The fused output layer and loss equal those of PyTorch in value and gradient, for any number of chunks."""

import math

import pytest
import torch
import torch.nn.functional as F

from infoxlm_core.model.linear_cross_entropy import linear_cross_entropy


def make_inputs(rows: int, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    """Return random hidden states, weights and bias of an output layer for 203 words, the same at every call."""
    generator = torch.Generator().manual_seed(rows)
    shapes = ((rows, 16), (203, 16), (203,))
    return [torch.randn(shape, generator=generator, dtype=dtype).requires_grad_() for shape in shapes]


@pytest.mark.parametrize("chunk_rows", [1, 7, 10, 64])
@pytest.mark.parametrize("factor", [1.0, 0.5])
def test_loss_and_gradients_equal_those_of_cross_entropy(chunk_rows, factor):
    inputs = make_inputs(10)
    expected_inputs = make_inputs(10)
    targets = torch.arange(10) * 19
    loss_weights = torch.linspace(0, 1, 10, dtype=torch.float64)

    loss, losses = linear_cross_entropy(*inputs, targets, loss_weights, max_chunk_rows=chunk_rows)
    (loss * factor).backward()

    expected = F.cross_entropy(F.linear(*expected_inputs), targets, reduction="none")
    ((expected * loss_weights).sum() * factor).backward()
    torch.testing.assert_close(losses, expected.detach())
    assert loss.item() == pytest.approx((expected * loss_weights).sum().item())
    for tensor, expected_tensor in zip(inputs, expected_inputs, strict=True):
        torch.testing.assert_close(tensor.grad, expected_tensor.grad)


@pytest.mark.item("A4")
def test_without_targets_loss_and_gradients_are_zero():
    inputs = make_inputs(0)

    loss, losses = linear_cross_entropy(*inputs, torch.empty(0, dtype=torch.long), torch.empty(0, dtype=torch.float64))
    loss.backward()

    assert loss.item() == 0.0
    assert losses.shape == (0,)
    assert all((tensor.grad == 0).all() for tensor in inputs)


def test_large_logits_have_finite_losses_and_gradients():
    hidden, weight, bias = make_inputs(4, torch.float32)
    with torch.no_grad():
        weight.mul_(1e4)

    loss, losses = linear_cross_entropy(hidden, weight, bias, torch.arange(4), torch.ones(4))
    loss.backward()

    expected = F.cross_entropy(F.linear(hidden, weight, bias), torch.arange(4), reduction="none")
    torch.testing.assert_close(losses, expected)
    assert hidden.grad.isfinite().all()
    assert weight.grad.isfinite().all()


@pytest.mark.parametrize("chunk_rows", [16, 64])
@pytest.mark.parametrize("probability", [0.5, 0.99, 0.999, 0.999999])
def test_bf16_gradients_are_within_half_a_percent_however_confident_the_model_is(probability, chunk_rows):
    """Compare each row with fp64. Rounding to the 8 bits of bf16 alone costs up to 0.4 %, and 0.15 % on average."""
    generator = torch.Generator().manual_seed(1)
    words, d = 64, 128
    weight = torch.linalg.qr(torch.randn(d, words, generator=generator)).Q.T.bfloat16().float()
    targets = torch.arange(words)  # the target of each row is its most likely word
    hidden = (weight * math.log((words - 1) * probability / (1 - probability))).bfloat16().float()
    bias = torch.randn(words, generator=generator) * 0.3
    loss_weights = torch.full((words,), 1 / 157_286)
    inputs = [tensor.clone().requires_grad_() for tensor in (hidden, weight, bias)]
    exact_inputs = [tensor.double().requires_grad_() for tensor in (hidden, weight, bias)]
    exact_losses = F.cross_entropy(F.linear(*exact_inputs), targets, reduction="none")
    assert exact_losses.detach().neg().exp().median() == pytest.approx(probability, abs=0.5 * (1 - probability))
    (exact_losses * loss_weights.double()).sum().backward()

    with torch.autocast("cpu", torch.bfloat16):
        loss, losses = linear_cross_entropy(*inputs, targets, loss_weights, max_chunk_rows=chunk_rows)
    loss.backward()

    assert losses.dtype == torch.float32
    for tensor, exact in zip(inputs[:2], exact_inputs[:2], strict=True):
        assert tensor.grad.dtype == torch.float32
        errors = (tensor.grad - exact.grad).norm(dim=1) / exact.grad.norm(dim=1)
        assert errors.max() <= 0.005
    # In the gradient of a bias, the contributions of the rows may cancel, so compare with the sum of their sizes.
    with torch.no_grad():
        contributions = (F.linear(*exact_inputs).softmax(dim=1) - F.one_hot(targets)).abs() * loss_weights[:, None]
    assert ((inputs[2].grad - exact_inputs[2].grad).abs() / contributions.sum(dim=0)).max() <= 0.005


@pytest.mark.slow
@pytest.mark.parametrize("rows", [64, 300])
def test_compiled_functions_give_the_same_loss_and_gradients(rows):
    targets = torch.arange(rows) % 203
    loss_weights = torch.full((rows,), 1 / rows)

    results = {}
    for compiler in ("", "aot_eager"):
        inputs = make_inputs(rows, torch.float32)
        with torch.autocast("cpu", torch.bfloat16):
            loss, losses = linear_cross_entropy(*inputs, targets, loss_weights, max_chunk_rows=200, compiler=compiler)
        loss.backward()
        results[compiler] = [losses, *(tensor.grad for tensor in inputs)]

    for eager, compiled in zip(results[""], results["aot_eager"], strict=True):
        torch.testing.assert_close(compiled, eager, atol=1e-6, rtol=1e-5)


def test_biases_and_loss_weights_are_not_rounded_to_bf16():
    hidden, weight = torch.zeros(4, 8).requires_grad_(), torch.zeros(64, 8).requires_grad_()
    bias, loss_weights = torch.linspace(3.0, 3.01, 64).requires_grad_(), torch.full((4,), 1 / 157_286)

    with torch.autocast("cpu", torch.bfloat16):
        loss, losses = linear_cross_entropy(hidden, weight, bias, torch.arange(4), loss_weights)
    loss.backward()

    torch.testing.assert_close(losses, -bias.log_softmax(dim=0)[:4].detach())
    assert bias.grad[4:].sum().item() == pytest.approx(60 / 64 * 4 / 157_286, rel=1e-3)
