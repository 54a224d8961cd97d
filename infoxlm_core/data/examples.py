"""Tokenized examples of a task: concatenated texts or text pairs.

    XLM-R      <s> a </s> </s> b </s>        types 0 0 0 0 0 0
    mBERT      [CLS] a [SEP] b [SEP]         types 0 0 0 1 1

The encoder's tokenizer determines the layout, so that fine-tuning uses the same layout as pre-training.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from transformers import PreTrainedTokenizerBase as Tokenizer

from infoxlm_core.data.layouts import number_positions

CHUNK = 20_000  # texts per tokenizer call; its Python lists need 20 times the memory of arrays


@dataclass(frozen=True)
class Examples:
    """N concatenated tokenized texts or text pairs."""

    ids: np.ndarray  # (T,) of a small integer type: with `types`, an example needs 5 bytes per token
    types: np.ndarray  # (T,) segment of each token; 0 for tokenizers without segments
    lengths: np.ndarray  # (N,) token count of each example, as int64

    def __len__(self) -> int:
        return len(self.lengths)

    @cached_property
    def starts(self) -> np.ndarray:
        """Index of each example's first token (N,)."""
        return self.lengths.cumsum() - self.lengths

    def take(self, rows: Sequence[int] | np.ndarray) -> "Examples":
        """Return the examples at `rows` as int64, in the given order. Rows may repeat."""
        rows = np.asarray(rows, np.int64)
        lengths = self.lengths[rows]
        indices = np.repeat(self.starts[rows], lengths) + number_positions(lengths)  # (T',)
        return Examples(self.ids[indices].astype(np.int64), self.types[indices].astype(np.int64), lengths)


def encode(
    tokenizer: Tokenizer, texts: Sequence[str], second_texts: Sequence[str] | None = None, max_tokens: int = 512
) -> Examples:
    """Tokenize texts or text pairs with special tokens. In long pairs, the longer side is truncated first."""
    batches = []
    for start in range(0, len(texts), CHUNK):
        selected = slice(start, start + CHUNK)
        encoded = tokenizer(
            list(texts[selected]),
            None if second_texts is None else list(second_texts[selected]),
            truncation="longest_first",
            max_length=max_tokens,
            return_attention_mask=False,
            return_token_type_ids=True,  # otherwise, generic tokenizer classes omit BERT's segments
        )
        batches.append(from_lists(encoded["input_ids"], encoded["token_type_ids"]))
    return join(batches)


def from_lists(ids: Sequence[Sequence[int]], types: Sequence[Sequence[int]] | None = None) -> Examples:
    """Make examples from a tokenizer's token ids and segments. Without `types`, all segments are 0."""
    flat_ids = _flatten(ids, np.int32)
    flat_types = np.zeros(len(flat_ids), np.int8) if types is None else _flatten(types, np.int8)
    lengths = np.array([len(example_ids) for example_ids in ids], np.int64)
    return Examples(flat_ids, flat_types, lengths)


def _flatten(lists: Sequence[Sequence[int]], dtype: type) -> np.ndarray:
    return np.fromiter(itertools.chain.from_iterable(lists), dtype)


def join(batches: Sequence[Examples]) -> Examples:
    """Concatenate batches of examples."""
    if not batches:
        return from_lists([])
    return Examples(
        np.concatenate([examples.ids for examples in batches]),
        np.concatenate([examples.types for examples in batches]),
        np.concatenate([examples.lengths for examples in batches]),
    )
