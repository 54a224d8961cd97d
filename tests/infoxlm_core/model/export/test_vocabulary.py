import json

import pytest
import torch
import torch.nn.functional as F

from infoxlm_core.errors import InputError
from infoxlm_core.model.export import sentence_encoder, sentence_transformers, vocabulary
from infoxlm_core.model.export.vocabulary import TrimmedTokenizer
from infoxlm_core.tasks.embedding import load_embedder
from tests.toys.exports import TEXTS, save_encoder

CHOSEN_TEXTS = [
    "Save the file before you close the window.",
    "Speichern Sie die Datei ☃ qqq.",
    "Une erreur est survenue.",
]
PREFIXES = {"infoxlm": "", "e5": "query: ", "distilbert": ""}


def export_trimmed(folder, kind, choose):
    """Export an encoder with the pieces that `choose` selects, and return source, output and tokenizer."""
    source = save_encoder(folder / "source", kind)
    encoder = sentence_encoder.load(source)
    content = sentence_transformers.read_tokenizer(source)
    trimmed = TrimmedTokenizer(content, choose(content), pad_id=encoder.encoder.config.pad_token_id)
    vocabulary.trim_embeddings(encoder, trimmed)
    sentence_transformers.write(encoder, source, folder / "output", trimmed.content)
    return source, folder / "output", trimmed


@pytest.mark.parametrize("kind", PREFIXES)
def test_chosen_texts_keep_the_vectors_of_the_original_model(tmp_path, kind):
    prefix = PREFIXES[kind]
    texts = [prefix + text for text in CHOSEN_TEXTS]
    source, output, trimmed = export_trimmed(
        tmp_path, kind, lambda content: vocabulary.find_pieces_in_text(content, texts)
    )
    layer = 2 if kind == "infoxlm" else None

    expected = load_embedder(source, layer, "mean", prefix="")(texts)
    vectors = load_embedder(output, layer, "mean", prefix="")(texts)
    tokenizer = sentence_encoder.load_tokenizer(output)
    encoder = sentence_encoder.load(output)
    assert torch.allclose(vectors, expected, atol=1e-5)
    exported_vectors = sentence_encoder.embed(encoder.run, tokenizer, texts)
    assert torch.allclose(F.normalize(exported_vectors, dim=1), F.normalize(expected, dim=1), atol=1e-5)
    rows = json.loads((output / "config.json").read_bytes())["vocab_size"]
    assert rows == len(trimmed.original_ids) < 0.6 * len(trimmed.original.get_vocab())
    assert not trimmed.splits_as_before(prefix + "Файл не найден")


@pytest.mark.parametrize("kind", ["e5", "distilbert"])
def test_text_in_the_chosen_scripts_is_split_as_before(tmp_path, kind):
    _, _, trimmed = export_trimmed(
        tmp_path, kind, lambda content: vocabulary.find_pieces_in_scripts(content, ["Latin"])
    )

    latin = [text for text in TEXTS if text.isascii() or "ñ" in text or "ế" in text or "ğ" in text or "¿" in text]
    assert len(latin) > 5
    assert all(trimmed.splits_as_before(text) for text in [*latin, "Zzyzx 123 ☃", "ＷＩＤＥ letters"])
    assert not trimmed.splits_as_before("Файл не найден")


def test_unknown_word_stays_unknown_when_pieces_are_removed(tmp_path):
    content = json.loads(sentence_transformers.read_tokenizer(save_encoder(tmp_path, "distilbert")))
    special = {token["content"]: token["id"] for token in content["added_tokens"]}
    content["model"]["vocab"] = special | {"ab": 6, "a": 7, "##bx": 8, "x": 9, "c": 10, "[unused]": 11}
    texts = ["abx", "a", "x", "cbx"]  # WordPiece reads abx as ab and finds no ##x; without ab it would find a and ##bx
    chosen = vocabulary.find_pieces_in_text(json.dumps(content), texts)
    trimmed = TrimmedTokenizer(json.dumps(content), chosen, pad_id=0)

    assert trimmed.original.encode("abx").tokens == ["[CLS]", "[UNK]", "[SEP]"]
    assert trimmed.original.encode("cbx").tokens == ["[CLS]", "c", "##bx", "[SEP]"]
    assert all(trimmed.splits_as_before(text) for text in texts)


def test_removed_pieces_do_not_change_the_score_of_unknown_characters(tmp_path):
    content = json.loads(sentence_transformers.read_tokenizer(save_encoder(tmp_path, "e5")))
    content["model"]["vocab"] = [
        *content["model"]["vocab"][:4], ["▁", -1.0], ["Ω!", -14.0], ["?", -14.0], ["!?", -0.5], ["rare", -30.0]
    ]  # fmt: skip
    content["added_tokens"] = content["added_tokens"][:4]
    # Ω alone is unknown: -40 by the score of `rare`, but -24 without it, and then Ω and !? would be the better split.
    text = "Ω!?"
    chosen = vocabulary.find_pieces_in_text(json.dumps(content), [text, "!?"])
    trimmed = TrimmedTokenizer(json.dumps(content), chosen, pad_id=1)

    assert trimmed.original.encode(text).tokens == ["<s>", "▁", "Ω!", "?", "</s>"]
    assert trimmed.splits_as_before(text)


def test_tokenizer_of_another_type_is_refused(tmp_path):
    content = json.loads(sentence_transformers.read_tokenizer(save_encoder(tmp_path, "e5")))
    content["model"] = {"type": "BPE", "vocab": {"a": 0}, "merges": []}
    content["added_tokens"] = []
    content["post_processor"] = None

    with pytest.raises(InputError, match=r"tokenizer.json is of type BPE: only Unigram and WordPiece can be trimmed"):
        TrimmedTokenizer(json.dumps(content), [0], pad_id=0)
