"""Measure retrieval on a general test set, to see what a model forgets when it is trained further.

The outcome of each question is recorded, so that the promotion gate can limit the loss.
"""

from collections import Counter
from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from typing import ClassVar

import pandas as pd

from infoxlm_core import manifests
from infoxlm_core.config import AlignedSetConfig, EvaluationConfig
from infoxlm_core.tasks import unreserved
from infoxlm_core.tasks.embedding import Embedder, load_embedder
from infoxlm_core.tasks.questions import Questions, digest_question, tabulate_outcomes
from infoxlm_core.tasks.retrieval.files import AlignedSentences, list_test_files, read_aligned
from infoxlm_core.tasks.retrieval.nearest import Hits, find_nearest_in_both_directions, mark_hits
from infoxlm_core.tasks.retrieval.run import score_directions
from infoxlm_core.tasks.scores import Scores, mean_over
from infoxlm_core.tasks.task import Task


class Guard(Task[EvaluationConfig]):
    """Retrieval on a general test set, as a task of the stage `evaluate`. Suites do not have this task."""

    name: ClassVar[str] = "guard"
    metrics: ClassVar[tuple[str, ...]] = ("mean",)
    unit: ClassVar[str] = "pairs"

    def measure_held_out(self, questions: Questions, model: Path, config: EvaluationConfig) -> Scores | None:  # noqa: ARG002
        """Measure the test set `config.guard`, or return None if there is none."""
        if config.guard is None:
            return None
        embedder = load_embedder(model, batch_size=config.batch_size, max_tokens=config.max_tokens)
        return measure(config.guard, model, embedder)


def measure(config: AlignedSetConfig, model: Path, embedder: Embedder) -> Scores:
    """Measure retrieval on a test set in both directions, with the vectors that `infoxlm embed` computes.

    Args:
        config: which test set and languages to read.
        model: directory of the model, whose manifest tells whether the set was removed from its training text.
        embedder: the loaded model.

    Raises:
        InputError: the set or a language is missing or not usable.
    """
    data = Path(config.data)
    sets = read_aligned(data, config.pivot, config.languages)
    hits = retrieve(sets, embedder)
    scores = {language: score_directions(hits[language]) for language in sets}
    test_set = manifests.digest(sets)
    details: dict[str, list[str]] = {}
    corpus = data if (data / "held_out").is_dir() else None
    unreserved_files = unreserved.find_unreserved_files(model, list_test_files(data), corpus)
    if unreserved_files:
        details["not_reserved"] = unreserved_files
    return Scores(
        Guard.name,
        scores,
        mean_over(scores),
        counts={language: len(sources) for language, (sources, _) in sets.items()},
        test_set=test_set,
        details=details,
        outcomes=_tabulate(sets, hits, test_set),
    )


def retrieve(sets: Mapping[str, AlignedSentences], embedder: Embedder) -> dict[str, Hits]:
    """Search for the translation of every sentence in both directions, and return the hits by language."""
    # Most sets have the same pivot sentences in all languages, so each distinct one is embedded once.
    distinct_sources = list(dict.fromkeys(chain.from_iterable(sources for sources, _ in sets.values())))
    row_of_source = {source: row for row, source in enumerate(distinct_sources)}
    distinct_vectors = embedder(distinct_sources)  # (distinct sources, d)
    hits: dict[str, Hits] = {}
    for language, (sources, targets) in sets.items():
        source_vectors = distinct_vectors[[row_of_source[source] for source in sources]]
        target_vectors = embedder(targets)
        from_pivot, to_pivot = find_nearest_in_both_directions(source_vectors, target_vectors)
        hits[language] = mark_hits({"from_pivot": from_pivot, "to_pivot": to_pivot})
    return hits


def _tabulate(sets: Mapping[str, AlignedSentences], hits: Mapping[str, Hits], test_set: str) -> pd.DataFrame:
    """Return a table with a row for each question in each direction, from which two models are compared.

    The id of a question contains the digest of the test set, so that outcomes on different sets are never compared.
    """
    tables = []
    for language, (sources, _) in sets.items():
        occurrences: Counter[str] = Counter()
        question_ids = []
        for source in sources:
            occurrences[source] += 1  # a set may have several translations of one sentence
            question_ids.append(digest_question(f"{test_set}/{occurrences[source]}/{source}"))
        for direction, is_hit in hits[language].items():
            table = tabulate_outcomes(Guard.name, language, question_ids, is_hit.numpy(), direction=direction)
            tables.append(table)
    return pd.concat(tables, ignore_index=True)
