"""FLOPs of a step, against the layers counted one by one."""

import pytest

from infoxlm_core.model.encoder import EncoderSize
from infoxlm_core.model.flops import count_step_flops, peak

SIZE = EncoderSize(vocabulary=50, layers=3, hidden=8, ffn=16, heads=2)


def layer(n: int) -> int:
    """Matrix multiplications of one layer on a sequence of n tokens: q k v o, both of the FFN, scores and mixture."""
    d, f = SIZE.hidden, SIZE.ffn
    return 4 * (2 * n * d * d) + 2 * (2 * n * d * f) + 2 * (2 * n * n * d)


def test_a_step_is_three_forwards_of_what_learns_and_one_of_the_key_encoder():
    masked = count_step_flops(SIZE, [5, 3], 4)
    assert masked == 3 * (3 * (layer(5) + layer(3)) + 4 * (2 * 8 * 50 + 2 * 8 * 8))

    contrast = count_step_flops(SIZE, [], 0, [5, 3], [6], contrast_layer=2, queue=7)
    assert contrast == 3 * 2 * (layer(5) + layer(3)) + 2 * layer(6) + 2 * (2 * 2 * 7 * 8)


@pytest.mark.parametrize(
    ("device", "tera"),
    [
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H100 NVL", 835),
        ("NVIDIA H20", 148),
        ("NVIDIA H200", 989),
        ("H200", 989),
    ],
)
def test_a_gpu_is_known_by_its_whole_name(device, tera):
    assert peak(device) == tera * 1e12


@pytest.mark.parametrize("device", ["abacus", "NVIDIA H100 80GB HBM3 MIG 1g.10gb", "NVIDIA H2000"])
def test_of_a_gpu_that_is_not_known_nothing_is_claimed(device):
    assert peak(device) is None
