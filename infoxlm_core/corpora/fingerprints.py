"""Digests of texts by which duplicates, and text kept for evaluation, are found again."""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from infoxlm_core.corpora import cleaning


class Keys(NamedTuple):
    """Three digests, 64 bits each, of every text of a row."""

    equal: Sequence[int]  # of the form in which training text is compared with text kept for evaluation
    near: Sequence[int]  # of what near duplicates have in common
    exact: Sequence[int]  # of the very text

    def of(self, side: int) -> "Keys":
        """Those of one side of a pair."""
        return Keys(*(digests[side : side + 1] for digests in self))


def keys(texts: Sequence[str]) -> Keys:
    """Return the keys of a row."""
    return Keys(*zip(*map(_keys, texts), strict=True))


@lru_cache(maxsize=1 << 16)  # the pivot's side of a message returns in every language
def _keys(text: str) -> tuple[int, int, int]:
    return (
        cleaning.digest("equal", cleaning.comparable(text)),
        cleaning.digest(cleaning.near_key(text)),
        cleaning.digest(text),
    )
