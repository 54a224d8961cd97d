"""Upload, download, delete and verify an artifact's files. Readers never see a partial artifact.

upload    uploads every file with its SHA-256, and the manifest last
download  downloads into a temporary directory, and renames the directory when every file matches the manifest
delete    deletes the manifest first, and then the other files
verify    hashes the files if a file was touched since the last verification
"""

import contextlib
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from components.adapters import storage
from components.adapters.storage import Store
from infoxlm_core import locks, manifests, user_files
from infoxlm_core.errors import DataCorrupt, InputError, StorageUnavailable

logger = logging.getLogger(__name__)

# ---------------------------------------------------------------- uploading and downloading


def read_manifest(uri: str) -> dict[str, Any] | None:
    """Return a stored artifact's manifest, or None if the artifact does not exist.

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

    The caller must hold a lease on the URI (the right to write there), because this function aborts all unfinished
    uploads below the URI.

    Args:
        directory: local directory with the artifact and its manifest.
        uri: URI at which to store the artifact.
        before_commit: function to call just before the upload of the manifest, which makes the artifact visible.
        replace: whether to delete an existing artifact at this URI first.

    Raises:
        DataCorrupt: a file differs from the manifest.
        InputError: the storage refuses, or the URI holds an artifact with different content.
        StorageUnavailable: the storage does not answer, or a stored file differs from its local original. Readers
            ignore the files uploaded so far, because their manifest is missing.
    """
    # The manifest may change during the upload, but must describe the uploaded files. Therefore, read it first.
    manifest_content = (directory / manifests.NAME).read_bytes()
    digests = _list_digests(directory)
    store = storage.open(uri)
    store.sweep()  # parts that a killed process has uploaded take up space, but no listing shows them
    if replace and manifest_exists(uri):
        delete(uri)
    for name, digest in sorted(digests.items()):
        path = manifests.join_inside(directory, name)
        if _is_stored(store, name, path, digest):  # an interrupted call may have uploaded this file
            continue
        if manifests.file_sha256(path) != digest:
            raise DataCorrupt(f"{path} changed after it was built: remove {directory}, then run again")
        store.upload(path, name, digest)
        if not _is_stored(store, name, path, digest):
            raise StorageUnavailable(f"{uri}/{name} differs from what was sent: run again")
    before_commit()
    # Write the manifest only if none exists (version None), so that another machine's artifact stays complete.
    if store.put_if(manifests.NAME, manifest_content, version=None) is None:
        raise InputError(f"{uri} already exists with different content: remove it, or use that artifact")


def _is_stored(store: Store, name: str, path: Path, digest: str) -> bool:
    """Return whether the storage has a file with this name and SHA-256, and with the size of the local file."""
    stored_file = store.head(name)
    return stored_file is not None and (stored_file.size, stored_file.sha256) == (path.stat().st_size, digest)


def _list_digests(directory: Path) -> dict[str, str]:
    """Return the SHA-256 of each artifact file by name, without the artifact's own manifest."""
    digests = {name: entry["sha256"] for name, entry in manifests.load(directory)["files"].items()}
    for path in directory.rglob(manifests.NAME):
        if path.parent != directory:  # nested artifacts: the outer manifest does not list their manifests
            digests[str(path.relative_to(directory))] = manifests.file_sha256(path)
    return digests


