"""Compare language codes of different standards.

Test sets use codes of two or three letters, sometimes followed by a script or region. Codes are compared in their
two-letter form: `de`, `deu` and `deu_Latn` as `de`; `zh`, `cmn`, `zho` and `zh-CN` as `zh`.
"""

import re
from collections.abc import Collection, Iterable, Sequence

from infoxlm_core.errors import InputError

# The 14 languages with parallel training text in the paper's Table 2, and the other 22 of XTREME's Tatoeba in its
# Table 3, in the order of the tables.
COVERED = ("ar", "bg", "zh", "de", "el", "fr", "hi", "ru", "es", "sw", "th", "tr", "ur", "vi")
UNCOVERED = (
    "af", "bn", "et", "eu", "fi", "he", "hu", "id", "it", "jv", "ja",
    "ka", "kk", "ko", "ml", "mr", "nl", "fa", "pt", "ta", "te", "tl",
)  # fmt: skip
GROUPS = {"14": COVERED, "22": UNCOVERED, "36": COVERED + UNCOVERED}

# Three-letter codes in test sets, with the two-letter codes for comparisons and reports.
_THREE_LETTER_CODES = """
    ara:ar arb:ar bul:bg cmn:zh zho:zh deu:de ell:el fra:fr hin:hi rus:ru spa:es swh:sw swa:sw tha:th tur:tr urd:ur
    vie:vi afr:af ben:bn est:et ekk:et eus:eu fin:fi heb:he hun:hu ind:id ita:it jav:jv jpn:ja kat:ka kaz:kk kor:ko
    mal:ml mar:mr nld:nl pes:fa fas:fa por:pt tam:ta tel:te tgl:tl fil:tl eng:en
"""
_ISO_639_1 = """
    aa ab ae af ak am an ar as av ay az ba be bg bi bm bn bo br bs ca ce ch co cr cs cu cv cy da de dv dz ee el en eo es
    et eu fa ff fi fj fo fr fy ga gd gl gn gu gv ha he hi ho hr ht hu hy hz ia id ie ig ii ik io is it iu ja jv ka kg ki
    kj kk kl km kn ko kr ks ku kv kw ky la lb lg li ln lo lt lu lv mg mh mi mk ml mn mr ms mt my na nb nd ne ng nl nn no
    nr nv ny oc oj om or os pa pi pl ps pt qu rm rn ro ru rw sa sc sd se sg si sk sl sm sn so sq sr ss st su sv sw ta te
    tg th ti tk tl tn to tr ts tt tw ty ug uk ur uz ve vi vo wa wo xh yi yo za zh zu
"""
_TWO_LETTERS = dict(pair.split(":") for pair in _THREE_LETTER_CODES.split())


def two_letters(code: str) -> str:
    """Return the two-letter form of a code: `de` for `deu` and `deu_Latn`. Languages without one keep their code."""
    language = re.split("[-_]", code)[0]
    return _TWO_LETTERS.get(language, language)


def is_known(code: str) -> bool:
    """Return whether a word is a language code, such as `de`, `deu` or `deu_Latn`."""
    language, *script_or_region = re.split("[-_]", code)
    if language in _ISO_639_1.split() or language in _TWO_LETTERS:
        return True
    # Three other letters may be part of a file name, so they count as a language only with a script or region.
    return len(language) == 3 and bool(script_or_region)


def shorten_codes(codes: Iterable[str]) -> dict[str, str]:
    """Return a mapping from a test set's codes to their short names in reports.

    A short name has two letters where possible. Of a language's scripts or regions, only the first is shortened:
    `zho_Hans` becomes `zh`, and `zho_Hant` keeps its code. `deu` and `deu_Latn` both become `de`.
    """
    names: dict[str, str] = {}
    first_variants: dict[str, str] = {}
    for code in _sort_variants_last(codes):
        short_name = two_letters(code)
        variant = "-".join(re.split("[-_]", code)[1:])  # `Latn` of `deu_Latn`, empty for `deu`
        if variant and short_name not in first_variants:
            first_variants[short_name] = variant
        is_short = not variant or variant == first_variants[short_name]
        names[code] = short_name if is_short else code
    return names


def _sort_variants_last(codes: Iterable[str]) -> list[str]:
    """Sort codes by name, with plain codes before those with a script or region."""
    return sorted(codes, key=lambda code: (len(re.split("[-_]", code)), code))


def sort_codes(codes: Iterable[str], order: Sequence[str] = GROUPS["36"]) -> list[str]:
    """Sort codes by a list of two-letter codes, by default the paper's order. Unlisted codes follow by name."""
    ranks = {language: rank for rank, language in enumerate(order)}

    def sort_key(code: str) -> tuple[int, str]:
        return ranks.get(two_letters(code), len(ranks)), code

    return sorted(codes, key=sort_key)


def choose_codes(available: Collection[str], requested: str | Iterable[str], source: str) -> list[str]:
    """Return a test set's codes for the requested languages, sorted.

    If a language has several variants, the code without a script or region is chosen, or else the first variant
    (`zho_Hans`, not `zho_Hant`).

    Args:
        available: codes in the test set.
        requested: `all`, a key of `GROUPS`, or codes in any form.
        source: name of the test set, for the error message.

    Raises:
        InputError: the test set lacks a requested language.
    """
    if requested == "all":
        return sort_codes(available)
    code_of_language: dict[str, str] = {}
    for code in _sort_variants_last(available):
        code_of_language.setdefault(two_letters(code), code)
    if isinstance(requested, str):
        languages = list(GROUPS[requested])
    else:
        languages = list(dict.fromkeys(two_letters(code) for code in requested))  # `de` and `deu` are the same
    missing = [language for language in languages if language not in code_of_language]
    if missing:
        missing_codes = ", ".join(missing)
        available_codes = ", ".join(sort_codes(available))
        raise InputError(f"{source} has no {missing_codes} (requested by `languages`): it has {available_codes}")
    return sort_codes(code_of_language[language] for language in languages)
