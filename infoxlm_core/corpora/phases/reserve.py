"""Phases reserve, label and unite: collect the text reserved for evaluation as sorted digests.

Four kinds of text are reserved: held-out corpora, the test sets of the config, and two random shares of the messages of
all other corpora. One share is held out as the held-out corpora are; the other becomes the labelled test set.

reserved/SET/…   digests for a set of `SETS`: those of the test sets, of a part, or of a partition of the near keys
united/SET       the union of all digests of the set, sorted
"""

import hashlib
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from infoxlm_core.corpora import cleaning, evaluation_sets, fingerprints
from infoxlm_core.corpora.phases.clean import CANDIDATE, flatten_lists
from infoxlm_core.corpora.phases.job import Files, Job, Record

REASONS = ("", "length_ratio", "held_out_share", "held_out", "evaluation_set", "labelled", "overlap", "not_similar")
"""Reasons to drop a clean row, by number. The first that applies is counted."""
_COLUMNS_OF_REASON = {
    "held_out": ("equal", "near"),
    "evaluation_set": ("equal", "near"),
    "labelled": ("near",),
    "overlap": ("runs",),
}
"""Reasons for which text is reserved -> the columns of keys that are compared with its digests."""
SETS = (*_COLUMNS_OF_REASON, "messages", "shared")
"""The sets of digests. messages: near keys of the pivot's side of the labelled test set; shared: near keys of text that
several corpora contain."""


def reserve(job: Job, number: int) -> Record:  # noqa: ARG001 - a task has a number
    """Store the digests of all test sets. Return the name, digest and number of texts of each file."""
    texts: set[int] = set()
    runs: set[int] = set()
    test_files = []
    for path in map(Path, job.config.evaluation_sets):
        for file in evaluation_sets.list_files(path):
            text_count = 0
            for text in evaluation_sets.read(file):
                text_count += 1
                clean_text = cleaning.normalise(text)
                if clean_text:
                    keys = fingerprints.compute_keys([clean_text], job.config.overlap)
                    texts.update(keys.equal, keys.near)
                    runs.update(keys.runs)
            test_files.append({"file": file.name, "sha256": evaluation_sets.digest(file), "texts": text_count})
    for name, digests in (("evaluation_set", texts), ("overlap", runs)):
        job.files.put(f"reserved/{name}/tests", np.array(sorted(digests), np.uint64).tobytes())
    return {"test_files": test_files}


def label(job: Job, number: int) -> Record:
    """Store the near keys of a partition that several corpora contain, and the messages of the labelled test set.

    A message that several corpora contain has no label.
    """
    keys_of_corpus: defaultdict[str, list[np.ndarray]] = defaultdict(list)
    candidates = [np.empty(0, CANDIDATE)]
    for part in job.parts:
        keys = job.read_slice(f"owners/{part.name}", np.uint64, number, job.partition_count)
        keys_of_corpus[part.corpus].append(keys)
        candidates.append(job.read_slice(f"candidates/{part.name}", CANDIDATE, number, job.partition_count))
    unique_keys = [np.unique(np.concatenate(keys)) for keys in keys_of_corpus.values()]
    keys, corpus_counts = np.unique(np.concatenate([np.empty(0, np.uint64), *unique_keys]), return_counts=True)
    shared = keys[corpus_counts > 1]
    pairs = np.concatenate(candidates)
    pairs = pairs[~_contains(shared, pairs["source"])]
    sets = {"labelled": np.union1d(pairs["source"], pairs["target"]), "messages": pairs["source"], "shared": shared}
    for name, digests in sets.items():
        job.files.put(f"reserved/{name}/{number}", digests.tobytes())
    return {}


def unite(job: Job, number: int) -> Record:  # noqa: ARG001 - a task has a number
    """Store all digests of each set in one sorted file."""
    paths = [entry.name for entry in job.files.entries()]
    united_digest = hashlib.sha256()
    for name in SETS:
        arrays = [np.empty(0, np.uint64)]
        for path in paths:
            if path.startswith(f"reserved/{name}/"):
                arrays.append(np.frombuffer(job.files.read(path), np.uint64))
        content = np.unique(np.concatenate(arrays)).tobytes()
        job.files.put(f"united/{name}", content)
        united_digest.update(hashlib.sha256(content).digest())
    return {"digest": united_digest.hexdigest()}


class Reserved:
    """Text that training text must not contain, as sorted 64-bit digests by name."""

    def __init__(self, digests: Mapping[str, np.ndarray], overlap: int):
        self.digests = digests
        self.overlap = overlap if len(digests["overlap"]) else 0

    def find_reasons(self, keys: pa.Table, is_excluded: np.ndarray) -> np.ndarray:
        """Return the numbers of the reasons to drop rows, 0 for none and for rows that are excluded, (rows,).

        Args:
            keys: table with the lists `equal`, `near` and `runs` of each row.
            is_excluded: (rows,) whether no reason is needed.
        """
        reasons = np.zeros(len(keys), np.uint8)
        for name, columns in _COLUMNS_OF_REASON.items():
            for column in columns:
                is_reserved = _contains_any(self.digests[name], keys[column])
                reasons[(reasons == 0) & ~is_excluded & is_reserved] = REASONS.index(name)
        return reasons

    def contains(self, name: str, digests: np.ndarray) -> np.ndarray:
        """Return whether each digest is in the set of this name."""
        return _contains(self.digests[name], digests)


_reserved_of_process: dict[str, Reserved] = {}  # all tasks of a process need the same digests


def read_reserved(job: Job) -> Reserved:
    """Return the digests of all reserved text, which a process opens once for all its tasks."""
    key = f"{job.reserved_digest} {job.config.overlap}"
    if key not in _reserved_of_process:
        digests = {name: _open_digests(job.files, f"united/{name}") for name in SETS}
        _reserved_of_process.clear()
        _reserved_of_process[key] = Reserved(digests, job.config.overlap)
    return _reserved_of_process[key]


def _open_digests(files: Files, name: str) -> np.ndarray:
    """Return the digests in a file. The processes of a machine share the memory of a file in a directory."""
    if files.directory is None:
        return np.frombuffer(files.read(name), np.uint64)
    with pa.memory_map(str(files.directory / name)) as file:
        return np.frombuffer(file.read_buffer(), np.uint64)


def _contains(digests: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Return whether each value is among sorted digests."""
    if not len(digests):
        return np.zeros(len(values), bool)
    positions = np.minimum(np.searchsorted(digests, values), len(digests) - 1)
    return digests[positions] == values


def _contains_any(digests: np.ndarray, column: pa.ChunkedArray) -> np.ndarray:
    """Return for each list of a column whether any of its values is among sorted digests."""
    rows = np.repeat(np.arange(len(column)), pc.list_value_length(column).to_numpy())
    is_reserved = np.zeros(len(column), bool)
    is_reserved[rows[_contains(digests, flatten_lists(column))]] = True
    return is_reserved