def download(uri: str, directory: Path, should_download: Callable[[Path], bool] = lambda _: True) -> None:
    """Download the files that an artifact's manifest lists, and the manifests of nested artifacts.

    Args:
        uri: URI of the artifact.
        directory: local directory of the copy. An earlier copy is replaced.
        should_download: predicate for the files to download, which must include the manifest.

    Raises:
        InputError: the artifact does not exist, or its manifest lists a path outside the artifact.
        DataCorrupt: a file is missing or differs from its manifest.
        StorageUnavailable: the storage does not answer.
    """
    remote_manifest = read_manifest(uri)
    if remote_manifest is None:
        raise InputError(f"{uri} has no {manifests.NAME}: run the stage that builds this artifact first")
    store = storage.open(uri)
    manifests.make_directory(directory.parent)
    # Renaming a directory is atomic only within a file system, so download beside the final directory.
    with locks.scratch_directory(directory.parent) as scratch:
        partial = scratch / "artifact"
        local_paths = _choose_local_paths(remote_manifest, partial, uri)
        for stored_file in store.entries():
            path = local_paths.get(stored_file.name)
            # Files that the manifest does not list are leftovers or were added by somebody else.
            if path and should_download(Path(stored_file.name)):
                path.parent.mkdir(parents=True, exist_ok=True)
                store.download(stored_file.name, path)
        kind, producer = remote_manifest["kind"], "the stage that builds it"
        manifests.load_verified(partial, kind, producer, should_read=should_download)
        shutil.rmtree(directory, ignore_errors=True)  # an earlier copy may be damaged or incomplete
        manifests.move_into_place(partial, directory, marker=manifests.NAME)
    logger.info("fetched %s", uri)


def _choose_local_paths(remote_manifest: dict[str, Any], directory: Path, uri: str) -> dict[str, Path]:
    """Return the local path of each artifact file by its name in the storage.

    The result includes a manifest for each directory. Any directory may be a nested artifact, such as the encoder of a
    pre-training, and the outer manifest does not list the manifests of nested artifacts.

    Raises:
        InputError: the manifest lists a path outside the artifact.
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
    """Delete an artifact. The manifest is deleted first, so that no reader sees a partial artifact."""
    store = storage.open(uri)
    store.delete(manifests.NAME)
    other_files = [stored_file.name for stored_file in store.entries()]
    if other_files:
        store.delete(*other_files)


# ---------------------------------------------------------------- verifying


def verify(directory: Path, kind: str) -> dict[str, Any]:
    """Verify an artifact against its manifest, and return the manifest.

    The files are hashed only if a file was touched since the last `record_verified`.
    """
    producer = f"the stage that builds {kind}"
    # Compute the state before reading the files. If a file changes meanwhile, the next call hashes the files again.
    state = compute_state(directory)
    if is_verified(directory, state):
        return manifests.load_verified(directory, kind, producer, should_hash=lambda _: False)  # checks only sizes
    manifest = manifests.load_verified(directory, kind, producer)
    record_verified(directory, state)
    return manifest


def compute_state(directory: Path) -> str:
    """Return a digest of all file sizes, times and inodes in a directory. Any write changes the digest."""
    states = []
    for path in sorted(directory.rglob("*")):
        if path.is_file():
            name = str(path.relative_to(directory))
            status = path.stat()
            # A program can set a file's modification time back, but not its change time (ctime).
            states.append((name, status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino))
    return manifests.digest(states)


def find_marker(directory: Path) -> Path:
    """Return the path of the marker, a file with the `compute_state` digest of a directory's last verified state."""
    # The marker lies outside the artifact, because a file that the manifest does not list would count as damage.
    kind_directory = directory.parent
    return kind_directory.parent / "verified" / f"{kind_directory.name}-{directory.name}"


def is_verified(directory: Path, state: str) -> bool:
    """Return whether a directory was verified in this state, a digest from `compute_state`."""
    with contextlib.suppress(OSError):  # a directory without a readable marker counts as not verified
        return find_marker(directory).read_bytes() == state.encode()
    return False


def record_verified(directory: Path, state: str) -> None:
    """Record that a directory was verified in this state. Do nothing if the store is read-only."""
    with contextlib.suppress(OSError):  # without the record, the next call only hashes the files again
        marker = find_marker(directory)
        marker.parent.mkdir(exist_ok=True)
        manifests.write_atomically(marker, state)


def verify_files(directory: Path) -> None:
    """Hash and verify an artifact's files, except token shards and training text, which are verified when read."""
    kind = manifests.load(directory)["kind"]

    def should_hash(path: Path) -> bool:
        is_training_text = kind == "corpus" and path.parts[0] in ("mono", "pairs")
        return kind != "shards" and not is_training_text

    manifests.load_verified(directory, kind, producer="the stage that builds it", should_hash=should_hash)
