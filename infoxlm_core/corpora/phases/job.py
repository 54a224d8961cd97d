"""Jobs of text preparation: shared input, intermediate files, and the loop that runs a phase's tasks."""

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
from infoxlm_core.progress import show_progress

Record = dict[str, Any]
"""JSON result of a finished task: row counts and other small values. Rows are exchanged in files instead."""
Task = Callable[["Job", int], Record]
"""Importable function of a job and a task number. Repeating a task writes the same files."""
_OFFSET = np.dtype("<u8")
_MARKER = "preparation"


class Files(Protocol):
    """Intermediate files of a preparation. All processes of the preparation see the same files."""

    @property
    def directory(self) -> Path | None:
        """Local directory of the files, or None if the files are not on a file system."""

    def read(self, name: str, start: int = 0, length: int | None = None) -> bytes:
        """Return `length` bytes of a file, starting at byte `start`. By default, return the whole file."""

    def put(self, name: str, content: str | bytes) -> None:
        """Write a file atomically. Readers never see an incomplete file."""

    def entries(self) -> Sequence[Any]:
        """Return all files, as objects with a `name`."""


class FileKey(NamedTuple):
    """Key of the report's row counts: a file's rows in one language."""

    corpus: str
    language: str  # for pairs, the target language
    kind: str  # table directory: mono, pairs, held_out_mono or held_out
    file: str


RowCounts = defaultdict[FileKey, Counter[str]]
"""Numbers of rows `read`, `kept`, and dropped for each reason."""


class Part(NamedTuple):
    """A bounded number of a source's rows, in one language or language pair. Each task of a phase processes one
    part."""

    name: str
    source_number: int  # index in `config.corpora`; several sources may belong to one corpus
    corpus: str
    kind: str  # table directory: mono, pairs, held_out_mono or held_out
    languages: tuple[str, ...]


@dataclass(frozen=True)
class Job:
    """Input shared by all tasks of a preparation. It is pickled for other processes."""

    config: PreparationConfig
    files: Files
    localise: Callable[[PreparationConfig], PreparationConfig] | None  # replaces the config's paths by local copies
    partition_count: int = 1  # number of tasks among which keys are divided by value
    parts: Sequence[Part] = ()
    medians: Mapping[str, float] = field(default_factory=dict)  # median log length ratio by language pair
    reserved_digest: str = ""  # digest of the text reserved for evaluation

    def put_marker(self) -> None:
        """Write the marker file, by which tasks on other machines check that they see this preparation's files."""
        self.files.put(_MARKER, "")

    def put_table(self, name: str, table: pa.Table) -> None:
        """Write a table as a Parquet file."""
        content = io.BytesIO()
        pq.write_table(table.combine_chunks(), content, compression="zstd")
        self.files.put(name, content.getvalue())

    def read_table(self, name: str, columns: Sequence[str] | None = None) -> pa.Table:
        """Read a table from a Parquet file. By default, read all columns."""
        content = io.BytesIO(self.files.read(name))
        return pq.read_table(content, columns=None if columns is None else list(columns)).combine_chunks()

    def put_slices(self, name: str, values: np.ndarray, slice_numbers: np.ndarray, slice_count: int) -> None:
        """Write an array as slices that can be read separately. Values keep their order within a slice.

        Args:
            name: name of the file.
            values: array (N,).
            slice_numbers: slice number of each value (N,), from 0 to `slice_count` - 1.
            slice_count: number of slices.
        """
        order = np.argsort(slice_numbers, kind="stable")
        offsets = np.searchsorted(slice_numbers[order], np.arange(slice_count + 1)).astype(_OFFSET)
        # With the offsets first, `read_slice` needs to read only two offsets and its own slice.
        self.files.put(name, offsets.tobytes() + values[order].tobytes())

    def read_slice(self, name: str, dtype: DTypeLike, slice_number: int, slice_count: int) -> np.ndarray:
        """Return one slice of an array written by `put_slices`."""
        offset_bytes = self.files.read(name, _OFFSET.itemsize * slice_number, 2 * _OFFSET.itemsize)
        start, end = np.frombuffer(offset_bytes, _OFFSET).tolist()
        value_size = np.dtype(dtype).itemsize
        header_size = _OFFSET.itemsize * (slice_count + 1)
        value_bytes = self.files.read(name, header_size + start * value_size, (end - start) * value_size)
        return np.frombuffer(value_bytes, dtype)


def run_phase(
    task: Task, job: Job, task_count: int, finished_records: Set[str], parallel_map: ParallelMap
) -> Iterator[Record]:
    """Run all tasks of a phase, and yield their records in order.

    Args:
        task: function that runs a task of the phase.
        job: shared input of all tasks.
        task_count: number of tasks.
        finished_records: names of records from an earlier attempt. Their tasks are not repeated.
        parallel_map: map function that runs the tasks.
    """
    record_names = [_name_record(task, number) for number in range(task_count)]
    unfinished_numbers = [number for number in range(task_count) if record_names[number] not in finished_records]
    new_records = parallel_map(functools.partial(_run_task, task, job), unfinished_numbers)  # in the same order
    with show_progress(task.__name__, task_count, "tasks") as advance:
        for name in record_names:
            if name in finished_records:
                yield json.loads(job.files.read(name))
            else:
                yield next(new_records)
            advance(1)


def _run_task(task: Task, job: Job, number: int) -> Record:
    """Run a task, then write its record. A record thus proves that all files of the task exist.

    Raises:
        InputError: the preparation's files are on another machine's disk.
    """
    try:
        job.files.read(_MARKER)  # a directory of the same name on another machine has no marker
    except FileNotFoundError as error:
        raise InputError(
            f"{error.filename} is missing on {socket.gethostname()}: give a store that all nodes share, such as "
            "s3://bucket/prefix"
        ) from error
    record = json.dumps(task(job, number), ensure_ascii=False)
    job.files.put(_name_record(task, number), record)
    return json.loads(record)  # JSON turns tuples into lists, so return what a resumed run would read


def _name_record(task: Task, number: int) -> str:
    return f"done/{task.__name__}-{number:06}.json"


def counts_to_json(counts: RowCounts) -> list[Any]:
    """Convert row counts to a JSON value for a record."""
    return [[*file_key, file_counts] for file_key, file_counts in counts.items()]


def add_counts(counts: RowCounts, record: Record) -> None:
    """Add a record's row counts to `counts`."""
    for *file_key, file_counts in record["counts"]:
        counts[FileKey(*file_key)].update(file_counts)
