"""Attention over packed sequences: each of its ways computes the same."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from infoxlm_core.model import attention
from infoxlm_core.model.attention import attend, attend_masked, cumulative_lengths, pack

LENGTHS = (5, 1, 9, 3)
CPU = torch.device("cpu")


def test_edges_that_a_prediction_has_remembered_can_be_saved_for_a_backward_pass():
    lengths = (3, 11, 4)
    with torch.inference_mode():
        cumulative_lengths(lengths, CPU)  # a development set of a fine-tuning

    edges = cumulative_lengths(lengths, CPU)  # the step after it

    assert edges.tolist() == [0, 3, 14, 18] and not edges.is_inference()


@pytest.mark.parametrize(("longest", "bound"), [(0, 512), (1, 512), (512, 512), (513, 1024), (1100, 2048)])
def test_all_batches_share_one_bound_unless_a_sequence_is_longer(longest, bound):
    assert pack((longest, 1), CPU).max_seqlen == bound


@pytest.mark.item("A9")
@pytest.mark.parametrize(
    ("queries", "causal"), [(LENGTHS, False), (LENGTHS, True), ((2, 0, 3, 1), False), ((1,) * 4, False)]
)
def test_attention_under_a_mask_equals_that_over_each_sequence(queries, causal):
    drawn = torch.Generator().manual_seed(7)
    q, k, v = (
        torch.randn(rows, 6, generator=drawn, dtype=torch.double).requires_grad_()
        for rows in (sum(queries), sum(LENGTHS), sum(LENGTHS))
    )
    asking, asked = pack(queries, CPU), pack(LENGTHS, CPU)
    expected = attend(q, k, v, asking, asked, heads=2, causal=causal)
    gradients = torch.autograd.grad(expected.square().sum(), (q, k, v))

    by_head = [rows.unflatten(1, (2, 3)) for rows in (q, k, v)]
    found = attend_masked(*by_head, asking, asked, causal=causal).flatten(1)

    torch.testing.assert_close(found, expected, atol=1e-12, rtol=0)
    for mine, other in zip(torch.autograd.grad(found.square().sum(), (q, k, v)), gradients, strict=True):
        torch.testing.assert_close(mine, other, atol=1e-12, rtol=0)


def test_dropout_of_attention_under_a_mask_keeps_the_expected_value():
    value, packing = torch.ones(3, 1, 4), pack((3,), CPU)
    torch.manual_seed(1)

    means = [attend_masked(value, value, value, packing, packing, dropout=0.5).mean() for _ in range(400)]

    assert torch.stack(means).mean().item() == pytest.approx(1.0, abs=0.1) and torch.stack(means).std() > 0.1


class Operations(TorchDispatchMode):
    """Counts operations."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += 1
        return function(*args, **(kwargs or {}))


def test_on_a_cpu_one_more_sequence_costs_few_operations():
    counts = []
    for sequences in (20, 120):
        rows, packing = torch.randn(3 * sequences, 4, requires_grad=True), pack((3,) * sequences, CPU)
        with Operations() as counted:
            attend(rows, rows, rows, packing, packing, heads=2).sum().backward()
        counts.append(counted.count)

    # attention and its derivative, two views, a slice, what autograd puts aside: 21 with views of each sequence's own
    assert (counts[1] - counts[0]) / 100 <= 9


def test_attention_of_no_rows_is_empty():
    nothing, some = torch.zeros(0, 4), torch.zeros(3, 4)

    assert attend(nothing, some, some, pack((0,), CPU), pack((3,), CPU), heads=2).shape == (0, 4)


@pytest.mark.parametrize(
    ("capability", "installed", "refusal", "expected"),
    [
        ((9, 0), True, "", "by FlashAttention 3"),
        ((9, 0), True, "undefined symbol", "by FlashAttention 2: version 3 cannot be used: undefined symbol"),
        ((9, 0), False, "", "by FlashAttention 2: version 3 (package flash_attn_3) is not installed"),
        ((8, 0), True, "", "by FlashAttention 2: version 3 is for GPUs of compute capability 9.x"),
    ],
)
def test_flash_attention_3_is_taken_where_it_can_be_and_the_log_says_so(
    monkeypatch, caplog, capability, installed, refusal, expected
):
    chosen: list[str] = []

    def activate(name: str) -> None:
        if refusal:
            raise RuntimeError(refusal)
        chosen.append(name)

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(attention.importlib.util, "find_spec", lambda name: name if installed else None)
    monkeypatch.setattr(torch.nn.attention, "activate_flash_attention_impl", activate)
    caplog.set_level("INFO")
    attention.choose_flash.cache_clear()

    found = attention.choose_flash(torch.device("cuda", 0))

    assert expected in caplog.text and f"by FlashAttention {found}" in expected
    assert chosen == ["FA3"] * (found == "3")
    assert attention.choose_flash(torch.device("cpu")) == ""
    attention.choose_flash.cache_clear()
