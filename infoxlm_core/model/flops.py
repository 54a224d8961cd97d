"""Model FLOPs of a training step and peak FLOP/s of GPUs, which together define model FLOPs utilisation (MFU)."""

from collections.abc import Sequence

from infoxlm_core.model.encoder import EncoderSize

PEAKS = {
    "A100": 312e12,
    "B200": 2250e12,
    "H100": 989e12,
    "H100-NVL": 835e12,
    "H100-PCIE": 756e12,
    "H20": 148e12,
    "H200": 989e12,
    "H200-NVL": 835e12,
    "V100": 125e12,
}
"""GPU -> its dense half-precision FLOP/s, from NVIDIA's data sheets."""
_DEVICES = {
    "NVIDIA A100 80GB PCIe": "A100",
    "NVIDIA A100-PCIE-40GB": "A100",
    "NVIDIA A100-SXM4-40GB": "A100",
    "NVIDIA A100-SXM4-80GB": "A100",
    "NVIDIA B200": "B200",
    "NVIDIA GH200 480GB": "H100",
    "NVIDIA H100 80GB HBM3": "H100",
    "NVIDIA H100 NVL": "H100-NVL",
    "NVIDIA H100 PCIe": "H100-PCIE",
    "NVIDIA H20": "H20",
    "NVIDIA H200": "H200",
    "NVIDIA H200 NVL": "H200-NVL",
    "Tesla V100-SXM2-16GB": "V100",
    "Tesla V100-SXM2-32GB": "V100",
}
"""Name of a GPU in its driver -> key of `PEAKS`. No prefixes: an H100 PCIe has three quarters of an H100's speed."""


def count_step_flops(
    size: EncoderSize,
    lm: Sequence[int],
    targets: int,
    query: Sequence[int] = (),
    key: Sequence[int] = (),
    contrast_layer: int = 0,
    queue: int = 0,
) -> float:
    """Return the FLOPs that an optimizer step needs. A multiply-add is 2 FLOPs, and backward costs twice the forward.

    Work that a better implementation could avoid, such as padding, recomputation and logits of unmasked tokens, is not
    counted, so that waste does not look like speed. Embeddings, optimizer, momentum updates and the first filling of
    the queue are not counted either, because they are small.

    Args:
        size: sizes of the encoder.
        lm: number of tokens of each MLM or TLM sequence.
        targets: number of masked positions.
        query: number of tokens of each query view.
        key: number of tokens of each key view.
        contrast_layer: number of the universal layer.
        queue: number of rows of the queue.
    """
    forward_and_backward = 3
    d = size.hidden
    encoder = _count_encoder_flops(size, lm, size.layers)
    head = targets * (2.0 * d * size.vocabulary + 2 * d * d)
    query_encoder = _count_encoder_flops(size, query, contrast_layer)
    key_encoder = _count_encoder_flops(size, key, contrast_layer)  # has no backward pass
    similarities = 4.0 * len(query) * queue * d  # one product forward and one backward: the queue needs no gradient
    contrast = forward_and_backward * query_encoder + key_encoder + similarities
    return forward_and_backward * (encoder + head) + contrast


def _count_encoder_flops(size: EncoderSize, lengths: Sequence[int], layers: int) -> float:
    """Return the FLOPs of a forward pass of sequences with these lengths through the given number of layers."""
    d = size.hidden
    tokens = float(sum(lengths))
    attended_pairs = float(sum(length * length for length in lengths))
    projections = 8 * d * d  # per token: query, key, value and output
    feed_forward = 4 * d * size.ffn  # per token
    return layers * ((projections + feed_forward) * tokens + 4 * d * attended_pairs)


def peak(gpu: str) -> float | None:
    """Return the peak FLOP/s of a GPU, given its name in `PEAKS` or in its driver, or None if it is unknown."""
    return PEAKS.get(_DEVICES.get(gpu, gpu))
