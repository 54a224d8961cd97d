"""Directories that travel between this machine and a storage: whole, or not there at all.

push      every file with its SHA-256, sizes compared; then the manifest, if there is none yet
pull      the manifest first; its files into a folder that appears when every byte is right
drop      the manifest first
mirror    a copy of what other people have put there, without a manifest: found again by names, sizes and versions
"""

import logging
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path, PurePosixPath
from typing import Any

from components.adapters import storage
from components.adapters.storage import Entry, Store
from components.platform import verification
from infoxlm_core import locks, manifests, outside
from infoxlm_core.errors import DataCorrupt, InputError, StorageUnavailable

logger = logging.getLogger(__name__)

_FORGOTTEN = timedelta(days=1)
"""After this long nobody goes on with an upload in parts: it is a dead process's."""

Files = dict[str, Entry]
"""By name below what is copied."""


# ---------------------------------------------------------------- directories with a manifest


def manifest(uri: str) -> dict[str, Any] | None:
    """The manifest of a directory; None if there is none, and so no directory.

    Raises:
        DataCorrupt: it cannot be read.
    """
    found = storage.open(uri).get(manifests.NAME)
    if found is None:
        return None
    remedy = "delete it and make it again"
    return outside.parse_json(found[0], manifests.Manifest, f"{uri}/{manifests.NAME}", remedy, DataCorrupt)


def manifest_exists(uri: str) -> bool:
    return storage.open(uri).head(manifests.NAME) is not None


def push(directory: Path, uri: str, before_commit: Callable[[], None] = lambda: None, replace: bool = False) -> None:
    """Upload a directory that has a manifest. Called again it sends only what is not there yet.

    Args:
        directory: what is uploaded.
        uri: of the copy.
        before_commit: called when all files have arrived, before the manifest makes them a directory.
        replace: put it in the place of another of this name, which is gone first.

    Raises:
        DataCorrupt: a file is not what the manifest says, or did not arrive so.
        InputError: the storage refuses, or has something else under this name already.
        StorageUnavailable: the storage does not answer; what was sent is no directory yet.
    """
    content = (directory / manifests.NAME).read_bytes()
    files = {name: entry["sha256"] for name, entry in manifests.load(directory)["files"].items()}
    inner = {str(path.relative_to(directory)) for path in directory.rglob(manifests.NAME)} - {manifests.NAME}
    files |= {name: manifests.file_sha256(directory / name) for name in inner}  # of artifacts within this one
    there = storage.open(uri)
    there.sweep(_FORGOTTEN)
    if replace and manifest_exists(uri):
        drop(uri)
    for name, digest in sorted(files.items()):
        path = manifests.inside(directory, name)
        if _has(there, name, path.stat().st_size, digest):
            continue
        if manifests.file_sha256(path) != digest:
            raise DataCorrupt(f"{path} changed after it was made: remove {directory} and run again")
        there.upload(path, name, digest)
        if not _has(there, name, path.stat().st_size, digest):
            raise StorageUnavailable(f"{uri}/{name} is not what was sent: run again")
    before_commit()
    if there.put_if(manifests.NAME, content, None) is None:
        raise InputError(f"{uri} is there already with other content: remove it, or take it from there")
    logger.info("sent %d files to %s", len(files) + 1, uri)


def pull(uri: str, directory: Path) -> None:
    """Download a directory, whole or not at all: what its manifest names, and the manifests of artifacts within.

    Raises:
        InputError: there is none, or its manifest names a place outside of it.
        DataCorrupt: a file is missing or not what its manifest says.
        StorageUnavailable: the storage does not answer.
    """
    described = manifest(uri)
    if described is None:
        raise InputError(f"{uri} holds no {manifests.NAME}: run the stage that makes it first")
    there = storage.open(uri)
    manifests.make_folder(directory.parent)
    with tempfile.TemporaryDirectory(prefix=".fetch-", dir=directory.parent) as folder:
        partial = Path(folder) / "it"
        named = {manifests.inside(partial, name, uri) for name in described["files"]}
        named |= {above / manifests.NAME for path in named for above in path.parents if above.is_relative_to(partial)}
        wanted = {str(path.relative_to(partial)): path for path in (*named, partial / manifests.NAME)}
        for entry in there.entries():
            if path := wanted.get(entry.name):
                path.parent.mkdir(parents=True, exist_ok=True)
                there.download(entry.name, path)
        manifests.read(partial, described["kind"], made_with="the stage that makes it")
        shutil.rmtree(directory, ignore_errors=True)  # what an interrupted process left, if anything
        manifests.move_into_place(partial, directory, manifests.NAME)
    logger.info("fetched %s", uri)


