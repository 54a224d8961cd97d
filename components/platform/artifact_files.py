"""Upload, download, delete and verify the files of an artifact, so that no reader ever sees a part of it.

upload    uploads every file with its SHA-256, and the manifest last
download  downloads into a temporary folder, and renames the folder when every file matches the manifest
delete    deletes the manifest first, and then the files
verify    hashes the files if any of them was touched since the last verification
"""

import contextlib
import logging
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from components.adapters import storage
from components.adapters.storage import Store
from infoxlm_core import manifests, user_files
from infoxlm_core.errors import DataCorrupt, InputError, StorageUnavailable

logger = logging.getLogger(__name__)

# ---------------------------------------------------------------- uploading and downloading


def read_manifest(uri: str) -> dict[str, Any] | None:
    """Return the manifest of a stored artifact, or None if the artifact does not exist.

    Raises:
        DataCorrupt: the manifest is malformed.
    """
    stored = storage.open(uri).get(manifests.NAME)
    if stored is None:
        return None
    content, _ = stored
    remedy = "delete it and build the artifact again"
    return user_files.parse_json(content, manifests.Manifest, f"{uri}/{manifests.NAME}", remedy, DataCorrupt)


def manifest_exists(uri: str) -> bool:
    """Return whether the URI holds a complete artifact."""
    return storage.open(uri).head(manifests.NAME) is not None


def upload(directory: Path, uri: str, before_commit: Callable[[], None] = lambda: None, replace: bool = False) -> None:
    """Upload an artifact. After an interruption, a repeated call uploads only the missing files.

    The caller must hold a lease on the URI, because unfinished uploads below it are removed.

    Args:
        directory: the artifact, with its manifest.
        uri: URI of the uploaded artifact.
        before_commit: called after the upload of all files except the manifest, which makes the artifact visible.
        replace: whether to delete an existing artifact at this URI first.

    Raises:
        DataCorrupt: a file differs from the manifest.
        InputError: the storage refuses, or the URI holds an artifact with other content.
        StorageUnavailable: the storage does not answer, or a stored file differs from what was sent. Readers ignore the
            uploaded files, because there is no manifest.
    """
    # Read the manifest first, because it must describe the files that are uploaded, even if it changes meanwhile.
    manifest_content = (directory / manifests.NAME).read_bytes()
    digests = _list_digests(directory)
    store = storage.open(uri)
    store.sweep()
    if replace and manifest_exists(uri):
        delete(uri)
    for name, digest in sorted(digests.items()):
        path = manifests.join_inside(directory, name)
        if _is_stored(store, name, path, digest):  # an interrupted call has uploaded this file
            continue
        if manifests.file_sha256(path) != digest:
            raise DataCorrupt(f"{path} changed after it was built: remove {directory} and run again")
        store.upload(path, name, digest)
        if not _is_stored(store, name, path, digest):
            raise StorageUnavailable(f"{uri}/{name} differs from what was sent: run again")
    before_commit()
    if store.put_if(manifests.NAME, manifest_content, version=None) is None:
        raise InputError(f"{uri} already exists with other content: remove it, or use that artifact")


def _is_stored(store: Store, name: str, path: Path, digest: str) -> bool:
    """Return whether the storage has a file with the size of a local file and this SHA-256."""
    stored_file = store.head(name)
    return stored_file is not None and (stored_file.size, stored_file.sha256) == (path.stat().st_size, digest)


def _list_digests(directory: Path) -> dict[str, str]:
    """Return the SHA-256 of each file of an artifact by name, except that of its manifest, which is uploaded last."""
    digests = {name: entry["sha256"] for name, entry in manifests.load(directory)["files"].items()}
    for path in directory.rglob(manifests.NAME):
        is_nested = path.parent != directory
        if is_nested:  # no manifest lists the manifests of nested artifacts
            digests[str(path.relative_to(directory))] = manifests.file_sha256(path)
    return digests


