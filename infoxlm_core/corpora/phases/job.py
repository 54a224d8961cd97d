"""What the tasks of a preparation share, the files that they exchange, and how the tasks of a phase run."""

import functools
import io
import json
import socket
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import DTypeLike

from infoxlm_core.config import PreparationConfig
from infoxlm_core.corpora.parallel import ParallelMap
from infoxlm_core.errors import InputError
from infoxlm_core.progress import progress

Record = dict[str, Any]
"""What a finished task reports, as JSON: counts of rows and other small facts."""
Task = Callable[["Job", int], Record]
"""A pure function that other processes can import. It reads files and puts files; a repetition puts equal files."""
_BOUND = np.dtype("<u8")
_MARKER = "preparation"


class Files(Protocol):
    """Intermediate files by name. Every process of a preparation sees the same files."""

    @property
    def directory(self) -> Path | None:
        """Directory of the files, if processes can map them into memory."""

    def read(self, name: str, start: int = 0, length: int | None = None) -> bytes:
        """Return `length` bytes of a file from `start` on; by default the whole file."""

    def put(self, name: str, content: str | bytes) -> None:
        """Write a file atomically: readers see all of it or nothing."""

    def entries(self) -> Sequence[Any]:
        """Return all files; each has its name as `name`."""


class FileKey(NamedTuple):
    """Identifies the rows of a file in a language, which the report counts together."""

    corpus: str
    language: str  # of a pair: that of its target
    kind: str  # the folder of their table: mono, pairs, held_out_mono or held_out
    file: str


RowCounts = defaultdict[FileKey, Counter[str]]
"""The numbers of rows that were `read`, `kept`, and dropped for each reason."""


class Part(NamedTuple):
    """Rows of a source in one language or language pair, which are cleaned, compared and written together."""

    name: str
    source: int  # index of the corpus in the config; several sources may belong to one corpus
    corpus: str
    kind: str  # the folder of their table
    languages: tuple[str, ...]


@dataclass(frozen=True)
class Job:
    """What all tasks share; pickled for tasks in other processes."""

    config: PreparationConfig
    files: Files
    localise: Callable[[PreparationConfig], PreparationConfig] | None
    partition_count: int = 1
    parts: Sequence[Part] = ()
    medians: Mapping[str, float] = field(default_factory=dict)  # language pair -> median log length ratio
    reserved_digest: str = ""  # of the digests of reserved text

    def put_marker(self) -> None:
        """Put the file by which a task recognises the files of its preparation."""
        self.files.put(_MARKER, "")

    def put_table(self, name: str, table: pa.Table) -> None:
        """Put a table as a Parquet file."""
        content = io.BytesIO()
        pq.write_table(table.combine_chunks(), content, compression="zstd")
        self.files.put(name, content.getvalue())

    def read_table(self, name: str, columns: Sequence[str] | None = None) -> pa.Table:
        """Read a table, or some of its columns."""
        content = io.BytesIO(self.files.read(name))
        return pq.read_table(content, columns=None if columns is None else list(columns)).combine_chunks()

    def put_slices(self, name: str, values: np.ndarray, slice_numbers: np.ndarray, slice_count: int) -> None:
        """Put values in slices that can be read separately. The values of a slice remain in their order.

        Args:
            name: name of the file.
            values: (N,) values.
            slice_numbers: (N,) number of the slice of each value, below `slice_count`.
            slice_count: number of slices.
        """
        order = np.argsort(slice_numbers, kind="stable")
        bounds = np.searchsorted(slice_numbers[order], np.arange(slice_count + 1)).astype(_BOUND)
        self.files.put(name, bounds.tobytes() + values[order].tobytes())

    def read_slice(self, name: str, dtype: DTypeLike, number: int, slice_count: int) -> np.ndarray:
        """Return a slice of a file that `put_slices` wrote."""
        bounds = np.frombuffer(self.files.read(name, _BOUND.itemsize * number, 2 * _BOUND.itemsize), _BOUND)
        first, end = bounds.tolist()
        value_bytes = np.dtype(dtype).itemsize
        header_bytes = _BOUND.itemsize * (slice_count + 1)
        content = self.files.read(name, header_bytes + first * value_bytes, (end - first) * value_bytes)
        return np.frombuffer(content, dtype)


def run_phase(task: Task, job: Job, count: int, finished: Set[str], parallel_map: ParallelMap) -> Iterator[Record]:
    """Yield the records of `count` tasks in order.

    Args:
        task: what each task does.
        job: what all tasks share.
        count: number of tasks.
        finished: names of the records that an earlier attempt wrote; these tasks do not run again.
        parallel_map: runs the tasks.
    """
    record_names = [_name_record(task, number) for number in range(count)]
    new_numbers = [number for number in range(count) if record_names[number] not in finished]
    new_records = parallel_map(functools.partial(_run_task, task, job), new_numbers)
    with progress(task.__name__, count, "tasks") as advance:
        for name in record_names:
            yield json.loads(job.files.read(name)) if name in finished else next(new_records)
            advance(1)


def _run_task(task: Task, job: Job, number: int) -> Record:
    """Run a task and write its record last, because the record says that all its files exist.

    Raises:
        InputError: this machine does not have the files of the preparation, which are on another machine's disk.
    """
    try:
        job.files.read(_MARKER)
    except FileNotFoundError as error:
        raise InputError(
            f"{error.filename} is missing on {socket.gethostname()}: give a store that all nodes share, such as "
            "s3://bucket/prefix"
        ) from error
    content = json.dumps(task(job, number), ensure_ascii=False)
    job.files.put(_name_record(task, number), content)
    return json.loads(content)  # as a later attempt reads it


def _name_record(task: Task, number: int) -> str:
    return f"done/{task.__name__}-{number:06}.json"


def counts_to_json(counts: RowCounts) -> list[Any]:
    """Return counts as a value of a record."""
    return [[*file_key, file_counts] for file_key, file_counts in counts.items()]


def add_counts(counts: RowCounts, record: Record) -> None:
    """Add the counts of a record."""
    for *file_key, file_counts in record["counts"]:
        counts[FileKey(*file_key)].update(file_counts)
