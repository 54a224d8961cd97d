"""The loss without stored logits equals PyTorch's, loss and gradients, in any number of chunks."""

import math

import pytest
import torch
import torch.nn.functional as F

from infoxlm_core.model.linear_cross_entropy import linear_cross_entropy


def leaves(rows: int, words: int = 203, kind: torch.dtype = torch.float64) -> list[torch.Tensor]:
    drawn = torch.Generator().manual_seed(rows)
    shapes = ((rows, 16), (words, 16), (words,))
    return [torch.randn(shape, generator=drawn, dtype=kind).requires_grad_() for shape in shapes]


@pytest.mark.parametrize("chunk", [1, 7, 10, 64])
@pytest.mark.parametrize("factor", [1.0, 0.5])
def test_loss_and_gradients_are_those_of_cross_entropy(chunk, factor):
    ours, theirs = leaves(10), leaves(10)
    targets, scale = torch.arange(10) * 19, torch.linspace(0, 1, 10, dtype=torch.float64)

    loss, losses = linear_cross_entropy(*ours, targets, scale, rows=chunk)
    (loss * factor).backward()

    expected = F.cross_entropy(F.linear(*theirs), targets, reduction="none")
    ((expected * scale).sum() * factor).backward()
    torch.testing.assert_close(losses, expected.detach())
    assert loss.item() == pytest.approx((expected * scale).sum().item())
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine.grad, other.grad)


@pytest.mark.item("A4")
def test_without_targets_the_loss_is_zero_and_so_are_the_gradients():
    ours = leaves(0)

    loss, losses = linear_cross_entropy(*ours, torch.empty(0, dtype=torch.long), torch.empty(0, dtype=torch.float64))
    loss.backward()

    assert loss.item() == 0.0 and losses.shape == (0,)
    assert all((leaf.grad == 0).all() for leaf in ours)


def test_very_unequal_logits_stay_finite():
    hidden, weight, bias = leaves(4, kind=torch.float32)
    with torch.no_grad():
        weight.mul_(1e4)

    loss, losses = linear_cross_entropy(hidden, weight, bias, torch.arange(4), torch.ones(4))
    loss.backward()

    torch.testing.assert_close(
        losses, F.cross_entropy(F.linear(hidden, weight, bias), torch.arange(4), reduction="none")
    )
    assert hidden.grad.isfinite().all() and weight.grad.isfinite().all()


def test_in_bfloat16_the_loss_is_still_counted_in_fp32():
    ours, exact = leaves(64, kind=torch.float32), leaves(64, kind=torch.float32)
    targets, scale = torch.arange(64), torch.full((64,), 1 / 64)

    with torch.autocast("cpu", torch.bfloat16):
        loss, losses = linear_cross_entropy(*ours, targets, scale)
    loss.backward()

    assert losses.dtype == torch.float32
    expected, _ = linear_cross_entropy(*exact, targets, scale)
    expected.backward()
    # three roundings to 8 bits, of both factors and the product: 3 * 2**-9 = 0.006 of the norm if all went one way
    assert loss.item() == pytest.approx(expected.item(), rel=0.01)
    for mine, other in zip(ours, exact, strict=True):
        assert mine.grad.dtype == torch.float32
        assert (mine.grad - other.grad).norm() <= 0.02 * other.grad.norm()


@pytest.mark.parametrize("chunk", [16, 64])
@pytest.mark.parametrize("probability", [0.5, 0.99, 0.999, 0.999999])
def test_in_bfloat16_the_gradients_of_confident_rows_are_as_good_as_those_of_others(probability, chunk):
    """Half a percent a row: a rounding to 8 bits is off by at most 0.4 %, on average by 0.15 %."""
    drawn = torch.Generator().manual_seed(1)
    words, d = 64, 128
    weight = torch.linalg.qr(torch.randn(d, words, generator=drawn)).Q.T.bfloat16().float()
    hidden, targets = weight.clone(), torch.arange(words)  # each row's own word is the likeliest
    hidden = (hidden * math.log((words - 1) * probability / (1 - probability))).bfloat16().float()
    bias, scale = torch.randn(words, generator=drawn) * 0.3, torch.full((words,), 1 / 157_286)
    ours = [leaf.clone().requires_grad_() for leaf in (hidden, weight, bias)]
    exact = [leaf.double().requires_grad_() for leaf in (hidden, weight, bias)]
    expected = F.cross_entropy(F.linear(*exact), targets, reduction="none")
    assert expected.detach().neg().exp().median() == pytest.approx(probability, abs=0.5 * (1 - probability))
    (expected * scale.double()).sum().backward()

    with torch.autocast("cpu", torch.bfloat16):
        loss, _ = linear_cross_entropy(*ours, targets, scale, rows=chunk)
    loss.backward()

    for mine, other in zip(ours[:2], exact[:2], strict=True):
        off = (mine.grad - other.grad).norm(dim=1) / other.grad.norm(dim=1)
        assert off.max() <= 0.005
    # of a bias, what comes from its own row and from the others may cancel: half a percent of both
    with torch.no_grad():
        moved = (F.linear(*exact).softmax(dim=1) - F.one_hot(targets)).abs() * scale[:, None]
    assert ((ours[2].grad - exact[2].grad).abs() / moved.sum(dim=0)).max() <= 0.005


@pytest.mark.slow
@pytest.mark.parametrize("rows", [64, 300])
def test_compiled_in_bfloat16_it_is_the_same(rows):
    ours, compiled = leaves(rows, kind=torch.float32), leaves(rows, kind=torch.float32)
    targets, scale = torch.arange(rows) % 203, torch.full((rows,), 1 / rows)

    found = []
    for given, compiler in ((ours, ""), (compiled, "aot_eager")):
        with torch.autocast("cpu", torch.bfloat16):
            loss, losses = linear_cross_entropy(*given, targets, scale, rows=200, compiler=compiler)
        loss.backward()
        found.append([losses, *(leaf.grad for leaf in given)])

    for mine, other in zip(*found, strict=True):
        torch.testing.assert_close(mine, other, atol=1e-6, rtol=1e-5)


def test_in_bfloat16_biases_and_scales_keep_their_bits():
    hidden, weight = torch.zeros(4, 8).requires_grad_(), torch.zeros(64, 8).requires_grad_()
    bias, scale = torch.linspace(3.0, 3.01, 64).requires_grad_(), torch.full((4,), 1 / 157_286)

    with torch.autocast("cpu", torch.bfloat16):
        loss, losses = linear_cross_entropy(hidden, weight, bias, torch.arange(4), scale)
    loss.backward()

    torch.testing.assert_close(losses, -bias.log_softmax(dim=0)[:4].detach())
    assert bias.grad[4:].sum().item() == pytest.approx(60 / 64 * 4 / 157_286, rel=1e-3)
