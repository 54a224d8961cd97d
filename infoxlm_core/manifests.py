"""Manifests of artifacts: the sizes and digests of all files in a directory, written last.

    {"kind": "corpus", "digest": "sha256:…", "files": {"mono/de/weblate.parquet": {"size": 1, "sha256": "…"}},
     "facts": {"lines": 3000}, "inputs": {"…": "sha256:…"}, "made_by": {"code": "…", "torch": "2.13.0"},
     "seal": "sha256:…"}

`digest` covers kind, files and facts, so equal content has the same digest on every machine. `seal` covers the complete
manifest, so any change to the manifest is detected. This module also has functions for writing files durably.
"""

import errno
import hashlib
import importlib.metadata
import json
import os
import uuid
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import IO, Any

from typing_extensions import TypedDict

from infoxlm_core import user_files
from infoxlm_core.errors import DataCorrupt, InputError, TryAgain

NAME = "manifest.json"
FINETUNING = 2
"""Version of fine-tuning, whose artifacts are of kind `classifier` in a pipeline and `tuned` in a suite."""
VERSIONS = {
    "corpus": 4,  # prepare_corpus
    "shards": 3,  # tokenize_corpus
    "pretrained": 1,  # pretrain
    "merged": 1,  # merge
    "classifier": FINETUNING,  # finetune
    "tuned": FINETUNING,  # measure, of a suite
    "scores": 5,  # evaluate
    "translator": 2,  # translate
    "translations": 2,  # evaluate_translation
    "points": 2,  # measure, of a suite
    "comparison": 4,  # compare
    "suite": 4,  # summarise
}
"""Version of each artifact kind. Raise a version when the same config and inputs produce different content, because
artifacts of earlier versions are not reused. `tests/infoxlm_core/stages/test_versions.py` fails if results change
without a new version."""

_IGNORED = (NAME, "README.md", "LICENSE", ".gitattributes", ".gitignore", ".DS_Store")
"""Names of files that verification ignores. Nested manifests belong to inner artifacts."""
_KEYS_BEFORE_SEALS = {"kind", "digest", "files", "facts", "inputs", "made_by"}  # older manifests have no seal
_LIBRARIES = ("torch", "transformers", "sentencepiece", "pyarrow", "numpy")


@user_files.allow_extra_keys
class Entry(TypedDict):
    """Size and digest of one file."""

    size: int
    sha256: str


@user_files.allow_extra_keys
class Manifest(TypedDict):
    """Keys of every manifest."""

    kind: str
    digest: str
    files: dict[str, Entry]
    facts: dict[str, Any]


def digest(value: Any) -> str:
    """Return the SHA-256 digest of a JSON value. The order of keys does not matter."""
    text = json.dumps(value, sort_keys=True, ensure_ascii=False, separators=(",", ":"), default=str)
    return "sha256:" + hashlib.sha256(text.encode()).hexdigest()


def file_sha256(path: Path) -> str:
    """Return a file's SHA-256 digest in hexadecimal."""
    with user_files.check_readable(path).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def digest_files(path: Path) -> str:
    """Return a single SHA-256 digest of the names and contents of all files below a directory, or of one file.

    Raises:
        InputError: a directory cannot be listed.
    """
    paths = [path] if path.is_file() else user_files.list_tree(path)
    return digest({str(file.relative_to(path)): file_sha256(file) for file in paths if file.is_file()})


@cache
def describe_software() -> dict[str, str]:
    """Return the digest of this package's source code and the versions of its libraries, for manifests."""
    root = Path(__file__).parent
    source_files = [path for path in sorted(root.rglob("*")) if path.suffix in (".py", ".j2", ".yaml")]
    source_digest = digest({str(path.relative_to(root)): file_sha256(path) for path in source_files})
    versions = {name: importlib.metadata.version(name) for name in _LIBRARIES}
    return {"code": source_digest} | versions


def join_inside(directory: Path | str, name: str, source: str = "") -> Path:
    """Join a directory and a file name. Reject names that lead out of the directory.

    Names in manifests and listings may come from an untrusted source.

    Args:
        directory: directory of the file.
        name: file name relative to the directory, separated by `/`.
        source: location from which the directory was copied, for the error message.

    Raises:
        InputError: the name is absolute, or one of its parts is empty, `.` or `..`.
    """
    # An absolute name starts with an empty part. No operating system accepts a null character in a name.
    has_forbidden_part = not {"", ".", ".."}.isdisjoint(name.split("/"))
    if has_forbidden_part or "\0" in name:
        location = source or directory
        path_without_control_characters = repr(f"{location}/{name}")[1:-1]
        raise InputError(f"{path_without_control_characters}: the file name leads out of its directory: rename it")
    return Path(directory, name)


