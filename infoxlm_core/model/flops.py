"""Model FLOPs of a training step and peak FLOP/s of GPUs, for model FLOPs utilization (MFU)."""

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
"""GPU -> dense half-precision FLOP/s, from NVIDIA's data sheets."""
_DEVICES = {
    "NVIDIA A100 80GB PCIe": "A100",
    "NVIDIA A100-PCIE-40GB": "A100",
    "NVIDIA A100-SXM4-40GB": "A100",
    "NVIDIA A100-SXM4-80GB": "A100",
    "NVIDIA B200": "B200",
    "NVIDIA GH200 480GB": "H100",  # the GPU of a GH200 superchip is an H100
    "NVIDIA H100 80GB HBM3": "H100",
    "NVIDIA H100 NVL": "H100-NVL",
    "NVIDIA H100 PCIe": "H100-PCIE",
    "NVIDIA H20": "H20",
    "NVIDIA H200": "H200",
    "NVIDIA H200 NVL": "H200-NVL",
    "Tesla V100-SXM2-16GB": "V100",
    "Tesla V100-SXM2-32GB": "V100",
}
"""GPU name from the driver -> key of `PEAKS`. Names match exactly: an H100 PCIe is slower than an H100."""


def count_step_flops(
    size: EncoderSize,
    lm_lengths: Sequence[int],
    targets: int,
    query_lengths: Sequence[int] = (),
    key_lengths: Sequence[int] = (),
    contrast_layer: int = 0,
    queue_rows: int = 0,
) -> float:
    """Count the model FLOPs of an optimizer step. A multiply-add is 2 FLOPs.

    The count excludes work that a better implementation could avoid: padding, recomputation and logits of unmasked
    tokens. It also excludes small parts: embeddings, optimizer, momentum updates and the first filling of the queue.

    Args:
        size: the encoder's sizes.
        lm_lengths: number of tokens in each MLM or TLM sequence.
        targets: number of masked positions.
        query_lengths: number of tokens in each query view.
        key_lengths: number of tokens in each key view.
        contrast_layer: number of the layer whose output is contrasted.
        queue_rows: number of keys in the queue.
    """
    training_factor = 3  # one forward pass, and a backward pass that costs twice as much
    hidden = size.hidden
    encoder_flops = _count_forward_flops(size, lm_lengths, size.layers)
    head_flops = targets * (2.0 * hidden * size.vocabulary + 2 * hidden * hidden)  # output layer and dense layer
    query_flops = _count_forward_flops(size, query_lengths, contrast_layer)
    key_flops = _count_forward_flops(size, key_lengths, contrast_layer)  # keys have no backward pass
    # 2 FLOPs forward, and 2 instead of 4 backward, because the queue's keys need no gradient.
    similarity_flops = 4.0 * len(query_lengths) * queue_rows * hidden
    contrast_flops = training_factor * query_flops + key_flops + similarity_flops
    return training_factor * (encoder_flops + head_flops) + contrast_flops


def _count_forward_flops(size: EncoderSize, lengths: Sequence[int], layers: int) -> float:
    """Count the FLOPs of a forward pass through `layers` layers for sequences of these lengths."""
    hidden = size.hidden
    token_count = float(sum(lengths))
    token_pairs = float(sum(length * length for length in lengths))  # a token attends to its whole sequence
    projection_flops = 8 * hidden * hidden  # per token: query, key, value and output
    feed_forward_flops = 4 * hidden * size.ffn  # per token
    attention_flops = 4 * hidden * token_pairs  # queries times keys, and weights times values
    return layers * ((projection_flops + feed_forward_flops) * token_count + attention_flops)


def find_peak_flops(gpu: str) -> float | None:
    """Return a GPU's peak FLOP/s, given its key in `PEAKS` or its driver name. Return None for an unknown GPU."""
    return PEAKS.get(_DEVICES.get(gpu, gpu))
