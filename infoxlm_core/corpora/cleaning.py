"""Clean single texts: normalise a text, and decide whether to drop it.

normalise("Datei\\u00a0\\u202aöffnen…\\n")                              ->  "Datei öffnen…"
find_reason_to_drop("Datei öffnen…", "ru", ("en", "ru"), CleaningConfig())  ->  "wrong_script"
"""

import hashlib
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Sequence
from functools import lru_cache, wraps
from pathlib import Path
from typing import Any, TypeVar

import regex
import yaml
from py3langid.langid import MODEL_FILE, LanguageIdentifier

from infoxlm_core.config import CleaningConfig
from infoxlm_core.languages import two_letters

Result = TypeVar("Result")

WITHOUT_SPACES = frozenset({"zh", "ja", "th", "lo", "km", "my", "bo"})  # languages without spaces between words

_SCRIPTS: dict[str, str] = yaml.safe_load(Path(__file__).with_name("scripts.yaml").read_text(encoding="utf-8"))

_LETTER = regex.compile(r"[\p{L}\p{M}]")
_LATIN = regex.compile(r"\p{Latin}")
_INVISIBLE = regex.compile(r"[[\p{Cc}\p{Cf}]--[\s\x1c-\x1f\u200c\u200d]]", regex.V1)  # joiners shape Persian and Hindi
_INVISIBLE_OR_JOINER = regex.compile(r"[[\p{Cc}\p{Cf}]--[\s\x1c-\x1f]]", regex.V1)
_TAGS_AND_LINKS = r"<[^<>]*>|&#?\w+;|https?:\S+"
_CODE = r"%\([^()]*\)\w|%\w|\$?\{[^{}]*\}|`[^`]*`|:\w+:|\w*[_/\\.]\w[\w/\\.-]*"
_MARKUP = regex.compile(rf"{_TAGS_AND_LINKS}|\S+@\S+|{_CODE}")
_MARKUP_WITHOUT_ADDRESSES = regex.compile(f"{_TAGS_AND_LINKS}|{_CODE}")
# Braces with other characters are ICU plural forms, whose words are translated.
_PLACEHOLDER = regex.compile(r"%(?:\(\w+\)|\d+\$)[sdiufxXcrg]|%[sdiufxXcrg](?![A-Za-z])|\{[\w.$-]*\}|</?[A-Za-z]\w*")
_LONG_REPETITION = re.compile(r"(\S)\1{19}")
_MAX_SAME_CHARACTER = 0.9  # largest share of a text's most frequent character
_MIN_REPEATED_LETTERS = 5  # "aaaaa" and "AA, AAA" are dropped, but not "aaaa"
_INSIGNIFICANT = regex.compile(r"[\p{P}\p{N}\s\u200c\u200d]+")  # in Persian, a joiner may stand for a space
# Smallest share of letters in the language's own scripts. It is low, because Latin names and commands occur in every
# language.
_MIN_OWN_SCRIPT = 0.15
_MAX_FOREIGN_SCRIPT = 0.2  # largest share of letters in other scripts, except Latin
_MIN_PROBABILITY = 0.05  # a text whose expected language is less probable is in a different language
_CACHED_TEXTS = 1 << 16
_CACHED_CHARACTERS = 1000  # largest length of a cached text


def cache_short_texts(function: Callable[..., Result]) -> Callable[..., Result]:
    """Cache the results of a function of a text, unless the text is long.

    The pivot side of a message is repeated for every language. Long texts are hardly ever repeated, and a cache of them
    would use gigabytes of memory.
    """
    cached_function = lru_cache(maxsize=_CACHED_TEXTS)(function)

    @wraps(function)
    def call(text: str, *arguments: Any) -> Result:
        return function(text, *arguments) if len(text) > _CACHED_CHARACTERS else cached_function(text, *arguments)

    return call


def normalise(text: str) -> str:
    """Normalise a text to NFC, remove control and format characters, and collapse spaces."""
    if text.isascii() and text.isprintable():  # most English text; normalisation would change nothing
        return " ".join(text.split())
    return " ".join(unicodedata.normalize("NFC", _INVISIBLE.sub("", text)).split())


def casefold(text: str) -> str:
    """Casefold a text, normalise it to NFKC and remove invisible characters, for comparison with reserved text."""
    if text.isascii() and text.isprintable():
        return " ".join(text.casefold().split())
    folded = unicodedata.normalize("NFKC", _INVISIBLE_OR_JOINER.sub("", text)).casefold()
    return " ".join(unicodedata.normalize("NFKC", folded).split())  # a casefolded text may not be normalised


def digest(*texts: str) -> int:
    """Return a 64-bit digest of texts. It is the same in every process, and small enough for sets of 100 million
    digests."""
    return int.from_bytes(hashlib.blake2b("\0".join(texts).encode(), digest_size=8).digest(), "little")


def extract_letters(text: str) -> str:
    """Casefold a text and remove digits, punctuation, spaces and joiners. Return the text unchanged if nothing would
    remain.

    Near-duplicates have the same letters (CCNet, section 3.1).
    """
    return _INSIGNIFICANT.sub("", text.casefold()) or text


