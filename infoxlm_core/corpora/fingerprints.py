"""Digests of texts that identify duplicates and text reserved for evaluation."""

import importlib.metadata
from bisect import bisect_left
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import regex

from infoxlm_core.config.corpora import RENSA_VERSION
from infoxlm_core.corpora import cleaning
from infoxlm_core.errors import InputError

_HAN = r"\p{Han}"
_OTHER_SIGNS = r"\p{Hiragana}\p{Katakana}\p{Thai}\p{Lao}\p{Khmer}\p{Myanmar}\p{Tibetan}"  # no spaces between words
_UNIT = regex.compile(
    rf"(?P<sign>[{_OTHER_SIGNS}])|[{_HAN}]|[[\p{{L}}\p{{M}}\p{{N}}]--[{_HAN}{_OTHER_SIGNS}]]+", regex.V1
)
MINHASH_LETTERS = 200  # runs of five letters of shorter rows are too few to estimate a similarity
_SHINGLE_LETTERS = 5
_BANDS = 20  # two rows with similarity s share a band with probability 1 - (1 - s^8)^20: 0.5 at 0.65, 0.98 at 0.8
_HASHES_PER_BAND = 8
_SIGNS_PER_WORD = 3  # the smallest useful number: vowel signs count, so 13 signs of Thai are often a common phrase


class Keys(NamedTuple):
    """64-bit digests of a row: three for each of its texts, one for each run of words, and one for each band."""

    equal: Sequence[int]  # of the form that is compared with reserved text
    near: Sequence[int]  # equal for near duplicates
    exact: Sequence[int]  # of the unchanged text
    runs: Sequence[int] = ()
    bands: Sequence[int] = ()  # of the row's MinHash signature; similar rows have some in common


def compute_keys(texts: Sequence[str], overlap: int = 0) -> Keys:
    """Return the keys of a row, without bands, which `compute_bands` returns. Runs have `overlap` words; 0: no runs."""
    equal, near, exact = zip(*map(_digest_text, texts), strict=True)
    run_digests = [digest for text in texts for digest in compute_runs(text, overlap)]
    return Keys(equal, near, exact, run_digests)


@lru_cache(maxsize=1 << 16)  # the pivot's side of a message occurs in every language
def _digest_text(text: str) -> tuple[int, int, int]:
    """Return the digests `equal`, `near` and `exact` of `Keys` for one text."""
    return (
        cleaning.digest("equal", cleaning.make_comparable(text)),
        cleaning.digest(cleaning.make_near_key(text)),
        cleaning.digest(text),
    )


def check_minhash() -> None:
    """Raise InputError if the library that computes MinHash signatures is not installed in the expected version."""
    try:
        is_installed = importlib.metadata.version("rensa") == RENSA_VERSION
    except importlib.metadata.PackageNotFoundError:
        is_installed = False
    if not is_installed:
        raise InputError(
            f"cleaning.near_duplicates: minhash needs rensa {RENSA_VERSION}: install infoxlm-pipeline[fuzzy], or leave "
            "near_duplicates at same_letters"
        )


def compute_bands(texts: Sequence[str]) -> list[int]:
    """Return the digests of the bands of a row's MinHash signature. A row of few letters has no bands."""
    import rensa  # an optional dependency, see `check_minhash`

    letters = "".join(cleaning.make_near_key(text) for text in texts)
    if len(letters) < MINHASH_LETTERS:
        return []
    starts = range(len(letters) - _SHINGLE_LETTERS + 1)
    sketch = rensa.RMinHash(num_perm=_BANDS * _HASHES_PER_BAND, seed=1)
    sketch.update([letters[start : start + _SHINGLE_LETTERS] for start in starts])
    signature = np.array(sketch.digest(), np.uint32).reshape(_BANDS, _HASHES_PER_BAND)
    return [cleaning.digest("band", str(number), band.tobytes().hex()) for number, band in enumerate(signature)]


def compute_runs(text: str, length: int) -> list[int]:
    """Return the digests of every run of `length` words. There are none if `length` is 0.

    Case, punctuation and spaces are ignored. Texts that share a long run quote the same source. In scripts without
    spaces, a Han character counts as a word, and three signs of any other script count as a word.
    """
    if not length:
        return []
    units = []  # words, Han characters and single signs of other scripts
    sizes = []  # of each unit, in signs
    for match in _UNIT.finditer(cleaning.make_comparable(text)):
        units.append(match[0])
        sizes.append(1 if match["sign"] else _SIGNS_PER_WORD)
    positions = list(accumulate(sizes, initial=0))  # number of signs before each unit; at the end, of all signs
    run_digests = []
    for first, position in enumerate(positions):
        end = bisect_left(positions, position + _SIGNS_PER_WORD * length)
        if end == len(positions):
            break  # the rest of the text is shorter than a run
        run_digests.append(cleaning.digest("run", *units[first:end]))
    return run_digests
