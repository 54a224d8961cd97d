"""Digests of texts that identify duplicates and text reserved for evaluation."""

from bisect import bisect_left
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

import regex

from infoxlm_core.corpora import cleaning

_HAN = r"\p{Han}"
_OTHER_SIGNS = r"\p{Hiragana}\p{Katakana}\p{Thai}\p{Lao}\p{Khmer}\p{Myanmar}\p{Tibetan}"  # no spaces between words
_UNIT = regex.compile(
    rf"(?P<sign>[{_OTHER_SIGNS}])|[{_HAN}]|[[\p{{L}}\p{{M}}\p{{N}}]--[{_HAN}{_OTHER_SIGNS}]]+", regex.V1
)
_SIGNS_PER_WORD = 3  # at least; vowel signs are signs, too, so that 13 signs of Thai are often a single phrase


class Keys(NamedTuple):
    """64-bit digests: three of every text of a row, and those of all runs of words in them."""

    equal: Sequence[int]  # of the form that is compared with reserved text
    near: Sequence[int]  # equal for near duplicates
    exact: Sequence[int]  # of the unchanged text
    runs: Sequence[int] = ()

    def of(self, side: int) -> "Keys":
        """Return the keys of one side of a pair."""
        return Keys(*(digests[side : side + 1] for digests in self[:3]))


def keys(texts: Sequence[str], overlap: int = 0) -> Keys:
    """Return the keys of a row; runs have `overlap` words, and there are none if it is 0."""
    equal, near, exact = zip(*map(_keys, texts), strict=True)
    return Keys(equal, near, exact, [digest for text in texts for digest in runs(text, overlap)])


@lru_cache(maxsize=1 << 16)  # the pivot's side of a message occurs in every language
def _keys(text: str) -> tuple[int, int, int]:
    return (
        cleaning.digest("equal", cleaning.comparable(text)),
        cleaning.digest(cleaning.near_key(text)),
        cleaning.digest(text),
    )


def runs(text: str, length: int) -> list[int]:
    """Return the digests of every run of `length` words; none if it is 0.

    Case, punctuation and spaces are ignored. Texts that share a long run quote the same source. In scripts without
    spaces, a Han character counts as a word, and three signs of any other script count as a word.
    """
    if not length:
        return []
    units, sizes = [], []
    for match in _UNIT.finditer(cleaning.comparable(text)):
        units.append(match[0])
        sizes.append(1 if match["sign"] else _SIGNS_PER_WORD)  # in signs
    starts = list(accumulate(sizes, initial=0))
    digests = []
    for first, start in enumerate(starts):
        end = bisect_left(starts, start + _SIGNS_PER_WORD * length)
        if end == len(starts):
            break
        digests.append(cleaning.digest("run", *units[first:end]))
    return digests