def load(directory: Path) -> dict[str, Any]:
    """Return an artifact's manifest without verifying its files. Raise DataCorrupt if the manifest is invalid."""
    return user_files.read_json(directory / NAME, Manifest, "build or copy the artifact again", DataCorrupt)


def load_if_ours(directory: Path) -> dict[str, Any] | None:
    """Return a directory's manifest, or None if this pipeline did not write one there."""
    path = directory / NAME
    if not path.is_file():
        return None
    content = user_files.read_json(path, Any, "build or copy the artifact again", DataCorrupt)
    # Other programs write files with the same name, but with different keys.
    if not isinstance(content, dict) or not Manifest.__required_keys__ <= content.keys():
        return None
    return load(directory)  # also checks the types of the values


@contextmanager
def open_atomically(path: Path) -> Iterator[IO[bytes]]:
    """Open a temporary file that replaces `path` when the `with` block ends without an error.

    Readers see either the old or the new content, also after a crash. If several processes write the file at the same
    time, the last to finish wins.
    """
    # A file created by `tempfile` would be unreadable for other users.
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        with temporary.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        if error.filename in (None, str(temporary)):  # errors from write() do not name the file
            error.filename = str(path)
        raise
    finally:
        temporary.unlink(missing_ok=True)
    sync_file(path.parent)


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write a file atomically. Readers see either the old or the new content, also after a crash."""
    with open_atomically(path) as file:
        file.write(content.encode() if isinstance(content, str) else content)


def move_into_place(partial: Path, final: Path, marker: str = "") -> None:
    """Rename a finished directory durably. After a power cut, the new path is either complete or missing.

    Args:
        partial: path of the finished directory.
        final: new path of the directory. A complete directory from another process is not replaced.
        marker: name of a file that only complete directories contain; "": any directory counts as complete.

    Raises:
        InputError: `final` is a file or a link.
    """
    sync_tree(partial)  # otherwise, the rename could reach the disk before the content
    try:
        partial.replace(final)
    except OSError as error:
        is_link_or_file = final.is_symlink() or final.is_file()
        if isinstance(error, NotADirectoryError) and is_link_or_file:  # the system's message names `partial`
            raise InputError(f"{final} is not a directory: remove it") from None
        if not (final / marker).exists():  # no other process has finished the directory first
            raise
    sync_file(final.parent)


def make_directory(path: Path) -> None:
    """Create a directory with its parents, and flush all new directories to disk."""
    missing_parents = [parent for parent in path.parents if not parent.is_dir()]
    path.mkdir(parents=True, exist_ok=True)
    for directory in (path, *missing_parents):
        sync_file(directory.parent)  # a new directory's entry is stored in its parent


def sync_tree(directory: Path) -> None:
    """Flush a directory and everything below it to disk."""
    for path in (*directory.rglob("*"), directory):
        sync_file(path)


def sync_file(path: Path) -> None:
    """Flush a file, or a directory's entries, to disk. Directories without read permission are skipped."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except PermissionError:
        if path.is_dir():
            return
        raise
    try:
        os.fsync(descriptor)
    except OSError as error:  # some network file systems do not support fsync
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


def write(
    directory: Path, kind: str, facts: dict[str, Any] | None = None, inputs: dict[str, str] | None = None
) -> dict[str, Any]:
    """Write and return the manifest of a finished artifact. The manifest lists all files below the directory.

    Args:
        directory: directory of the artifact, which must be complete.
        kind: artifact kind, such as `corpus`.
        facts: properties of the content that readers need, such as row counts.
        inputs: mapping from input artifact to digest.
    """
    files = {}
    for path in sorted(directory.rglob("*")):
        if path.is_file() and path.name != NAME:
            name = str(path.relative_to(directory))
            files[name] = {"size": path.stat().st_size, "sha256": file_sha256(path)}
    # The digest omits inputs and software, so that equal content has the same digest wherever it comes from.
    content = {"kind": kind, "files": files, "facts": facts or {}}
    manifest = content | {"digest": digest(content), "inputs": inputs or {}, "made_by": describe_software()}
    manifest["seal"] = digest(manifest)
    write_atomically(directory / NAME, json.dumps(manifest, indent=1, sort_keys=True, ensure_ascii=False) + "\n")
    return manifest


def _find_unlisted_file(directory: Path, listed_names: Collection[str]) -> Path | None:
    """Return a file below the directory that the manifest does not list, or None. Harmless files are ignored."""
    for path in sorted(directory.rglob("*")):
        name = str(path.relative_to(directory))
        is_in_hidden_directory = name.startswith(".") and "/" in name  # .git, or the Hugging Face client's .cache
        is_temporary = path.name.startswith(".") and path.suffix in (".lock", ".tmp")
        is_ignored = is_in_hidden_directory or is_temporary or path.name in _IGNORED
        is_real_directory = path.is_dir() and not path.is_symlink()  # a symbolic link may lead to any content
        if not is_ignored and not is_real_directory and name not in listed_names:
            return path
    return None


