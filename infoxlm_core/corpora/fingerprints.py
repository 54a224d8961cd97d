"""Digests of texts that identify duplicates and text reserved for evaluation."""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import regex

from infoxlm_core.corpora import cleaning

_WITHOUT_SPACES = r"\p{Han}\p{Hiragana}\p{Katakana}\p{Thai}\p{Lao}\p{Khmer}\p{Myanmar}\p{Tibetan}"
_UNIT = regex.compile(rf"[{_WITHOUT_SPACES}]|[[\p{{L}}\p{{M}}\p{{N}}]--[{_WITHOUT_SPACES}]]+", regex.V1)


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
    """Return the digests of every run of `length` words, or of signs in scripts without spaces; none if it is 0.

    Case, punctuation and spaces are ignored. Texts that share a long run quote the same source.
    """
    if not length:
        return []
    units = _UNIT.findall(cleaning.comparable(text))
    return [cleaning.digest("run", *units[first : first + length]) for first in range(len(units) - length + 1)]
