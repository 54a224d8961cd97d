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

MAX_PLANTED = 2_000  # maximum number of planted pairs; more would change the neighbours in a small file
HISTOGRAM_STEP = 0.01  # bar width of the margin histogram


class Corpus(NamedTuple):
    """Two files in two languages, and the translation pairs to plant."""

    sources: DistinctLines
    targets: DistinctLines
    planted: list[tuple[str, str]]
    num_skipped: int  # number of translation pairs that are not planted


class MiningResult(NamedTuple):
    """The matches between the lines of two files, of which the first `num_pairs` are mined."""

    matches: Matches
    num_pairs: int  # number of matches that reach the chosen margin
    margin: float  # the chosen margin
    curves: Curves | None  # None if the user chose the margin
    num_equal_texts: int  # number of texts in both files


def read_corpus(paths: tuple[Path, Path], pairs: Path | None, codes: LanguagePair) -> Corpus:
    """Read two files and, for calibration, a file of translation pairs.

    Calibration plants some of the pairs: it adds them to the lines of the files and measures how many are found.

    Args:
        paths: two files with one sentence per line.
        pairs: file of translation pairs; None: no calibration.
        codes: languages of the two files, and of the two sides of the pairs.

    Raises:
        InputError: a file is missing, damaged or empty, or there are too few pairs.
    """
    sources = files.read_distinct(paths[0])
    targets = files.read_distinct(paths[1])
    if pairs is None:
        return Corpus(sources, targets, planted=[], num_skipped=0)
    candidates = files.read_pairs(pairs, codes)
    planted = _select_planted(candidates, {*sources.texts, *targets.texts})
    if len(planted) < calibration.FEWEST_PAIRS:
        raise InputError(
            f"{pairs}: only {len(planted)} of {len(candidates)} pairs are neither in the files nor repeated: give at "
            f"least {calibration.FEWEST_PAIRS} such pairs for --calibrate"
        )
    return Corpus(sources, targets, planted, num_skipped=len(candidates) - len(planted))


def _select_planted(pairs: Sequence[tuple[str, str]], texts_of_files: set[str]) -> list[tuple[str, str]]:
    """Draw up to `MAX_PLANTED` pairs to plant (add to the files), without repeated texts or texts from the files."""
    used_texts = set(texts_of_files)
    planted = []
    shuffled_pairs = sorted(pairs, key=lambda pair: cleaning.digest(*pair))  # a random order, the same in every run
    for source, target in shuffled_pairs:
        # Equal texts are never mined, so they would not show how well translations are found.
        if source != target and used_texts.isdisjoint((source, target)):
            used_texts.update((source, target))
            planted.append((source, target))
        if len(planted) == MAX_PLANTED:
            break
    return planted


def mine_pairs(
    corpus: Corpus, embedder: Embedder, model_digest: str, cache: Path, precision: float, threshold: float | None
) -> MiningResult:
    """Match the lines of two files by their vectors, and mine the matches whose margin reaches a threshold.

    Args:
        corpus: the lines, and the translation pairs for calibration.
        embedder: embedder for the lines.
        model_digest: digest of the embedder's model files.
        cache: directory for cached vectors; see `embed_cached`.
        precision: minimum share of correct pairs among the mined pairs; ignored if a threshold is given.
        threshold: lowest margin of a mined pair; None: the lowest margin that reaches the precision.

    Raises:
        InputError: no margin reaches the precision, or no line can be matched.
    """
    search = _find_neighbours(corpus, embedder, model_digest, cache)
    matches = match_lines(search)
    if not len(matches.margins):
        raise InputError("no line is the neighbour of a line in the other file: give files with more lines")
    curves = None
    if threshold is None:
        curves = calibration.estimate(search, matches)
        threshold = calibration.choose_margin(curves, precision)
    num_pairs = int((matches.margins >= threshold).sum())
    num_equal_texts = int((search.excluded_targets >= 0).sum())
    return MiningResult(matches, num_pairs, threshold, curves, num_equal_texts)


def _find_neighbours(corpus: Corpus, embedder: Embedder, model_digest: str, cache: Path) -> Search:
    """Embed the files' lines and planted translations, and find their neighbours. Exclude equal texts from matching."""
    source_texts = [corpus.sources.texts]
    target_texts = [corpus.targets.texts]
    if corpus.planted:
        # Planted lines have separate arrays, so that a file's cached vectors can be reused for other language pairs.
        source_texts.append([source for source, _ in corpus.planted])
        target_texts.append([target for _, target in corpus.planted])
    source_vectors = [vector_files.embed_cached(embedder, model_digest, texts, cache) for texts in source_texts]
    target_vectors = [vector_files.embed_cached(embedder, model_digest, texts, cache) for texts in target_texts]
    forward, backward = find_neighbours(source_vectors, target_vectors)
    none_excluded = [-1] * len(corpus.planted)  # planted texts are never in the files
    excluded_targets = np.array(_find_equal_texts(corpus.sources.texts, corpus.targets.texts) + none_excluded)
    excluded_sources = np.array(_find_equal_texts(corpus.targets.texts, corpus.sources.texts) + none_excluded)
    return Search(forward, backward, excluded_targets, excluded_sources, len(corpus.planted))


def _find_equal_texts(texts: Sequence[str], other_texts: Sequence[str]) -> list[int]:
    """Return each text's row in the other file, or -1 if the other file does not contain the text."""
    row_of_text = {text: row for row, text in enumerate(other_texts)}
    return [row_of_text.get(text, -1) for text in texts]


def list_pairs(corpus: Corpus, result: MiningResult) -> Iterator[MinedPair]:
    """Yield the mined pairs in descending order of margin."""
    sources = corpus.sources
    targets = corpus.targets
    for row in range(result.num_pairs):  # matches are sorted by margin, so the first ones reach the threshold
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
    """Return a report on the lines, the matches, the margin histogram and the calibration."""
    margins = result.matches.margins
    first_step = math.floor(float(margins.min()) / HISTOGRAM_STEP)
    last_step = math.floor(float(margins.max()) / HISTOGRAM_STEP) + 1
    # Round the edges, because multiples of 0.01 are not exact in binary.
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
            "curves": [result.curves.look_up(edge) for edge in edges[:-1]],  # a point for each bar of the histogram
        }
    return report


def _describe_lines(lines: DistinctLines) -> dict[str, Any]:
    """Return a file's number of read lines, number of distinct lines, and numbers of dropped lines by reason."""
    num_dropped = sum(lines.dropped.values())
    return {"read": len(lines.texts) + num_dropped, "distinct": len(lines.texts), "dropped": lines.dropped}