def load_verified(
    directory: Path | str,
    kind: str,
    producer: str,
    should_hash: Callable[[Path], bool] = lambda _: True,
    should_read: Callable[[Path], bool] = lambda _: True,
) -> dict[str, Any]:
    """Verify an artifact's files and return its manifest.

    Args:
        directory: directory of the artifact.
        kind: expected artifact kind.
        producer: stage that creates artifacts of this kind, for error messages.
        should_hash: predicate for files whose digest is verified. For all other files, only the size is verified.
        should_read: predicate for files to verify. All other files may be missing.

    Raises:
        InputError: the manifest is missing or has a different kind.
        DataCorrupt: a file is missing, changed or unlisted.
    """
    directory = Path(directory)
    manifest_path = directory / NAME
    if not manifest_path.is_file():
        raise InputError(f"no {NAME} in {directory}: run {producer} first")
    remedy = f"remove the directory and run {producer} again"
    manifest: dict[str, Any] = user_files.read_json(manifest_path, Manifest, remedy, DataCorrupt)
    _verify_seal(manifest, manifest_path, remedy)  # before relying on the names and digests in the manifest
    _verify_files(manifest, manifest_path, remedy, should_hash, should_read)
    unlisted_file = _find_unlisted_file(directory, manifest["files"])
    if unlisted_file:
        raise DataCorrupt(f"{unlisted_file} is not listed in {manifest_path}: move it out of this directory")
    if manifest["kind"] != kind:
        raise InputError(
            f"{directory} is an artifact of kind {manifest['kind']}, not {kind}: give the output of {producer}"
        )
    return manifest


def _verify_files(
    manifest: dict[str, Any],
    manifest_path: Path,
    remedy: str,
    should_hash: Callable[[Path], bool],
    should_read: Callable[[Path], bool],
) -> None:
    """Verify a manifest's files. Arguments: see `load_verified`."""
    try:
        for name, size_and_digest in manifest["files"].items():
            path = join_inside(manifest_path.parent, name)
            if should_read(Path(name)):
                verify_file(path, size_and_digest, remedy, should_hash(Path(name)))
    except (InputError, OSError) as error:  # a name leads out of the directory or is too long
        known_error = user_files.translate_error(error, manifest_path)
        # A failing disk or missing permissions do not mean that the artifact is damaged.
        may_be_valid = isinstance(known_error, TryAgain) or isinstance(error, PermissionError)
        if may_be_valid:
            raise known_error or error from error
        raise DataCorrupt(f"{manifest_path} cannot be read ({error}): {remedy}") from error


def _verify_seal(manifest: dict[str, Any], path: Path, remedy: str) -> None:
    """Raise DataCorrupt if a manifest's digest or seal does not match its content."""
    content_digest = digest({name: manifest[name] for name in ("kind", "files", "facts")})
    if content_digest != manifest["digest"]:
        raise DataCorrupt(f"{path} has digest {manifest['digest']}, but its content has {content_digest}: {remedy}")
    if manifest.keys() <= _KEYS_BEFORE_SEALS:  # only older manifests may lack a seal
        return
    expected_seal = digest({name: value for name, value in manifest.items() if name != "seal"})
    seal = manifest.get("seal", "")
    if seal != expected_seal:
        raise DataCorrupt(f"{path} has seal {seal!s:.80}, but its content has {expected_seal}: {remedy}")


def verify_file(path: Path, size_and_digest: dict[str, Any], remedy: str, should_hash: bool = True) -> None:
    """Raise DataCorrupt if a file differs from its manifest entry.

    Args:
        path: path of the file.
        size_and_digest: manifest entry of the file.
        remedy: advice to the user, for the error message.
        should_hash: whether to compare the digest. Otherwise only the size is compared, which is fast.
    """
    if not path.is_file():
        raise DataCorrupt(f"{path} is missing: {remedy}")
    size = path.stat().st_size
    expected_size = size_and_digest["size"]
    if size != expected_size:
        raise DataCorrupt(f"{path} has {size} bytes, but its manifest lists {expected_size}: {remedy}")
    if not should_hash:
        return
    sha256 = file_sha256(path)
    expected_sha256 = size_and_digest["sha256"]
    if sha256 != expected_sha256:
        raise DataCorrupt(f"{path} has sha256 {sha256[:12]}…, but its manifest lists {expected_sha256[:12]}…: {remedy}")
