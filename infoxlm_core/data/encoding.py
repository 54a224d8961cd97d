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

from infoxlm_core.data.shards import TOKENS, end_to_end
from infoxlm_core.data.vocabulary import EOS, FIRST_PIECE, UNK

SIDES = {"text": "", "source": ".source", "target": ".target"}  # column of a corpus -> end of its table's name
SENTENCE_ID = "sentence_id"


@functools.lru_cache(maxsize=1)  # a worker encodes many chunks with one model
def processor_of(model: bytes) -> sentencepiece.SentencePieceProcessor:
    """Return the processor of a serialized SentencePiece model."""
    return sentencepiece.SentencePieceProcessor(model_proto=model)


def encode(processor: sentencepiece.SentencePieceProcessor, texts: list[str]) -> list[np.ndarray]:
    """Return the token ids of each text in XLM-R's layout, without special tokens."""
    pieces_of_texts = processor.encode(texts)
    piece_ids = np.fromiter(itertools.chain.from_iterable(pieces_of_texts), np.int64)
    # SentencePiece counts <unk>, <s>, </s> and then the pieces from 3; XLM-R counts the pieces from 4.
    token_ids = np.where(piece_ids == 0, UNK, piece_ids + FIRST_PIECE - 3)
    lengths = [len(pieces) for pieces in pieces_of_texts]
    offsets = itertools.accumulate(lengths, initial=0)
    return [token_ids[start:end] for start, end in itertools.pairwise(offsets)]


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
    complete_rows = []
    for row in range(len(chunk)):
        if all(len(column[row]) for column in ids.values()):
            complete_rows.append(row)
    columns = {}
    for side, column in ids.items():
        remaining_rows = [column[row] for row in complete_rows]
        columns[side] = _make_column(remaining_rows, with_eos=side == "text")
    if "source" in texts:
        sentence_ids = [sentence_id(texts["source"][row]) for row in complete_rows]
        columns[SENTENCE_ID] = pa.array(sentence_ids, pa.uint64())
    return pa.table(columns)


def _make_column(rows: Sequence[np.ndarray], with_eos: bool) -> pa.Array:
    """Return a column of lists of token ids; `with_eos` appends `</s>` to each list."""
    if with_eos:
        rows = [np.append(row, EOS) for row in rows]
    flat = end_to_end(rows).astype(TOKENS)
    lengths = [len(row) for row in rows]
    return pa.LargeListArray.from_arrays(np.cumsum([0, *lengths]), flat)


def sentence_id(text: str) -> int:
    """Return a 64-bit hash of a pair's pivot side; pairs with the same hash translate the same sentence."""
    comparable_text = " ".join(unicodedata.normalize("NFKC", text).casefold().split())
    return int.from_bytes(hashlib.blake2b(comparable_text.encode(), digest_size=8).digest(), "little")
