"""Digests of texts by which duplicates, and text kept for evaluation, are found again."""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import regex

from infoxlm_core.corpora import cleaning

_WITHOUT_SPACES = r"\p{Han}\p{Hiragana}\p{Katakana}\p{Thai}\p{Lao}\p{Khmer}\p{Myanmar}\p{Tibetan}"
_UNIT = regex.compile(rf"[{_WITHOUT_SPACES}]|[[\p{{L}}\p{{M}}\p{{N}}]--[{_WITHOUT_SPACES}]]+", regex.V1)


class Keys(NamedTuple):
    """Digests, 64 bits each: three of every text of a row, and those of all runs of words in them."""

    equal: Sequence[int]  # of the form in which training text is compared with text kept for evaluation
    near: Sequence[int]  # of what near duplicates have in common
    exact: Sequence[int]  # of the very text
    runs: Sequence[int] = ()

    def of(self, side: int) -> "Keys":
        """Those of one side of a pair."""
        return Keys(*(digests[side : side + 1] for digests in self[:3]))


def keys(texts: Sequence[str], overlap: int = 0) -> Keys:
    """Return the keys of a row; its runs are of `overlap` words, none if that is 0."""
    equal, near, exact = zip(*map(_keys, texts), strict=True)
    return Keys(equal, near, exact, [digest for text in texts for digest in runs(text, overlap)])


@lru_cache(maxsize=1 << 16)  # the pivot's side of a message returns in every language
def _keys(text: str) -> tuple[int, int, int]:
    return (
        cleaning.digest("equal", cleaning.comparable(text)),
        cleaning.digest(cleaning.near_key(text)),
        cleaning.digest(text),
    )


def runs(text: str, length: int) -> list[int]:
    """Digests of every run of so many words, or of signs where a script has no spaces; none if `length` is 0.

    Case, punctuation and spaces do not count: texts that share a run have copied, or quote the same source.
    """
    if not length:
        return []
    units = _UNIT.findall(cleaning.comparable(text))
    return [cleaning.digest("run", *units[first : first + length]) for first in range(len(units) - length + 1)]
