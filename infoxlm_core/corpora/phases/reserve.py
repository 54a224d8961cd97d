"""Phases that collect digests of the text reserved for evaluation, for removing this text from training.

Four kinds of text are reserved: held-out corpora, the config's test sets, and two random shares of the messages in all
other corpora. The share `held_out_share` is treated like held-out corpora. The share `labelled_share` becomes the
labelled test set.

reserved/SET/…        digests of a set in `SETS`, from the test sets, a part, or a partition of the letters
all_reserved/SET      all digests of the set, sorted
"""

import hashlib
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from infoxlm_core.corpora import cleaning, evaluation_sets, fingerprints
from infoxlm_core.corpora.phases.clean import LETTERS_OF_PAIR, flatten_lists
from infoxlm_core.corpora.phases.job import Files, Job, Record

REASONS = ("", "length_ratio", "held_out_share", "held_out", "evaluation_set", "labelled", "overlap", "not_similar")
"""Reasons to drop a clean row. Files store their index. If several reasons apply, the first is counted."""
NO_REASON = 0  # index of the rows to keep
_COLUMNS_OF_REASON = {
    "held_out": ("casefolded", "letters"),
    "evaluation_set": ("casefolded", "letters"),
    "labelled": ("letters",),
    "overlap": ("ngrams",),
}
"""Mapping from the reason for reserving text to the columns of `Keys` that are compared with the text's digests."""
SETS = (*_COLUMNS_OF_REASON, "labelled_messages", "shared")
"""Sets of digests: one for each reason · labelled_messages: pivot sides of the labelled test set · shared: texts
that several corpora contain. The last two sets contain letter digests."""


def reserve_test_sets(job: Job, _: int) -> Record:
    """Store the digests of all test set texts. Return each file's name, digest and text count."""
    text_digests: set[int] = set()
    ngram_digests: set[int] = set()
    paths = [file for path in job.config.evaluation_sets for file in evaluation_sets.list_files(Path(path))]
    test_files = []
    for path in paths:
        text_count = 0
        for text in evaluation_sets.read_texts(path):
            text_count += 1
            normalised_text = cleaning.normalise(text)
            if normalised_text:
                keys = fingerprints.compute_keys([normalised_text], job.config.overlap)
                text_digests.update(keys.casefolded, keys.letters)
                ngram_digests.update(keys.ngrams)
        test_files.append({"file": path.name, "sha256": evaluation_sets.digest(path), "texts": text_count})
    job.files.put("reserved/evaluation_set/tests", np.array(sorted(text_digests), np.uint64).tobytes())
    job.files.put("reserved/overlap/tests", np.array(sorted(ngram_digests), np.uint64).tobytes())
    return {"test_files": test_files}


def choose_labelled_test_set(job: Job, partition: int) -> Record:
    """Choose a partition's messages for the labelled test set. Also store the digests that several corpora share.

    A message's label is its corpus, so a message that occurs in several corpora cannot be labelled.
    """
    digests_by_corpus: defaultdict[str, list[np.ndarray]] = defaultdict(list)
    candidates_by_part = [np.empty(0, LETTERS_OF_PAIR)]
    for part in job.parts:
        letter_digests = job.read_slice(f"letters/{part.name}", np.uint64, partition, job.partition_count)
        digests_by_corpus[part.corpus].append(letter_digests)
        drawn = job.read_slice(f"labelled_candidates/{part.name}", LETTERS_OF_PAIR, partition, job.partition_count)
        candidates_by_part.append(drawn)
    distinct_digests = [np.unique(np.concatenate(digests)) for digests in digests_by_corpus.values()]
    all_digests = np.concatenate([np.empty(0, np.uint64), *distinct_digests])
    digests, corpus_counts = np.unique(all_digests, return_counts=True)
    shared_digests = digests[corpus_counts > 1]
    candidates = np.concatenate(candidates_by_part)
    chosen = candidates[~_contains(shared_digests, candidates["source"])]
    chosen_digests = np.union1d(chosen["source"], chosen["target"])
    job.files.put(f"reserved/labelled/{partition}", chosen_digests.tobytes())
    job.files.put(f"reserved/labelled_messages/{partition}", chosen["source"].tobytes())
    job.files.put(f"reserved/shared/{partition}", shared_digests.tobytes())
    return {}


