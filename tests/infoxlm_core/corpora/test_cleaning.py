"""How texts are normalised, and for which reason they are dropped."""

import hashlib
import sys
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infoxlm_core.config import CleaningConfig
from infoxlm_core.corpora.cleaning import (
    casefold,
    digest,
    extract_letters,
    find_reason_to_drop,
    find_reason_to_drop_row,
    normalise,
    remove_markup,
)
from infoxlm_core.corpora.fingerprints import compute_keys

LANGUAGES = ("en", "de", "es", "fr", "ar", "ru", "tr", "zh", "ja", "vi")
RULES = CleaningConfig(min_characters=4, max_characters=200, min_words=2)


@pytest.mark.item("B09")
@pytest.mark.parametrize(
    ("text", "normal"),
    [
        ("  a \t b\u00a0\u3000c\n", "a b c"),
        ("a\rb\x0bc\x0cd\x1ce\x85f\u2028g\u2029h", "a b c d e f g h"),
        ("e\u0301", "é"),
        ("\u202aabc\u202c\u200f \u2066d\u2069", "abc d"),
        ("a\x00b\x07c\ufeffd\u00ade", "abcde"),
        ("می\u200cخواهم", "می\u200cخواهم"),
        ("private \ue000", "private \ue000"),
    ],
)
def test_normalising_collapses_white_space_and_removes_invisible_characters(text, normal):
    assert normalise(text) == normal


@given(st.text())
def test_normalising_again_changes_nothing(text):
    normal = normalise(text)

    assert normalise(normal) == normal
    assert "\n" not in normal
    assert "\t" not in normal


@given(st.text())
def test_casefolded_text_ignores_unicode_form_and_invisible_characters(text):
    assert casefold(unicodedata.normalize("NFD", text)) == casefold(text)
    assert casefold(f" {text}\u200e\t") == casefold(text)
    assert casefold(normalise(text)) == casefold(text)


@pytest.mark.item("B02")
@pytest.mark.parametrize(
    ("text", "language", "reason"),
    [
        ("", "en", "empty"),
        ("a b", "en", "too_short"),
        ("ab " * 100, "en", "too_long"),
        ("Settings", "en", "few_words"),
        ("设置密码", "zh", None),
        ("12 / 34 %(x)s", "en", "no_letters"),
        ("Datei öffnen", "ru", "wrong_script"),
        ("Открыть файл", "de", "wrong_script"),
        ("فتح الملف", "ar", None),
        ("PayPal عبر Stripe", "ar", None),
        ('<a href="https://example.org/">Файл</a> %(name)s', "ru", None),
        ("Показать файл 日本語日本語", "ru", "wrong_script"),
        ("Bitte geben Sie eine gültige Adresse für Ihren Server ein.", "de", None),
        ("Bitte geben Sie eine gültige Adresse für Ihren Server ein.", "fr", "wrong_language"),
        ("Kurz und gut", "fr", None),  # too short to tell
        ("a" * 50 + " a", "de", "one_sign"),
        ("aaaaa aaaaa", "de", "one_sign"),
        ("A, AA, AAA …", "de", "one_sign"),
        ("Aal Aas", "de", None),
        ("<" * 50 + " ab", "de", "one_sign"),
        ("So" + "o" * 30 + ", das ist ein recht langes Wort", "de", None),
        ("-" * 30 + " Seite 12", "de", None),
    ],
)
def test_text_is_dropped_for_the_first_reason_that_applies(text, language, reason):
    assert find_reason_to_drop(text, language, LANGUAGES, RULES) == reason


@pytest.mark.parametrize(
    ("text", "plain_text"),
    [
        ("Write to <b>me@example.org</b>, please", "Write to please"),
        ("Write to <b>%(name)s</b>, please", "Write to , please"),
        ("See https://example.org/a and `ls` in ${HOME} or a/b.txt", "See and in or"),
        ("北京：写信给a@b.cn，谢谢 再见", "再见"),
        ("北京：写信给我，谢谢 再见", "北京：写信给我，谢谢 再见"),
    ],
)
def test_markup_addresses_and_code_are_removed_before_letters_are_counted(text, plain_text):
    assert " ".join(remove_markup(text).split()) == plain_text


