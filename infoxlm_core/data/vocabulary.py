"""Special token ids and vocabulary size of a tokenizer.

Tokenizers differ in their layouts:

    XLM-R    `<s>` 0, `<pad>` 1, `</s>` 2, `<unk>` 3, pieces from 4, `<mask>` last
    mBERT    `[PAD]` 0, `[UNK]` 100, `[CLS]` 101, `[SEP]` 102, `[MASK]` 103, all other ids are pieces
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self

import numpy as np

from infoxlm_core.errors import TokenizerMismatch

BOS, PAD, EOS, UNK, FIRST_PIECE = 0, 1, 2, 3, 4  # XLM-R's ids
FIRST_POSITION = PAD + 1  # position of a sequence's first token; padding has position `PAD`
SPECIAL_TOKENS = ("<s>", "<pad>", "</s>", "<unk>", "<mask>")


@dataclass(frozen=True)
class Vocabulary:
    """Special ids and number of ids of a tokenizer."""

    begin: int  # `<s>` or `[CLS]`, before each sequence
    end: int  # `</s>` or `[SEP]`, after each segment
    pad: int
    unk: int
    mask: int
    special_ids: tuple[int, ...]  # all special ids, ascending; excluded from random replacements
    size: int

    @classmethod
    def xlm_r(cls, size: int) -> Self:
        """Return XLM-R's layout with `size` ids. All SentencePiece models of this package use this layout."""
        mask = size - 1
        return cls(BOS, EOS, PAD, UNK, mask, (BOS, PAD, EOS, UNK, mask), size)

    @classmethod
    def from_facts(cls, facts: Mapping[str, Any]) -> Self:
        """Read the vocabulary from the facts of a shards manifest, see `as_facts`."""
        if "vocabulary" not in facts:
            return cls.xlm_r(facts["vocabulary_size"])
        vocabulary = cls(**facts["vocabulary"])
        return dataclasses.replace(vocabulary, special_ids=tuple(vocabulary.special_ids))  # JSON has no tuples

    def as_facts(self) -> dict[str, Any]:
        """Return the facts for a shards manifest. For XLM-R's layout, only the size is recorded, as in older shards."""
        facts: dict[str, Any] = {"vocabulary_size": self.size}
        if not self.is_xlm_r:
            facts["vocabulary"] = dataclasses.asdict(self)
        return facts

    @property
    def is_xlm_r(self) -> bool:
        """Whether the special ids have XLM-R's layout."""
        return self == Vocabulary.xlm_r(self.size)

    def check_xlm_r(self, system: str) -> None:
        """Raise TokenizerMismatch if the special ids do not have XLM-R's layout. Some systems require this layout."""
        if not self.is_xlm_r:
            raise TokenizerMismatch(
                f"system {system} needs XLM-R's ids (<s> {BOS}, </s> {EOS}), but sequences of the shards begin with "
                f"{self.begin} and end with {self.end}: set tokenization.model to a SentencePiece model or to null"
            )

    @cached_property
    def ordinary_ids(self) -> np.ndarray:
        """All ordinary (not special) ids, in ascending order."""
        return np.setdiff1d(np.arange(self.size), self.special_ids)

    def are_delimiters(self, ids: np.ndarray) -> np.ndarray:
        """Return a mask of the ids that begin a sequence or end a segment."""
        return (ids == self.begin) | (ids == self.end)
