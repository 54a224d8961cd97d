"""A row of a corpus, and the lines of a file: whatever its compression, each is text or dropped for a reason."""

import io
import lzma
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple

import pyarrow as pa

from infoxlm_core import outside
from infoxlm_core.errors import InputError

MAX_LINE = 1 << 20  # bytes; longer lines are skipped without holding them in memory
LOOK_AHEAD = 32 << 20  # bytes
_CODECS = {".bz2": "bz2", ".gz": "gzip", ".lz4": "lz4", ".zst": "zstd"}
COMPRESSED = (".xz", *_CODECS)
MAX_RATIO = 100  # of unpacked to packed size, above which a file is a bomb


class Row(NamedTuple):
    """One line (one language) or one pair (the pivot's first), and where it stands (gettext: the n-th message)."""

    languages: tuple[str, ...]
    texts: tuple[str, ...]
    file: str
    line: int
    dropped: str | None = None
    """Why the row cannot be used at all; its texts then mean nothing, but for `invalid_utf8`: file:line:byte."""


class _Unpacked(io.RawIOBase):
    """Bytes of a file that may be compressed; refuses damaged files and bombs."""

    def __init__(self, path: Path):
        self.path, self.count = path, 0
        self.packed: Any = pa.OSFile(str(outside.check_readable(path)))
        self.stream = lzma.open(self.packed) if path.suffix == ".xz" else _decompressed(self.packed, path)  # noqa: SIM115

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        try:
            chunk = self.stream.read(len(buffer))
        except (OSError, EOFError, lzma.LZMAError) as error:
            raise InputError(f"{self.path} is damaged ({error}): fetch it again") from None
        buffer[: len(chunk)] = chunk
        self.count += len(chunk)
        if self.count > MAX_RATIO * self.packed.tell() + MAX_LINE:  # so far, lest a bomb is read for long
            raise InputError(f"{self.path}: DecompressionLimit: unpacks to over {MAX_RATIO} times its size: refused")
        return len(chunk)


def _decompressed(packed: Any, path: Path) -> Any:
    codec = _CODECS.get(path.suffix)
    return pa.CompressedInputStream(packed, codec) if codec else packed


def unpack(path: Path) -> IO[bytes]:
    """Open a file; how it is compressed, if at all, its suffix tells. A bomb is refused before a line of it is used."""
    try:
        if path.suffix in COMPRESSED:
            with io.BufferedReader(_Unpacked(path), MAX_LINE) as ahead:
                for _ in range(LOOK_AHEAD // MAX_LINE):
                    ahead.read(MAX_LINE)
        return io.BufferedReader(_Unpacked(path), MAX_LINE)
    except OSError as error:
        raise InputError(f"{path} cannot be opened ({error}): check it") from None


def read(path: Path) -> Iterator[tuple[int, str, str | None]]:
    """Yield (number from 1, text, reason to drop). Only \\n ends a line, so that numbers agree with `wc -l`."""
    with unpack(path) as file:
        number = 0
        while line := file.readline(MAX_LINE):
            number += 1
            if len(line) == MAX_LINE and line[-1:] != b"\n":
                while (rest := file.readline(MAX_LINE)) and rest[-1:] != b"\n":
                    pass
                yield number, "", "too_long"
                continue
            line = line.removesuffix(b"\n").removesuffix(b"\r")
            if number == 1:
                line = line.removeprefix(b"\xef\xbb\xbf")
            try:
                yield number, line.decode(), None
            except UnicodeDecodeError as error:
                yield number, f"{path}:{number}:{error.start + 1}", "invalid_utf8"
