"""List the corpora of a prepared text by name and digest, for a tracker's list of inputs."""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from infoxlm_core import manifests

_TABLE = re.compile(r"(?P<kind>mono|pairs|held_out|held_out_mono)/(?P<language>[^/]+)/(?P<corpus>[^/]+)\.parquet")


@dataclass(frozen=True)
class Dataset:
    """A corpus of a prepared text."""

    name: str
    digest: str
    """Digest of the corpus's tables. It changes with the text, the cleaning and the split."""

    held_out: bool
    """Whether the corpus is reserved for evaluation."""

    languages: tuple[str, ...]
    lines: Mapping[str, int] = field(default_factory=dict)
    """Line counts by kind of text and outcome, such as {"pairs read": 90, "pairs kept": 80}."""


def list_datasets(
    table_files: Mapping[str, Mapping[str, Any]], counts_of_files: Iterable[Mapping[str, Any]]
) -> list[Dataset]:
    """Return the corpora of a prepared text, sorted by name.

    Args:
        table_files: `files` of the text's manifest: mapping from table path to size and digest.
        counts_of_files: `files` of the text's report.json: row counts of each input file.
    """
    digests_of_corpus: defaultdict[str, dict[str, str]] = defaultdict(dict)
    languages_of_corpus: defaultdict[str, set[str]] = defaultdict(set)
    training_corpora: set[str] = set()  # corpora with training tables
    for path, file_entry in table_files.items():
        table = _TABLE.fullmatch(path)
        if table is None:  # labelled.parquet contains text of several corpora
            continue
        corpus = table["corpus"]
        digests_of_corpus[corpus][path] = file_entry["sha256"]
        languages_of_corpus[corpus].update(table["language"].split("-"))
        if not table["kind"].startswith("held_out"):
            training_corpora.add(corpus)
    lines_of_corpus = _sum_lines(counts_of_files)
    datasets = []
    for corpus, digests in sorted(digests_of_corpus.items()):
        digest = manifests.digest(digests).removeprefix("sha256:")
        languages = tuple(sorted(languages_of_corpus[corpus]))
        is_held_out = corpus not in training_corpora
        datasets.append(Dataset(corpus, digest, is_held_out, languages, lines_of_corpus.get(corpus, {})))
    return datasets


def _sum_lines(counts_of_files: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, int]]:
    """Return a mapping from corpus to `Dataset.lines`."""
    lines: defaultdict[str, dict[str, int]] = defaultdict(Counter)
    for file_counts in counts_of_files:
        for outcome in ("read", "kept"):
            lines[file_counts["corpus"]][f"{file_counts['kind']} {outcome}"] += file_counts[outcome]
    return dict(lines)
