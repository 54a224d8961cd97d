"""MLQA's and SQuAD's scores on strings that a reader can normalise by hand."""

import sys
import unicodedata

import pytest

from infoxlm_core.errors import InputError
from infoxlm_core.tasks.question_answering.answers import (
    choose_normaliser,
    f1,
    is_punctuation,
    normalise,
    normalise_squad,
    score,
)
from infoxlm_core.tasks.scores import mean_over

pytestmark = pytest.mark.item("A21")


@pytest.mark.parametrize(
    ("language", "text", "normalised"),
    [
        ("en", "The quick, brown fox's tail!", "quick brown foxs tail"),
        ("es", "El Niño y la Niña, unos años", "niño y niña años"),
        ("de", "Der Hund des Mannes; ein Haus", "hund mannes haus"),
        ("vi", "Của những chiếc xe", "xe"),
        ("hi", "दिल्ली, भारत।", "दिल्ली भारत"),
        ("zh", "北京2020年（奥运）会 ABC def", "北 京 2020 年 奥 运 会 abc def"),
        ("zh", "，。", ""),
        ("ar", "السلام عليكم، رجال", "سلام عليكم رج"),
        ("ar", "في البيت", "في بيت"),
    ],
)
def test_mlqa_normalises_each_language_by_its_own_articles_and_tokens(language, text, normalised):
    assert normalise(text, language) == normalised


def test_squad_and_xquad_know_only_english():
    assert normalise_squad("北京（2020）年, The end.") == "北京（2020）年 end"


def test_articles_go_only_as_whole_words():
    assert normalise("Anthem of a theatre", "en") == "anthem of theatre"


@pytest.mark.skipif(unicodedata.unidata_version != "14.0.0", reason="the count is that of Unicode 14")
def test_punctuation_is_828_characters():
    assert sum(is_punctuation(chr(code)) for code in range(sys.maxunicode + 1)) == 828


@pytest.mark.parametrize(
    ("language", "prediction", "answer", "expected"),
    [
        ("zh", "北京大学", "北京", 2 / 3),
        ("en", "a the cat", "cat sat", 2 / 3),
        ("de", "die Stadt Berlin", "Berlin", 2 / 3),
        ("en", "", "x", 0.0),
        ("ar", "البيت", "بيت", 1.0),
        ("en", "the", "a", 0.0),  # both empty
    ],
)
def test_f1_counts_common_tokens(language, prediction, answer, expected):
    assert f1(normalise(prediction, language), normalise(answer, language)) == pytest.approx(expected)


def test_a_token_counts_as_often_as_both_sides_have_it():
    assert f1("cat cat dog", "cat dog dog") == pytest.approx(2 / 3)


def test_an_answer_is_compared_with_its_best_gold_answer_and_a_missing_one_scores_nothing():
    answers = {"1": ["Berlin", "die Stadt Berlin"], "2": ["بيت"], "3": ["x"], "4": ["the"]}

    found = score({"1": "Stadt", "2": "بيت", "4": "a"}, answers, normalise_squad)

    # F1 of "Stadt" with "die stadt berlin" is 1/2; two empty strings match exactly and have no common token
    assert found == pytest.approx({"f1": (0.5 + 1 + 0 + 0) / 4, "exact_match": 2 / 4})


def test_every_language_weighs_the_same_however_many_questions_it_has():
    answers = {"en": {str(i): ["right"] for i in range(9)}, "ar": {"1": ["بيت"]}, "zh": {"1": ["北京"]}}
    predictions = {"en": {str(i): "right" for i in range(9)}, "ar": {"1": "البيت"}}

    scores = {
        name: score(predictions.get(name, {}), gold, choose_normaliser("mlqa", name)) for name, gold in answers.items()
    }

    assert scores["ar"] == scores["en"] == {"f1": 1.0, "exact_match": 1.0}
    assert mean_over(scores) == pytest.approx({"f1": 2 / 3, "exact_match": 2 / 3})
    assert score(predictions["ar"], answers["ar"], choose_normaliser("squad", "ar")) == {"f1": 0.0, "exact_match": 0.0}


def test_another_language_and_a_question_without_answer_are_refused():
    with pytest.raises(InputError, match="'fr' is not one of MLQA's"):
        normalise("le chat", "fr")
    with pytest.raises(InputError, match="'fr' is not one of MLQA's"):
        choose_normaliser("mlqa", "fr")
    with pytest.raises(InputError, match="a question has no gold answer"):
        score({}, {"1": []}, normalise_squad)
