"""Manifests of artifacts: the sizes and digests of all files of a directory, written last.

    {"kind": "corpus", "digest": "sha256:…", "files": {"mono/de/weblate.parquet": {"size": 1, "sha256": "…"}},
     "facts": {"lines": 3000}, "inputs": {"…": "sha256:…"}, "made_by": {"code": "…", "torch": "2.13.0"},
     "seal": "sha256:…"}

`digest` covers kind, files and facts: equal content has an equal digest on every machine. `seal` covers the complete
manifest, so that any change to it is detected. The module also has the functions that write files durably.
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
"""Version of fine-tuning. Its artifact is a `classifier` in a pipeline and `tuned` in a suite."""
VERSIONS = {
    "corpus": 3,  # prepare_corpus
    "shards": 3,  # tokenize_corpus
    "pretrained": 1,  # pretrain
    "merged": 1,  # merge
    "classifier": FINETUNING,  # finetune
    "tuned": FINETUNING,  # measure, of a suite
    "scores": 4,  # evaluate
    "translator": 1,  # translate
    "translations": 1,  # evaluate_translation
    "points": 1,  # measure, of a suite
    "comparison": 4,  # compare
    "suite": 4,  # summarise
}
"""Version of each kind of artifact. Raise it when the same config and inputs produce different content: artifacts of
earlier versions are not reused. `tests/infoxlm_core/stages/test_versions.py` fails if only the results change."""

_IGNORED = (NAME, "README.md", "LICENSE", ".gitattributes", ".gitignore", ".DS_Store")
"""Names of files that readers ignore. Nested manifests belong to inner artifacts."""
_KEYS_BEFORE_SEALS = {"kind", "digest", "files", "facts", "inputs", "made_by"}  # older manifests have no seal
_LIBRARIES = ("torch", "transformers", "sentencepiece", "pyarrow", "numpy")


@user_files.allow_extra_keys
class Entry(TypedDict):
    """Size and digest of one file."""

    size: int
    sha256: str


@user_files.allow_extra_keys
class Manifest(TypedDict):
    """The keys that every manifest has."""

    kind: str
    digest: str
    files: dict[str, Entry]
    facts: dict[str, Any]


def digest(value: Any) -> str:
    """Return the SHA-256 of a JSON value, independent of the order of its keys."""
    text = json.dumps(value, sort_keys=True, ensure_ascii=False, separators=(",", ":"), default=str)
    return "sha256:" + hashlib.sha256(text.encode()).hexdigest()


def file_sha256(path: Path) -> str:
    """Return the SHA-256 of a file as hexadecimal digits."""
    with user_files.check_readable(path).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def digest_files(path: Path) -> str:
    """Return one SHA-256 over the name and content of a file, or of all files below a directory.

    Raises:
        InputError: a directory must not be listed.
    """
    paths = [path] if path.is_file() else user_files.list_tree(path)
    digests = {}
    for file in paths:
        if file.is_file():
            digests[str(file.relative_to(path))] = file_sha256(file)
    return digest(digests)


@cache
def describe_software() -> dict[str, str]:
    """Return the digest of this package's source code and the versions of libraries, which manifests record."""
    root = Path(__file__).parent
    source_files = [path for path in sorted(root.rglob("*")) if path.suffix in (".py", ".j2", ".yaml")]
    source_digest = digest({str(path.relative_to(root)): file_sha256(path) for path in source_files})
    versions = {name: importlib.metadata.version(name) for name in _LIBRARIES}
    return {"code": source_digest} | versions


def join_inside(directory: Path | str, name: str, source: str = "") -> Path:
    """Return the path of a file in a directory. Refuse a name that leads out of the directory.

    Names in manifests and listings cannot be trusted, because others may have written them.

    Args:
        directory: the directory.
        name: name of the file, with `/` between directories.
        source: where the directory was copied from, for the error message.

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
    """Return the manifest of an artifact without verifying the files. Raise DataCorrupt if it is invalid."""
    return user_files.read_json(directory / NAME, Manifest, "build or copy the artifact again", DataCorrupt)


def load_if_ours(directory: Path) -> dict[str, Any] | None:
    """Return the manifest of an artifact, or None if the directory has no manifest of this pipeline."""
    path = directory / NAME
    if not path.is_file():
        return None
    content = user_files.read_json(path, Any, "build or copy the artifact again", DataCorrupt)
    # Other programs also write files of this name, with other keys.
    if not isinstance(content, dict) or not Manifest.__required_keys__ <= content.keys():
        return None
    return load(directory)


@contextmanager
def open_atomically(path: Path) -> Iterator[IO[bytes]]:
    """Open a new file for writing, which replaces `path` when the `with` block ends without an error.

    Readers see either the old or the new content, also after a crash. Several processes may write the file at the same
    time: the last one to finish wins.
    """
    # `tempfile` would make the file unreadable for other users.
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        with temporary.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        if error.filename in (None, str(temporary)):  # errors of write() do not name the file
            error.filename = str(path)
        raise
    finally:
        temporary.unlink(missing_ok=True)
    sync_file(path.parent)


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write a file. Readers see either its old or its new content, also after a crash."""
    with open_atomically(path) as file:
        file.write(content.encode() if isinstance(content, str) else content)


def move_into_place(partial: Path, final: Path, marker: str = "") -> None:
    """Rename a finished directory. After a power cut, it is either complete or missing under its new path.

    Args:
        partial: the finished directory.
        final: its new path. If another process has already moved a complete directory there, it is not replaced.
        marker: name of a file that only complete directories contain.

    Raises:
        InputError: `final` is a file or a link.
    """
    sync_tree(partial)  # the rename may reach the disk before the content
    try:
        partial.replace(final)
    except OSError as error:
        is_link_or_file = final.is_symlink() or final.is_file()
        if isinstance(error, NotADirectoryError) and is_link_or_file:  # the system's message would name `partial`
            raise InputError(f"{final} is not a directory: remove it") from None
        if not (final / marker).exists():
            raise
    sync_file(final.parent)


