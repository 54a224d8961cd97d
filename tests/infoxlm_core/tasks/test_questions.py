"""Which questions an evaluation draws, and which pairs share no token."""

import torch

from infoxlm_core.config import EvaluationConfig
from infoxlm_core.tasks.questions import Questions, draw_pairs, draw_sentences, mark_unshared
from infoxlm_core.tasks.retrieval.task import FEWEST_UNSHARED
from tests.toys.models import save_tokenizer


def test_drawn_pairs_have_no_sentence_in_common():
    rows = [("Save", "Speichern"), ("save", "Sichern"), ("Keep", "speichern"), ("Open", "Öffnen"), ("Close", "Zu")]

    pairs = draw_pairs(rows, EvaluationConfig(seed=1))

    assert len(pairs) >= 3
    assert len({source.casefold() for source, _ in pairs}) == len(pairs)
    assert len({target.casefold() for _, target in pairs}) == len(pairs)
    assert len(draw_pairs(rows, EvaluationConfig(retrieval_pairs=2))) == 2


def test_perplexity_sentences_are_distinct_and_of_every_language():
    held_out = {code: [(f"s{i}", f"{code}{i % 15}") for i in range(20)] for code in ("de", "zh")}

    sentences = draw_sentences("en", held_out, EvaluationConfig(perplexity_sentences=10))

    assert list(sentences) == ["en", "de", "zh"]
    assert [len(set(texts)) for texts in sentences.values()] == [10, 10, 10]


def test_punctuation_and_spaces_do_not_count_as_shared_tokens(tmp_path):
    tokenizer = save_tokenizer(tmp_path, ["save", "speichern", "42", "ไฟล์", ".", ",", "%s", "\u2581", "—"])
    pairs = [
        ("save \u2581 .", "speichern \u2581 ."),
        ("save , — .", "ไฟล์ , — ."),
        ("save 42", "speichern 42"),
        ("save %s", "speichern %s"),
        ("save", "save ."),
    ]

    assert mark_unshared(tokenizer, pairs, 32).tolist() == [True, True, False, False, False]


def test_a_language_with_too_few_unshared_pairs_counts_none_of_them():
    pair_numbers = torch.arange(60)
    unshared = {"de": pair_numbers < FEWEST_UNSHARED, "ru": pair_numbers < FEWEST_UNSHARED - 1}
    questions = Questions("en", {}, {}, {}, unshared)

    assert questions.select_unshared("de").equal(unshared["de"])
    assert not questions.select_unshared("ru").any()
