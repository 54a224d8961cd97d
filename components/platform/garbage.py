"""Garbage collection of a store: delete items that are old and that no remaining item refers to.

The roots are all items younger than a limit, and the artifacts of registered versions. Every item whose digest occurs
in a manifest, a checkpoint or a note of a remaining item remains as well, transitively. A training therefore keeps its
shards and their corpus from its start to its last checkpoint. `parameters/` is never deleted, because a recurring run
of Kubeflow may refer to its files.
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

NOTES = ("work", "begun")
"""Folders of small files that describe a training or a job."""
FOLDERS = (*artifacts.KINDS, *NOTES, "runs", "outcome", "cost")
"""Folders of a store whose items may be deleted."""
_DESCRIPTIONS = (manifests.NAME, checkpoints.META)
_KEY = re.compile(r"(?<![0-9a-f])[0-9a-f]{16}(?![0-9a-f])")
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")


@dataclass(frozen=True)
class Item:
    """An artifact, the checkpoints of a run, a note, or the cost records of an artifact."""

    name: str
    """Path in the store, such as corpus/3f2a…"""
    files: tuple[str, ...]
    """Paths of its files, the manifest first."""
    size: int
    """Bytes."""
    modified: datetime
    """Time of its newest file."""
    names: frozenset[str]
    """Names by which other items refer to it: the digests of its manifests, and the key in its path."""
    mentions: frozenset[str]
    """All digests and keys in its manifests, checkpoints and notes."""


def survey(store: str) -> list[Item]:
    """Return all items of a store, sorted by name; this reads all manifests, metadata of checkpoints, and notes."""
    opened = storage.open(store)
    by_name: dict[str, list[Entry]] = defaultdict(list)
    for entry in opened.entries():
        folder, *inner = entry.name.split("/")
        if folder not in FOLDERS or not inner or inner[0].startswith("."):
            continue
        name = inner[0]
        if folder == "work":
            name = name.partition(".")[0]  # JOB.json and JOB.followed are one item
        elif folder == "cost":
            name = "/".join(inner[:-1])
        by_name[f"{folder}/{name}"].append(entry)
    return [_inspect(opened, name, entries) for name, entries in sorted(by_name.items())]


def _inspect(store: storage.Store, name: str, entries: list[Entry]) -> Item:
    names, mentions = set(_KEY.findall(name)), set()
    for entry in entries:
        if Path(entry.name).name in _DESCRIPTIONS or name.startswith(tuple(f"{folder}/" for folder in NOTES)):
            content, _ = store.get(entry.name) or (b"", "")
            text = content.decode(errors="replace")
            mentions |= {*_DIGEST.findall(text), *_KEY.findall(text)}
            names |= set(re.findall(rf'"digest": "({_DIGEST.pattern})"', text))
    size, modified = sum(entry.size for entry in entries), max(entry.modified for entry in entries)
    manifest = f"{name}/{manifests.NAME}"
    files = sorted((entry.name for entry in entries), key=lambda file: (file != manifest, file))
    return Item(name, tuple(files), size, modified, frozenset(names), frozenset(mentions))


def find_deletable(
    items: Collection[Item], needed: Collection[str], older: timedelta, now: datetime | None = None
) -> list[Item]:
    """Return the items that nothing refers to and that are old enough to delete.

    Args:
        items: all items of a store.
        needed: digests and keys of artifacts that something outside of the store needs.
        older: items younger than this remain.
        now: the current time; default: the clock.
    """
    limit = (now or datetime.now(UTC)) - older
    needed_names, candidates = set(needed), list(items)
    keys_of_runs: set[str] = set()

    def remains(item: Item) -> bool:
        if item.modified > limit:
            return True
        if item.name.startswith(("runs/", "cost/")):  # no artifact depends on them
            return False
        if item.name.startswith(NOTES):  # a restarted job, or a resumed training, reads its note
            return not keys_of_runs.isdisjoint(item.mentions)
        return not needed_names.isdisjoint(item.names)

    while remaining := [item for item in candidates if remains(item)]:
        candidates = [item for item in candidates if item not in remaining]
        for item in remaining:
            needed_names |= item.mentions
            if item.name.startswith("runs/"):
                keys_of_runs |= item.names
    return candidates


def delete(store: str, item: Item) -> None:
    """Delete an item, manifest first, so that no reader sees a partial artifact; then delete its local copy."""
    opened = storage.open(store)
    opened.delete(item.files[0])
    if len(item.files) > 1:
        opened.delete(*item.files[1:])
    path = (opened.directory or artifacts.local_directory(store)) / item.name
    shutil.rmtree(path, ignore_errors=True)
    artifact_files.marker_of(path).unlink(missing_ok=True)
