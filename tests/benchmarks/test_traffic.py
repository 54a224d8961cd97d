"""What is counted of a layer and of the loss."""

import pytest
import torch

from benchmarks import traffic


def test_operators_are_counted_by_what_they_read_and_write():
    rows = torch.ones(10, 8)
    with traffic.Operators() as counted:
        (rows + rows).view(80).mul_(2)
        rows @ rows.T

    assert counted.bytes == {"add": 3 * 320, "mul_": 2 * 320, "mm": 2 * 320 + 400} and counted.total == 5 * 320


def test_a_layer_under_autocast_alone_moves_241_bytes_a_token_and_d():
    assert sum(traffic.layer_by_operators(traffic.TOKENS, traffic.HIDDEN, plain=True)) == pytest.approx(241, abs=1)


@pytest.mark.slow
def test_a_compiled_layer_moves_at_most_120_bytes_a_token_and_d():
    found = sum(traffic.layer_by_kernels(512, 64)) - 12 * 12 * 64 / 512  # but for gradients of weights, summed

    assert 60 < found <= 120


@pytest.mark.slow
def test_between_its_products_a_compiled_loss_moves_at_most_12_gb_for_4096_rows():
    rows, words = 64, 4096

    assert traffic.loss_by_kernels(rows, words) / (rows * words) * traffic.ROWS * traffic.WORDS < 12e9
