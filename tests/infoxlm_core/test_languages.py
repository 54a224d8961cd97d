"""One language, whatever a test set calls it."""

import pytest

from infoxlm_core import languages
from infoxlm_core.errors import InputError


@pytest.mark.parametrize("code", ["zh", "cmn", "zho", "zh-CN", "zho_Hans"])
def test_every_spelling_of_a_language_has_the_same_two_letters(code):
    assert languages.two_letters(code) == "zh"
    assert languages.is_known(code)


def test_words_that_only_look_like_codes_are_no_languages():
    assert not any(map(languages.is_known, ("foo", "xx", "train", "dev")))


def test_of_two_scripts_one_has_the_short_name_and_the_other_keeps_its_own():
    assert languages.shorten(["zho_Hant", "zho_Hans", "deu"]) == {
        "zho_Hans": "zh", "zho_Hant": "zho_Hant", "deu": "de"
    }  # fmt: skip


def test_languages_stand_in_the_order_of_the_papers_tables():
    assert languages.sort(["xx", "af", "deu", "ar", "vi"]) == ["ar", "deu", "vi", "af", "xx"]


def test_wanted_languages_are_found_in_any_spelling_and_one_that_is_not_there_is_named():
    there = ["deu_Latn", "zho_Hant", "zho_Hans", "swh_Latn", "fra-CA", "fra"]

    assert languages.choose(there, ["zh", "fr", "sw"], "the set") == ["zho_Hans", "fra", "swh_Latn"]
    with pytest.raises(InputError, match=r"the set has no ur .* it has zho_Hans, zho_Hant, deu_Latn, fra, fra-CA"):
        languages.choose(there, ["ur", "de"], "the set")


def test_the_groups_are_those_of_the_paper_in_its_order():
    table_2 = "ara bul cmn deu ell fra hin rus spa swh tha tur urd vie"
    table_3 = "afr ben est eus fin heb hun ind ita jav jpn kat kaz kor mal mar nld pes por tam tel tgl"
    covered, uncovered = table_2.split(), table_3.split()

    assert languages.choose(set(covered + uncovered), "14", "set") == covered
    assert languages.choose(set(covered + uncovered), "22", "set") == uncovered
    assert languages.choose(set(covered + uncovered), "36", "set") == covered + uncovered
    xtreme = (
        "ar he vi id jv tl eu ml ta te af nl de el bn hi mr ur fa fr it pt es bg ru ja ka ko th sw zh kk tr et fi hu"
    )
    assert set(languages.GROUPS["36"]) == set(xtreme.split())
    assert languages.sort(["ces", "deu", "amh", "ar"]) == ["ar", "deu", "amh", "ces"]
