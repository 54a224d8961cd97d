"""What comes from outside is looked at before it is opened, and has the shape that we expect before it is used.

A pipe or a device among the files would be waited for, or read, for ever. JSON that is `[]`, `5` or nested a thousand
deep is no manifest, however valid it is. Either way the error is one of ours, and names the file and what to do.
"""

import errno
import functools
import itertools
import os
import stat
from pathlib import Path
from typing import Any

from pydantic import ConfigDict, TypeAdapter, ValidationError, with_config

from infoxlm_core.errors import EncodingError, InfoXLMError, InputError, StorageFull, StorageUnavailable

allow_extra_keys = with_config(ConfigDict(extra="allow"))
"""Decorates a TypedDict of which only some names are known; others are kept as they are."""
MAX_JSON = 256 << 20
"""Bytes of a JSON file of ours or of a model; the largest known, tokenizer.json of a large vocabulary, has 20 MB."""

_KINDS = (
    (stat.S_ISFIFO, "a named pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
    (stat.S_ISDIR, "a folder"),
)
_FULL = (errno.ENOSPC, errno.EDQUOT)
_PASSES = (errno.EIO, errno.ESTALE, errno.EREMOTEIO, errno.ENOTCONN, errno.ETIMEDOUT)
_DENIED = (errno.EACCES, errno.EPERM)
_REMEDIES = {
    errno.EACCES: "change its permissions, or give another path",
    errno.EPERM: "change its permissions, or give another path",
    errno.EROFS: "give a path that can be written",
    errno.ENAMETOOLONG: "give a shorter name",
    errno.ELOOP: "its links lead to themselves: give another path",
    errno.ENOTDIR: "a part of the path is a file: give another path",
    errno.EISDIR: "it is a folder: move it elsewhere",
    errno.EEXIST: "something else is there: give another path",
    errno.EMFILE: "raise the limit of open files (ulimit -n)",
    errno.ENFILE: "raise the limit of open files (ulimit -n)",
    errno.EPIPE: "whoever reads the output has ended: let it read to the end",
}


def is_full(error: BaseException) -> bool:
    """Whether an error says that there is no space: libraries wrap what the system said in errors of their own."""
    if isinstance(error, OSError) and error.errno in _FULL:
        return True
    full = ("No space left", "Disk quota exceeded", "os error 28", "os error 122", "database or disk is full")
    return any(said in str(error) for said in full)


def is_panic(error: BaseException) -> bool:
    """Whether a library in Rust, such as `tokenizers`, has given up: its error is no Exception, and has no class that
    could be imported."""
    return type(error).__name__ == "PanicException"


def translate_error(error: BaseException, where: object = "") -> InfoXLMError | None:
    """What the operating system says as an error of ours; None if it is none that a user can mend.

    Args:
        error: any; also one that a library made of what the system said.
        where: what was read or written, if the error does not name it.
    """
    said = " ".join(str(error).split())[:300]
    if is_full(error):
        place = getattr(error, "filename", None) or where or "the disk"
        return StorageFull(f"{place}: no space left ({said}): free some, then run again")
    if is_panic(error):
        return InputError(f"{where or 'the input'}: a tokenizer gives up on it ({said}): copy the tokenizer again")
    if not isinstance(error, OSError) or error.errno is None:
        return None
    path = str(error.filename or where or "a file")
    if len(path) > 200:
        path = f"{path[:200]}…"
    if error.errno in _PASSES:
        return StorageUnavailable(f"{path}: the storage fails ({error.strerror}): run again when it is well")
    if error.errno in _REMEDIES:
        return InputError(f"{path}: {error.strerror}: {_REMEDIES[error.errno]}")
    return None


def check_readable(path: Path) -> Path:
    """The path of a file that can be opened without waiting, and ends; links are followed.

    Raises:
        InputError: there is none, it may not be looked at, or it is a folder, a pipe, a socket or a device.
    """
    try:
        mode = path.stat().st_mode
    except (OSError, ValueError) as error:  # ValueError: a zero byte in the name
        raise translate_error(error, path) or InputError(
            f"{path!s:.200}: no such file: give one that is there"
        ) from None
    for is_kind, name in _KINDS:
        if is_kind(mode):
            raise InputError(f"{path} is {name}, not a file: give a file")
    return path


def list_tree(folder: Path) -> list[Path]:
    """All that lies below a folder, files and folders, sorted; links to folders are not followed.

    Unlike `rglob`, which takes a folder that may not be listed for an empty one: what is in it would be missing, in
    training text or among the tests that are kept out of it, and nobody would know.

    Raises:
        InputError: a folder may not be listed.
    """

    def refuse(error: OSError) -> None:
        if not isinstance(error, FileNotFoundError):  # removed meanwhile
            raise translate_error(error, folder) or error

    if not folder.is_dir():  # nor if it has a zero byte in its name
        return []
    return sorted(
        Path(place, name) for place, *names in os.walk(folder, onerror=refuse) for name in itertools.chain(*names)
    )


def read_bytes(path: Path, limit: int) -> bytes:
    """The content of a file of at most so many bytes; InputError otherwise."""
    try:
        if (size := check_readable(path).stat().st_size) > limit:
            raise InputError(f"{path} has {size:,} bytes, more than {limit:,}: give a smaller file")
        return path.read_bytes()
    except OSError as error:
        raise translate_error(error, path) or InputError(f"{path} cannot be read ({error}): give another") from None


def read_text(path: Path, limit: int) -> str:
    """A UTF-8 file, a mark at its beginning left out; EncodingError names line and byte where it is none."""
    return decode(read_bytes(path, limit), str(path))


def decode(content: bytes, what: str) -> str:
    """UTF-8 whatever the locale is; EncodingError names line and byte where it is none."""
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        content = error.object  # without the mark, if there was one
        line, begin = content.count(b"\n", 0, error.start) + 1, content.rfind(b"\n", 0, error.start) + 1
        where = f"{what}:{line}:{error.start - begin + 1}"
        raise EncodingError(f"{where}: not UTF-8 from this byte on: convert it") from None


@functools.cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def parse_json(
    content: bytes | str, kind: Any, what: object, remedy: str, error: type[InfoXLMError] = InputError
) -> Any:
    """JSON of a kind, any type that pydantic knows; nesting is bounded.

    Args:
        content: the text.
        kind: what it must be: `dict[str, float]`, a TypedDict, ….
        what: names it in the error.
        remedy: what to do about it.
        error: the class of the error.
    """
    try:
        return _adapter(kind).validate_json(content, strict=True)
    except ValidationError as failure:
        raise error(f"{what} cannot be read ({_first(failure)}): {remedy}") from None


def validate(value: Any, kind: Any, what: object, remedy: str, error: type[InfoXLMError] = InputError) -> Any:
    """A value that has been read already, as a kind; arguments as of `parse_json`."""
    try:
        return _adapter(kind).validate_python(value, strict=True)
    except ValidationError as failure:
        raise error(f"{what}: {_first(failure)}: {remedy}") from None


def _first(failure: ValidationError) -> str:
    first = failure.errors(include_input=False, include_url=False)[0]
    return "".join(f"{part!s:.80}: " for part in first["loc"]) + first["msg"]


def read_json(path: Path, kind: Any, remedy: str, error: type[InfoXLMError] = InputError, limit: int = MAX_JSON) -> Any:
    """`parse_json` of a file; a file that is missing or cannot be read is an `error`, too."""
    try:
        if not path.exists():
            raise error(f"{path}: no such file: {remedy}")
        content = read_bytes(path, limit)
    except (InputError, OSError) as failure:
        if isinstance(failure, error):
            raise
        cause = failure if isinstance(failure, OSError) else failure.__context__
        if isinstance(cause, OSError) and cause.errno in (*_PASSES, *_DENIED):  # nothing is wrong with the file
            raise translate_error(cause, path) or failure from None
        raise error(f"{failure}: {remedy}") from None
    return parse_json(content.removeprefix(b"\xef\xbb\xbf"), kind, path, remedy, error)