@cache_short_texts
def find_reason_to_drop(text: str, language: str, languages: tuple[str, ...], rules: CleaningConfig) -> str | None:
    """Return the reason to drop a normalised text, or None.

    Args:
        text: normalised text.
        language: expected language of the text.
        languages: all languages of the run, as candidates for language identification.
        rules: limits of the config.
    """
    if not text:
        return "empty"
    if len(text) < rules.min_characters:
        return "too_short"
    if len(text) > rules.max_characters:
        return "too_long"
    if language not in WITHOUT_SPACES and len(text.split()) < rules.min_words:
        return "few_words"
    # Counting characters is slow, so count them only in texts with a long repetition.
    if _LONG_REPETITION.search(text) and max(map(text.count, set(text))) > _MAX_SAME_CHARACTER * len(text):
        return "one_sign"
    plain_text = remove_markup(text)
    letters = _LETTER.findall(plain_text)
    if not letters:
        return "no_letters"
    if _is_wrong_script(plain_text, len(letters), language):
        return "wrong_script"
    # Letters separated by punctuation or spaces, such as "AA, AAA", are not a long repetition.
    most_frequent_count = max(Counter(_LETTER.findall(plain_text.casefold())).values())
    if len(letters) >= _MIN_REPEATED_LETTERS and most_frequent_count > _MAX_SAME_CHARACTER * len(letters):
        return "one_sign"
    if len(letters) >= rules.min_identified_characters and is_other_language(plain_text, language, languages):
        return "wrong_language"
    return None


def remove_markup(text: str) -> str:
    """Replace tags, links, addresses, placeholders and other code in a text by spaces."""
    # Searching for an address takes time in proportion to the square of the length of a text without spaces, such as a
    # Chinese paragraph.
    pattern = _MARKUP if "@" in text else _MARKUP_WITHOUT_ADDRESSES
    return pattern.sub(" ", text)


def _is_wrong_script(text: str, letter_count: int, language: str) -> bool:
    """Return whether too few letters of a text are in its language's scripts, or too many in foreign scripts."""
    own_script_count = len(_make_letter_pattern(language).findall(text))
    foreign_count = letter_count - own_script_count
    if "Latin" not in find_scripts(language):
        foreign_count -= len(_LATIN.findall(text))  # every language has Latin names and abbreviations
    has_too_few_own = own_script_count < _MIN_OWN_SCRIPT * letter_count
    has_too_many_foreign = foreign_count > _MAX_FOREIGN_SCRIPT * letter_count
    return has_too_few_own or has_too_many_foreign


def find_reason_to_drop_row(
    texts: Sequence[str], languages: Sequence[str], all_languages: tuple[str, ...], rules: CleaningConfig
) -> str | None:
    """Return the reason to drop a normalised sentence or translation pair, or None."""
    for text, language in zip(texts, languages, strict=True):
        reason = find_reason_to_drop(text, language, all_languages, rules)
        if reason:
            return reason
    if len(texts) == 1:
        return None
    source, target = texts
    if source.casefold() == target.casefold():
        return "untranslated"
    if rules.same_numbers and list_digits(source) != list_digits(target):
        return "other_numbers"
    if rules.same_placeholders and list_placeholders(source) != list_placeholders(target):
        return "other_placeholders"
    return None


def list_digits(text: str) -> list[int]:
    """Return the sorted values of a text's decimal digits, in any script."""
    return sorted(unicodedata.decimal(character) for character in text if character.isdecimal())


def list_placeholders(text: str) -> list[str]:
    """Return the sorted placeholders and tag names of a text."""
    return sorted(_PLACEHOLDER.findall(text))


def is_other_language(text: str, language: str, languages: tuple[str, ...]) -> bool:
    """Return whether a text is clearly not in `language`. Return False if the identifier does not know `language`."""
    identifier = _load_identifier(languages)
    if language not in identifier.labels:
        return False
    probabilities = dict(identifier.rank(text))
    return bool(probabilities[language] < _MIN_PROBABILITY)


@lru_cache
def _load_identifier(languages: tuple[str, ...]) -> LanguageIdentifier:
    identifier = LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True)
    identifier.set_languages(set(languages) & set(identifier.labels))  # raises ValueError for unknown languages
    return identifier


@lru_cache
def find_scripts(language: str) -> tuple[str, ...]:
    """Return the Unicode names of a language's scripts. Codes of three letters are accepted, too."""
    code = two_letters(language)
    scripts = tuple(script for script, languages in _SCRIPTS.items() if code in languages.split())
    return scripts or ("Latin",)


@lru_cache
def _make_letter_pattern(language: str) -> regex.Pattern:
    """Return a pattern that matches letters of a language's scripts, marks, and the long vowel sign."""
    script_classes = "".join(rf"\p{{{script}}}" for script in find_scripts(language))
    return regex.compile(f"[{script_classes}" + r"\p{Inherited}ー]")
