"""Removes pieces from a tokenizer, and their rows from the word embeddings, to make a model smaller.

A text whose pieces all remain is split as before, because the removed pieces occurred only in worse splits. Other text
is split into more and shorter pieces, or becomes the unknown token, so its vectors differ.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

import regex
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordPiece
from torch import nn

from infoxlm_core.errors import InputError
from infoxlm_core.model.export.sentence_encoder import SentenceEncoder

_CONTINUATION = "##"  # prefix of WordPiece pieces that continue a word
_LINES = 1000  # lines that are tokenized at once


class TrimmedTokenizer:
    """A tokenizer with fewer pieces, in which the id of a piece is the rank of its original id."""

    def __init__(self, content: str, chosen_ids: Iterable[int], pad_id: int) -> None:
        """Remove all pieces except the chosen ones, special tokens, and those on which unknown text depends.

        Args:
            content: tokenizer.json of the original.
            chosen_ids: ids of the pieces to keep.
            pad_id: the padding id, which stays the same, because RoBERTa and XLM-R count positions from it.
        """
        self.original = _load(content)
        remaining_ids = {*chosen_ids, *range(pad_id + 1)}
        settings = json.loads(content)
        remaining_ids |= _required_ids(settings)
        self.ids = sorted(remaining_ids)  # row i of the smaller word embeddings is row ids[i] of the original
        ranks = {original_id: rank for rank, original_id in enumerate(self.ids)}
        _renumber(settings, ranks)
        self.content = json.dumps(settings, ensure_ascii=False)
        self.tokenizer = _load(self.content)

    def splits_as_before(self, text: str) -> bool:
        """Return whether a text is split into the same pieces as by the original tokenizer."""
        ids = self.tokenizer.encode(text).ids
        return [self.ids[rank] for rank in ids] == self.original.encode(text).ids


def _load(content: str) -> Tokenizer:
    """Load a tokenizer.json without the truncation and padding that some published files contain."""
    tokenizer = Tokenizer.from_str(content)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def pieces_of_text(content: str, lines: Iterable[str]) -> set[int]:
    """Return the ids of all pieces that occur in a text, and of its single characters.

    Args:
        content: content of a tokenizer.json.
        lines: the lines of the text.
    """
    tokenizer = _load(content)
    vocabulary = tokenizer.get_vocab(with_added_tokens=False)
    unknown_id = vocabulary.get(tokenizer.model.unk_token) if isinstance(tokenizer.model, WordPiece) else None
    ids: set[int] = set()
    characters = {"▁"}
    stream = iter(lines)
    batch = list(islice(stream, _LINES))
    while batch:
        for line, encoding in zip(batch, tokenizer.encode_batch(batch), strict=True):
            normalised = tokenizer.normalizer.normalize_str(line) if tokenizer.normalizer else line
            ids.update(encoding.ids)
            characters.update(normalised)
            if unknown_id in encoding.ids:
                # WordPiece matches a word piece by piece until none fits, and then returns only the unknown token. Keep
                # the pieces that it tried, or the word could be split differently.
                ids.update(vocabulary[piece] for piece in _substrings(tokenizer, normalised) if piece in vocabulary)
        batch = list(islice(stream, _LINES))
    for piece, piece_id in vocabulary.items():
        if piece.removeprefix(_CONTINUATION) in characters:
            ids.add(piece_id)
    return ids


def _substrings(tokenizer: Tokenizer, text: str) -> Iterator[str]:
    """Yield all substrings of the words of a normalised text, as WordPiece would write them."""
    for word, _ in tokenizer.pre_tokenizer.pre_tokenize_str(text):
        for start in range(len(word)):
            prefix = _CONTINUATION if start else ""
            for end in range(start + 1, len(word) + 1):
                yield prefix + word[start:end]


def pieces_of_scripts(content: str, scripts: Sequence[str]) -> set[int]:
    """Return the ids of all pieces whose letters are in these Unicode scripts, so that such text is split as before.

    Args:
        content: content of a tokenizer.json.
        scripts: names of Unicode scripts, such as Latin and Cyrillic.
    """
    classes = "".join(rf"\p{{{script}}}" for script in (*scripts, "Common", "Inherited"))
    pattern = regex.compile(f"[{classes}]*")
    vocabulary = Tokenizer.from_str(content).get_vocab(with_added_tokens=False)
    return {piece_id for piece, piece_id in vocabulary.items() if pattern.fullmatch(piece)}


def _required_ids(settings: dict[str, Any]) -> set[int]:
    """Return the ids of added tokens, the unknown token, bytes, and the piece that sets the score of unknown text."""
    model = settings["model"]
    ids = {token["id"] for token in settings["added_tokens"]}
    if model["type"] == "Unigram":
        scores = [score for _, score in model["vocab"]]
        ids.add(scores.index(min(scores)))  # unknown characters score 10 less than this piece
        if model["unk_id"] is not None:
            ids.add(model["unk_id"])
        if model.get("byte_fallback"):
            ids.update(number for number, (piece, _) in enumerate(model["vocab"]) if piece.startswith("<0x"))
    elif model["type"] == "WordPiece":
        ids.add(model["vocab"][model["unk_token"]])
    else:
        raise InputError(f"tokenizer.json is of type {model['type']}: only Unigram and WordPiece can be trimmed")
    return ids


def _renumber(settings: dict[str, Any], new_ids: dict[int, int]) -> None:
    """Replace the ids in the content of a tokenizer.json, and remove pieces that have no new id."""
    model = settings["model"]
    if model["type"] == "Unigram":
        model["vocab"] = [piece_and_score for old_id, piece_and_score in enumerate(model["vocab"]) if old_id in new_ids]
        if model["unk_id"] is not None:
            model["unk_id"] = new_ids[model["unk_id"]]
    else:
        vocabulary = model["vocab"]
        model["vocab"] = {piece: new_ids[old_id] for piece, old_id in vocabulary.items() if old_id in new_ids}
    for token in settings["added_tokens"]:
        token["id"] = new_ids[token["id"]]
    if settings["post_processor"]:
        _renumber_template(settings["post_processor"], new_ids)
    settings["padding"] = None  # it contains the old padding id; users set padding again


def _renumber_template(processor: dict[str, Any], new_ids: dict[int, int]) -> None:
    """Replace the ids of the special tokens that a post-processor adds."""
    for inner in processor.get("processors", ()):
        _renumber_template(inner, new_ids)
    for name in ("sep", "cls"):  # of BertProcessing and RobertaProcessing
        if name in processor:
            token, token_id = processor[name]
            processor[name] = [token, new_ids[token_id]]
    if processor["type"] == "TemplateProcessing":
        for token in processor["special_tokens"].values():
            token["ids"] = [new_ids[token_id] for token_id in token["ids"]]


def trim(encoder: SentenceEncoder, tokenizer: TrimmedTokenizer) -> None:
    """Remove the rows of an encoder's word embeddings whose pieces are not in the trimmed tokenizer."""
    model: Any = encoder.encoder
    embeddings = model.get_input_embeddings()
    rows = embeddings.weight.detach()[torch.tensor(tokenizer.ids)]
    model.set_input_embeddings(nn.Embedding.from_pretrained(rows))
    model.config.vocab_size = len(rows)
    for name, value in model.config.to_dict().items():
        if name.endswith("_token_id") and value in tokenizer.ids:
            setattr(model.config, name, tokenizer.ids.index(value))
