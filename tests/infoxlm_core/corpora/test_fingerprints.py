"""Keys of texts: which texts count as equal, as near duplicates, and as quotations of the same source."""

import pytest

from infoxlm_core.corpora.fingerprints import compute_keys, digest_ngrams


def test_texts_that_differ_in_case_have_equal_keys_except_the_exact_one():
    text = compute_keys(["Open the file"])
    upper_case = compute_keys(["OPEN THE FILE"])
    other_text = compute_keys(["Close the window"])

    assert text.casefolded == upper_case.casefolded
    assert text.letters == upper_case.letters
    assert text.exact != upper_case.exact
    assert {*text.casefolded, *text.letters, *text.exact}.isdisjoint(
        {*other_text.casefolded, *other_text.letters, *other_text.exact}
    )


@pytest.mark.parametrize(
    ("text", "other_text", "is_shared"),
    [
        ("Now ONE TWO THREE FOUR FIVE!", "one, two — three four “five” six", True),
        ("one two three four five", "one two three four six", False),
        ("我们明天早上坐火车去", "他说：明天早上坐 train", True),
    ],
)
def test_texts_share_a_run_of_five_words_in_any_punctuation_and_case(text, other_text, is_shared):
    assert set(digest_ngrams(text, 5)).isdisjoint(digest_ngrams(other_text, 5)) is not is_shared


def test_text_shorter_than_a_run_has_no_runs():
    assert digest_ngrams("one two three four", 5) == []
    assert digest_ngrams("one two three four", 0) == []


@pytest.mark.parametrize(
    ("phrase", "text", "other_text"),
    [
        (
            "ระหว่างวันที่",
            "งานจัดขึ้นระหว่างวันที่สามถึงห้าของเดือนนี้",
            "โรงเรียนปิดระหว่างวันที่ฝนตกหนักและถนนน้ำท่วม",
        ),
        (
            "アドレスを入力してください",
            "送信する前に正しいメールアドレスを入力してください。",
            "接続できません。別のサーバーのアドレスを入力してください。",
        ),
    ],
    ids=["th", "ja"],
)
def test_in_scripts_without_spaces_13_signs_are_no_run_but_a_quotation_is(phrase, text, other_text):
    assert len(phrase) == 13

    assert set(digest_ngrams(text, 13)).isdisjoint(digest_ngrams(other_text, 13))
    quotation = text * 2
    assert not set(digest_ngrams(quotation, 13)).isdisjoint(digest_ngrams(f"{phrase} {quotation} {phrase}", 13))
