"""Compare language codes, which in test sets have two or three letters, and perhaps a script or region.

de   deu   deu_Latn        one language, compared as `de`
zh   cmn   zho   zh-CN     one language, compared as `zh`
"""

import re
from collections.abc import Collection, Iterable
from pathlib import Path

import yaml

from infoxlm_core.errors import InputError

# The 14 languages with parallel training text in the paper's Table 2, and the other 22 of XTREME's Tatoeba in its
# Table 3, in the order of the tables.
COVERED = ("ar", "bg", "zh", "de", "el", "fr", "hi", "ru", "es", "sw", "th", "tr", "ur", "vi")
UNCOVERED = (
    "af", "bn", "et", "eu", "fi", "he", "hu", "id", "it", "jv", "ja",
    "ka", "kk", "ko", "ml", "mr", "nl", "fa", "pt", "ta", "te", "tl",
)  # fmt: skip
GROUPS = {"14": COVERED, "22": UNCOVERED, "36": COVERED + UNCOVERED}

_CODES: dict[str, str] = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
_TWO_LETTERS = dict(code.split(":") for code in _CODES["three_letters"].split())


def two_letters(code: str) -> str:
    """Return `de` for `deu`, `deu_Latn` and `de`; a language without a known two-letter code keeps its code."""
    language = re.split("[-_]", code)[0]
    return _TWO_LETTERS.get(language, language)


def is_known(code: str) -> bool:
    """Return whether a word is a language code: ISO 639-1, three letters, or three letters with a script."""
    language, *more = re.split("[-_]", code)
    return language in _CODES["iso_639_1"].split() or language in _TWO_LETTERS or (len(language) == 3 and bool(more))


def shorten(codes: Iterable[str]) -> dict[str, str]:
    """Return the name under which each code of a test set is reported: two letters where possible.

    Only the variant that `choose` selects gets the short name: `zho_Hans` becomes `zh`, and `zho_Hant` beside it keeps
    its code.
    """
    names: dict[str, str] = {}
    variant_of_name: dict[str, str] = {}
    for code in _plain_codes_first(codes):
        short_name, variant = two_letters(code), "-".join(re.split("[-_]", code)[1:])
        has_short_name = not variant or variant_of_name.setdefault(short_name, variant) == variant
        names[code] = short_name if has_short_name else code
    return names


def _plain_codes_first(codes: Iterable[str]) -> list[str]:
    """Sort codes without a script or region before those with one."""
    return sorted(codes, key=lambda code: (len(re.split("[-_]", code)), code))


def sort(codes: Iterable[str]) -> list[str]:
    """Sort codes in the order of the paper's Tables 2 and 3, then all others by name."""
    ranks = {language: rank for rank, language in enumerate(GROUPS["36"])}
    return sorted(codes, key=lambda code: (ranks.get(two_letters(code), len(ranks)), code))


def choose(available: Collection[str], requested: str | Iterable[str], where: str) -> list[str]:
    """Return the sorted codes of the requested languages in a test set.

    Args:
        available: the codes in the test set. A language in several variants is represented by the code without a
            script or region, else by the first one (`zho_Hans`, not `zho_Hant`).
        requested: `all`, a key of GROUPS, or codes in any spelling.
        where: the test set, for the error message.

    Raises:
        InputError: the test set lacks a language.
    """
    if requested == "all":
        return sort(available)
    code_of_language: dict[str, str] = {}
    for code in _plain_codes_first(available):
        code_of_language.setdefault(two_letters(code), code)
    languages = list(GROUPS[requested] if isinstance(requested, str) else dict.fromkeys(map(two_letters, requested)))
    missing = [language for language in languages if language not in code_of_language]
    if missing:
        raise InputError(
            f"{where} has no {', '.join(missing)} (requested by `languages`): it has {', '.join(sort(available))}"
        )
    return sort(code_of_language[language] for language in languages)