def download(uri: str, directory: Path) -> None:
    """Download the files that the manifest of an artifact lists, and the manifests of nested artifacts.

    Raises:
        InputError: there is no artifact, or its manifest lists a path outside of the artifact.
        DataCorrupt: a file is missing or differs from its manifest.
        StorageUnavailable: the storage does not answer.
    """
    remote_manifest = read_manifest(uri)
    if remote_manifest is None:
        raise InputError(f"{uri} has no {manifests.NAME}: run the stage that builds this artifact first")
    store = storage.open(uri)
    manifests.make_directory(directory.parent)
    with tempfile.TemporaryDirectory(prefix=".fetch-", dir=directory.parent) as folder:
        partial = Path(folder) / "artifact"
        local_paths = _choose_local_paths(remote_manifest, partial, uri)
        for stored_file in store.entries():
            path = local_paths.get(stored_file.name)
            if path:
                path.parent.mkdir(parents=True, exist_ok=True)
                store.download(stored_file.name, path)
        manifests.load_verified(partial, remote_manifest["kind"], producer="the stage that builds it")
        shutil.rmtree(directory, ignore_errors=True)  # an earlier copy may be damaged or incomplete
        manifests.move_into_place(partial, directory, manifests.NAME)
    logger.info("fetched %s", uri)


def _choose_local_paths(remote_manifest: dict[str, Any], directory: Path, uri: str) -> dict[str, Path]:
    """Return the local path for each file of an artifact, by its name in the storage.

    The result includes a manifest for each folder, because any folder may be a nested artifact.

    Raises:
        InputError: the manifest lists a path outside of the artifact.
    """
    paths = {directory / manifests.NAME}
    for name in remote_manifest["files"]:
        path = manifests.join_inside(directory, name, uri)
        paths.add(path)
        for parent in path.parents:
            if parent.is_relative_to(directory):
                paths.add(parent / manifests.NAME)
    return {str(path.relative_to(directory)): path for path in paths}


def delete(uri: str) -> None:
    """Delete an artifact, beginning with the manifest, so that no reader sees a partial artifact."""
    store = storage.open(uri)
    store.delete(manifests.NAME)
    names = [stored_file.name for stored_file in store.entries()]
    if names:
        store.delete(*names)


# ---------------------------------------------------------------- verifying


def verify(directory: Path, kind: str) -> dict[str, Any]:
    """Verify an artifact against its manifest, and return the manifest.

    The files are hashed only if any of them was touched since the last `record_verified`.
    """
    producer = f"the stage that builds {kind}"
    # Computed before the files are read, so that a change during the verification leads to another one.
    state = compute_state(directory)
    if is_verified(directory, state):
        return manifests.load_verified(directory, kind, producer, should_hash=_should_hash_nothing)
    manifest = manifests.load_verified(directory, kind, producer)
    record_verified(directory, state)
    return manifest


def _should_hash_nothing(_: Path) -> bool:
    """Return False for every file, so that only its size is verified."""
    return False


def compute_state(directory: Path) -> str:
    """Return a digest of the sizes, times and inodes of all files of a directory, which changes with any write."""
    states = []
    for path in sorted(directory.rglob("*")):
        if path.is_file():
            name = str(path.relative_to(directory))
            status = path.stat()
            states.append((name, status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino))
    return manifests.digest(states)


def find_marker(directory: Path) -> Path:
    """Return the path of the file that records in which state a directory was last verified (`compute_state`)."""
    kind_folder = directory.parent
    return kind_folder.parent / "verified" / f"{kind_folder.name}-{directory.name}"


def is_verified(directory: Path, state: str) -> bool:
    """Return whether a directory was verified in a state, which `compute_state` returns."""
    with contextlib.suppress(OSError):  # without a readable marker, the directory counts as not verified
        return find_marker(directory).read_bytes() == state.encode()
    return False


def record_verified(directory: Path, state: str) -> None:
    """Record that a directory was verified in a state of `compute_state`. Do nothing in a read-only store."""
    with contextlib.suppress(OSError):
        marker = find_marker(directory)
        marker.parent.mkdir(exist_ok=True)
        manifests.write_atomically(marker, state)


def verify_files(directory: Path) -> None:
    """Hash and verify the files of an artifact, except token shards and training text, which their readers verify."""
    kind = manifests.load(directory)["kind"]

    def should_hash(path: Path) -> bool:
        is_training_text = kind == "corpus" and path.parts[0] in ("mono", "pairs")
        return kind != "shards" and not is_training_text

    manifests.load_verified(directory, kind, producer="the stage that builds it", should_hash=should_hash)
