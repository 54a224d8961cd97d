"""Measure retrieval on a general test set, to find out how much a model forgets in further training.

The outcome of each question is recorded, so that the promotion gate can limit the loss of accuracy.
"""

from collections import Counter
from collections.abc import Mapping
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
    """Retrieve each sentence's translation in a general test set, in both directions.

    This task runs in the stage `evaluate`, and is not available in suites.
    """

    name: ClassVar[str] = "guard"
    metrics: ClassVar[tuple[str, ...]] = ("mean",)
    unit: ClassVar[str] = "pairs"

    def measure_held_out(self, questions: Questions, model: Path, config: EvaluationConfig) -> Scores | None:  # noqa: ARG002
        """Measure retrieval on the test set `config.guard`. Return None if no set is configured."""
        if config.guard is None:
            return None
        embedder = load_embedder(model, batch_size=config.batch_size, max_tokens=config.max_tokens)
        return measure(config.guard, model, embedder)


def measure(config: AlignedSetConfig, model: Path, embedder: Embedder) -> Scores:
    """Measure retrieval on a test set in both directions, with the vectors of `infoxlm embed`.

    Args:
        config: the test set and its languages.
        model: directory of the model; its manifest lists the test sets removed from the training text.
        embedder: the loaded model.

    Raises:
        InputError: the set or a language is missing or not usable.
    """
    data = Path(config.data)
    sets = read_aligned(data, config.pivot, config.languages)
    hits = retrieve(sets, embedder)
    scores = {language: score_directions(hits[language]) for language in sets}
    test_set_digest = manifests.digest(sets)
    corpus = data if (data / "held_out").is_dir() else None  # the test set may be a prepared corpus
    unreserved_files = unreserved.find_unreserved_files(model, list_test_files(data), corpus)
    return Scores(
        Guard.name,
        scores,
        mean_over(scores),
        counts={language: len(sources) for language, (sources, _) in sets.items()},
        test_set=test_set_digest,
        details={"not_reserved": unreserved_files} if unreserved_files else {},
        outcomes=_tabulate(sets, hits, test_set_digest),
    )


def retrieve(sets: Mapping[str, AlignedSentences], embedder: Embedder) -> dict[str, Hits]:
    """Search for the translation of every sentence in both directions, and return the hits by language."""
    # Most sets have the same pivot sentences in all languages, so each distinct sentence is embedded once.
    distinct_sources = list(dict.fromkeys(source for sources, _ in sets.values() for source in sources))
    row_of_source = {source: row for row, source in enumerate(distinct_sources)}
    distinct_vectors = embedder(distinct_sources)  # (distinct sources, d)
    hits: dict[str, Hits] = {}
    for language, (sources, targets) in sets.items():
        source_vectors = distinct_vectors[[row_of_source[source] for source in sources]]
        target_vectors = embedder(targets)
        from_pivot, to_pivot = find_nearest_in_both_directions(source_vectors, target_vectors)
        hits[language] = mark_hits({"from_pivot": from_pivot, "to_pivot": to_pivot})
    return hits


def _tabulate(sets: Mapping[str, AlignedSentences], hits: Mapping[str, Hits], test_set_digest: str) -> pd.DataFrame:
    """Tabulate the outcome of the task `Guard` for each question and direction, for the comparison of two models.

    Question ids depend on `test_set_digest`, so that outcomes on different sets are never compared.
    """
    tables = []
    for language, (sources, _) in sets.items():
        occurrences: Counter[str] = Counter()
        question_ids = []
        for source in sources:
            occurrences[source] += 1  # a set may contain several translations of the same sentence
            question_ids.append(digest_question(f"{test_set_digest}/{occurrences[source]}/{source}"))
        for direction, is_hit in hits[language].items():
            tables.append(tabulate_outcomes(Guard.name, language, question_ids, is_hit.numpy(), direction=direction))
    return pd.concat(tables, ignore_index=True)
