"""The questions of an evaluation: what is drawn, and which pairs share no token."""

import torch

from infoxlm_core.config import EvaluationConfig
from infoxlm_core.tasks.questions import Questions, draw_pairs, draw_sentences, mark_unshared
from infoxlm_core.tasks.retrieval.task import FEWEST_UNSHARED
from tests.toys.models import save_tokenizer


def test_drawn_pairs_share_no_side_and_depend_on_the_seed_alone():
    rows = [("Save", "Speichern"), ("save", "Sichern"), ("Keep", "speichern"), ("Open", "Öffnen"), ("Close", "Zu")]

    drawn = draw_pairs(rows, EvaluationConfig(seed=1))

    assert len({a.casefold() for a, _ in drawn}) == len({b.casefold() for _, b in drawn}) == len(drawn) >= 3
    assert drawn == draw_pairs(rows, EvaluationConfig(seed=1))
    assert len(draw_pairs(rows, EvaluationConfig(retrieval_pairs=2))) == 2


def test_perplexity_sentences_are_distinct_and_of_every_language():
    held_out = {code: [(f"s{i}", f"{code}{i % 15}") for i in range(20)] for code in ("de", "zh")}

    drawn = draw_sentences("en", held_out, EvaluationConfig(perplexity_sentences=10))

    assert list(drawn) == ["en", "de", "zh"]
    assert all(len(set(sentences)) == 10 for sentences in drawn.values())


def test_punctuation_and_bare_spaces_are_no_common_token_but_words_numbers_and_placeholders_are(tmp_path):
    tokenizer = save_tokenizer(tmp_path, ["save", "speichern", "42", "ไฟล์", ".", ",", "%s", "\u2581", "—"])
    pairs = [
        ("save \u2581 .", "speichern \u2581 ."),
        ("save , — .", "ไฟล์ , — ."),
        ("save 42", "speichern 42"),
        ("save %s", "speichern %s"),
        ("save", "save ."),
    ]

    assert mark_unshared(tokenizer, pairs, 32).tolist() == [True, True, False, False, False]


def test_a_language_with_few_pairs_without_a_common_token_has_no_score_of_them():
    enough, few = torch.arange(60) < FEWEST_UNSHARED, torch.arange(60) < FEWEST_UNSHARED - 1
    questions = Questions("en", {}, {}, {}, {"de": enough, "ru": few})

    assert questions.select_unshared("de").equal(enough)
    assert not questions.select_unshared("ru").any()
