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


class MiningResult(NamedTuple):
    """The matches of the lines of two files, and which of them are mined."""

    matches: Matches
    num_pairs: int  # number of mined pairs: the first matches, which have at least the chosen margin
    margin: float  # the chosen margin
    curves: Curves | None  # None if the user has chosen the margin
    num_equal_texts: int  # texts that are in both files


def read_corpus(paths: tuple[Path, Path], pairs: Path | None, codes: LanguagePair) -> Corpus:
    """Read two files and, for calibration, a file of translation pairs.

    Args:
        paths: the files with one sentence per line.
        pairs: the file of translation pairs, if any.
        codes: the languages of both files and of both sides of the pairs.

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
    """Draw up to `MAX_PLANTED` pairs whose texts are neither in the files nor in another drawn pair."""
    used_texts = set(texts_of_files)
    planted = []
    shuffled_pairs = sorted(pairs, key=lambda pair: cleaning.digest(*pair))  # the same order in every run
    for source, target in shuffled_pairs:
        if source != target and used_texts.isdisjoint((source, target)):
            used_texts.update((source, target))
            planted.append((source, target))
        if len(planted) == MAX_PLANTED:
            break
    return planted


def mine_pairs(
    corpus: Corpus, embedder: Embedder, model_digest: str, cache: Path, precision: float, threshold: float | None
) -> MiningResult:
    """Match the lines of two files by their vectors, and keep the matches whose margin reaches a threshold.

    Args:
        corpus: the lines, and the translation pairs for calibration.
        embedder: computes the vectors of the lines.
        model_digest: identifies the files of the embedder's model.
        cache: folder of vectors; see `embed_cached`.
        precision: smallest share of correct pairs among the mined ones; ignored if a threshold is given.
        threshold: the lowest margin of a mined pair; None: the lowest one that reaches the precision.

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
    num_equal_texts = int((search.excluded_targets >= 0).sum())
    return MiningResult(matches, num_pairs, threshold, curves, num_equal_texts)


def _find_neighbours(corpus: Corpus, embedder: Embedder, model_digest: str, cache: Path) -> Search:
    """Embed all lines and planted lines, and find their neighbours. Equal texts are excluded from matching."""
    source_vectors = [vector_files.embed_cached(embedder, model_digest, corpus.sources.texts, cache)]
    target_vectors = [vector_files.embed_cached(embedder, model_digest, corpus.targets.texts, cache)]
    if corpus.planted:
        # Planted lines have arrays of their own, so that the cached vectors of a file serve other language pairs.
        planted_sources = [source for source, _ in corpus.planted]
        planted_targets = [target for _, target in corpus.planted]
        source_vectors.append(vector_files.embed_cached(embedder, model_digest, planted_sources, cache))
        target_vectors.append(vector_files.embed_cached(embedder, model_digest, planted_targets, cache))
    forward, backward = find_neighbours(source_vectors, target_vectors)
    none_excluded = [-1] * len(corpus.planted)  # no text of a file equals a planted one
    excluded_targets = np.array(_find_equal_texts(corpus.sources.texts, corpus.targets.texts) + none_excluded)
    excluded_sources = np.array(_find_equal_texts(corpus.targets.texts, corpus.sources.texts) + none_excluded)
    return Search(forward, backward, excluded_targets, excluded_sources, len(corpus.planted))


def _find_equal_texts(texts: Sequence[str], other_texts: Sequence[str]) -> list[int]:
    """Return for each text the row of the same text in the other file, or -1 if it is not there."""
    row_of_text = {text: row for row, text in enumerate(other_texts)}
    return [row_of_text.get(text, -1) for text in texts]


def list_pairs(corpus: Corpus, result: MiningResult) -> Iterator[MinedPair]:
    """Yield the mined pairs, the highest margin first."""
    sources = corpus.sources
    targets = corpus.targets
    for row in range(result.num_pairs):
        source = result.matches.sources[row]
        target = result.matches.targets[row]
        yield MinedPair(
            float(result.matches.margins[row]),
            sources.numbers[source],
            targets.numbers[target],
            sources.texts[source],
            targets.texts[target],
        )


def describe(corpus: Corpus, result: MiningResult) -> dict[str, Any]:
    """Return a report on the lines, the matches, the histogram of their margins, and the calibration."""
    margins = result.matches.margins
    first_step = math.floor(float(margins.min()) / HISTOGRAM_STEP)
    last_step = math.floor(float(margins.max()) / HISTOGRAM_STEP) + 1
    # Multiples of 0.01 are rounded, because they are not exact in binary.
    edges = [round(step * HISTOGRAM_STEP, 2) for step in range(first_step, last_step + 1)]
    histogram, _ = np.histogram(margins, edges)
    report: dict[str, Any] = {
        "pairs": result.num_pairs,
        "margin": result.margin,
        "matches": len(margins),
        "lines": [_describe_lines(corpus.sources), _describe_lines(corpus.targets)],
        "in_both_files": result.num_equal_texts,
        "histogram": {"margins": edges, "matches": histogram.tolist()},
    }
    if result.curves:
        report["calibration"] = {
            "planted_pairs": len(corpus.planted),
            "skipped_pairs": corpus.num_skipped,
            "chosen": result.curves.look_up(result.margin),
            "curves": [result.curves.look_up(edge) for edge in edges[:-1]],
        }
    return report


def _describe_lines(lines: DistinctLines) -> dict[str, Any]:
    """Return how many lines of a file were read, how many were distinct, and how many were dropped by reason."""
    num_dropped = sum(lines.dropped.values())
    return {"read": len(lines.texts) + num_dropped, "distinct": len(lines.texts), "dropped": lines.dropped}
