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

# All languages of ISO 639-1, by the three-letter codes of ISO 639-3.
_ISO_639 = """
    aar:aa abk:ab ave:ae afr:af aka:ak amh:am arg:an ara:ar asm:as ava:av aym:ay aze:az bak:ba bel:be bul:bg bis:bi
    bam:bm ben:bn bod:bo bre:br bos:bs cat:ca che:ce cha:ch cos:co cre:cr ces:cs chu:cu chv:cv cym:cy dan:da deu:de
    div:dv dzo:dz ewe:ee ell:el eng:en epo:eo spa:es est:et eus:eu fas:fa ful:ff fin:fi fij:fj fao:fo fra:fr fry:fy
    gle:ga gla:gd glg:gl grn:gn guj:gu glv:gv hau:ha heb:he hin:hi hmo:ho hrv:hr hat:ht hun:hu hye:hy her:hz ina:ia
    ind:id ile:ie ibo:ig iii:ii ipk:ik ido:io isl:is ita:it iku:iu jpn:ja jav:jv kat:ka kon:kg kik:ki kua:kj kaz:kk
    kal:kl khm:km kan:kn kor:ko kau:kr kas:ks kur:ku kom:kv cor:kw kir:ky lat:la ltz:lb lug:lg lim:li lin:ln lao:lo
    lit:lt lub:lu lav:lv mlg:mg mah:mh mri:mi mkd:mk mal:ml mon:mn mar:mr msa:ms mlt:mt mya:my nau:na nob:nb nde:nd
    nep:ne ndo:ng nld:nl nno:nn nor:no nbl:nr nav:nv nya:ny oci:oc oji:oj orm:om ori:or oss:os pan:pa pli:pi pol:pl
    pus:ps por:pt que:qu roh:rm run:rn ron:ro rus:ru kin:rw san:sa srd:sc snd:sd sme:se sag:sg sin:si slk:sk slv:sl
    smo:sm sna:sn som:so sqi:sq srp:sr ssw:ss sot:st sun:su swe:sv swa:sw tam:ta tel:te tgk:tg tha:th tir:ti tuk:tk
    tgl:tl tsn:tn ton:to tur:tr tso:ts tat:tt twi:tw tah:ty uig:ug ukr:uk urd:ur uzb:uz ven:ve vie:vi vol:vo wln:wa
    wol:wo xho:xh yid:yi yor:yo zha:za zho:zh zul:zu
"""
# Test sets such as FLORES name an individual language where ISO 639-1 has one code for a group of languages, such as
# Standard Arabic for Arabic. Filipino is a form of Tagalog.
_MEMBERS_OF_GROUPS = """
    als:sq arb:ar ayr:ay azj:az cmn:zh ekk:et fil:tl fuv:ff gaz:om khk:mn kmr:ku knc:kr lvs:lv npi:ne ory:or pbt:ps
    pes:fa plt:mg quy:qu swh:sw uzn:uz ydd:yi zsm:ms
"""
_TWO_LETTERS = dict(pair.split(":") for pair in (_ISO_639 + _MEMBERS_OF_GROUPS).split())
_WORDS = frozenset({"cor", "cos", "div", "fry", "her", "pan", "run", "sag", "sin", "sun", "tat", "ton", "vol"})
"""Codes that are words in names of files more often than languages."""


def two_letters(code: str) -> str:
    """Return the two-letter form of a code: `de` for `deu` and `deu_Latn`. Languages without one keep their code."""
    language = re.split("[-_]", code)[0]
    return _TWO_LETTERS.get(language, language)


def is_known(code: str) -> bool:
    """Return whether a word is a language code, such as `de`, `deu` or `deu_Latn`."""
    language, *script_or_region = re.split("[-_]", code)
    if language in _TWO_LETTERS.values() or (language in _TWO_LETTERS and language not in _WORDS):
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
