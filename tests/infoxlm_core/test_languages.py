"""Language codes of different standards are compared and sorted as the same language."""

import pytest

from infoxlm_core import languages
from infoxlm_core.errors import InputError


@pytest.mark.parametrize("code", ["zh", "cmn", "zho", "zh-CN", "zho_Hans"])
def test_every_spelling_of_a_language_has_the_same_two_letters(code):
    assert languages.two_letters(code) == "zh"
    assert languages.is_known(code)


@pytest.mark.parametrize(
    ("code", "short_code"), [("ces_Latn", "cs"), ("pol", "pl"), ("npi_Deva", "ne"), ("kmr_Latn", "ku"), ("ceb", "ceb")]
)
def test_codes_of_test_sets_are_shortened_in_all_languages(code, short_code):
    assert languages.two_letters(code) == short_code
    assert languages.choose_codes(["eng_Latn", code], [short_code], "the set") == [code]


@pytest.mark.parametrize("word", ["foo", "xx", "train", "dev", "run"])
def test_word_that_looks_like_a_code_is_not_a_language(word):
    assert not languages.is_known(word)


def test_only_one_of_two_scripts_gets_the_short_name():
    names = languages.shorten_codes(["zho_Hant", "zho_Hans", "deu"])

    assert names == {"zho_Hans": "zh", "zho_Hant": "zho_Hant", "deu": "de"}


def test_codes_are_sorted_in_the_order_of_the_papers_tables():
    assert languages.sort_codes(["xx", "af", "deu", "ar", "vi"]) == ["ar", "deu", "vi", "af", "xx"]


def test_requested_languages_are_chosen_in_any_spelling():
    available = ["deu_Latn", "zho_Hant", "zho_Hans", "swh_Latn", "fra-CA", "fra"]

    assert languages.choose_codes(available, ["zh", "fr", "sw"], "the set") == ["zho_Hans", "fra", "swh_Latn"]
    with pytest.raises(InputError, match=r"the set has no ur .* it has zho_Hans, zho_Hant, deu_Latn, fra, fra-CA"):
        languages.choose_codes(available, ["ur", "de"], "the set")


def test_groups_are_those_of_the_paper():
    table_2 = "ara bul cmn deu ell fra hin rus spa swh tha tur urd vie"
    table_3 = "afr ben est eus fin heb hun ind ita jav jpn kat kaz kor mal mar nld pes por tam tel tgl"
    codes_of_groups = {"14": table_2, "22": table_3, "36": f"{table_2} {table_3}"}
    xtreme = (
        "ar he vi id jv tl eu ml ta te af nl de el bn hi mr ur fa fr it pt es bg ru ja ka ko th sw zh kk tr et fi hu"
    )

    for group, codes in codes_of_groups.items():
        assert " ".join(languages.choose_codes(codes_of_groups["36"].split(), group, "set")) == codes
    assert set(languages.GROUPS["36"]) == set(xtreme.split())
