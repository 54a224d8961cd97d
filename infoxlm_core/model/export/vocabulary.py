"""Removes pieces from a tokenizer, and their rows from the word embeddings, to make a model smaller.

A text whose pieces all remain is split as before, because the removed pieces occurred only in worse splits. Other text
is split into more and shorter pieces, or becomes the unknown token, so its vectors differ.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import regex
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordPiece
from torch import nn

from infoxlm_core.errors import InputError
from infoxlm_core.model.export.sentence_encoder import SentenceEncoder

_CONTINUATION = "##"  # prefix of WordPiece pieces that continue a word
_BATCH_LINES = 1000  # lines that are tokenized at once


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
        tokenizer_json = json.loads(content)
        remaining_ids = {*chosen_ids, *range(pad_id + 1), *_find_required_ids(tokenizer_json)}
        self.ids = sorted(remaining_ids)  # row i of the smaller word embeddings is row ids[i] of the original
        new_ids = {original_id: new_id for new_id, original_id in enumerate(self.ids)}
        _replace_ids(tokenizer_json, new_ids)
        self.content = json.dumps(tokenizer_json, ensure_ascii=False)
        self.tokenizer = _load(self.content)

    def splits_as_before(self, text: str) -> bool:
        """Return whether a text is split into the same pieces as by the original tokenizer."""
        original_ids = [self.ids[new_id] for new_id in self.tokenizer.encode(text).ids]
        return original_ids == self.original.encode(text).ids


def _load(content: str) -> Tokenizer:
    """Load a tokenizer.json without the truncation and padding that some published files contain."""
    tokenizer = Tokenizer.from_str(content)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def find_pieces_in_text(content: str, lines: Iterable[str]) -> set[int]:
    """Return the ids of all pieces into which a text is split, and of its single characters.

    Args:
        content: content of a tokenizer.json.
        lines: the lines of the text.
    """
    tokenizer = _load(content)
    vocabulary = tokenizer.get_vocab(with_added_tokens=False)
    ids: set[int] = set()
    characters = {"▁"}  # in place of a space
    for batch in _iterate_batches(lines):
        for line, encoding in zip(batch, tokenizer.encode_batch(batch), strict=True):
            normalised_line = tokenizer.normalizer.normalize_str(line) if tokenizer.normalizer else line
            ids.update(encoding.ids)
            characters.update(normalised_line)
            if isinstance(tokenizer.model, WordPiece) and tokenizer.model.unk_token in encoding.tokens:
                # WordPiece matches a word piece by piece until none fits, and then returns only the unknown token. Keep
                # the pieces that it tried, or the word could be split differently.
                for piece in _iterate_substrings(tokenizer, normalised_line):
                    if piece in vocabulary:
                        ids.add(vocabulary[piece])
    for piece, piece_id in vocabulary.items():
        if piece.removeprefix(_CONTINUATION) in characters:
            ids.add(piece_id)
    return ids


def _iterate_batches(lines: Iterable[str]) -> Iterator[list[str]]:
    """Yield the lines of a text in batches, which the tokenizer encodes in parallel."""
    batch: list[str] = []
    for line in lines:
        batch.append(line)
        if len(batch) == _BATCH_LINES:
            yield batch
            batch = []
    if batch:
        yield batch


def _iterate_substrings(tokenizer: Tokenizer, text: str) -> Iterator[str]:
    """Yield all substrings of the words of a normalised text, as WordPiece would write them."""
    for word, _ in tokenizer.pre_tokenizer.pre_tokenize_str(text):
        for start in range(len(word)):
            prefix = _CONTINUATION if start else ""
            for end in range(start + 1, len(word) + 1):
                yield prefix + word[start:end]


def find_pieces_in_scripts(content: str, scripts: Sequence[str]) -> set[int]:
    """Return the ids of all pieces whose characters belong to some Unicode scripts, or to none, like digits.

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
    """Return the ids of pieces that a tokenizer needs for any text, such as special tokens and bytes."""
    model = tokenizer_json["model"]
    ids = {token["id"] for token in tokenizer_json["added_tokens"]}
    if model["type"] == "Unigram":
        scores = [score for _, score in model["vocab"]]
        ids.add(scores.index(min(scores)))  # the score of unknown characters is that of the worst piece minus 10
        if model["unk_id"] is not None:
            ids.add(model["unk_id"])
        if model.get("byte_fallback"):
            for piece_id, (piece, _) in enumerate(model["vocab"]):
                if piece.startswith("<0x"):
                    ids.add(piece_id)
    elif model["type"] == "WordPiece":
        ids.add(model["vocab"][model["unk_token"]])
    else:
        raise InputError(f"tokenizer.json is of type {model['type']}: only Unigram and WordPiece can be trimmed")
    return ids


def _replace_ids(tokenizer_json: dict[str, Any], new_ids: dict[int, int]) -> None:
    """Replace the ids in the content of a tokenizer.json, and remove pieces that have no new id."""
    model = tokenizer_json["model"]
    if model["type"] == "Unigram":  # the vocabulary is a list of pieces and scores, in which the id is the index
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
    tokenizer_json["padding"] = None  # it contains the old padding id; users set padding again


def _replace_template_ids(processor: dict[str, Any], new_ids: dict[int, int]) -> None:
    """Replace the ids of the special tokens that a post-processor adds to a text."""
    for child in processor.get("processors", ()):  # of a Sequence
        _replace_template_ids(child, new_ids)
    for role in ("sep", "cls"):  # of BertProcessing and RobertaProcessing
        if role in processor:
            token, token_id = processor[role]
            processor[role] = [token, new_ids[token_id]]
    if processor["type"] == "TemplateProcessing":
        for token in processor["special_tokens"].values():
            token["ids"] = [new_ids[token_id] for token_id in token["ids"]]


def trim_embeddings(encoder: SentenceEncoder, tokenizer: TrimmedTokenizer) -> None:
    """Remove the word embeddings of an encoder whose pieces are not in the trimmed tokenizer."""
    model: Any = encoder.encoder
    all_embeddings = model.get_input_embeddings().weight.detach()  # (V, d)
    remaining_embeddings = all_embeddings[torch.tensor(tokenizer.ids)]
    model.set_input_embeddings(nn.Embedding.from_pretrained(remaining_embeddings))
    model.config.vocab_size = len(remaining_embeddings)
    for name, token_id in model.config.to_dict().items():
        if name.endswith("_token_id") and token_id in tokenizer.ids:
            setattr(model.config, name, tokenizer.ids.index(token_id))
