"""The questions of an evaluation: what is drawn, and which pairs share no token."""

from infoxlm_core.config import EvaluationConfig
from infoxlm_core.tasks.questions import draw_pairs, draw_sentences, shares_no_token


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


def test_pairs_without_a_common_token_are_known_by_their_ids():
    assert shares_no_token([[5, 6], [7], [8, 9]], [[6], [5], [1, 2]]).tolist() == [False, True, True]
