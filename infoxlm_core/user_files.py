"""Read users' files safely: refuse pipes and devices, validate JSON, and translate operating system errors.

Opening a named pipe blocks forever, reading a device never ends, and valid JSON may have any structure. Instead, the
functions raise an error that names the file and the remedy.
"""

import codecs
import errno
import functools
import os
import stat
from pathlib import Path
from typing import Any

from pydantic import ConfigDict, TypeAdapter, ValidationError, with_config

from infoxlm_core.errors import EncodingError, InfoXLMError, InputError, StorageFull, StorageUnavailable

allow_extra_keys = with_config(ConfigDict(extra="allow"))
"""Decorator for a TypedDict that need not list all keys of a JSON object."""
MAX_JSON = 256 << 20  # bytes; the tokenizer.json of a large vocabulary has 20 MB

_OTHER_FILE_TYPES = (
    (stat.S_ISFIFO, "a named pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
    (stat.S_ISDIR, "a directory"),
)
_DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
_TEMPORARY = (errno.EIO, errno.ESTALE, errno.EREMOTEIO, errno.ENOTCONN, errno.ETIMEDOUT)
_REMEDIES = {
    errno.EACCES: "change its permissions, or give another path",
    errno.EPERM: "change its permissions, or give another path",
    errno.EROFS: "give a path that can be written",
    errno.ENAMETOOLONG: "give a shorter name",
    errno.ELOOP: "give a path whose symbolic links form no loop",
    errno.ENOTDIR: "give a path whose parents are directories",
    errno.EISDIR: "move this directory to another place",
    errno.EEXIST: "give another path",
    errno.EMFILE: "raise the limit of open files (ulimit -n)",
    errno.ENFILE: "raise the limit of open files (ulimit -n)",
    errno.EPIPE: "let the program that reads the output read to the end",
}


def is_full(error: BaseException) -> bool:
    """Return whether an error reports a full disk or quota."""
    if isinstance(error, OSError) and error.errno in _DISK_FULL:
        return True
    # Libraries quote the system's message in errors of their own classes.
    messages = ("No space left", "Disk quota exceeded", "os error 28", "os error 122", "database or disk is full")
    return any(message in str(error) for message in messages)


def is_panic(error: BaseException) -> bool:
    """Return whether an error is a Rust library's panic, which derives from BaseException."""
    return type(error).__name__ == "PanicException"  # the class cannot be imported


def translate_error(error: BaseException, source: object = "") -> InfoXLMError | None:
    """Translate an operating system error to an `InfoXLMError`. Return None if a user cannot fix the cause.

    Args:
        error: the system's error, or a library's error that quotes its message.
        source: file that was read or written, for errors without a file name.
    """
    message = " ".join(str(error).split())[:300]  # a library's message may be long and have several lines
    if is_full(error):
        path = getattr(error, "filename", None) or source or "the disk"
        return StorageFull(f"{path}: no space left ({message}): free some space, then run again")
    if is_panic(error):  # for example, if a regular expression in tokenizer.json backtracks too long
        return InputError(f"{source or 'the input'}: the tokenizer fails ({message}): copy the tokenizer again")
    if not isinstance(error, OSError) or error.errno is None:
        return None
    path = str(error.filename or source or "a file")
    if len(path) > 200:
        path = f"{path[:200]}…"
    if error.errno in _TEMPORARY:
        return StorageUnavailable(f"{path}: the storage fails ({error.strerror}): repair it, then run again")
    if error.errno in _REMEDIES:
        return InputError(f"{path}: {error.strerror}: {_REMEDIES[error.errno]}")
    return None


def check_readable(path: Path) -> Path:
    """Check that a path leads to a regular file, and return the path.

    Raises:
        InputError: the file is missing or inaccessible, or is a directory, pipe, socket or device.
    """
    try:
        mode = path.stat().st_mode
    except (OSError, ValueError) as error:  # ValueError: null character in the name
        clear_error = translate_error(error, path) or InputError(f"{path!s:.200}: no such file: give an existing file")
        raise clear_error from None
    for has_type, type_name in _OTHER_FILE_TYPES:
        if has_type(mode):
            raise InputError(f"{path} is {type_name}, not a file: give a file")
    return path


def list_tree(directory: Path) -> list[Path]:
    """Return the sorted paths of all files and directories below a directory, without following linked directories.

    Raises:
        InputError: a directory cannot be listed. `Path.rglob` would silently skip its files.
    """
    if not directory.is_dir():
        return []
    paths: list[Path] = []
    errors: list[OSError] = []
    for parent, directory_names, file_names in os.walk(directory, onerror=errors.append):
        paths += [Path(parent, name) for name in (*directory_names, *file_names)]
    for error in errors:
        if not isinstance(error, FileNotFoundError):  # another process may have removed the directory
            raise translate_error(error, directory) or error  # unchanged if it has no translation
    return sorted(paths)


def read_bytes(path: Path, max_bytes: int) -> bytes:
    """Return a file's content. Raise InputError if the file is unreadable or larger than `max_bytes`."""
    try:
        size = check_readable(path).stat().st_size
        if size > max_bytes:
            raise InputError(f"{path} has {size:,} bytes, more than {max_bytes:,}: give a smaller file")
        return path.read_bytes()
    except OSError as error:
        clear_error = translate_error(error, path) or InputError(f"{path} cannot be read ({error}): give another file")
        raise clear_error from None


def read_text(path: Path, max_bytes: int) -> str:
    """Return a UTF-8 file's text without a byte order mark. Raise EncodingError if the file is not UTF-8."""
    return decode(read_bytes(path, max_bytes), str(path))


def decode(content: bytes, source: str) -> str:
    """Decode UTF-8 and remove the byte order mark. Raise EncodingError with the position of the first invalid byte."""
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        content = error.object  # without the byte order mark
        line = content.count(b"\n", 0, error.start) + 1
        column = error.start - content.rfind(b"\n", 0, error.start)  # in bytes, counted from 1
        raise EncodingError(f"{source}:{line}:{column}: not UTF-8 from this byte on: convert the file") from None


@functools.cache
def _make_adapter(expected_type: Any) -> TypeAdapter[Any]:
    return TypeAdapter(expected_type)


def parse_json(
    content: bytes | str, expected_type: Any, source: object, remedy: str, error_class: type[InfoXLMError] = InputError
) -> Any:
    """Parse JSON and validate its structure.

    Args:
        content: JSON text.
        expected_type: type of the value, such as `dict[str, float]` or a TypedDict.
        source: file name, for the error message.
        remedy: advice to the user, for the error message.
        error_class: error to raise if the text is invalid.
    """
    try:
        return _make_adapter(expected_type).validate_json(content, strict=True)
    except ValidationError as error:
        raise error_class(f"{source} cannot be read ({_describe_first(error)}): {remedy}") from None


def validate(value: Any, expected_type: Any, source: object, remedy: str) -> Any:
    """Return the value if it has the expected type; otherwise raise InputError. Arguments: see `parse_json`."""
    try:
        return _make_adapter(expected_type).validate_python(value, strict=True)
    except ValidationError as error:
        raise InputError(f"{source}: {_describe_first(error)}: {remedy}") from None


def _describe_first(validation_error: ValidationError) -> str:
    """Describe a value's first error by its location and message."""
    error = validation_error.errors(include_input=False, include_url=False)[0]
    location = "".join(f"{key!s:.80}: " for key in error["loc"])
    return location + error["msg"]


def read_json(path: Path, expected_type: Any, remedy: str, error_class: type[InfoXLMError] = InputError) -> Any:
    """Read and validate a JSON file. Arguments: see `parse_json`.

    Raises:
        error_class: the file is missing or invalid.
        InputError: the user lacks permission to read the file.
    """
    try:
        content = read_bytes(path, MAX_JSON)
    except InputError as error:
        system_error = error.__context__  # still set, although `raise … from None` hides it in tracebacks
        if isinstance(system_error, PermissionError):
            raise  # the file itself may be valid
        if isinstance(system_error, FileNotFoundError):
            raise error_class(f"{path}: no such file: {remedy}") from None
        if isinstance(error, error_class):
            raise
        raise error_class(f"{error}: {remedy}") from None
    return parse_json(content.removeprefix(codecs.BOM_UTF8), expected_type, path, remedy, error_class)
