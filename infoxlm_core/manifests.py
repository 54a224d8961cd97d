"""A directory is an artifact when it holds a manifest: sizes and digests of its files, written last.

    {"kind": "corpus", "digest": "sha256:…", "files": {"mono/de/weblate.parquet": {"size": 1, "sha256": "…"}},
     "facts": {"lines": 3000}, "inputs": {"…": "sha256:…"}, "made_by": {"code": "…", "torch": "2.13.0"},
     "seal": "sha256:…"}

`digest` covers kind, files and facts, so equal content has an equal digest wherever and whenever it was made. `seal`
covers all the rest as well, so that no bit of a manifest changes unseen.
"""

import errno
import hashlib
import importlib.metadata
import json
import os
import uuid
from collections.abc import Callable, Collection
from functools import cache
from pathlib import Path
from typing import Any

from typing_extensions import TypedDict

from infoxlm_core import outside
from infoxlm_core.errors import DataCorrupt, InputError, TryAgain

NAME = "manifest.json"
FINETUNING = 1
"""Version of one computation that makes two kinds of artifacts: in a pipeline `classifier`, in a suite `tuned`."""
VERSIONS = {
    "corpus": 2,  # prepare_corpus
    "shards": 1,  # tokenize_corpus
    "pretrained": 1,  # pretrain
    "classifier": FINETUNING,  # finetune
    "tuned": FINETUNING,  # measure, of a suite
    "scores": 2,  # evaluate
    "points": 1,  # measure, of a suite
    "comparison": 2,  # compare
    "suite": 2,  # summarise
}
"""Raise the version of a kind of artifact when the same config and inputs give another content: what was made before is
then made anew. Digests of source do not tell: they also change with a comment. `tests/infoxlm_core/test_versions.py`
fails if results of a stage change and its version does not."""

_BESIDE = (
    NAME,
    "README.md",
    "LICENSE",
    ".gitattributes",
    ".gitignore",
    ".DS_Store",
)  # nobody reads them; manifests are those of parts
_UNSEALED = {"kind", "digest", "files", "facts", "inputs", "made_by"}  # names in older manifests, which have no seal
_LIBRARIES = ("torch", "transformers", "sentencepiece", "pyarrow", "numpy")


@outside.allow_extra_keys
class Entry(TypedDict):
    """What a manifest says of one file."""

    size: int
    sha256: str


@outside.allow_extra_keys
class Manifest(TypedDict):
    """What every manifest of ours has; some have more."""

    kind: str
    digest: str
    files: dict[str, Entry]
    facts: dict[str, Any]


def digest(value: Any) -> str:
    """SHA-256 of a JSON value, independent of the order of its keys."""
    text = json.dumps(value, sort_keys=True, ensure_ascii=False, separators=(",", ":"), default=str)
    return "sha256:" + hashlib.sha256(text.encode()).hexdigest()


def file_sha256(path: Path) -> str:
    """SHA-256 of a file's bytes, as hexadecimal digits."""
    with outside.check_readable(path).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def digest_files(place: Path) -> str:
    """SHA-256 of names and bytes of all files below a folder, or of a file; InputError if one may not be listed."""
    files = [place] if place.is_file() else [path for path in outside.list_tree(place) if path.is_file()]
    return digest({str(path.relative_to(place)): file_sha256(path) for path in files})


@cache
def describe_software() -> dict[str, str]:
    """What computed an artifact, for the record: a digest of this package's source, and versions of libraries."""
    root = Path(__file__).parent
    files = [path for path in sorted(root.rglob("*")) if path.suffix in (".py", ".j2", ".yaml")]
    code = digest({str(path.relative_to(root)): file_sha256(path) for path in files})
    return {"code": code} | {name: importlib.metadata.version(name) for name in _LIBRARIES}


def join_inside(directory: Path | str, name: str, source: str = "") -> Path:
    """Join a name that comes from outside, from a manifest or a listing, to the folder that it must not leave.

    Raises InputError, naming the `source` that the folder is a copy of, if the name is absolute, or has a part that is
    empty, `.` or `..`.
    """
    if "\0" in name or not {"", ".", ".."}.isdisjoint(name.split("/")):
        shown = repr(f"{source or directory}/{name}")[1:-1]  # one line, whatever is in the name
        raise InputError(f"{shown}: a name that leads out of its folder: rename it")
    return Path(directory, name)


