"""The median of the length ratios of a language pair, and the pairs that are too far from it."""

import random
import statistics
from collections import Counter

import numpy as np
import pytest

from infoxlm_core.corpora import length_ratio


def test_median_is_exact_to_one_percent_and_equal_however_the_corpus_is_split():
    rng = random.Random(1)
    pairs = [("a" * rng.randint(5, 90), "ก" * rng.randint(5, 90)) for _ in range(501)]
    bins = [length_ratio.find_bin(length_ratio.compute_log_ratio(pair)) for pair in pairs]

    median = length_ratio.find_median(Counter(bins))

    assert median == pytest.approx(statistics.median(map(length_ratio.compute_log_ratio, pairs)), abs=0.01)
    assert median == length_ratio.find_median(Counter(bins[300:]) + Counter(bins[:300]))


def test_pair_is_unusual_if_either_side_is_too_long_for_the_median():
    median = length_ratio.compute_log_ratio(("ten signs.", "สิบตัวอักษร"))  # 33 bytes

    ratios = np.array([length_ratio.compute_log_ratio(("ten signs.", "ก" * number)) for number in range(1, 60)])
    lengths = 1 + np.flatnonzero(~length_ratio.is_unusual(4.0, ratios, median))

    assert (lengths[0], lengths[-1]) == (3, 44)  # 33 bytes / 4 = 8.25, and 33 * 4 = 132