@pytest.mark.parametrize(
    ("text", "language"),
    [
        ("Башҡорт теле — төрки телдәренең береһе", "ba"),
        ("Ирон ӕвзаг у ирӕйнаг ӕвзӕгтӕй иу", "os"),
        ("Саха тыла түүр тылларыгар киирэр", "sah"),
        ("ދިވެހިރާއްޖެ އަކީ ޖަޒީރާ ޤައުމެއް", "dv"),
        ("لاہور پنجاب دا سب توں وڈا شہر اے", "pnb"),
        ("नेपाल भाषा पुलांगु भाषा खः", "new"),
        ("Открыть файл", "rus"),
    ],
)
def test_text_in_the_script_of_its_language_is_kept(text, language):
    assert find_reason_to_drop(normalise(text), language, (*LANGUAGES, language), RULES) is None


@pytest.mark.item("B08")
def test_long_texts_do_not_stay_in_memory():
    text = "Open the file. " * 100
    references = sys.getrefcount(text)

    find_reason_to_drop(text, "en", LANGUAGES, RULES)
    compute_keys([text])

    assert sys.getrefcount(text) == references


def test_language_that_cannot_be_identified_is_judged_only_by_its_script():
    text = "Bitte geben Sie eine gültige Adresse für Ihren Server ein."

    assert find_reason_to_drop(text, "xx", (*LANGUAGES, "xx"), RULES) is None


@pytest.mark.item("B02")
@pytest.mark.parametrize(
    ("source", "target", "reason"),
    [
        ("Open the file", "Datei öffnen", None),
        ("Open the file", "", "empty"),
        ("Open", "Datei öffnen", "few_words"),
        ("Google Maps API", "google maps API", "untranslated"),
    ],
)
def test_pair_is_dropped_with_either_side(source, target, reason):
    assert find_reason_to_drop_row((source, target), ("en", "de"), LANGUAGES, RULES) == reason


@pytest.mark.item("B06")
def test_near_duplicates_differ_in_case_digits_and_punctuation_only():
    assert extract_letters("Delete 3 files?") == extract_letters("delete 17 files!")
    assert extract_letters("Delete files") != extract_letters("Delete file")
    assert extract_letters("12:30") == "12:30"  # nothing else would be left
    assert extract_letters("کتاب‌ها را می‌خوانم.") == extract_letters("کتاب ها را می خوانم")


def test_digest_separates_texts_and_is_equal_in_every_process():
    assert len({digest("a", "b"), digest("ab"), digest("b", "a")}) == 3
    assert digest("a") == int.from_bytes(hashlib.blake2b(b"a", digest_size=8).digest(), "little")


@pytest.mark.item("B02")
@pytest.mark.parametrize(
    ("rule", "source", "target", "language", "reason"),
    [
        ("same_numbers", "Pay 10,000 euros on 3.5.", "Zahlen Sie am 3.5. 10 000 Euro", "de", None),
        ("same_numbers", "Delete 25 files", "刪除２５個檔案", "zh", None),
        # Separators differ too much to compare the order of digits.
        ("same_numbers", "Delete 25 files", "Löschen Sie 52 Dateien", "de", None),
        ("same_numbers", "Delete 25 files", "Löschen Sie 26 Dateien", "de", "other_numbers"),
        ("same_numbers", "Delete two files", "Löschen Sie 2 Dateien", "de", "other_numbers"),
        ("same_placeholders", "Delete %(name)s and %s", "%s und %(name)s löschen", "de", None),
        ("same_placeholders", "Delete after %(count)s days", "%(count)s天之后删除", "zh", None),
        ("same_placeholders", "A 50% chance of rain", "Eine 50%ige Aussicht auf Regen", "de", None),
        ("same_placeholders", "Open <a href='x'>the file</a>", "<a href='y'>Datei öffnen</a>", "de", None),
        ("same_placeholders", "Delete {file} and {folder}", "{Datei} und {folder} löschen", "de", "other_placeholders"),
        ("same_placeholders", "Delete %1$s from %2$s", "%1$s löschen", "de", "other_placeholders"),
        ("same_placeholders", "Open <b>the file</b>", "<b>Datei öffnen<b>", "de", "other_placeholders"),
    ],
)
def test_pair_with_other_numbers_or_placeholders_is_dropped_by_an_optional_rule(rule, source, target, language, reason):
    pair = (source, target)

    assert find_reason_to_drop_row(pair, ("en", language), LANGUAGES, CleaningConfig(**{rule: True})) == reason
    assert find_reason_to_drop_row(pair, ("en", language), LANGUAGES, CleaningConfig()) is None