def load(directory: Path) -> dict[str, Any]:
    """The manifest of an artifact as it stands, nothing verified but its form; DataCorrupt if it is none."""
    return outside.read_json(directory / NAME, Manifest, "make or copy it again", DataCorrupt)


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write a file so that a reader sees the old content or all of the new, also after a crash.

    Several processes may write it at once: each has a temporary file of its own, and the last to finish counts.
    """
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")  # tempfile's would be readable by us alone
    try:
        with temporary.open("xb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        error.filename = error.filename or str(path)  # a write names none: of several disks it may be any that is full
        raise
    finally:
        temporary.unlink(missing_ok=True)
    sync_file(path.parent)


def move_into_place(partial: Path, final: Path, sign: str = "") -> None:
    """Rename a finished directory, so that it is whole or not there, also after a power cut; somebody may have been
    faster, and then has made the same, if the file `sign` is there. InputError: a file or a link has the name."""
    sync_tree(partial)  # else the name may outlive what is in it
    try:
        partial.replace(final)
    except OSError as error:
        if isinstance(error, NotADirectoryError) and final.is_symlink() | final.is_file():  # the error names `partial`
            raise InputError(f"{final} is in the way: it is no folder of ours; remove it") from None
        if not (final / sign).exists():
            raise
    sync_file(final.parent)


def make_folder(path: Path) -> None:
    """Make a folder, and those above it, that survive a power cut, even if somebody else has just made it."""
    missing = [folder for folder in path.parents if not folder.is_dir()]
    path.mkdir(parents=True, exist_ok=True)
    for folder in (path, *missing):
        sync_file(folder.parent)


def sync_tree(directory: Path) -> None:
    """Make all files below a directory, and their names, survive a power cut."""
    for path in (*directory.rglob("*"), directory):
        sync_file(path)


def sync_file(path: Path) -> None:
    """Make a written file, or the renames inside a directory, survive a power cut; not in a directory that we may
    enter and not list, which nobody can open."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except PermissionError:
        if path.is_dir():
            return
        raise
    try:
        os.fsync(descriptor)
    except OSError as error:  # some network file systems cannot
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


def write(
    directory: Path, kind: str, facts: dict[str, Any] | None = None, inputs: dict[str, str] | None = None
) -> dict[str, Any]:
    """Describe all files below a directory in its manifest and return it. The last act of making an artifact."""
    files = {
        str(path.relative_to(directory)): {"size": path.stat().st_size, "sha256": file_sha256(path)}
        for path in sorted(directory.rglob("*"))
        if path.is_file() and path.name != NAME
    }
    content = {"kind": kind, "files": files, "facts": facts or {}}
    manifest = content | {"digest": digest(content), "inputs": inputs or {}, "made_by": describe_software()}
    manifest["seal"] = digest(manifest)
    write_atomically(directory / NAME, json.dumps(manifest, indent=1, sort_keys=True, ensure_ascii=False) + "\n")
    return manifest


def unnamed(directory: Path, files: Collection[str]) -> list[str]:
    """Files of a directory that its manifest does not name, though a reader of the directory might take them in."""
    found = []
    for path in sorted(directory.rglob("*")):
        name = str(path.relative_to(directory))
        hidden = name[0] == "." and "/" in name  # .git, or .cache of the hub's client
        beside = hidden or path.name in _BESIDE or (path.name[0] == "." and path.suffix in (".lock", ".tmp"))
        if not beside and name not in files and (path.is_symlink() or not path.is_dir()):
            found.append(name)
    return found


def read(
    directory: Path | str, kind: str, made_with: str, check: Callable[[Path], bool] = lambda _: True
) -> dict[str, Any]:
    """Read a manifest and compare every file with it; hash only those for which `check` is true.

    Raises:
        InputError: there is no manifest (its stage, `made_with`, was not run), or it describes something else.
        DataCorrupt: a file is missing, differs from what was written, or was put there later.
    """
    directory = Path(directory)
    path = directory / NAME
    if not path.is_file():
        raise InputError(f"no {NAME} in {directory}: run {made_with} first")
    remedy = f"remove the directory and run {made_with} again"
    manifest: dict[str, Any] = outside.read_json(path, Manifest, remedy, DataCorrupt)
    found, files, facts = manifest["kind"], manifest["files"], manifest["facts"]
    described = digest({"kind": found, "files": files, "facts": facts})
    if described != manifest["digest"]:
        raise DataCorrupt(f"{path} has digest {manifest['digest']} but describes {described}: {remedy}")
    sealed = {name: value for name, value in manifest.items() if name != "seal"}
    seal = manifest.get("seal", digest(sealed) if sealed.keys() <= _UNSEALED else "")
    if seal != digest(sealed):
        raise DataCorrupt(f"{path} has seal {seal!s:.80} but describes {digest(sealed)}: {remedy}")
    try:
        for name, entry in files.items():
            verify_file(join_inside(directory, name), entry, remedy, hashed=check(Path(name)))
    except (InputError, OSError) as error:  # a name that leads elsewhere, or is too long to be one
        said = outside.translate_error(error, path)
        if isinstance(said, TryAgain) or isinstance(error, PermissionError):  # which damages nothing
            raise said or error from error
        raise DataCorrupt(f"{path} cannot be read ({error}): {remedy}") from error
    if more := unnamed(directory, files):
        raise DataCorrupt(f"{directory / more[0]} is not named in {path}: move it elsewhere")
    if found != kind:
        raise InputError(f"{directory} holds a {found}, not a {kind}: give the output of {made_with}")
    return manifest


def verify_file(path: Path, entry: dict[str, Any], remedy: str, hashed: bool = True) -> None:
    """Compare one file with its entry in a manifest; raise DataCorrupt if it differs."""
    if not path.is_file():
        raise DataCorrupt(f"{path} is missing: {remedy}")
    if path.stat().st_size != entry["size"]:
        raise DataCorrupt(f"{path} has {path.stat().st_size} bytes, its manifest says {entry['size']}: {remedy}")
    if hashed and (found := file_sha256(path)) != entry["sha256"]:
        raise DataCorrupt(f"{path} has sha256 {found[:12]}…, its manifest says {entry['sha256'][:12]}…: {remedy}")
