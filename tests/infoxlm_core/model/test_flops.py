"""FLOPs of a step, against the layers counted one by one."""

from infoxlm_core.model.encoder import EncoderSize
from infoxlm_core.model.flops import must_do_flops, peak

SIZE = EncoderSize(vocabulary=50, layers=3, hidden=8, ffn=16, heads=2)


def layer(n: int) -> int:
    """Matrix multiplications of one layer on a sequence of n tokens: q k v o, both of the FFN, scores and mixture."""
    d, f = SIZE.hidden, SIZE.ffn
    return 4 * (2 * n * d * d) + 2 * (2 * n * d * f) + 2 * (2 * n * n * d)


def test_a_step_is_three_forwards_of_what_learns_and_one_of_the_key_encoder():
    masked = must_do_flops(SIZE, [5, 3], 4)
    assert masked == 3 * (3 * (layer(5) + layer(3)) + 4 * (2 * 8 * 50 + 2 * 8 * 8))

    contrast = must_do_flops(SIZE, [], 0, [5, 3], [6], contrast_layer=2, queue=7)
    assert contrast == 3 * 2 * (layer(5) + layer(3)) + 2 * layer(6) + 2 * (2 * 2 * 7 * 8)


def test_a_gpu_is_known_by_a_part_of_its_name():
    assert peak("NVIDIA A100-SXM4-80GB") == 312e12
    assert peak("abacus") is None
