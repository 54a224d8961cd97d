"""Codes of languages: test sets name a language with two letters, three, or a script besides; tables have an order.

de   deu   deu_Latn        one language; `de` is the name we compare
zh   cmn   zho   zh-CN     likewise
"""

import re
from collections.abc import Collection, Iterable
from pathlib import Path

import yaml

from infoxlm_core.errors import InputError

# The 14 languages with parallel training text in the paper, in the order of its Table 2; the 22 of XTREME's Tatoeba
# without, in the order of its Table 3.
COVERED = ("ar", "bg", "zh", "de", "el", "fr", "hi", "ru", "es", "sw", "th", "tr", "ur", "vi")
UNCOVERED = (
    "af", "bn", "et", "eu", "fi", "he", "hu", "id", "it", "jv", "ja",
    "ka", "kk", "ko", "ml", "mr", "nl", "fa", "pt", "ta", "te", "tl",
)  # fmt: skip
GROUPS = {"14": COVERED, "22": UNCOVERED, "36": COVERED + UNCOVERED}

_CODES: dict[str, str] = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
_TWO_LETTERS = dict(code.split(":") for code in _CODES["three_letters"].split())


def two_letters(code: str) -> str:
    """`deu`, `deu_Latn` and `de` -> `de`; a language that is in none of the paper's tables keeps its code."""
    language = re.split("[-_]", code)[0]
    return _TWO_LETTERS.get(language, language)


def is_known(code: str) -> bool:
    """Whether a word is the code of a language: ISO 639-1, one of the paper's in three letters, or with a script."""
    language, *more = re.split("[-_]", code)
    return language in _CODES["iso_639_1"].split() or language in _TWO_LETTERS or (len(language) == 3 and bool(more))


def shorten(codes: Iterable[str]) -> dict[str, str]:
    """The names under which the languages of a set are counted: two letters where there are such.

    Of a language in several scripts or regions only the one that `choose` takes: `zho_Hans` is `zh`, and `zho_Hant`
    beside it stays what it is.
    """
    names: dict[str, str] = {}
    taken: dict[str, str] = {}  # short name -> the script or region that has it
    for code in sorted(codes, key=lambda code: (len(re.split("[-_]", code)), code)):
        variant, short = "-".join(re.split("[-_]", code)[1:]), two_letters(code)
        names[code] = short if not variant or taken.setdefault(short, variant) == variant else code
    return names


def sort(codes: Iterable[str]) -> list[str]:
    """Codes in the order of the paper's Tables 2 and 3, then all others by name."""
    places = {language: place for place, language in enumerate(GROUPS["36"])}
    return sorted(codes, key=lambda code: (places.get(two_letters(code), len(places)), code))


def choose(available: Collection[str], wanted: str | Iterable[str], where: str) -> list[str]:
    """Pick the codes of the wanted languages out of those of a test set, sorted; InputError, naming `where`, if one
    lacks.

    `wanted` is `all`, a key of GROUPS, or codes in any spelling. Where a set has a language in several scripts or
    regions, the one without is taken, else the first by name (`zho_Hans`, not `zho_Hant`).
    """
    if wanted == "all":
        return sort(available)
    by_language: dict[str, list[str]] = {}
    for code in sorted(available, key=lambda code: (len(re.split("[-_]", code)), code)):
        by_language.setdefault(two_letters(code), []).append(code)
    asked = list(GROUPS[wanted] if isinstance(wanted, str) else dict.fromkeys(map(two_letters, wanted)))
    if missing := [language for language in asked if language not in by_language]:
        raise InputError(
            f"{where} has no {', '.join(missing)} (asked for by languages): it has {', '.join(sort(available))}"
        )
    return sort(by_language[language][0] for language in asked)