def drop(uri: str) -> None:
    """Delete a directory: it is gone with its manifest, the rest follows."""
    there = storage.open(uri)
    there.delete(manifests.NAME)
    if rest := [entry.name for entry in there.entries()]:
        there.delete(*rest)


def _has(there: Store, name: str, size: int, digest: str) -> bool:
    found = there.head(name)
    return found is not None and (found.size, found.sha256) == (size, digest)


# ---------------------------------------------------------------- what other people have put there


def mirror(
    source: str,
    cache: Path,
    deep: bool = False,
    choose: Callable[[Files], Files] = lambda found: found,
    folders: Callable[[Files], Sequence[str]] = lambda _: (),
) -> Path:
    """Copy files into a folder of `cache` that is named by a digest of their names, sizes and versions, once.

    A copy that is damaged is fetched once more.

    Args:
        source: URI of a folder; without anything below it, of a file.
        cache: folder of all such copies.
        deep: also what lies in folders below it; the copy keeps the folder's own name.
        choose: which of the files are wanted.
        folders: which folders below it are wanted too, all that is in them, by what lies directly under it.

    Returns:
        the folder, or the one file if that is what `source` names.

    Raises:
        InputError: there is nothing, or the storage refuses.
        DataCorrupt: what came is not what was stored: another size, or another digest than our manifest's.
        StorageUnavailable: the storage does not answer.
    """
    source = source.rstrip("/")
    found, alone = _list(source, deep)
    for folder in folders(found):
        more, _ = _list(f"{source}/{folder}", True)
        found |= {f"{folder}/{name}": entry for name, entry in more.items()}
    wanted = choose(found)
    if not wanted:
        raise InputError(f"{source} holds no file: check bucket and prefix")
    below = PurePosixPath(source).name if deep and not alone else ""
    name = f"{storage.scheme(source)}-" + _digest(source, wanted).removeprefix("sha256:")[:16]
    manifests.make_folder(cache)
    final = cache / name

    def fetch() -> None:
        with tempfile.TemporaryDirectory(prefix=".fetch-", dir=cache) as folder:
            whole = Path(folder) / "it"
            _download(source, wanted, alone, manifests.inside(whole, below, source) if below else whole)
            verification.note_copy(whole, final)
            if replaced := final.is_dir() and not verification.is_as_noted(final):
                final.rename(Path(folder) / "damaged")
            manifests.move_into_place(whole, final)
        logger.info("fetched %s%s", final, " once more" if replaced else "")

    if not final.is_dir():
        fetch()
    elif not verification.is_as_noted(final):
        lock = verification.marker_of(final).with_suffix(".lock")
        lock.parent.mkdir(exist_ok=True)
        with locks.acquire(lock):
            if not verification.is_as_noted(final):  # nobody was faster
                logger.warning("%s is not what was fetched, or nobody noted what was: fetching it once more", final)
                fetch()
    return final / below / next(iter(wanted)) if alone else final / below


def state(source: str) -> str:
    """A digest of names, sizes and versions of all that is there; raises as `mirror` does."""
    source = source.rstrip("/")
    found, _ = _list(source, deep=True)
    if not found:
        raise InputError(f"{source} holds no file: check bucket and prefix")
    return _digest(source, found)


def _list(source: str, deep: bool) -> tuple[Files, bool]:
    """Files below a URI by their names there; if there is none, the file of that very name, and that it is alone."""
    there = storage.open(source)
    found = {entry.name: entry for entry in there.entries(deep) if not entry.name.endswith("/")}
    if found or not (entry := there.head()):
        return found, False
    return {PurePosixPath(source).name: entry}, True


def _digest(source: str, files: Files) -> str:
    return manifests.digest([source, [(name, entry.size, entry.version) for name, entry in sorted(files.items())]])


def _download(source: str, wanted: Files, alone: bool, directory: Path) -> None:
    """Copy files into a directory and compare them with what the storage, and perhaps our manifest, says of them."""
    there = storage.open(source)
    paths = {name: manifests.inside(directory, name, source) for name in wanted}  # all, before the first is written
    for name, path in paths.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        there.download("" if alone else name, path)
        manifests.verify_file(path, {"size": wanted[name].size}, "run again", hashed=False)
    _verify(directory, paths, source)


def _verify(directory: Path, paths: Mapping[str, Path], source: str) -> None:
    """Compare files with their digests where our manifest came along; a data set may have another of that name."""
    if not (directory / manifests.NAME).is_file():
        return
    try:
        files = manifests.load(directory)["files"]
    except DataCorrupt:
        return
    for name, entry in files.items():
        if name in paths:
            manifests.verify_file(paths[name], entry, f"upload {source} again")
