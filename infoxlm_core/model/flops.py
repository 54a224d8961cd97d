"""What a step has to compute, and what share of a GPU's speed that is: the one definition of MFU."""

from collections.abc import Sequence

from infoxlm_core.model.encoder import EncoderSize

PEAKS = {"H100": 989e12, "H200": 989e12, "A100": 312e12, "V100": 125e12}  # dense half-precision FLOP/s of a GPU


def must_do_flops(
    size: EncoderSize,
    lm: Sequence[int],
    targets: int,
    query: Sequence[int] = (),
    key: Sequence[int] = (),
    contrast_layer: int = 0,
    queue: int = 0,
) -> float:
    """FLOPs of one optimizer step, a multiply-add being 2; backward counts twice the forward.

    Padding, the head on unmasked rows, contrast above its layer, recomputation, embeddings, optimizer, EMA and queue
    prefill never count: else waste would look like speed. `lm`, `query` and `key` are the tokens of each MLM or TLM
    sequence and of each view, `targets` the masked positions, `queue` its rows.
    """
    d = size.hidden

    def encoder(lengths: Sequence[int], layers: int) -> float:
        rows, squares = float(sum(lengths)), float(sum(n * n for n in lengths))
        return layers * ((8 * d * d + 4 * d * size.ffn) * rows + 4 * d * squares)

    head = targets * (2.0 * d * size.vocabulary + 2 * d * d)
    contrast = 3 * encoder(query, contrast_layer) + encoder(key, contrast_layer) + 4.0 * len(query) * queue * d
    return 3 * (encoder(lm, size.layers) + head) + contrast


def peak(gpu: str) -> float | None:
    """FLOP/s of a GPU by its name; None if unknown."""
    return next((speed for part, speed in PEAKS.items() if part in gpu), None)
