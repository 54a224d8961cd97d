"""Encode sentences as token ids in XLM-R's layout, a chunk of rows at a time; any machine can process a chunk.

source: ["Open the page"]  target: ["Öffne die Seite"]
source: [[31, 7, 52]]      target: [[88, 12, 9, 40]]    sentence_id: [1234567890123456789]
"""

import functools
import hashlib
import itertools
import unicodedata
from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import sentencepiece

from infoxlm_core.data.shards import TOKENS
from infoxlm_core.data.vocabulary import EOS, FIRST_PIECE, UNK

SIDES = {"text": "", "source": ".source", "target": ".target"}  # column of a corpus -> end of its table's name
SENTENCE_ID = "sentence_id"


@functools.lru_cache(maxsize=1)  # a worker encodes many chunks with one model
def processor_of(model: bytes) -> sentencepiece.SentencePieceProcessor:
    """Return the processor of a serialized SentencePiece model."""
    return sentencepiece.SentencePieceProcessor(model_proto=model)


def encode(processor: sentencepiece.SentencePieceProcessor, texts: list[str]) -> list[np.ndarray]:
    """Return the ids of each text in XLM-R's layout, without special tokens: SentencePiece's ids plus one."""
    pieces = processor.encode(texts)
    flat = np.fromiter(itertools.chain.from_iterable(pieces), np.int64)
    flat = np.where(flat == 0, UNK, flat + FIRST_PIECE - 3)
    ends = itertools.accumulate(map(len, pieces), initial=0)
    return [flat[start:end] for start, end in itertools.pairwise(ends)]


def encode_chunk(chunk: pa.Table, model: bytes) -> pa.Table:
    """Encode rows of text and drop rows in which a side has no tokens.

    Args:
        chunk: the column `text`, or the columns `source` and `target`.
        model: a serialized SentencePiece model; other machines do not have its file.

    Returns:
        The same columns with token ids, and for pairs the column `sentence_id`. Monolingual rows end with `</s>`.
    """
    texts = {side: chunk[side].to_pylist() for side in chunk.column_names}
    ids = {side: encode(processor_of(model), column) for side, column in texts.items()}
    complete_rows = [row for row in range(len(chunk)) if all(len(column[row]) for column in ids.values())]
    columns = {}
    for side, column in ids.items():
        remaining_rows = [column[row] for row in complete_rows]
        columns[side] = _lists(remaining_rows, with_eos=side == "text")
    if "source" in texts:
        sentence_ids = [sentence_id(texts["source"][row]) for row in complete_rows]
        columns[SENTENCE_ID] = pa.array(sentence_ids, pa.uint64())
    return pa.table(columns)


def _lists(rows: Sequence[np.ndarray], with_eos: bool) -> pa.Array:
    """Return a column of lists of ids; with `with_eos` each list ends with `</s>`."""
    if with_eos:
        rows = [np.append(row, EOS) for row in rows]
    flat = np.concatenate([np.empty(0, np.int64), *rows]).astype(TOKENS)
    return pa.LargeListArray.from_arrays(np.cumsum([0, *map(len, rows)]), flat)


def sentence_id(text: str) -> int:
    """Return a 64-bit hash of a pair's pivot side; pairs with the same hash translate the same sentence."""
    comparable_text = " ".join(unicodedata.normalize("NFKC", text).casefold().split())
    return int.from_bytes(hashlib.blake2b(comparable_text.encode(), digest_size=8).digest(), "little")
