"""FLOPs of a step, compared with a count of its matrix products."""

import pytest

from infoxlm_core.model.encoder import EncoderSize
from infoxlm_core.model.flops import count_step_flops, find_peak_flops

SIZE = EncoderSize(vocabulary=50, layers=3, hidden=8, ffn=16, heads=2)


def layer_flops(n: int) -> int:
    """Count one layer for n tokens: 4 projections, 2 matrices of the feed-forward network, scores and weighted sum."""
    d, ffn = SIZE.hidden, SIZE.ffn
    return 4 * (2 * n * d * d) + 2 * (2 * n * d * ffn) + 2 * (2 * n * n * d)


def test_training_costs_three_forward_passes_and_the_key_encoder_one():
    masked_lm = count_step_flops(SIZE, [5, 3], 4)
    assert masked_lm == 3 * (3 * (layer_flops(5) + layer_flops(3)) + 4 * (2 * 8 * 50 + 2 * 8 * 8))

    contrast = count_step_flops(SIZE, [], 0, [5, 3], [6], contrast_layer=2, queue_rows=7)
    assert contrast == 3 * 2 * (layer_flops(5) + layer_flops(3)) + 2 * layer_flops(6) + 2 * (2 * 2 * 7 * 8)


@pytest.mark.parametrize(
    ("gpu", "peak_flops"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("H200", 989e12),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("NVIDIA H2000", None),
    ],
)
def test_peak_is_known_only_for_complete_names_of_gpus(gpu, peak_flops):
    assert find_peak_flops(gpu) == peak_flops
