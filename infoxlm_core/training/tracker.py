"""Where a run reports its curves: a Protocol, and the tracker that needs nothing but a file.

The file, `metrics.jsonl`, is the record: one line per call, `{"step": 10, "loss/mlm": 2.3}`. Whatever ships the
points elsewhere reads them from there, so a server that is slow or gone never holds up a step.
"""

import json
import os
import sys
from pathlib import Path
from typing import Annotated, Protocol

from pydantic import Field

from infoxlm_core import manifests, outside
from infoxlm_core.errors import DataCorrupt, InputError

METRICS = "metrics.jsonl"  # the curves, in a run's directory beside its checkpoints, and beside an exported model

_Int64 = Annotated[int, Field(ge=-(2**63), lt=2**63)]  # a larger one is a float, as numbers of curves are
Point = tuple[int, dict[str, float]]


class Tracker(Protocol):
    """What training says about itself while it runs: `resume` first, and when it goes back; `close` last, once."""

    def resume(self, step: int) -> None:
        """Forget every point after `step`: the run continues there (0: from the start). Of points that repeat what was
        told before, `repeated` is 1, and `rewinds` says which time it is."""

    def log(self, step: int, values: dict[str, float]) -> None:
        """Report named values of one optimizer step; return at once."""

    def sync(self) -> None:
        """Make what was logged survive a power cut; called with each checkpoint."""

    def close(self) -> None: ...


class FileTracker:
    """Appends to a `metrics.jsonl`; what an earlier process left in it stays until `resume`."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        manifests.make_folder(self.path.parent)
        self.path.touch()
        self._keep_until(sys.maxsize)  # mends a torn last line, so that the next one does not continue it

    def resume(self, step: int) -> None:
        self._file.close()
        self._keep_until(step)

    def log(self, step: int, values: dict[str, float]) -> None:
        self._file.write(_line(step, values))
        self._file.flush()  # to the operating system: it survives this process, and a shipping thread can read it

    def sync(self) -> None:
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()

    def _keep_until(self, step: int) -> None:
        lines = [_line(*point) for point in read(self.path) if point[0] <= step]
        if "".join(lines).encode() != self.path.read_bytes():
            manifests.write_atomically(self.path, "".join(lines))
        self._file = self.path.open("a", encoding="utf-8")  # until close()


def _line(step: int, values: dict[str, float]) -> str:
    return json.dumps({"step": step, **values}) + "\n"


def read(path: Path | str) -> list[Point]:
    """Read the points of a `metrics.jsonl` in the order they were logged, without a torn last line; DataCorrupt if a
    complete line holds no point."""
    with Path(path).open("rb") as file:
        return [parse(line, f"{path}:{number}") for number, line in enumerate(file, 1) if line.endswith(b"\n")]


def parse(line: bytes, where: str) -> Point:
    """Read one line; `where` names it in the error."""
    try:
        values = outside.parse_json(line, dict[str, _Int64 | float], where, "")
        if isinstance(step := values.pop("step", None), int):
            return step, values
        raise InputError("no step")
    except InputError:
        raise DataCorrupt(f"{where}: {line[:80]!r} is no point of a curve: remove this line") from None
