"""The corpora of a prepared text, as a tracker lists the inputs of a run: by name and digest."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from infoxlm_core import manifests

_TABLE = re.compile(r"(?P<kind>mono|pairs|held_out|held_out_mono)/(?P<language>[^/]+)/(?P<corpus>[^/]+)\.parquet")


@dataclass(frozen=True)
class Dataset:
    """One corpus."""

    name: str
    digest: str
    """Digest of all its files; it changes with the corpus, the cleaning and the split."""

    held_out: bool
    """Whether the corpus is reserved for evaluation."""

    languages: tuple[str, ...]
    lines: Mapping[str, int] = field(default_factory=dict)
    """Numbers of lines read and kept, by kind of text."""


def list_datasets(files: Mapping[str, Mapping[str, Any]], report: Iterable[Mapping[str, Any]]) -> list[Dataset]:
    """List the corpora of a prepared text by name.

    Args:
        files: `files` of its manifest.
        report: `files` of its report.json.
    """
    digests_of_corpus: dict[str, dict[str, str]] = {}
    languages: dict[str, set[str]] = {}
    training: set[str] = set()  # names of corpora with a table that is not held out
    for path, file_facts in files.items():
        match = _TABLE.fullmatch(path)
        if match:
            digests_of_corpus.setdefault(match["corpus"], {})[path] = file_facts["sha256"]
            languages.setdefault(match["corpus"], set()).update(match["language"].split("-"))
            if not match["kind"].startswith("held_out"):
                training.add(match["corpus"])
    lines: dict[str, dict[str, int]] = {}
    for file_counts in report:
        corpus_counts = lines.setdefault(file_counts["corpus"], {})
        for count_name in ("read", "kept"):
            name = f"{file_counts['kind']} {count_name}"
            corpus_counts[name] = corpus_counts.get(name, 0) + file_counts[count_name]
    return [
        Dataset(
            name=name,
            digest=manifests.digest(digests).removeprefix("sha256:"),
            held_out=name not in training,
            languages=tuple(sorted(languages[name])),
            lines=lines.get(name, {}),
        )
        for name, digests in sorted(digests_of_corpus.items())
    ]
