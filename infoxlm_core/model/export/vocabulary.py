"""Trims a model's vocabulary: removes pieces from the tokenizer, and their rows from the word embeddings.

If none of a text's pieces are removed, the text is split as before, because removed pieces occur only in worse splits.
Any other text is split into shorter pieces or unknown tokens, so its vector changes.
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
_BATCH_LINES = 1000  # lines to tokenize in parallel


class TrimmedTokenizer:
    """A tokenizer with fewer pieces. The remaining pieces keep their order, but have consecutive ids."""

    def __init__(self, content: str, chosen_ids: Iterable[int], pad_id: int) -> None:
        """Remove all pieces except chosen pieces, special tokens, and pieces required for unknown text.

        Args:
            content: content of the original tokenizer.json.
            chosen_ids: ids of the pieces to keep.
            pad_id: padding id. It does not change, because RoBERTa and XLM-R count positions from the padding id.
        """
        self.original = _load(content)
        tokenizer_json = json.loads(content)
        remaining_ids = {*chosen_ids, *range(pad_id + 1), *_find_required_ids(tokenizer_json)}
        self.original_ids = sorted(remaining_ids)  # new id -> original id
        new_ids = {original_id: new_id for new_id, original_id in enumerate(self.original_ids)}
        _replace_ids(tokenizer_json, new_ids)
        self.content = json.dumps(tokenizer_json, ensure_ascii=False)
        self.tokenizer = _load(self.content)

    def splits_as_before(self, text: str) -> bool:
        """Return whether this tokenizer splits a text into the same pieces as the original tokenizer."""
        ids = [self.original_ids[new_id] for new_id in self.tokenizer.encode(text).ids]
        return ids == self.original.encode(text).ids


def _load(content: str) -> Tokenizer:
    """Load a tokenizer.json, and disable truncation and padding, which some published files enable."""
    tokenizer = Tokenizer.from_str(content)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def find_pieces_in_text(content: str, lines: Iterable[str]) -> set[int]:
    """Return the ids of all pieces and single characters that occur in a text.

    The characters let the trimmed tokenizer split new words of the same script, instead of returning unknown tokens.

    Args:
        content: content of a tokenizer.json.
        lines: lines of the text.
    """
    tokenizer = _load(content)
    vocabulary = tokenizer.get_vocab(with_added_tokens=False)
    ids: set[int] = set()
    characters = {"▁"}  # SentencePiece's symbol for a space
    for batch in _iterate_batches(lines):
        for line, encoding in zip(batch, tokenizer.encode_batch(batch), strict=True):
            normalized_line = tokenizer.normalizer.normalize_str(line) if tokenizer.normalizer else line
            ids.update(encoding.ids)
            characters.update(normalized_line)
            if isinstance(tokenizer.model, WordPiece) and tokenizer.model.unk_token in encoding.tokens:
                # WordPiece returns the unknown token for a word if any part of the word has no piece. Keep all pieces
                # of the word, because WordPiece could otherwise find a different split.
                pieces = _iterate_substrings(tokenizer, normalized_line)
                ids.update(vocabulary[piece] for piece in pieces if piece in vocabulary)
    ids.update(vocabulary[piece] for piece in vocabulary if piece.removeprefix(_CONTINUATION) in characters)
    return ids


def _iterate_batches(lines: Iterable[str]) -> Iterator[list[str]]:
    """Yield batches of lines, because the tokenizer encodes the lines of a batch in parallel."""
    remaining_lines = iter(lines)
    while batch := list(islice(remaining_lines, _BATCH_LINES)):
        yield batch


def _iterate_substrings(tokenizer: Tokenizer, text: str) -> Iterator[str]:
    """Yield all substrings of a normalized text's words, in WordPiece's notation."""
    for word, _ in tokenizer.pre_tokenizer.pre_tokenize_str(text):
        for start in range(len(word)):
            prefix = _CONTINUATION if start else ""
            for end in range(start + 1, len(word) + 1):
                yield prefix + word[start:end]


def find_pieces_in_scripts(content: str, scripts: Sequence[str]) -> set[int]:
    """Return the ids of all pieces that consist of the given Unicode scripts and common characters, such as digits.

    Args:
        content: content of a tokenizer.json.
        scripts: names of Unicode scripts, such as Latin and Cyrillic.
    """
    scripts = [*scripts, "Common", "Inherited"]  # digits and punctuation; combining marks
    character_classes = "".join(rf"\p{{{script}}}" for script in scripts)  # such as \p{Latin}
    pattern = regex.compile(f"[{character_classes}]*")
    vocabulary = Tokenizer.from_str(content).get_vocab(with_added_tokens=False)
    return {piece_id for piece, piece_id in vocabulary.items() if pattern.fullmatch(piece)}


def _find_required_ids(tokenizer_json: dict[str, Any]) -> set[int]:
    """Return the ids of pieces that a tokenizer must keep, such as special tokens and bytes."""
    model = tokenizer_json["model"]
    ids = {token["id"] for token in tokenizer_json["added_tokens"]}
    if model["type"] == "Unigram":
        scores = [score for _, score in model["vocab"]]
        ids.add(scores.index(min(scores)))  # the worst piece's score determines the score of unknown characters
        if model["unk_id"] is not None:
            ids.add(model["unk_id"])
        if model.get("byte_fallback"):
            ids.update(piece_id for piece_id, (piece, _) in enumerate(model["vocab"]) if piece.startswith("<0x"))
    elif model["type"] == "WordPiece":
        ids.add(model["vocab"][model["unk_token"]])
    else:
        raise InputError(f"tokenizer.json is of type {model['type']}: only Unigram and WordPiece can be trimmed")
    return ids


def _replace_ids(tokenizer_json: dict[str, Any], new_ids: dict[int, int]) -> None:
    """Replace the ids in a tokenizer.json, and remove pieces without a new id."""
    model = tokenizer_json["model"]
    if model["type"] == "Unigram":  # the vocabulary is a list of (piece, score); a piece's index is its id
        model["vocab"] = [entry for old_id, entry in enumerate(model["vocab"]) if old_id in new_ids]
        if model["unk_id"] is not None:
            model["unk_id"] = new_ids[model["unk_id"]]
    else:
        old_vocabulary = model["vocab"]  # piece -> id
        model["vocab"] = {piece: new_ids[old_id] for piece, old_id in old_vocabulary.items() if old_id in new_ids}
    for token in tokenizer_json["added_tokens"]:
        token["id"] = new_ids[token["id"]]
    if tokenizer_json["post_processor"]:
        _replace_template_ids(tokenizer_json["post_processor"], new_ids)
    tokenizer_json["padding"] = None  # contains the old padding id; callers enable padding again


def _replace_template_ids(processor: dict[str, Any], new_ids: dict[int, int]) -> None:
    """Replace the ids of the special tokens that a post-processor adds to a text, in place."""
    for child in processor.get("processors", ()):  # if the type is Sequence
        _replace_template_ids(child, new_ids)
    for role in ("sep", "cls"):  # if the type is BertProcessing or RobertaProcessing
        if role in processor:
            token, token_id = processor[role]
            processor[role] = [token, new_ids[token_id]]
    if processor["type"] == "TemplateProcessing":
        for token in processor["special_tokens"].values():
            token["ids"] = [new_ids[token_id] for token_id in token["ids"]]


def trim_embeddings(encoder: SentenceEncoder, tokenizer: TrimmedTokenizer) -> None:
    """Remove the word embeddings of pieces that the trimmed tokenizer lacks, and update the ids in the config."""
    model: Any = encoder.encoder
    all_embeddings = model.get_input_embeddings().weight.detach()  # (V, d)
    remaining_embeddings = all_embeddings[torch.tensor(tokenizer.original_ids)]
    model.set_input_embeddings(nn.Embedding.from_pretrained(remaining_embeddings))
    model.config.vocab_size = len(remaining_embeddings)
    for name, token_id in model.config.to_dict().items():
        if name.endswith("_token_id") and token_id in tokenizer.original_ids:  # otherwise, there is no such token
            setattr(model.config, name, tokenizer.original_ids.index(token_id))
