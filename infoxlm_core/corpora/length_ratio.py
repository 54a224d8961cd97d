"""Compare the lengths of a pair's sides with the median of its language pair.

A Thai translation has 2.7 times the UTF-8 bytes of its English source, and a Chinese translation 0.9 times. A common
limit for all languages must therefore be relative to their medians. The median is computed from a histogram, because a
histogram is small, and histograms of parts of a corpus can be added in any order.
"""

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np

_BIN = 0.01  # width of a bin: the ratios in it differ by 1 %


def compute_log_ratio(texts: Sequence[str]) -> float:
    """Return the natural logarithm of the target's UTF-8 bytes divided by the source's. Neither side may be empty."""
    source, target = texts
    return math.log(len(target.encode()) / len(source.encode()))


def find_bin(texts: Sequence[str]) -> int:
    """Return the number of the histogram bin of a pair."""
    return round(compute_log_ratio(texts) / _BIN)


def find_median(histogram: Counter[int]) -> float:
    """Return the median log ratio of a histogram that counts the pairs in each bin."""
    counted_pairs = 0
    for bin_number in sorted(histogram):
        counted_pairs += histogram[bin_number]
        if 2 * counted_pairs >= histogram.total():
            return _BIN * bin_number
    raise ValueError("the histogram is empty")


def is_unusual(max_ratio: float, log_ratios: np.ndarray, median: float) -> np.ndarray:
    """Return whether a side of each pair is over `max_ratio` times as long as the median log ratio predicts, (N,)."""
    return np.abs(log_ratios - median) > math.log(max_ratio)
