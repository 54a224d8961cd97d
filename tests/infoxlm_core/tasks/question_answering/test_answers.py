"""MLQA's and SQuAD's scores on strings that a reader can normalise by hand."""

import sys
import unicodedata

import pytest

from infoxlm_core.errors import InputError
from infoxlm_core.tasks.question_answering.answers import (
    check_language,
    is_punctuation,
    normalise_mlqa,
    normalise_squad,
    score,
    token_f1,
)
from infoxlm_core.tasks.scores import mean_over

pytestmark = pytest.mark.item("A21")


@pytest.mark.parametrize(
    ("language", "text", "normalised"),
    [
        ("en", "The quick, brown fox's tail!", "quick brown foxs tail"),
        ("en", "Anthem of a theatre", "anthem of theatre"),  # articles are removed as whole words only
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
def test_mlqa_removes_the_articles_of_each_language(language, text, normalised):
    assert normalise_mlqa(text, language) == normalised


def test_squad_removes_english_articles_and_ascii_punctuation():
    assert normalise_squad("北京（2020）年, The end.") == "北京（2020）年 end"


@pytest.mark.skipif(unicodedata.unidata_version != "14.0.0", reason="the count is that of Unicode 14")
def test_punctuation_is_828_characters():
    assert sum(is_punctuation(chr(code)) for code in range(sys.maxunicode + 1)) == 828


@pytest.mark.parametrize(
    ("language", "prediction", "answer", "expected"),
    [
        ("zh", "北京大学", "北京", 2 / 3),
        ("en", "a the cat", "cat sat", 2 / 3),
        ("en", "cat cat dog", "cat dog dog", 2 / 3),  # a token counts as often as both texts have it
        ("de", "die Stadt Berlin", "Berlin", 2 / 3),
        ("en", "", "x", 0.0),
        ("ar", "البيت", "بيت", 1.0),
        ("en", "the", "a", 0.0),  # both are empty
    ],
)
def test_f1_counts_common_tokens(language, prediction, answer, expected):
    assert token_f1(normalise_mlqa(prediction, language), normalise_mlqa(answer, language)) == pytest.approx(expected)


def test_the_best_gold_answer_counts_and_a_missing_prediction_scores_zero():
    answers = {"1": ["Berlin", "die Stadt Berlin"], "2": ["بيت"], "3": ["x"], "4": ["the"]}

    scores = score({"1": "Stadt", "2": "بيت", "4": "a"}, answers, "squad", "en")

    # F1 of "Stadt" with "die stadt berlin" is 1/2; two empty strings match exactly and have no common token
    assert scores == pytest.approx({"f1": (0.5 + 1 + 0 + 0) / 4, "exact_match": 2 / 4})


def test_languages_weigh_the_same_whatever_their_number_of_questions():
    english = score(dict.fromkeys("123456789", "right"), {key: ["right"] for key in "123456789"}, "squad", "en")
    arabic = score({"1": "wrong"}, {"1": ["right"]}, "squad", "ar")

    assert mean_over({"en": english, "ar": arabic}) == {"f1": 0.5, "exact_match": 0.5}  # 0.9 over all questions


@pytest.mark.parametrize(("normaliser", "expected"), [("mlqa", 1.0), ("squad", 0.0)])
def test_the_normaliser_decides_whether_an_arabic_article_matters(normaliser, expected):
    scores = score({"1": "البيت"}, {"1": ["بيت"]}, normaliser, "ar")

    assert scores == {"f1": expected, "exact_match": expected}


def test_languages_outside_mlqa_and_questions_without_answer_are_refused():
    with pytest.raises(InputError, match="'fr' is not one of MLQA's"):
        check_language("mlqa", "fr")
    with pytest.raises(InputError, match="a question has no gold answer"):
        score({}, {"1": []}, "squad", "en")
