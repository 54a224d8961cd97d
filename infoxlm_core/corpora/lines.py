"""Rows of a corpus, and the lines of plain and compressed files."""

import codecs
import io
import itertools
import lzma
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple

import pyarrow as pa

from infoxlm_core import user_files
from infoxlm_core.errors import EncodingError, InputError

MAX_LINE = 1 << 20  # bytes; longer lines are skipped without loading them
LOOK_AHEAD = 32 << 20  # bytes to decompress before using the first line, to detect a decompression bomb
_CODECS = {".bz2": "bz2", ".gz": "gzip", ".lz4": "lz4", ".zst": "zstd"}  # pyarrow cannot decompress .xz
COMPRESSED = (".xz", *_CODECS)
AnyPath = Path | zipfile.Path
"""A file on this machine, or a file in a zip file."""
MAX_RATIO = 100  # largest ratio of unpacked to packed size; files above it count as decompression bombs


class Row(NamedTuple):
    """A sentence, or a translation pair whose first side is the pivot's."""

    languages: tuple[str, ...]
    texts: tuple[str, ...]
    file: str
    line: int
    """Line number in the file, or message number in a gettext catalog. If documents are compared, all rows of a
    document have the number of its first line."""
    dropped: str | None = None
    """Reason to drop the row, or None. The texts of a dropped row are not used, except for `invalid_utf8`: the first
    text is the position file:line:byte."""


class Line(NamedTuple):
    """One line of a file."""

    number: int  # counted from 1
    text: str
    dropped: str | None = None
    """Reason to drop the line, or None. For `too_long`, the text is empty. For `invalid_utf8`, the text is the position
    file:line:byte of the first invalid byte."""


class _UnpackedFile(io.RawIOBase):
    """Reads the decompressed content of a file. Damaged files and decompression bombs raise InputError."""

    def __init__(self, path: AnyPath):
        self.path = path
        self.unpacked_bytes = 0
        self.packed_file: pa.OSFile | None = None
        self.stream: Any
        if isinstance(path, zipfile.Path):
            self.packed_size = path.root.getinfo(path.at).compress_size
            self.stream = path.open("rb")
            return
        self.packed_file = pa.OSFile(str(user_files.check_readable(path)))
        if path.suffix == ".xz":
            self.stream = lzma.open(self.packed_file)  # noqa: SIM115
        elif path.suffix in _CODECS:
            self.stream = pa.CompressedInputStream(self.packed_file, _CODECS[path.suffix])
        else:
            self.stream = self.packed_file

    def count_packed_bytes(self) -> int:
        """Return the number of compressed bytes read so far. For a member of a zip file, return its compressed size."""
        return self.packed_size if self.packed_file is None else self.packed_file.tell()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        """Fill a buffer with up to `len(buffer)` decompressed bytes, and return their number."""
        try:
            chunk = self.stream.read(len(buffer))
        except (OSError, EOFError, lzma.LZMAError, zlib.error, zipfile.BadZipFile) as error:
            raise InputError(f"{self.path} is damaged ({error}): fetch it again") from None
        buffer[: len(chunk)] = chunk
        self.unpacked_bytes += len(chunk)
        if self.unpacked_bytes > limit_unpacked_bytes(self.count_packed_bytes()):
            raise InputError(  # docs/errors.md lists the message as `DecompressionLimit`
                f"{self.path}: DecompressionLimit: unpacks to over {MAX_RATIO} times its size: if the file is correct, "
                "unpack it"
            )
        return len(chunk)


def limit_unpacked_bytes(packed_bytes: int) -> int:
    """Return how much a file may unpack to. Even a short, repetitive file may have `MAX_LINE` bytes, which are safe."""
    return MAX_RATIO * packed_bytes + MAX_LINE


def open_zip(path: Path, expected_kind: str) -> zipfile.ZipFile:
    """Open a zip file. Raise InputError if it is damaged. The message names the expected kind of file."""
    try:
        return zipfile.ZipFile(user_files.check_readable(path))
    except (zipfile.BadZipFile, OSError, NotImplementedError, ValueError) as error:  # unknown version, invalid names
        raise InputError(f"{path} is not {expected_kind} ({error})") from None


def unpack(path: AnyPath) -> IO[bytes]:
    """Open a file for reading, and decompress it if its suffix is in `COMPRESSED`. Raise InputError for a decompression
    bomb."""
    try:
        if path.suffix in COMPRESSED:
            # Decompress and discard the first part: this usually detects a bomb before its first line is used.
            with io.BufferedReader(_UnpackedFile(path), MAX_LINE) as first_part:
                for _ in range(LOOK_AHEAD // MAX_LINE):
                    first_part.read(MAX_LINE)
        return io.BufferedReader(_UnpackedFile(path), MAX_LINE)
    except (OSError, RuntimeError, zipfile.BadZipFile) as error:  # RuntimeError: encrypted or unknown compression
        raise InputError(f"{path} cannot be opened ({error}): write it again") from None


def read_lines(path: AnyPath) -> Iterator[Line]:
    """Yield the lines of a file. Overlong and invalid lines have a reason to drop them.

    Only \\n ends a line, so that line numbers agree with `wc -l`.
    """
    with unpack(path) as file:
        for number in itertools.count(1):
            content = file.readline(MAX_LINE)
            if not content:
                return
            if len(content) == MAX_LINE and not content.endswith(b"\n"):
                while content and not content.endswith(b"\n"):  # skip the rest of the line
                    content = file.readline(MAX_LINE)
                yield Line(number, "", "too_long")
                continue
            content = content.removesuffix(b"\n").removesuffix(b"\r")
            if number == 1:
                content = content.removeprefix(codecs.BOM_UTF8)  # not text; programs on Windows write it
            try:
                line = Line(number, content.decode())
            except UnicodeDecodeError as error:  # the text is replaced by the position, see `Line.dropped`
                line = Line(number, f"{path}:{number}:{error.start + 1}", "invalid_utf8")
            yield line


def read_valid_texts(path: Path) -> Iterator[str]:
    """Yield the text of every line of a file. All lines must be valid.

    Raises:
        EncodingError: a line is not UTF-8.
        InputError: a line is too long.
    """
    for line in read_lines(path):
        if line.dropped == "invalid_utf8":
            position = line.text  # see `Line.dropped`
            raise EncodingError(f"{position}: not UTF-8 from this byte on. Convert the file to UTF-8.")
        if line.dropped:
            raise InputError(f"{path}:{line.number} is too long, over {MAX_LINE:,} bytes. Split the line.")
        yield line.text
