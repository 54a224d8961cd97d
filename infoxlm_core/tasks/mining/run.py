"""Measure mining on sets in the layout of BUCC 2018.

A checksum of the sentence ids divides the sources into two halves. The first half selects the threshold with the best
F1, and the second half is scored with this threshold. The search covers the sentences of both halves together.
"""

import logging
import tempfile
import zlib
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from infoxlm_core import manifests
from infoxlm_core.errors import InputError
from infoxlm_core.model.huggingface.any_encoder import describe
from infoxlm_core.tasks import vector_files
from infoxlm_core.tasks.embedding import Embedder, load_embedder
from infoxlm_core.tasks.mining import bucc
from infoxlm_core.tasks.mining.bucc import MiningSet
from infoxlm_core.tasks.mining.matching import Matches, Search, match_lines
from infoxlm_core.tasks.mining.neighbours import check_faiss_if_large, find_neighbours
from infoxlm_core.tasks.mining.task import MiningConfig
from infoxlm_core.tasks.scores import Scores, mean_over

logger = logging.getLogger(__name__)


class MatchedHalf(NamedTuple):
    """The matches of one half of the sources, in descending order of margin."""

    margins: np.ndarray  # (N,) float32
    is_gold: np.ndarray  # (N,) bool
    num_gold: int  # number of gold pairs in the half, matched or not


def read_sets(config: MiningConfig) -> dict[str, MiningSet]:
    """Return a mapping from language to mining set.

    Raises:
        InputError: a set is missing or damaged, or needs faiss, which is not installed.
    """
    sets = {}
    for language, files in bucc.find_sets(Path(config.data), config.pivot, config.name).items():
        mining_set = bucc.read_set(files)
        check_faiss_if_large(len(mining_set.sources.ids), len(mining_set.targets.ids))
        sets[language] = mining_set
    return sets


def check(config: MiningConfig, has_grid: bool) -> None:  # noqa: ARG001
    """Raise InputError if a set is missing or damaged, or needs faiss, which is not installed."""
    read_sets(config)


def list_test_files(config: MiningConfig) -> list[Path]:
    """List the local files with sentences, without the gold files."""
    sets = bucc.find_sets(Path(config.data), config.pivot, config.name)
    return [path for files in sets.values() for path in (files.sources, files.targets)]


def measure(config: MiningConfig, encoder: Path, output: Path) -> Scores:
    """Match the sentences of every set by the vectors of `infoxlm embed`, and score the matches against the gold pairs.

    Write all matches of a language to LANGUAGE.parquet, in descending order of margin.

    Raises:
        InputError: the model or a set is missing or not usable.
    """
    sets = read_sets(config)
    embedder = load_embedder(encoder, batch_size=config.batch_size, max_tokens=config.max_tokens, prefix=config.prefix)
    scores = {}
    counts = {}
    thresholds = {}
    content_by_language = {}
    for language, mining_set in sets.items():
        # Sort the gold pairs, because a frozenset has no fixed order, on which the digest would depend.
        content_by_language[language] = mining_set._asdict() | {"gold": sorted(mining_set.gold)}
        matches = _match(mining_set, embedder, output)
        # Scores would be too high on the half that selects the threshold, so the other half is scored.
        threshold_half, test_half = split_into_halves(mining_set, matches)
        thresholds[language] = choose_threshold(threshold_half)
        scores[language] = score_half(test_half, thresholds[language])
        counts[language] = test_half.num_gold
        _write_matches(output / f"{language}.parquet", mining_set, matches)
        logger.info("%s: F1 %.4f at margin %.4f", language, scores[language]["f1"], thresholds[language])
    return Scores(
        "mining",
        scores,
        mean_over(scores),
        counts=counts,
        test_set=manifests.digest(content_by_language),
        details={
            "thresholds": thresholds,
            "vector": embedder.spec._asdict() | {"prefix": embedder.encoder.prefix},
            "encoder": describe(embedder.encoder.model),
        },
    )


def _match(mining_set: MiningSet, embedder: Embedder, output: Path) -> Matches:
    """Match the sources of a set with its targets."""
    output.mkdir(parents=True, exist_ok=True)
    # Temporary files hold the vectors, because memory may be too small.
    with tempfile.TemporaryDirectory(dir=output) as directory:
        model_digest = ""  # not needed, because only one model uses the directory
        source_vectors = vector_files.embed_cached(embedder, model_digest, mining_set.sources.texts, Path(directory))
        target_vectors = vector_files.embed_cached(embedder, model_digest, mining_set.targets.texts, Path(directory))
        forward, backward = find_neighbours([source_vectors], [target_vectors])
    # Exclude no target and no source (-1), because two equal texts may be a gold pair.
    excluded_targets = np.full(len(forward.rows), -1)
    excluded_sources = np.full(len(backward.rows), -1)
    return match_lines(Search(forward, backward, excluded_targets, excluded_sources, num_planted=0))


def split_into_halves(mining_set: MiningSet, matches: Matches) -> tuple[MatchedHalf, MatchedHalf]:
    """Split the matches and gold pairs into a half for the threshold and a half for the scores.

    Raises:
        InputError: a half has no gold pair.
    """
    # The half depends only on a checksum of the sentence's id, so a sentence stays in its half if the set changes.
    half_of_source = np.array([zlib.crc32(source_id.encode()) % 2 for source_id in mining_set.sources.ids])
    pairs = zip(matches.sources.tolist(), matches.targets.tolist(), strict=True)
    is_gold = np.array([pair in mining_set.gold for pair in pairs], dtype=bool)
    halves = []
    for half in (0, 1):
        is_in_half = half_of_source[matches.sources] == half
        num_gold = sum(1 for source, _ in mining_set.gold if half_of_source[source] == half)
        if num_gold == 0:
            raise InputError(f"too few gold pairs ({len(mining_set.gold)}) to choose and test a threshold: add pairs")
        halves.append(MatchedHalf(matches.margins[is_in_half], is_gold[is_in_half], num_gold))
    return halves[0], halves[1]


def choose_threshold(half: MatchedHalf) -> float:
    """Return the threshold with the best F1. All margins are candidates."""
    # In descending order of margin, exactly the first n matches reach the margin of match n.
    num_matches = np.arange(1, len(half.margins) + 1)
    f1 = 2 * half.is_gold.cumsum() / (num_matches + half.num_gold)
    return float(half.margins[f1.argmax()])


def score_half(half: MatchedHalf, threshold: float) -> dict[str, float]:
    """Return the F1, precision and recall of the matches whose margin reaches the threshold."""
    is_mined = half.margins >= threshold
    num_correct = int(half.is_gold[is_mined].sum())
    num_mined = int(is_mined.sum())
    return {
        "f1": 2 * num_correct / (num_mined + half.num_gold),  # equals the harmonic mean of precision and recall
        "precision": num_correct / max(num_mined, 1),
        "recall": num_correct / half.num_gold,
    }


def _write_matches(path: Path, mining_set: MiningSet, matches: Matches) -> None:
    """Write a row per match, with its margin, sentence ids, texts, and the flag `is_gold`."""
    sources, targets, gold = mining_set
    pairs = list(zip(matches.sources.tolist(), matches.targets.tolist(), strict=True))
    columns = {
        "margin": matches.margins,
        "source_id": [sources.ids[source] for source, _ in pairs],
        "target_id": [targets.ids[target] for _, target in pairs],
        "source": [sources.texts[source] for source, _ in pairs],
        "target": [targets.texts[target] for _, target in pairs],
        "is_gold": [pair in gold for pair in pairs],
    }
    pq.write_table(pa.table(columns), path)
