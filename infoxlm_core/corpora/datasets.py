"""The corpora of a prepared text, as a tracker lists what a run has read: by name and digest of what was kept."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from infoxlm_core import manifests

_PART = re.compile(r"(?P<kind>mono|pairs|held_out|held_out_mono)/(?P<language>[^/]+)/(?P<corpus>[^/]+)\.parquet")


@dataclass(frozen=True)
class Dataset:
    """One corpus."""

    name: str
    digest: str
    """Of all its files, as hexadecimal digits: another corpus, cleaning or split has another one."""

    held_out: bool
    """No training text: kept for evaluation."""

    languages: tuple[str, ...]
    lines: Mapping[str, int] = field(default_factory=dict)
    """Read and kept, of each kind of text."""


def list_datasets(files: Mapping[str, Mapping[str, Any]], report: Iterable[Mapping[str, Any]]) -> list[Dataset]:
    """The corpora of a prepared text in the order of their names.

    Args:
        files: of its manifest, with their SHA-256.
        report: `files` of its report.json, with the lines that were read and kept.
    """
    parts: dict[str, dict[str, str]] = {}
    languages: dict[str, set[str]] = {}
    training: set[str] = set()
    for path, said in files.items():
        if match := _PART.fullmatch(path):
            parts.setdefault(match["corpus"], {})[path] = said["sha256"]
            languages.setdefault(match["corpus"], set()).update(match["language"].split("-"))
            if not match["kind"].startswith("held_out"):
                training.add(match["corpus"])
    lines: dict[str, dict[str, int]] = {}
    for entry in report:
        of = lines.setdefault(entry["corpus"], {})
        for what in ("read", "kept"):
            of[f"{entry['kind']} {what}"] = of.get(f"{entry['kind']} {what}", 0) + entry[what]
    return [
        Dataset(
            name=name,
            digest=manifests.digest(found).removeprefix("sha256:"),
            held_out=name not in training,
            languages=tuple(sorted(languages[name])),
            lines=lines.get(name, {}),
        )
        for name, found in sorted(parts.items())
    ]
