"""The files of an artifact: upload and download them, completely or not at all, and compare them with the manifest.

push      uploads every file with its SHA-256, then the manifest, if there is none yet
pull      downloads into a temporary folder, which is renamed once every file matches the manifest
drop      deletes the manifest first, so that no reader sees a partial artifact
verify    hashes the files if any of them was touched since the last check
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
from infoxlm_core import manifests, outside
from infoxlm_core.errors import DataCorrupt, InputError, StorageUnavailable

logger = logging.getLogger(__name__)

# ---------------------------------------------------------------- uploading and downloading


def manifest(uri: str) -> dict[str, Any] | None:
    """Return the manifest of a stored artifact, or None if the artifact does not exist.

    Raises:
        DataCorrupt: the manifest is malformed.
    """
    stored = storage.open(uri).get(manifests.NAME)
    if stored is None:
        return None
    content, _ = stored
    remedy = "delete it and build the artifact again"
    return outside.parse_json(content, manifests.Manifest, f"{uri}/{manifests.NAME}", remedy, DataCorrupt)


def manifest_exists(uri: str) -> bool:
    """Return whether the URI holds a complete artifact."""
    return storage.open(uri).head(manifests.NAME) is not None


def push(directory: Path, uri: str, before_commit: Callable[[], None] = lambda: None, replace: bool = False) -> None:
    """Upload an artifact. A repeated call sends only the files that are missing.

    The caller holds a lease on the URI, because unfinished uploads below it are removed.

    Args:
        directory: the artifact, with its manifest.
        uri: where to upload it.
        before_commit: called after all other files are uploaded and before the manifest is.
        replace: first delete the artifact that has this URI.

    Raises:
        DataCorrupt: a file differs from the manifest.
        InputError: the storage refuses, or the URI holds an artifact with other content.
        StorageUnavailable: the storage does not answer. Without a manifest, the uploaded files are not an artifact.
    """
    # Read the manifest before the upload, so that a manifest that is changed meanwhile is not uploaded.
    manifest_content = (directory / manifests.NAME).read_bytes()
    digests = _list_digests(directory)
    store = storage.open(uri)
    store.sweep()
    if replace and manifest_exists(uri):
        drop(uri)
    for name, digest in sorted(digests.items()):
        path = manifests.join_inside(directory, name)
        if _is_stored(store, name, path.stat().st_size, digest):
            continue
        if manifests.file_sha256(path) != digest:
            raise DataCorrupt(f"{path} changed after it was built: remove {directory} and run again")
        store.upload(path, name, digest)
        if not _is_stored(store, name, path.stat().st_size, digest):
            raise StorageUnavailable(f"{uri}/{name} differs from what was sent: run again")
    before_commit()
    if store.put_if(manifests.NAME, manifest_content, version=None) is None:
        raise InputError(f"{uri} already exists with other content: remove it, or use that artifact")


def _list_digests(directory: Path) -> dict[str, str]:
    """Return the SHA-256 of each file of an artifact by name, except its manifest, which is uploaded last."""
    digests = {name: described["sha256"] for name, described in manifests.load(directory)["files"].items()}
    for path in directory.rglob(manifests.NAME):
        is_nested_artifact = path.parent != directory
        if is_nested_artifact:  # a manifest lists no manifests
            digests[str(path.relative_to(directory))] = manifests.file_sha256(path)
    return digests


def pull(uri: str, directory: Path) -> None:
    """Download an artifact: the files that its manifest names, and the manifests of nested artifacts.

    Raises:
        InputError: there is no artifact, or its manifest names a path outside of it.
        DataCorrupt: a file is missing or differs from its manifest.
        StorageUnavailable: the storage does not answer.
    """
    remote_manifest = manifest(uri)
    if remote_manifest is None:
        raise InputError(f"{uri} has no {manifests.NAME}: run the stage that builds this artifact first")
    store = storage.open(uri)
    manifests.make_folder(directory.parent)
    with tempfile.TemporaryDirectory(prefix=".fetch-", dir=directory.parent) as folder:
        partial = Path(folder) / "artifact"
        local_paths = _choose_local_paths(remote_manifest, partial, uri)
        for stored_file in store.entries():
            path = local_paths.get(stored_file.name)
            if path:
                path.parent.mkdir(parents=True, exist_ok=True)
                store.download(stored_file.name, path)
        manifests.read(partial, remote_manifest["kind"], producer="the stage that builds it")
        shutil.rmtree(directory, ignore_errors=True)  # a damaged or incomplete copy
        manifests.move_into_place(partial, directory, manifests.NAME)
    logger.info("fetched %s", uri)


def _choose_local_paths(remote_manifest: dict[str, Any], directory: Path, uri: str) -> dict[str, Path]:
    """Return where to download each file of an artifact, by its name in the storage.

    The result also has a manifest for each folder, because any folder may be a nested artifact.

    Raises:
        InputError: the manifest names a path outside of the artifact.
    """
    paths = {directory / manifests.NAME}
    for name in remote_manifest["files"]:
        path = manifests.join_inside(directory, name, uri)
        paths.add(path)
        for parent in path.parents:
            if parent.is_relative_to(directory):
                paths.add(parent / manifests.NAME)
    return {str(path.relative_to(directory)): path for path in paths}


def drop(uri: str) -> None:
    """Delete an artifact, beginning with the manifest, so that no reader sees a partial artifact."""
    store = storage.open(uri)
    store.delete(manifests.NAME)
    names = [stored_file.name for stored_file in store.entries()]
    if names:
        store.delete(*names)


def _is_stored(store: Store, name: str, size: int, digest: str) -> bool:
    """Return whether the storage has a file with this size and SHA-256."""
    stored_file = store.head(name)
    return stored_file is not None and stored_file.size == size and stored_file.sha256 == digest


# ---------------------------------------------------------------- verifying


def verify(directory: Path, kind: str) -> dict[str, Any]:
    """Verify an artifact against its manifest, and return the manifest.

    Files are hashed only if any of them was touched since the last `record_verified`.
    """
    state = file_state(directory)
    already_verified = is_verified(directory, state)
    producer = f"the stage that builds {kind}"
    manifest = manifests.read(directory, kind, producer=producer, should_hash=lambda _: not already_verified)
    if not already_verified:
        record_verified(directory, state)
    return manifest


def file_state(directory: Path, excluded: str = manifests.NAME) -> str:
    """Return a digest of the sizes, times and inodes of all files except the manifest, which has its own digest."""
    states = []
    for path in sorted(directory.rglob("*")):
        if path.is_file() and path.name != excluded:
            name = str(path.relative_to(directory))
            status = path.stat()
            states.append((name, status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino))
    return manifests.digest(states)


def marker_of(directory: Path) -> Path:
    """Return the path of the file that records the `file_state` at which a directory was last verified."""
    kind_folder = directory.parent
    return kind_folder.parent / "verified" / f"{kind_folder.name}-{directory.name}"


def is_verified(directory: Path, state: str) -> bool:
    """Return whether the whole directory was verified in this state."""
    with contextlib.suppress(OSError):  # without a readable marker the directory counts as not verified
        return marker_of(directory).read_bytes() == state.encode()
    return False


def record_verified(directory: Path, state: str) -> None:
    """Record that the whole directory was verified in this state. Do nothing in a read-only store."""
    with contextlib.suppress(OSError):
        marker_of(directory).parent.mkdir(exist_ok=True)
        manifests.write_atomically(marker_of(directory), state)


def verify_files(directory: Path) -> None:
    """Verify the files of an artifact, except token shards and training text, whose readers verify them."""
    kind = ""
    with contextlib.suppress(DataCorrupt):  # `manifests.read` below reports what is wrong
        kind = manifests.load(directory)["kind"]

    def is_hashed(path: Path) -> bool:
        is_training_text = kind == "corpus" and path.parts[0] in ("mono", "pairs")
        return kind != "shards" and not is_training_text

    manifests.read(directory, kind, producer="the stage that builds it", should_hash=is_hashed)
