"""Encode sentences as token ids in chunks of rows, which any machine can process.

source: ["Open the page"]  target: ["Öffne die Seite"]
source: [[31, 7, 52]]      target: [[88, 12, 9, 40]]    sentence_id: [1234567890123456789]
"""

import functools
import hashlib
import itertools
import json
import unicodedata
from collections.abc import Callable, Collection
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import sentencepiece
from tokenizers import Tokenizer

from infoxlm_core.data.shards import SENTENCE_ID, TEXT, concatenate_int64
from infoxlm_core.data.vocabulary import FIRST_PIECE, UNK, Vocabulary
from infoxlm_core.data.writing import make_column


@dataclass(frozen=True)
class SerializedTokenizer:
    """A tokenizer that can be sent to machines without its files."""

    model: bytes  # SentencePiece model, or result of `serialize`
    vocabulary: Vocabulary
    prefix: str = ""  # text to add before every sentence


Encode = Callable[[list[str]], list[np.ndarray]]
"""Function that returns each text's token ids, without special tokens."""


def serialize(tokenizer: Tokenizer, special_ids: Collection[int]) -> bytes:
    """Serialize a tokenizer as JSON, without special tokens.

    The characters `</s>` or `[SEP]` in a text must be encoded as ordinary text. In a unigram model, special tokens are
    also pieces, so these pieces receive names that no text contains.
    """
    content = json.loads(tokenizer.to_str())
    content["added_tokens"] = [token for token in content["added_tokens"] if not token["special"]]
    # Samplers add special tokens and truncate, so the stored token ids must be those of the plain text.
    content |= {"post_processor": None, "truncation": None, "padding": None}
    pieces = content["model"]["vocab"]
    if isinstance(pieces, list):  # a unigram model
        for token_id in special_ids:
            if token_id < len(pieces):
                pieces[token_id][0] += "\0"
    return json.dumps(content, ensure_ascii=False).encode()


@functools.lru_cache(maxsize=1)  # a worker encodes many chunks with the same tokenizer
def load_encoder(model: bytes) -> Encode:
    """Load an encoding function from a serialized SentencePiece model or the result of `serialize`."""
    if model.startswith(b"{"):
        return functools.partial(_encode_fast, Tokenizer.from_str(model.decode()))
    return functools.partial(encode, sentencepiece.SentencePieceProcessor(model_proto=model))


def _encode_fast(tokenizer: Tokenizer, texts: list[str]) -> list[np.ndarray]:
    """Return each text's token ids, without special tokens."""
    encodings = tokenizer.encode_batch_fast(texts, add_special_tokens=False)
    return [np.array(encoding.ids, np.int64) for encoding in encodings]


def encode(processor: sentencepiece.SentencePieceProcessor, texts: list[str]) -> list[np.ndarray]:
    """Return each text's token ids in XLM-R's layout, without special tokens."""
    pieces_by_text = processor.encode(texts)
    piece_ids = np.fromiter(itertools.chain.from_iterable(pieces_by_text), np.int64)
    # SentencePiece numbers <unk>, <s>, </s>, and then pieces from 3. XLM-R numbers pieces from 4.
    token_ids = np.where(piece_ids == 0, UNK, piece_ids + FIRST_PIECE - 3)
    lengths = [len(pieces) for pieces in pieces_by_text]
    offsets = itertools.accumulate(lengths, initial=0)
    return [token_ids[start:end] for start, end in itertools.pairwise(offsets)]


def encode_chunk(chunk: pa.Table, tokenizer: SerializedTokenizer) -> pa.Table:
    """Encode each row's text. Drop rows in which a text has no tokens besides the prefix.

    Args:
        chunk: table with the column `text`, or the columns `source` and `target`.
        tokenizer: serialized tokenizer.

    Returns:
        Table with the same columns as token ids, and for pairs the column `sentence_id`. Monolingual rows end with
        `</s>`.
    """
    encode_texts = load_encoder(tokenizer.model)
    ids_by_column: dict[str, list[np.ndarray]] = {}
    for column in chunk.column_names:
        ids_by_column[column] = encode_texts([tokenizer.prefix + text for text in chunk[column].to_pylist()])
    prefix_ids = encode_texts([tokenizer.prefix])[0]
    complete_rows = _find_complete_rows(ids_by_column, prefix_ids)

    encoded_columns: dict[str, pa.Array] = {}
    for column, token_ids in ids_by_column.items():
        complete_ids = [token_ids[row] for row in complete_rows]
        if column == TEXT:
            complete_ids = [np.append(ids, tokenizer.vocabulary.end) for ids in complete_ids]
        lengths = [len(ids) for ids in complete_ids]
        encoded_columns[column] = make_column(concatenate_int64(complete_ids), lengths)
    if "source" in ids_by_column:
        sources = chunk["source"].to_pylist()
        sentence_ids = [sentence_id(sources[row]) for row in complete_rows]
        encoded_columns[SENTENCE_ID] = pa.array(sentence_ids, pa.uint64())
    return pa.table(encoded_columns)


def _find_complete_rows(ids_by_column: dict[str, list[np.ndarray]], prefix_ids: np.ndarray) -> list[int]:
    """Return the numbers of the rows in which every column has tokens besides the prefix."""
    complete_rows = []
    for row, row_ids in enumerate(zip(*ids_by_column.values(), strict=True)):
        if not any(np.array_equal(token_ids, prefix_ids) for token_ids in row_ids):
            complete_rows.append(row)
    return complete_rows


def sentence_id(text: str) -> int:
    """Return a 64-bit hash of a pair's pivot side. Pairs with equal hashes translate the same sentence.

    Differences in case, spaces and equivalent characters do not change the hash.
    """
    comparable_text = " ".join(unicodedata.normalize("NFKC", text).casefold().split())
    return int.from_bytes(hashlib.blake2b(comparable_text.encode(), digest_size=8).digest(), "little")
