"""Compare the lengths of a pair's sides with the median of its language pair.

A Thai translation has 2.7 times the UTF-8 bytes of its English source, and a Chinese translation 0.9 times. A common
limit for all languages must therefore be relative to their medians. Medians are computed from histograms, which are
small and can be summed over the parts of a corpus.
"""

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np

_BIN = 0.01  # bin width: the length ratios in a bin differ by 1 %


def compute_log_ratio(texts: Sequence[str]) -> float:
    """Return the natural logarithm of the ratio of target to source length in UTF-8 bytes. Neither side may be
    empty."""
    source, target = texts
    return math.log(len(target.encode()) / len(source.encode()))


def find_bin(log_ratio: float) -> int:
    """Return the histogram bin number of a pair's log ratio."""
    return round(log_ratio / _BIN)


def find_median(histogram: Counter[int]) -> float:
    """Return the median log ratio of a histogram with the pair count of each bin."""
    counted_pairs = 0
    for bin_number in sorted(histogram):
        counted_pairs += histogram[bin_number]
        if 2 * counted_pairs >= histogram.total():
            return _BIN * bin_number
    raise ValueError("the histogram is empty")


def is_unusual(max_ratio: float, log_ratios: np.ndarray, median: float) -> np.ndarray:
    """Return a mask (N,) of the pairs whose length ratio differs from the median by more than a factor of
    `max_ratio`."""
    return np.abs(log_ratios - median) > math.log(max_ratio)