def make_directory(path: Path) -> None:
    """Create a directory and its parents, and flush them to disk, so that they survive a power cut."""
    missing_parents = [parent for parent in path.parents if not parent.is_dir()]
    path.mkdir(parents=True, exist_ok=True)
    for directory in (path, *missing_parents):
        sync_file(directory.parent)  # the entry of a new directory is data of its parent


def sync_tree(directory: Path) -> None:
    """Flush a directory and everything below it to disk."""
    for path in (*directory.rglob("*"), directory):
        sync_file(path)


def sync_file(path: Path) -> None:
    """Flush a file, or the entries of a directory, to disk. A directory without read permission is skipped."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except PermissionError:
        if path.is_dir():
            return
        raise
    try:
        os.fsync(descriptor)
    except OSError as error:  # some network file systems do not support it
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


def write(
    directory: Path, kind: str, facts: dict[str, Any] | None = None, inputs: dict[str, str] | None = None
) -> dict[str, Any]:
    """Write and return the manifest of all files below a directory. This is the last step of creating an artifact.

    Args:
        directory: the finished files of the artifact.
        kind: kind of artifact, such as `corpus`.
        facts: properties of the content that readers need, such as numbers of rows.
        inputs: name of each input artifact -> its digest.
    """
    files = {}
    for path in sorted(directory.rglob("*")):
        if path.is_file() and path.name != NAME:
            name = str(path.relative_to(directory))
            files[name] = {"size": path.stat().st_size, "sha256": file_sha256(path)}
    content = {"kind": kind, "files": files, "facts": facts or {}}
    manifest = content | {"digest": digest(content), "inputs": inputs or {}, "made_by": describe_software()}
    manifest["seal"] = digest(manifest)
    write_atomically(directory / NAME, json.dumps(manifest, indent=1, sort_keys=True, ensure_ascii=False) + "\n")
    return manifest


def _find_unlisted_file(directory: Path, listed_names: Collection[str]) -> Path | None:
    """Return a file below a directory whose name is not in the manifest, or None. Files that do no harm are ignored."""
    for path in sorted(directory.rglob("*")):
        name = str(path.relative_to(directory))
        is_in_hidden_directory = name.startswith(".") and "/" in name  # .git, or .cache of the Hugging Face client
        is_temporary = path.name.startswith(".") and path.suffix in (".lock", ".tmp")
        is_ignored = is_in_hidden_directory or is_temporary or path.name in _IGNORED
        is_real_directory = path.is_dir() and not path.is_symlink()  # a linked directory may contain anything
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
    """Return the manifest of an artifact after verifying its files.

    Args:
        directory: the artifact.
        kind: the expected kind of artifact.
        producer: the stage that creates artifacts of this kind, for error messages.
        should_hash: returns whether the digest of a file is verified; otherwise only its size is.
        should_read: returns whether a file is verified at all; other files may be missing.

    Raises:
        InputError: there is no manifest, or it describes another kind of artifact.
        DataCorrupt: a file is missing, was changed or was added.
    """
    directory = Path(directory)
    manifest_path = directory / NAME
    if not manifest_path.is_file():
        raise InputError(f"no {NAME} in {directory}: run {producer} first")
    remedy = f"remove the directory and run {producer} again"
    manifest: dict[str, Any] = user_files.read_json(manifest_path, Manifest, remedy, DataCorrupt)
    _verify_seal(manifest, manifest_path, remedy)
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
    """Verify the files that a manifest lists. Arguments: see `load_verified`."""
    try:
        for name, size_and_digest in manifest["files"].items():
            path = join_inside(manifest_path.parent, name)
            if should_read(Path(name)):
                verify_file(path, size_and_digest, remedy, should_hash(Path(name)))
    except (InputError, OSError) as error:  # the name leads out of the directory, or is too long for a file
        known_error = user_files.translate_error(error, manifest_path)
        may_be_valid = isinstance(known_error, TryAgain) or isinstance(error, PermissionError)
        if may_be_valid:
            raise known_error or error from error
        raise DataCorrupt(f"{manifest_path} cannot be read ({error}): {remedy}") from error


def _verify_seal(manifest: dict[str, Any], path: Path, remedy: str) -> None:
    """Raise DataCorrupt if a manifest was changed after it was written, so that its own digests do not match."""
    content_digest = digest({name: manifest[name] for name in ("kind", "files", "facts")})
    if content_digest != manifest["digest"]:
        raise DataCorrupt(f"{path} has digest {manifest['digest']}, but its content has {content_digest}: {remedy}")
    if manifest.keys() <= _KEYS_BEFORE_SEALS:
        return
    expected_seal = digest({name: value for name, value in manifest.items() if name != "seal"})
    seal = manifest.get("seal", "")
    if seal != expected_seal:
        raise DataCorrupt(f"{path} has seal {seal!s:.80}, but its content has {expected_seal}: {remedy}")


def verify_file(path: Path, size_and_digest: dict[str, Any], remedy: str, should_hash: bool = True) -> None:
    """Raise DataCorrupt if a file differs from its entry in a manifest.

    Args:
        path: the file.
        size_and_digest: its entry in the manifest.
        remedy: what the user can do, for the error message.
        should_hash: whether to compare the digest. Otherwise compare only the size, which is fast.
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
