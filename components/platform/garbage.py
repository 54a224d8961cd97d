"""Garbage collection: delete old store items that no needed item refers to.

Young items and the artifacts of registered versions are needed. A needed item also needs every item whose digest is in
its manifests, checkpoints or notes (`NOTES`). For example, an unfinished training run needs its shards, and the shards
need their corpus. `parameters/` is never deleted, because a recurring Kubeflow run may refer to its files.
"""

import re
import shutil
from collections import defaultdict
from collections.abc import Collection
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

from components.adapters import storage
from components.adapters.storage import Entry
from components.platform import artifact_files, artifacts
from infoxlm_core import manifests
from infoxlm_core.training import checkpoints

NOTES = ("work", "begun")
"""Store directories with notes: small files that describe a training run or a job."""
DIRECTORIES = (*artifacts.KINDS, *NOTES, "runs", "outcome", "cost", "preparing")
"""Store directories whose items may be deleted."""
_FILES_WITH_DIGESTS = (manifests.NAME, checkpoints.META)
_KEY = re.compile(r"(?<![0-9a-f])[0-9a-f]{16}(?![0-9a-f])")
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_OWN_DIGEST = re.compile(rf'"digest": "({_DIGEST.pattern})"')  # a manifest contains its own digest in this form


@dataclass(frozen=True)
class Item:
    """A store item: an artifact, a run's checkpoints, a note, an outcome, or an artifact's cost records."""

    name: str
    """Path in the store, such as corpus/3f2a…"""
    files: tuple[str, ...]
    """Paths of the item's files, the manifest first."""
    size: int
    """Total size in bytes."""
    modified: datetime
    """Modification time of the newest file."""
    identifiers: frozenset[str]
    """Digests and keys by which other items refer to this item."""
    references: frozenset[str]
    """All digests and keys in this item's manifests, checkpoints and notes."""


def list_items(store: str) -> list[Item]:
    """Return all items of a store, sorted by name, with their references to other items."""
    opened_store = storage.open(store)
    stored_files = opened_store.entries()
    if opened_store.directory is None:
        # A preparation without a cluster leaves its intermediate files only in the local copy of a remote store.
        local_files = storage.open(artifacts.local_directory(store) / "preparing").entries()
        stored_files += [replace(local_file, name=f"preparing/{local_file.name}") for local_file in local_files]
    files_by_item: dict[str, list[Entry]] = defaultdict(list)
    for stored_file in stored_files:
        name = _find_item_name(stored_file.name)
        if name:
            files_by_item[name].append(stored_file)
    return [_read_item(opened_store, name, files) for name, files in sorted(files_by_item.items())]


def _find_item_name(path: str) -> str:
    """Return the name of the item that contains a file, or "" if garbage collection must ignore the file."""
    directory, *inner_path = path.split("/")
    # A name with a dot in front belongs to a lock, or to an artifact that is being built or downloaded.
    if directory not in DIRECTORIES or not inner_path or inner_path[0].startswith("."):
        return ""
    if directory == "cost":  # cost/RUN/KIND/KEY/ID.json
        return path.rpartition("/")[0]
    name = inner_path[0]
    if directory == "work":  # JOB.json and JOB.followed form one item
        name, _, _ = name.partition(".")
    return f"{directory}/{name}"


def _read_item(store: storage.Store, name: str, files: list[Entry]) -> Item:
    """Make an item from its files. Read its digest and other items' digests from manifests, checkpoints and notes."""
    is_note = name.partition("/")[0] in NOTES  # a small file about a job or a training run
    identifiers = set(_KEY.findall(name))
    references: set[str] = set()
    for stored_file in files:
        has_digests = Path(stored_file.name).name in _FILES_WITH_DIGESTS
        if is_note or has_digests:
            content, _ = store.get(stored_file.name) or (b"", "")  # the file may be deleted meanwhile
            text = content.decode(errors="replace")
            # Search the text instead of parsing it, so that a damaged or older file keeps its references.
            references.update(_DIGEST.findall(text), _KEY.findall(text))
            identifiers.update(_OWN_DIGEST.findall(text))
    manifest = f"{name}/{manifests.NAME}"
    # Sort the manifest first, because `delete` begins with the first file.
    file_names = sorted((file.name for file in files), key=lambda file_name: (file_name != manifest, file_name))
    return Item(
        name,
        files=tuple(file_names),
        size=sum(stored_file.size for stored_file in files),
        modified=max(stored_file.modified for stored_file in files),
        identifiers=frozenset(identifiers),
        references=frozenset(references),
    )


def find_deletable(
    items: Collection[Item], roots: Collection[str], min_age: timedelta, current_time: datetime | None = None
) -> list[Item]:
    """Return the old items that no needed item refers to.

    Args:
        items: all items of a store.
        roots: digests and keys of artifacts that are needed outside the store, such as registered models.
        min_age: smallest age for deletion; all younger items are needed.
        current_time: reference time for ages; default: now.
    """
    newest_deletable_time = (current_time or datetime.now(UTC)) - min_age
    needed_identifiers = set(roots)
    needed_run_keys: set[str] = set()  # a needed run also needs the notes (`NOTES`) that name it
    candidates = list(items)  # items that are not known to be needed
    while True:
        needed_items = []
        for item in candidates:
            is_young = item.modified > newest_deletable_time
            if is_young or _is_referenced(item, needed_identifiers, needed_run_keys):
                needed_items.append(item)
        if not needed_items:
            return candidates
        candidates = [item for item in candidates if item not in needed_items]
        # Needed items need all items they refer to, so check the remaining candidates again.
        for item in needed_items:
            needed_identifiers |= item.references
            if item.name.startswith("runs/"):
                needed_run_keys |= item.identifiers


def _is_referenced(item: Item, needed_identifiers: set[str], needed_run_keys: set[str]) -> bool:
    """Return whether a needed item depends on this item."""
    if item.name.startswith(("runs/", "cost/")):  # no item depends on checkpoints or cost records
        return False
    if item.name.startswith(NOTES):  # a restarted job or a resumed training run reads its note
        return not needed_run_keys.isdisjoint(item.references)
    return not needed_identifiers.isdisjoint(item.identifiers)


def delete(store: str, item: Item) -> None:
    """Delete an item and its local copy. The manifest is deleted first, so that no reader sees a partial artifact."""
    opened_store = storage.open(store)
    first_file, *other_files = item.files  # the manifest, if the item has one
    opened_store.delete(first_file)
    if other_files:
        opened_store.delete(*other_files)
    # Also remove the empty directories that are left, the local copy, and tokens that were streamed to this machine.
    path = (opened_store.directory or artifacts.local_directory(store)) / item.name
    for directory in (path, artifacts.streaming_directory(path)):
        shutil.rmtree(directory, ignore_errors=True)
    artifact_files.find_marker(path).unlink(missing_ok=True)
