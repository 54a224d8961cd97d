"""Tokenised examples of a task: texts or pairs of texts, end to end.

    XLM-R      <s> a </s> </s> b </s>        types 0 0 0 0 0 0
    mBERT      [CLS] a [SEP] b [SEP]         types 0 0 0 1 1

The layout is the tokenizer's own, so that any encoder is fine-tuned on what it was pre-trained to read.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from transformers import PreTrainedTokenizerBase as Tokenizer

AT_ONCE = 20_000  # texts that are tokenised at a time: Python lists need 20 times the memory of arrays


@dataclass(frozen=True)
class Examples:
    """N tokenised texts, or pairs, end to end."""

    ids: np.ndarray  # (T,) of any integer type, to hold millions of examples in 5 bytes a token
    types: np.ndarray  # (T,) the segment of each token; 0 if the tokenizer has no segments
    lengths: np.ndarray  # (N,) int64, tokens of each example

    def __len__(self) -> int:
        return len(self.lengths)

    @cached_property
    def starts(self) -> np.ndarray:
        """Index of each example's first token, (N,)."""
        return self.lengths.cumsum() - self.lengths

    def take(self, rows: Sequence[int] | np.ndarray) -> "Examples":
        """Return the examples at `rows`, in that order, as int64; rows may repeat."""
        rows = np.asarray(rows, np.int64)
        lengths = self.lengths[rows]
        position_in_example = np.arange(lengths.sum()) - np.repeat(lengths.cumsum() - lengths, lengths)
        indices = np.repeat(self.starts[rows], lengths) + position_in_example
        return Examples(self.ids[indices].astype(np.int64), self.types[indices].astype(np.int64), lengths)


def encode(
    tokenizer: Tokenizer, texts: Sequence[str], pairs: Sequence[str] | None = None, max_tokens: int = 512
) -> Examples:
    """Tokenise texts or pairs with special tokens; the longer side of a long pair is truncated first."""
    parts = []
    for start in range(0, len(texts), AT_ONCE):
        chunk = slice(start, start + AT_ONCE)
        encoded = tokenizer(
            list(texts[chunk]),
            None if pairs is None else list(pairs[chunk]),
            truncation="longest_first",
            max_length=max_tokens,
            return_attention_mask=False,
            return_token_type_ids=True,  # generic tokenizer classes omit BERT's segments otherwise
        )
        parts.append(from_lists(encoded["input_ids"], encoded["token_type_ids"]))
    return join(parts)


def from_lists(ids: Sequence[Sequence[int]], types: Sequence[Sequence[int]] | None = None) -> Examples:
    """Return examples from the lists of a tokenizer."""
    flat = _flat(ids, np.int32)
    segments = np.zeros(len(flat), np.int8) if types is None else _flat(types, np.int8)
    return Examples(flat, segments, np.array([*map(len, ids)], np.int64))


def _flat(rows: Sequence[Sequence[int]], kind: type) -> np.ndarray:
    return np.fromiter(itertools.chain.from_iterable(rows), kind)


def join(parts: Sequence[Examples]) -> Examples:
    """Concatenate examples."""
    if not parts:
        return from_lists([])
    return Examples(
        np.concatenate([part.ids for part in parts]),
        np.concatenate([part.types for part in parts]),
        np.concatenate([part.lengths for part in parts]),
    )
