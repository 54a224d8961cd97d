"""Texts, or pairs of texts, as a tokenizer lays them out for a task, end to end.

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

AT_ONCE = 20_000  # texts between the tokenizer's lists and our arrays: lists of numbers need 20 times the memory


@dataclass(frozen=True)
class Examples:
    """N tokenised texts, or pairs, end to end."""

    ids: np.ndarray  # (T,) of any integer type: millions of examples are kept in 5 bytes a token
    types: np.ndarray  # (T,) likewise, the segment of each token; 0 where the tokenizer knows none
    lengths: np.ndarray  # (N,) int64, tokens of each example

    def __len__(self) -> int:
        return len(self.lengths)

    @cached_property
    def starts(self) -> np.ndarray:
        """(N,) place of each example's first token."""
        return self.lengths.cumsum() - self.lengths

    def take(self, rows: Sequence[int] | np.ndarray) -> "Examples":
        """The examples of some rows, in that order, in int64; a row may come again."""
        rows = np.asarray(rows, np.int64)
        lengths = self.lengths[rows]
        within = np.arange(lengths.sum()) - np.repeat(lengths.cumsum() - lengths, lengths)
        places = np.repeat(self.starts[rows], lengths) + within
        return Examples(self.ids[places].astype(np.int64), self.types[places].astype(np.int64), lengths)


def encode(
    tokenizer: Tokenizer, texts: Sequence[str], pairs: Sequence[str] | None = None, max_tokens: int = 512
) -> Examples:
    """Tokenise texts, or pairs, with special tokens; of a pair that is too long the longer side is cut first."""
    parts = []
    for start in range(0, len(texts), AT_ONCE):
        some = slice(start, start + AT_ONCE)
        found = tokenizer(
            list(texts[some]),
            None if pairs is None else list(pairs[some]),
            truncation="longest_first",
            max_length=max_tokens,
            return_attention_mask=False,
            return_token_type_ids=True,  # else a tokenizer of no known class leaves BERT's segments out
        )
        parts.append(from_lists(found["input_ids"], found["token_type_ids"]))
    return join(parts)


def from_lists(ids: Sequence[Sequence[int]], types: Sequence[Sequence[int]] | None = None) -> Examples:
    """Examples from the lists of a tokenizer."""
    flat = _flat(ids, np.int32)
    segments = np.zeros(len(flat), np.int8) if types is None else _flat(types, np.int8)
    return Examples(flat, segments, np.array([*map(len, ids)], np.int64))


def _flat(rows: Sequence[Sequence[int]], kind: type) -> np.ndarray:
    return np.fromiter(itertools.chain.from_iterable(rows), kind)


def join(parts: Sequence[Examples]) -> Examples:
    """The examples of all parts, one part after the other."""
    if not parts:
        return from_lists([])
    return Examples(
        np.concatenate([part.ids for part in parts]),
        np.concatenate([part.types for part in parts]),
        np.concatenate([part.lengths for part in parts]),
    )
