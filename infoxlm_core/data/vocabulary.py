"""Token ids: which are special, and how many a tokenizer has.

XLM-R    `<s>` 0, `<pad>` 1, `</s>` 2, `<unk>` 3, pieces from 4, `<mask>` last
mBERT    `[PAD]` 0, `[UNK]` 100, `[CLS]` 101, `[SEP]` 102, `[MASK]` 103, pieces before and after them
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self

import numpy as np

from infoxlm_core.errors import TokenizerMismatch

BOS, PAD, EOS, UNK, FIRST_PIECE = 0, 1, 2, 3, 4  # XLM-R's
FIRST_POSITION = PAD + 1  # positions of a sequence start here; padding has its own, below
SPECIAL_TOKENS = ("<s>", "<pad>", "</s>", "<unk>", "<mask>")


@dataclass(frozen=True)
class Vocabulary:
    """The special ids of a tokenizer and the number of its ids."""

    begin: int  # `<s>` or `[CLS]`, the first token of a sequence
    end: int  # `</s>` or `[SEP]`, the token after each segment of a sequence
    pad: int
    unk: int
    mask: int
    special_ids: tuple[int, ...]  # all special ids in ascending order; no random replacement of a token is one of them
    size: int

    @classmethod
    def xlm_r(cls, size: int) -> Self:
        """Return XLM-R's layout of `size` ids, which every SentencePiece model of this package has."""
        mask = size - 1
        return cls(BOS, EOS, PAD, UNK, mask, (BOS, PAD, EOS, UNK, mask), size)

    @classmethod
    def from_facts(cls, facts: Mapping[str, Any]) -> Self:
        """Return the vocabulary that the manifest of shards records. See `as_facts`."""
        if "vocabulary" not in facts:
            return cls.xlm_r(facts["vocabulary_size"])
        vocabulary = cls(**facts["vocabulary"])
        return dataclasses.replace(vocabulary, special_ids=tuple(vocabulary.special_ids))

    def as_facts(self) -> dict[str, Any]:
        """Return the facts for the manifest of shards. XLM-R's layout needs only its size, as in older shards."""
        facts: dict[str, Any] = {"vocabulary_size": self.size}
        if not self.is_xlm_r:
            facts["vocabulary"] = dataclasses.asdict(self)
        return facts

    @property
    def is_xlm_r(self) -> bool:
        """Return whether the special ids are those of XLM-R's layout."""
        return self == Vocabulary.xlm_r(self.size)

    def check_xlm_r(self, system: str) -> None:
        """Raise TokenizerMismatch if the special ids are not XLM-R's, which some systems require."""
        if not self.is_xlm_r:
            raise TokenizerMismatch(
                f"system {system} needs XLM-R's ids (<s> {BOS}, </s> {EOS}), but sequences of the shards begin with "
                f"{self.begin} and end with {self.end}: set tokenization.model to a SentencePiece model or to null"
            )

    @cached_property
    def ordinary_ids(self) -> np.ndarray:
        """Return all ids that are not special, in ascending order."""
        return np.setdiff1d(np.arange(self.size), self.special_ids)

    def are_delimiters(self, ids: np.ndarray) -> np.ndarray:
        """Return for each id whether it begins a sequence or ends a segment."""
        return (ids == self.begin) | (ids == self.end)
