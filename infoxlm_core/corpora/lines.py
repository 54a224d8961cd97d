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

MAX_LINE = 1 << 20  # bytes; longer lines are skipped without holding them in memory
LOOK_AHEAD = 32 << 20  # bytes that are decompressed to detect a bomb before the first line is used
_CODECS = {".bz2": "bz2", ".gz": "gzip", ".lz4": "lz4", ".zst": "zstd"}
COMPRESSED = (".xz", *_CODECS)
AnyPath = Path | zipfile.Path
"""A file on this machine, or a file in a zip file."""
MAX_RATIO = 100  # unpacked by packed size; a file above it is a decompression bomb


class Row(NamedTuple):
    """A sentence, or a translation pair that begins with the pivot's side."""

    languages: tuple[str, ...]
    texts: tuple[str, ...]
    file: str
    line: int
    """Number of the line in its file. In a gettext catalog, number of the message. For all rows of a document that is
    compared as a whole, the line on which the document begins."""
    dropped: str | None = None
    """Reason to drop the row, or None. The texts of a dropped row are not used, but for `invalid_utf8` the first is the
    position file:line:byte."""


class Line(NamedTuple):
    """A line of a file."""

    number: int  # counted from 1
    text: str
    dropped: str | None = None
    """Reason to drop the line, or None. The text of a `too_long` line is empty. That of an `invalid_utf8` line is the
    position file:line:byte of its first invalid byte."""


class _UnpackedFile(io.RawIOBase):
    """The decompressed content of a file. Reading a damaged file or a decompression bomb raises InputError."""

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
        """Return how many bytes of the file were read so far. Of a file in a zip file, return the packed size."""
        return self.packed_size if self.packed_file is None else self.packed_file.tell()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        """Read up to `len(buffer)` bytes into a buffer, and return their number."""
        try:
            chunk = self.stream.read(len(buffer))
        except (OSError, EOFError, lzma.LZMAError, zlib.error, zipfile.BadZipFile) as error:
            raise InputError(f"{self.path} is damaged ({error}): fetch it again") from None
        buffer[: len(chunk)] = chunk
        self.unpacked_bytes += len(chunk)
        max_bytes = MAX_RATIO * self.count_packed_bytes() + MAX_LINE
        if self.unpacked_bytes > max_bytes:
            raise InputError(f"{self.path}: DecompressionLimit: unpacks to over {MAX_RATIO} times its size: refused")
        return len(chunk)


def open_zip(path: Path, expected_kind: str) -> zipfile.ZipFile:
    """Open a zip file. Raise InputError if it is damaged, with a message that names the expected kind of file."""
    try:
        return zipfile.ZipFile(user_files.check_readable(path))
    except (zipfile.BadZipFile, OSError, NotImplementedError, ValueError) as error:  # another version, bad names
        raise InputError(f"{path} is not {expected_kind} ({error})") from None


def unpack(path: AnyPath) -> IO[bytes]:
    """Open a file, and decompress it if its suffix is in `COMPRESSED`. Raise InputError for a decompression bomb."""
    try:
        if path.suffix in COMPRESSED:
            # Decompress the first part and discard it: this usually detects a bomb before its first line is used.
            with io.BufferedReader(_UnpackedFile(path), MAX_LINE) as first_part:
                for _ in range(LOOK_AHEAD // MAX_LINE):
                    first_part.read(MAX_LINE)
        return io.BufferedReader(_UnpackedFile(path), MAX_LINE)
    except (OSError, RuntimeError, zipfile.BadZipFile) as error:  # RuntimeError: encrypted, or an unknown compression
        raise InputError(f"{path} cannot be opened ({error}): write it again") from None


def read_lines(path: AnyPath) -> Iterator[Line]:
    """Yield the lines of a file, some with a reason to drop them.

    Only \\n ends a line, so that the numbers agree with `wc -l`.
    """
    with unpack(path) as file:
        for number in itertools.count(1):
            content = file.readline(MAX_LINE)
            if not content:
                return
            if len(content) == MAX_LINE and not content.endswith(b"\n"):
                _skip_rest_of_line(file)
                yield Line(number, "", "too_long")
                continue
            content = content.removesuffix(b"\n").removesuffix(b"\r")
            if number == 1:
                content = content.removeprefix(codecs.BOM_UTF8)
            try:
                line = Line(number, content.decode())
            except UnicodeDecodeError as error:
                line = Line(number, f"{path}:{number}:{error.start + 1}", "invalid_utf8")
            yield line


def _skip_rest_of_line(file: IO[bytes]) -> None:
    """Read to the end of a line without holding it in memory."""
    while True:
        content = file.readline(MAX_LINE)
        if not content or content.endswith(b"\n"):
            return


def read_valid_texts(path: Path) -> Iterator[str]:
    """Yield the text of every line of a file, all of which must be valid.

    Raises:
        EncodingError: a line is not UTF-8.
        InputError: a line is too long.
    """
    for line in read_lines(path):
        if line.dropped == "invalid_utf8":
            position = line.text
            raise EncodingError(f"{position}: not UTF-8 from this byte on. Convert the file.")
        if line.dropped:
            raise InputError(f"{path}:{line.number} is too long, over {MAX_LINE:,} bytes. Split the line.")
        yield line.text
