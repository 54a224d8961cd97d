"""Compute digests of texts for finding duplicates and text reserved for evaluation."""

import importlib.metadata
from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import regex

from infoxlm_core.config.corpora import RENSA_VERSION
from infoxlm_core.corpora import cleaning
from infoxlm_core.errors import InputError

_HAN = r"\p{Han}"
_OTHER_SCRIPTS = r"\p{Hiragana}\p{Katakana}\p{Thai}\p{Lao}\p{Khmer}\p{Myanmar}\p{Tibetan}"  # scripts without spaces
_UNIT = regex.compile(
    rf"(?P<character>[{_OTHER_SCRIPTS}])|[{_HAN}]|[[\p{{L}}\p{{M}}\p{{N}}]--[{_HAN}{_OTHER_SCRIPTS}]]+", regex.V1
)
MIN_MINHASH_LETTERS = 200  # shorter rows have too few shingles for estimating similarity
_SHINGLE_LETTERS = 5
_BANDS = 20  # two rows with similarity s share a band with probability 1 - (1 - s^8)^20: 0.5 at 0.65, 0.98 at 0.8
_HASHES_PER_BAND = 8
# A smaller number would not do: in Thai, vowel signs count as characters, and 13 characters are often a common phrase.
_CHARACTERS_PER_WORD = 3


class Keys(NamedTuple):
    """64-bit digests of a row's text, for comparing rows."""

    casefolded: Sequence[int]  # of each casefolded text, for finding reserved text
    letters: Sequence[int]  # of each text's letters, which are the same in near-duplicates
    exact: Sequence[int]  # of each unchanged text
    ngrams: Sequence[int] = ()  # of every word n-gram, for finding quotations of reserved text
    minhash_bands: Sequence[int] = ()  # of the MinHash signature's bands; similar rows share a band


def compute_keys(texts: Sequence[str], ngram_length: int = 0) -> Keys:
    """Compute a row's keys, except MinHash bands.

    Args:
        texts: sentence, or both sides of a pair.
        ngram_length: number of words per n-gram; 0: no n-grams.
    """
    casefolded, letters, exact = zip(*map(_digest_text, texts), strict=True)
    ngrams = [digest for text in texts for digest in digest_ngrams(text, ngram_length)]
    return Keys(casefolded, letters, exact, ngrams)


@cleaning.cache_short_texts
def _digest_text(text: str) -> tuple[int, int, int]:
    """Return one text's digests for the fields `casefolded`, `letters` and `exact` of `Keys`."""
    return (
        cleaning.digest("equal", cleaning.casefold(text)),
        cleaning.digest(cleaning.extract_letters(text)),
        cleaning.digest(text),
    )


def check_minhash() -> None:
    """Raise InputError if the expected version of the MinHash library is not installed."""
    try:  # only this version, because others may compute different signatures
        is_installed = importlib.metadata.version("rensa") == RENSA_VERSION
    except importlib.metadata.PackageNotFoundError:
        is_installed = False
    if not is_installed:
        raise InputError(
            f"cleaning.near_duplicates: minhash needs rensa {RENSA_VERSION}: install infoxlm-pipeline[fuzzy], or leave "
            "near_duplicates at same_letters"
        )


def compute_minhash_bands(texts: Sequence[str]) -> list[int]:
    """Return a digest of each band of a row's MinHash signature, or an empty list for a row with few letters.

    Rows with similar sets of letter 5-grams probably share a band.
    """
    import rensa  # an optional dependency, see `check_minhash`

    letters = "".join(cleaning.extract_letters(text) for text in texts)
    if len(letters) < MIN_MINHASH_LETTERS:
        return []
    starts = range(len(letters) - _SHINGLE_LETTERS + 1)
    shingles = [letters[start : start + _SHINGLE_LETTERS] for start in starts]
    minhash = rensa.RMinHash(num_perm=_BANDS * _HASHES_PER_BAND, seed=1)
    minhash.update(shingles)
    bands = np.array(minhash.digest(), np.uint32).reshape(_BANDS, _HASHES_PER_BAND)
    # Each digest includes the band's number, so that different bands of two rows never match.
    return [cleaning.digest("band", str(number), band.tobytes().hex()) for number, band in enumerate(bands)]


def digest_ngrams(text: str, word_count: int) -> list[int]:
    """Return a digest of every n-gram of `word_count` words, or an empty list if `word_count` is 0.

    Case, punctuation and spaces are ignored. One Han character counts as a word, and so do three characters of other
    scripts without spaces between words.
    """
    if not word_count:
        return []
    units = []  # words, Han characters, and characters of other scripts without spaces
    unit_sizes = []  # in thirds of a word
    for match in _UNIT.finditer(cleaning.casefold(text)):
        units.append(match[0])
        unit_sizes.append(1 if match["character"] else _CHARACTERS_PER_WORD)
    ngram_size = _CHARACTERS_PER_WORD * word_count
    unit_starts = list(accumulate(unit_sizes, initial=0))  # the last value is the text's size
    digests = []
    for first_unit, start in enumerate(unit_starts):
        end_unit = bisect_left(unit_starts, start + ngram_size)
        if end_unit == len(unit_starts):
            break  # the remaining text is shorter than an n-gram
        digests.append(cleaning.digest("run", *units[first_unit:end_unit]))  # a run of units
    return digests
