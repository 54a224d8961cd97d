"""Attention over packed sequences: all ways to compute it agree."""

import pytest
import torch

from infoxlm_core.model import attention
from infoxlm_core.model.attention import attend, attend_masked, cumulative_lengths, pack

CPU = torch.device("cpu")


def test_cached_lengths_of_a_prediction_can_be_used_in_training():
    with torch.inference_mode():
        cumulative_lengths((3, 11, 4), CPU)

    boundaries = cumulative_lengths((3, 11, 4), CPU)

    assert boundaries.tolist() == [0, 3, 14, 18]
    assert not boundaries.is_inference()


@pytest.mark.parametrize(("longest", "bound"), [(0, 512), (512, 512), (513, 1024), (1100, 2048)])
def test_bound_of_lengths_is_512_or_a_higher_power_of_two(longest, bound):
    assert pack((longest, 1), CPU).max_seqlen == bound


@pytest.mark.item("A9")
@pytest.mark.parametrize(
    ("query_lengths", "causal"), [((5, 1, 9, 3), False), ((5, 1, 9, 3), True), ((2, 0, 3, 1), False)]
)
def test_attention_with_a_mask_equals_attention_by_sequence(query_lengths, causal):
    generator = torch.Generator().manual_seed(7)
    key_lengths = (5, 1, 9, 3)
    inputs = []
    for row_count in (sum(query_lengths), sum(key_lengths), sum(key_lengths)):
        inputs.append(torch.randn(row_count, 6, generator=generator, dtype=torch.double).requires_grad_())
    packings = pack(query_lengths, CPU), pack(key_lengths, CPU)
    expected = attend(*inputs, *packings, heads=2, causal=causal)
    expected_gradients = torch.autograd.grad(expected.square().sum(), inputs)

    inputs_by_head = [rows.unflatten(1, (2, 3)) for rows in inputs]
    output = attend_masked(*inputs_by_head, *packings, causal=causal).flatten(1)

    torch.testing.assert_close(output, expected, atol=1e-12, rtol=0)
    gradients = torch.autograd.grad(output.square().sum(), inputs)
    for gradient, expected_gradient in zip(gradients, expected_gradients, strict=True):
        torch.testing.assert_close(gradient, expected_gradient, atol=1e-12, rtol=0)


def test_attention_without_queries_is_empty_and_its_keys_and_values_have_gradients_of_zero():
    keys = torch.ones(3, 4, requires_grad=True)
    values = torch.ones(3, 4, requires_grad=True)

    output = attend(torch.zeros(0, 4), keys, values, pack((0,), CPU), pack((3,), CPU), heads=2)
    output.sum().backward()

    assert output.shape == (0, 4)
    assert torch.equal(keys.grad, torch.zeros(3, 4))  # None would break the sum over the workers of a sharded model
    assert torch.equal(values.grad, torch.zeros(3, 4))


def test_flash_attention_2_is_used_if_version_3_cannot_be_imported(monkeypatch, caplog):
    def fail(_: str) -> None:
        raise ImportError("undefined symbol")

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(torch.nn.attention, "activate_flash_attention_impl", fail)
    caplog.set_level("INFO")

    assert attention.activate_flash_attention.__wrapped__(torch.device("cuda", 0)) == "2"
    assert "version 3 (flash_attn_3) cannot be used: undefined symbol" in caplog.text
