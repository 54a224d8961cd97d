"""Write and read a run's curves: the protocol of trackers, and a tracker that writes `metrics.jsonl`.

The file has one line per logged step: `{"step": 10, "loss/mlm": 2.3}`. Other trackers read the points from this file
and send them to a server, so that a slow server never delays a step.
"""

import json
import os
import sys
from pathlib import Path
from typing import Annotated, Protocol

from pydantic import Field

from infoxlm_core import manifests, user_files
from infoxlm_core.errors import DataCorrupt, InputError

METRICS = "metrics.jsonl"  # file name in a run's directory and in an exported model

_Int64 = Annotated[int, Field(ge=-(2**63), lt=2**63)]  # larger integers are read as floats
Point = tuple[int, dict[str, float]]


class Tracker(Protocol):
    """Writes a run's curves. Call `resume` at the start and after every rewind, and `close` at the end."""

    def resume(self, step: int) -> None:
        """Delete all points after `step`. After a rewind, points have the metrics `repeated` and `rewinds`."""

    def log(self, step: int, values: dict[str, float]) -> None:
        """Write a step's metrics without blocking."""

    def sync(self) -> None:
        """Flush all points to disk, so that they survive a power failure. Called before each checkpoint."""

    def close(self) -> None: ...


class FileTracker:
    """Appends to a `metrics.jsonl` file. Points of an earlier process remain until `resume`."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        manifests.make_directory(self.path.parent)
        self.path.touch()
        self._open_until(sys.maxsize)  # deletes a partly written last line

    def resume(self, step: int) -> None:
        self._file.close()
        self._open_until(step)

    def log(self, step: int, values: dict[str, float]) -> None:
        self._file.write(_line(step, values))
        self._file.flush()  # makes the point visible to other threads, and safe if this process dies

    def sync(self) -> None:
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()

    def _open_until(self, step: int) -> None:
        """Delete the points after `step` and open the file for appending."""
        text = "".join(_line(point_step, values) for point_step, values in read(self.path) if point_step <= step)
        if text.encode() != self.path.read_bytes():
            manifests.write_atomically(self.path, text)
        self._file = self.path.open("a", encoding="utf-8")


def _line(step: int, values: dict[str, float]) -> str:
    return json.dumps({"step": step, **values}) + "\n"


def read(path: Path | str) -> list[Point]:
    """Read the points of a `metrics.jsonl` file in order, ignoring a partly written last line.

    Raises:
        DataCorrupt: a complete line is not a point.
    """
    points = []
    with Path(path).open("rb") as file:
        for number, line in enumerate(file, start=1):
            if line.endswith(b"\n"):
                points.append(parse(line, f"{path}:{number}"))
    return points


def parse(line: bytes, location: str) -> Point:
    """Parse one line. The location, such as FILE:LINE, is for the error message."""
    try:
        values = user_files.parse_json(line, dict[str, _Int64 | float], location, "")
        step = values.pop("step", None)
        if not isinstance(step, int):
            raise InputError("no step")
        return step, values
    except InputError:
        raise DataCorrupt(f"{location}: {line[:80]!r} is not a point of a curve: remove this line") from None