def merge_reserved_digests(job: Job, _: int) -> Record:
    """Merge each set's digests into one sorted file. Return a digest of all sets."""
    file_names = [entry.name for entry in job.files.entries()]
    digest_of_sets = hashlib.sha256()
    for set_name in SETS:
        arrays = [np.empty(0, np.uint64)]
        for file_name in file_names:
            if file_name.startswith(f"reserved/{set_name}/"):
                arrays.append(np.frombuffer(job.files.read(file_name), np.uint64))
        content = np.unique(np.concatenate(arrays)).tobytes()
        job.files.put(f"all_reserved/{set_name}", content)
        digest_of_sets.update(hashlib.sha256(content).digest())
    return {"digest": digest_of_sets.hexdigest()}


class ReservedText:
    """Sets of 64-bit digests of the text that is reserved for evaluation.

    Args:
        digests: sorted digests by name of the set in `SETS`.
        ngram_length: number of words per n-gram; 0: n-grams are not compared.
    """

    def __init__(self, digests: Mapping[str, np.ndarray], ngram_length: int):
        self.digests = digests
        # N-grams take most of the time, so do not compute them if there is nothing to compare them with.
        self.ngram_length = ngram_length if len(digests["overlap"]) else 0

    def find_reasons(self, keys: pa.Table) -> np.ndarray:
        """Return the reason for reserving each row's text (rows,), as an index in `REASONS`, or `NO_REASON`.

        Args:
            keys: table with the fields `casefolded`, `letters` and `ngrams` of `Keys` as columns.
        """
        reasons = np.zeros(len(keys), np.uint8)
        for reason, columns in _COLUMNS_OF_REASON.items():
            for column in columns:
                is_reserved = _contains_any(self.digests[reason], keys[column])
                reasons[(reasons == NO_REASON) & is_reserved] = REASONS.index(reason)
        return reasons

    def contains(self, set_name: str, values: np.ndarray) -> np.ndarray:
        """Return a mask of the digests (values,) that are in a set of `SETS`."""
        return _contains(self.digests[set_name], values)


_reserved_text_of_process: dict[str, ReservedText] = {}  # shared by all tasks of a process


def load_reserved_text(job: Job) -> ReservedText:
    """Load the text reserved for evaluation, once per process."""
    key = f"{job.reserved_digest} {job.config.overlap}"
    if key not in _reserved_text_of_process:
        digests = {set_name: _open_digests(job.files, f"all_reserved/{set_name}") for set_name in SETS}
        _reserved_text_of_process.clear()  # frees the memory of an earlier job
        _reserved_text_of_process[key] = ReservedText(digests, job.config.overlap)
    return _reserved_text_of_process[key]


def _open_digests(files: Files, name: str) -> np.ndarray:
    """Read the digests in a file. Local files are memory-mapped, so that all processes of a machine share the
    memory."""
    if files.directory is None:
        return np.frombuffer(files.read(name), np.uint64)
    with pa.memory_map(str(files.directory / name)) as file:
        return np.frombuffer(file.read_buffer(), np.uint64)


def _contains(sorted_digests: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Return a mask of the values (values,) that are among the digests."""
    if not len(sorted_digests):
        return np.zeros(len(values), bool)
    positions = np.searchsorted(sorted_digests, values)
    positions = np.minimum(positions, len(sorted_digests) - 1)  # a value above all digests has no position
    return sorted_digests[positions] == values


def _contains_any(sorted_digests: np.ndarray, lists: pa.ChunkedArray) -> np.ndarray:
    """Return a mask of the lists (lists,) with at least one value among the digests."""
    list_numbers = np.repeat(np.arange(len(lists)), pc.list_value_length(lists).to_numpy())
    is_match = _contains(sorted_digests, flatten_lists(lists))
    contains_match = np.zeros(len(lists), bool)
    contains_match[list_numbers[is_match]] = True
    return contains_match
