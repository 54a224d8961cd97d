"""What of a store nobody needs any more: it is old, and nothing that stays names it.

What stays: everything younger than a limit; what the registry's versions were made of; and, over and over, what one of
these names by digest in a manifest or a checkpoint. A training that runs saves, so its shards and its corpus stay.
"""

import re
import shutil
from collections import defaultdict
from collections.abc import Collection
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from components.adapters import storage
from components.adapters.storage import Entry
from components.platform import artifact_files, artifacts
from infoxlm_core import manifests
from infoxlm_core.training import checkpoints

FOLDERS = (*artifacts.KINDS, "runs", "work", "outcome")
"""What lies in these folders of a store may be deleted, one by one."""
_FACTS = (manifests.NAME, checkpoints.META)
_KEY = re.compile(r"(?<![0-9a-f])[0-9a-f]{16}(?![0-9a-f])")
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")


@dataclass(frozen=True)
class Thing:
    """An artifact, the checkpoints of a run, or a note."""

    name: str
    """Below the store, such as corpus/3f2a…"""
    files: tuple[str, ...]
    """Likewise, the manifest first: without it the others are nothing."""
    size: int
    """Bytes."""
    modified: datetime
    """Its youngest file."""
    names: frozenset[str]
    """By which others know it: the digests of its manifests, and the key in its name."""
    mentions: frozenset[str]
    """All digests and keys in its manifests, checkpoints, and what it tells a job to do."""


def survey(store: str) -> list[Thing]:
    """All that lies in a store's folders, sorted by name; small files of facts are read."""
    there = storage.open(store)
    by_name: dict[str, list[Entry]] = defaultdict(list)
    for entry in there.entries():
        folder, *inner = entry.name.split("/")
        if folder in FOLDERS and inner and not inner[0].startswith("."):
            name = (
                inner[0].partition(".")[0] if folder == "work" else inner[0]
            )  # a job, and the sign that it is followed
            by_name[f"{folder}/{name}"].append(entry)
    return [_look_at(there, name, entries) for name, entries in sorted(by_name.items())]


def _look_at(there: storage.Store, name: str, entries: list[Entry]) -> Thing:
    names, mentions = set(_KEY.findall(name)), set()
    for entry in entries:
        if Path(entry.name).name in _FACTS or name.startswith("work/"):
            content, _ = there.get(entry.name) or (b"", "")
            text = content.decode(errors="replace")
            mentions |= {*_DIGEST.findall(text), *_KEY.findall(text)}
            names |= set(re.findall(rf'"digest": "({_DIGEST.pattern})"', text))
    size, modified = sum(entry.size for entry in entries), max(entry.modified for entry in entries)
    first = f"{name}/{manifests.NAME}"
    files = sorted((entry.name for entry in entries), key=lambda file: (file != first, file))
    return Thing(name, tuple(files), size, modified, frozenset(names), frozenset(mentions))


def superfluous(
    things: Collection[Thing], needed: Collection[str], older: timedelta, now: datetime | None = None
) -> list[Thing]:
    """Those that may go; `needed` are digests and keys of artifacts that something outside of the store needs."""
    limit = (now or datetime.now(UTC)) - older
    known, left = set(needed), list(things)
    keys_of_runs: set[str] = set()

    def stays(thing: Thing) -> bool:
        if thing.modified > limit:
            return True
        if thing.name.startswith("runs/"):  # an artifact that is made needs its checkpoints no more
            return False
        if thing.name.startswith("work/"):  # a job that starts again reads it again
            return not keys_of_runs.isdisjoint(thing.mentions)
        return not known.isdisjoint(thing.names)

    while staying := [thing for thing in left if stays(thing)]:
        left = [thing for thing in left if thing not in staying]
        for thing in staying:
            known |= thing.mentions
            if thing.name.startswith("runs/"):
                keys_of_runs |= thing.names
    return left


def delete(store: str, thing: Thing) -> None:
    """Delete a thing: an artifact's manifest first, so that it is gone before it is incomplete."""
    there = storage.open(store)
    there.delete(thing.files[0])
    if rest := thing.files[1:]:
        there.delete(*rest)
    path = (there.directory or artifacts.local(store)) / thing.name  # of a store elsewhere, this machine's copy
    shutil.rmtree(path, ignore_errors=True)
    artifact_files.marker_of(path).unlink(missing_ok=True)
