"""What a step has to compute, and what share of a GPU's speed that is: the one definition of MFU."""

from collections.abc import Sequence

PEAKS = {"H100": 989e12, "H200": 989e12, "A100": 312e12, "V100": 125e12}
"""Dense half-precision FLOP/s of a GPU, by a part of its name."""


def must_do_flops(
    lm: Sequence[int],
    targets: int,
    query: Sequence[int],
    key: Sequence[int],
    *,
    d: int,
    f: int,
    T: int,
    contrast_layer: int,
    V: int,
    K: int,
) -> float:
    """FLOPs of one optimizer step, a multiply-add being 2; backward counts twice the forward.

    Padding, the head on unmasked rows, contrast above its layer, recomputation, embeddings, optimizer, EMA and queue
    prefill never count: else waste would look like speed.

    Args:
        lm: tokens of each MLM and TLM sequence.
        targets: masked positions.
        query: tokens of each query view.
        key: tokens of each key view.
        d: hidden size.
        f: FFN size.
        T: layers.
        contrast_layer: universal layer.
        V: vocabulary.
        K: rows of the queue.
    """

    def encoder(lengths: Sequence[int], layers: int) -> float:
        return layers * ((8 * d * d + 4 * d * f) * float(sum(lengths)) + 4 * d * float(sum(n * n for n in lengths)))

    head = targets * (2.0 * d * V + 2 * d * d)
    contrast = 3 * encoder(query, contrast_layer) + encoder(key, contrast_layer) + 4.0 * len(query) * K * d
    return 3 * (encoder(lm, T) + head) + contrast


def peak(gpu: str) -> float | None:
    """FLOP/s of a GPU by its name; None if unknown."""
    return next((speed for part, speed in PEAKS.items() if part in gpu), None)
