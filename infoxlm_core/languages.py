"""Codes of languages: test sets name a language with two letters, three, or a script besides; tables have an order.

de   deu   deu_Latn        one language; `de` is the name we compare
zh   cmn   zho   zh-CN     likewise
"""

import re
from collections.abc import Collection, Iterable

from infoxlm_core.errors import InputError

COVERED = ("ar", "bg", "zh", "de", "el", "fr", "hi", "ru", "es", "sw", "th", "tr", "ur", "vi")
"""The 14 languages with parallel training text in the paper, in the order of its Table 2."""

UNCOVERED = (
    "af", "bn", "et", "eu", "fi", "he", "hu", "id", "it", "jv", "ja",
    "ka", "kk", "ko", "ml", "mr", "nl", "fa", "pt", "ta", "te", "tl",
)  # fmt: skip
"""The 22 of XTREME's Tatoeba without, in the order of its Table 3."""

GROUPS = {"14": COVERED, "22": UNCOVERED, "36": COVERED + UNCOVERED}

_CODES = (
    "ara:ar arb:ar bul:bg cmn:zh zho:zh deu:de ell:el fra:fr hin:hi rus:ru spa:es swh:sw swa:sw tha:th tur:tr urd:ur "
    "vie:vi afr:af ben:bn est:et ekk:et eus:eu fin:fi heb:he hun:hu ind:id ita:it jav:jv jpn:ja kat:ka kaz:kk kor:ko "
    "mal:ml mar:mr nld:nl pes:fa fas:fa por:pt tam:ta tel:te tgl:tl fil:tl eng:en"
)
_TWO_LETTERS = dict(code.split(":") for code in _CODES.split())
_ISO_639_1 = (
    "aa ab ae af ak am an ar as av ay az ba be bg bi bm bn bo br bs ca ce ch co cr cs cu cv cy da de dv dz ee el en eo "
    "es et eu fa ff fi fj fo fr fy ga gd gl gn gu gv ha he hi ho hr ht hu hy hz ia id ie ig ii ik io is it iu ja jv ka "
    "kg ki kj kk kl km kn ko kr ks ku kv kw ky la lb lg li ln lo lt lu lv mg mh mi mk ml mn mr ms mt my na nb nd ne ng "
    "nl nn no nr nv ny oc oj om or os pa pi pl ps pt qu rm rn ro ru rw sa sc sd se sg si sk sl sm sn so sq sr ss st su "
    "sv sw ta te tg th ti tk tl tn to tr ts tt tw ty ug uk ur uz ve vi vo wa wo xh yi yo za zh zu"
)


def two_letters(code: str) -> str:
    """`deu`, `deu_Latn` and `de` -> `de`; a language that is in none of the paper's tables keeps its code."""
    language = re.split("[-_]", code)[0]
    return _TWO_LETTERS.get(language, language)


def is_known(code: str) -> bool:
    """Whether a word is the code of a language: ISO 639-1, one of the paper's in three letters, or with a script."""
    language, *more = re.split("[-_]", code)
    return language in _ISO_639_1.split() or language in _TWO_LETTERS or (len(language) == 3 and bool(more))


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
