"""Mine translation pairs from two files of sentences in two languages."""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from infoxlm_core.corpora import cleaning
from infoxlm_core.errors import InputError
from infoxlm_core.tasks import vector_files
from infoxlm_core.tasks.embedding import Embedder
from infoxlm_core.tasks.mining import calibration, files
from infoxlm_core.tasks.mining.calibration import Curves
from infoxlm_core.tasks.mining.files import DistinctLines, LanguagePair, MinedPair
from infoxlm_core.tasks.mining.matching import Matches, Search, match_lines
from infoxlm_core.tasks.mining.neighbours import find_neighbours

MAX_PLANTED = 2_000  # pairs; more would change the neighbours of the lines of a small file
HISTOGRAM_STEP = 0.01  # width of a bar of the histogram of margins


class Corpus(NamedTuple):
    """Two files in two languages, and the translation pairs that are planted in them."""

    sources: DistinctLines
    targets: DistinctLines
    planted: list[tuple[str, str]]
    num_skipped: int  # translation pairs that were not planted


class Mined(NamedTuple):
    """The matches of the lines of two files."""

    matches: Matches
    num_pairs: int  # the first matches, which have at least the chosen margin
    margin: float  # the chosen margin
    curves: Curves | None  # None if the user has chosen the margin
    num_equal_texts: int  # texts that are in both files


def read(paths: tuple[Path, Path], pairs: Path | None, codes: LanguagePair) -> Corpus:
    """Read two files and, for calibration, a file of translation pairs.

    Raises:
        InputError: a file is missing, damaged or empty, or there are too few pairs.
    """
    sources = files.read_distinct(paths[0])
    targets = files.read_distinct(paths[1])
    if pairs is None:
        return Corpus(sources, targets, [], 0)
    candidates = files.read_pairs(pairs, codes)
    planted = _select_planted(candidates, {*sources.texts, *targets.texts})
    if len(planted) < calibration.FEWEST_PAIRS:
        raise InputError(
            f"{pairs}: {len(planted)} of {len(candidates)} pairs are neither in the files nor repeated: give at least "
            f"{calibration.FEWEST_PAIRS} for --calibrate"
        )
    return Corpus(sources, targets, planted, len(candidates) - len(planted))


def _select_planted(pairs: Sequence[tuple[str, str]], texts_of_files: set[str]) -> list[tuple[str, str]]:
    """Draw pairs whose texts are not in the files and in no other drawn pair."""
    used_texts = set(texts_of_files)
    planted = []
    for pair in sorted(pairs, key=lambda pair: cleaning.digest(*pair)):  # pseudo-random order
        if pair[0] != pair[1] and used_texts.isdisjoint(pair):
            used_texts.update(pair)
            planted.append(pair)
        if len(planted) == MAX_PLANTED:
            break
    return planted


def mine(
    corpus: Corpus, embedder: Embedder, model_digest: str, cache: Path, precision: float, threshold: float | None
) -> Mined:
    """Match the lines of two files by their vectors, and choose from which margin up a match is a translation pair.

    Args:
        corpus: the lines.
        embedder: computes the vectors of the lines.
        model_digest: identifies the files of the embedder's model.
        cache: folder of vectors; see `embed_once`.
        precision: smallest share of right pairs among the mined ones; ignored if a threshold is given.
        threshold: the lowest margin of a pair; None: the lowest one that reaches the precision on the planted pairs.

    Raises:
        InputError: no margin reaches the precision, or no line can be matched.
    """
    search = _find_neighbours(corpus, embedder, model_digest, cache)
    matches = match_lines(search)
    if not len(matches.margins):
        raise InputError("no line is next to a line of the other file: give files with more lines")
    curves = None
    if threshold is None:
        curves = calibration.estimate(search, matches)
        threshold = calibration.choose_margin(curves, precision)
    num_pairs = int((matches.margins >= threshold).sum())
    num_equal_texts = int((search.source_twins >= 0).sum())
    return Mined(matches, num_pairs, threshold, curves, num_equal_texts)


def _find_neighbours(corpus: Corpus, embedder: Embedder, model_digest: str, cache: Path) -> Search:
    """Embed all lines and planted lines, and find their neighbours."""

    def embed(texts: Sequence[str]) -> list[np.ndarray]:
        return [vector_files.embed_once(embedder, model_digest, texts, cache)] if texts else []

    source_texts = corpus.sources.texts
    target_texts = corpus.targets.texts
    # Lines and planted lines are separate arrays, because the stored vectors of the lines are used again for other
    # language pairs.
    source_vectors = embed(source_texts) + embed([source for source, _ in corpus.planted])
    target_vectors = embed(target_texts) + embed([target for _, target in corpus.planted])
    forward, backward = find_neighbours(source_vectors, target_vectors)
    no_twins = [-1] * len(corpus.planted)  # a planted line has no equal line on the other side
    source_twins = np.array(_find_twins(source_texts, target_texts) + no_twins)
    target_twins = np.array(_find_twins(target_texts, source_texts) + no_twins)
    return Search(forward, backward, source_twins, target_twins, len(corpus.planted))


def _find_twins(texts: Sequence[str], other_texts: Sequence[str]) -> list[int]:
    """Return for each text the row of the same text in the other file, or -1 if it is not there."""
    row_of_text = {text: row for row, text in enumerate(other_texts)}
    return [row_of_text.get(text, -1) for text in texts]


def list_pairs(corpus: Corpus, mined: Mined) -> Iterator[MinedPair]:
    """Yield the mined pairs, the highest margin first."""
    sources = corpus.sources
    targets = corpus.targets
    for row in range(mined.num_pairs):
        source = mined.matches.sources[row]
        target = mined.matches.targets[row]
        yield MinedPair(
            float(mined.matches.margins[row]),
            sources.numbers[source],
            targets.numbers[target],
            sources.texts[source],
            targets.texts[target],
        )


def describe(corpus: Corpus, mined: Mined) -> dict[str, Any]:
    """Return the numbers of lines and matches, the histogram of margins, and the curves of the calibration."""
    margins = mined.matches.margins
    first_step = math.floor(float(margins.min()) / HISTOGRAM_STEP)
    last_step = math.floor(float(margins.max()) / HISTOGRAM_STEP) + 1
    # Multiples of 0.01 are rounded, because they are not exact in binary.
    edges = [round(step * HISTOGRAM_STEP, 2) for step in range(first_step, last_step + 1)]
    histogram, _ = np.histogram(margins, edges)
    description: dict[str, Any] = {
        "pairs": mined.num_pairs,
        "margin": mined.margin,
        "matches": len(margins),
        "lines": [_describe_lines(corpus.sources), _describe_lines(corpus.targets)],
        "in_both_files": mined.num_equal_texts,
        "histogram": {"margins": edges, "matches": histogram.tolist()},
    }
    if mined.curves:
        description["calibration"] = {
            "planted_pairs": len(corpus.planted),
            "skipped_pairs": corpus.num_skipped,
            "chosen": mined.curves.look_up(mined.margin),
            "curves": [mined.curves.look_up(edge) for edge in edges[:-1]],
        }
    return description


def _describe_lines(lines: DistinctLines) -> dict[str, Any]:
    """Return how many lines of a file were read, and how many were dropped by reason."""
    num_dropped = sum(lines.dropped.values())
    return {"read": len(lines.texts) + num_dropped, "distinct": len(lines.texts), "dropped": lines.dropped}
