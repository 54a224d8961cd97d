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
    lm_lengths: Sequence[int],
    targets: int,
    query_lengths: Sequence[int] = (),
    key_lengths: Sequence[int] = (),
    contrast_layer: int = 0,
    queue_rows: int = 0,
) -> float:
    """Return the FLOPs that an optimizer step needs. A multiply-add is 2 FLOPs.

    Padding, recomputation and logits of unmasked tokens are not counted, because a better implementation could avoid
    them. Embeddings, optimizer, momentum updates and the first filling of the queue are not counted, because they are
    small.

    Args:
        size: sizes of the encoder.
        lm_lengths: number of tokens of each MLM or TLM sequence.
        targets: number of masked positions.
        query_lengths: number of tokens of each query view.
        key_lengths: number of tokens of each key view.
        contrast_layer: number of the universal layer.
        queue_rows: number of keys in the queue.
    """
    training_factor = 3  # forward and backward pass; the backward pass costs twice the forward pass
    hidden = size.hidden
    encoder_flops = _count_forward_flops(size, lm_lengths, size.layers)
    head_flops = targets * (2.0 * hidden * size.vocabulary + 2 * hidden * hidden)
    query_flops = _count_forward_flops(size, query_lengths, contrast_layer)
    key_flops = _count_forward_flops(size, key_lengths, contrast_layer)  # keys have no backward pass
    # One product forward and one backward, because the queue needs no gradient.
    similarity_flops = 4.0 * len(query_lengths) * queue_rows * hidden
    contrast_flops = training_factor * query_flops + key_flops + similarity_flops
    return training_factor * (encoder_flops + head_flops) + contrast_flops


def _count_forward_flops(size: EncoderSize, lengths: Sequence[int], layers: int) -> float:
    """Return the FLOPs of a forward pass of sequences with these lengths through this number of layers."""
    hidden = size.hidden
    token_count = float(sum(lengths))
    token_pairs = float(sum(length * length for length in lengths))  # each token attends to its whole sequence
    projection_flops = 8 * hidden * hidden  # per token: query, key, value and output
    feed_forward_flops = 4 * hidden * size.ffn  # per token
    attention_flops = 4 * hidden * token_pairs  # products of queries with keys, and of weights with values
    return layers * ((projection_flops + feed_forward_flops) * token_count + attention_flops)


def find_peak_flops(gpu: str) -> float | None:
    """Return the peak FLOP/s of a GPU, given its name in `PEAKS` or in its driver, or None if it is unknown."""
    return PEAKS.get(_DEVICES.get(gpu, gpu))
