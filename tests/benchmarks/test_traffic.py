"""What is counted of a layer and of the loss."""

import pytest
import torch

from benchmarks import traffic
from infoxlm_core.model.encoder import EncoderSize
from infoxlm_core.systems.infoxlm import step_time


def test_operators_are_counted_by_what_they_read_and_write():
    rows = torch.ones(10, 8)
    with traffic.Operators() as counted:
        (rows + rows).view(80).mul_(2)
        rows @ rows.T

    assert counted.bytes == {"add": 3 * 320, "mul_": 2 * 320, "mm": 2 * 320 + 400} and counted.total == 5 * 320


def test_a_layer_under_autocast_alone_moves_241_bytes_a_token_and_d():
    assert sum(traffic.layer_by_operators(traffic.TOKENS, traffic.HIDDEN, plain=True)) == pytest.approx(241, abs=1)


def test_the_plan_s_bytes_of_a_step_are_those_that_its_operators_move():
    tokens, hidden = traffic.TOKENS, traffic.HIDDEN
    gradients = step_time.MOVED_BYTES * 12 * hidden / tokens  # of a layer's 12 d² weights
    forward, backward = step_time.LAYER_BYTES[False]
    assert traffic.layer_by_operators(tokens, hidden, plain=False) == pytest.approx(
        (forward, backward + gradients), abs=0.2
    )
    assert traffic.loss_by_operators(512, 32_002) / (512 * 32_002) == pytest.approx(
        step_time.LOGIT_BYTES[False], abs=0.2
    )
    assert traffic.against_queue(32, 4096, 64) / (32 * 4096) == pytest.approx(step_time.QUEUE_BYTES, rel=0.02)
    for tokens, targets, words in ((36_864, 4_000, 250_002), (65_536, 4_000, 8_000), (4_096, 4_000, 32_002)):
        found = traffic.around_layers(tokens, targets, words, 768)
        each = sum(step_time.EMBEDDING_BYTES) * tokens + step_time.HEAD_BYTES * targets
        assert found == pytest.approx(768 * (each + step_time.TABLE_BYTES * words), rel=0.02)


def test_a_micro_batch_waits_for_no_value_and_has_three_quarters_of_the_operators_that_it_had():
    _, base, _, samples = traffic.MICRO_BATCHES[0]

    found = traffic.launches(EncoderSize(traffic.WORDS, **base | {"layers": 3}), 2, samples, fused=False)

    # layers of 66, of the key encoder 18, and 211 beside them: 1,147 in base, 1,500 at first
    assert found["operators"] <= 3 * 66 + 2 * 18 + 211


@pytest.mark.slow
def test_a_compiled_layer_moves_at_most_120_bytes_a_token_and_d():
    found = sum(traffic.layer_by_kernels(512, 64)) - 12 * 12 * 64 / 512  # but for gradients of weights, summed

    assert 60 < found <= 120
    assert found == pytest.approx(sum(step_time.LAYER_BYTES[True]), rel=0.02)  # in a step of 8,192 tokens: within 0.1


@pytest.mark.slow
def test_between_its_products_a_compiled_loss_moves_at_most_12_gb_for_4096_rows():
    rows, words = 64, 4096

    found = traffic.loss_by_kernels(rows, words) / (rows * words)

    assert found * traffic.ROWS * traffic.WORDS < 12e9
    assert found == pytest.approx(step_time.LOGIT_BYTES[True], rel=0.02)
