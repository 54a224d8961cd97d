"""Sentences -> token ids in XLM-R's layout, a chunk of rows at a time, on whatever machine.

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
    return sentencepiece.SentencePieceProcessor(model_proto=model)


def encode(processor: sentencepiece.SentencePieceProcessor, texts: list[str]) -> list[np.ndarray]:
    """Ids of each text in XLM-R's layout, without special tokens: SentencePiece's ids move up by one."""
    found = processor.encode(texts)
    flat = np.fromiter(itertools.chain.from_iterable(found), np.int64)
    flat = np.where(flat == 0, UNK, flat + FIRST_PIECE - 3)
    ends = itertools.accumulate(map(len, found), initial=0)
    return [flat[start:end] for start, end in itertools.pairwise(ends)]


def encode_chunk(chunk: pa.Table, model: bytes) -> pa.Table:
    """Encode rows of text (column text, or source and target): columns of the same names with token ids, and of pairs
    the id of their sentence. A row with a side that has no token goes. Monolingual rows end with `</s>`.

    The SentencePiece model comes as bytes, since other machines do not have its file.
    """
    texts = {side: chunk[side].to_pylist() for side in chunk.column_names}
    ids = {side: encode(processor_of(model), column) for side, column in texts.items()}
    filled = [row for row in range(len(chunk)) if all(len(column[row]) for column in ids.values())]
    columns = {side: _lists([column[row] for row in filled], ends=side == "text") for side, column in ids.items()}
    if "source" in texts:
        columns[SENTENCE_ID] = pa.array([sentence_id(texts["source"][row]) for row in filled], pa.uint64())
    return pa.table(columns)


def _lists(rows: Sequence[np.ndarray], ends: bool) -> pa.Array:
    """A column of lists of ids, of which each ends with `</s>` or does not."""
    if ends:
        rows = [np.append(row, EOS) for row in rows]
    flat = np.concatenate([np.empty(0, np.int64), *rows]).astype(TOKENS)
    return pa.LargeListArray.from_arrays(np.cumsum([0, *map(len, rows)]), flat)


def sentence_id(text: str) -> int:
    """64-bit hash of a pair's first side: pairs of equal hash are translations of the same sentence."""
    plain = " ".join(unicodedata.normalize("NFKC", text).casefold().split())
    return int.from_bytes(hashlib.blake2b(plain.encode(), digest_size=8).digest(), "little")
