"""Phases offer and reduce: decide which rows are dropped, by comparing 16-byte keys instead of text.

A row is offered as up to five items with a key each: the row, its sides as sentences, and its sides as labelled text.
Items with equal keys are duplicates, and all but the first in the order of the input are dropped. The bands of a row's
MinHash signature are a further item with several keys. Rows that share a band are similar, and all but the first are
dropped. If documents are compared, the first row of a document is offered for all its rows.

reasons/PART   a byte for each row, see `REASONS`
keys/PART      items of the part with their keys, in slices by partition
repeats/PART   items that the part does not send, each with the first item of the part that has its key and text
drops/P        items of partition P that are dropped, in slices by part
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from infoxlm_core.corpora import cleaning, length_ratio
from infoxlm_core.corpora.phases.clean import DRAWN_HELD_OUT, find_partitions, flatten_lists
from infoxlm_core.corpora.phases.job import Job, Part, Record
from infoxlm_core.corpora.phases.reserve import REASONS, Reserved, read_reserved
from infoxlm_core.corpora.tables import HELD_OUT

STATES = ("kept", "duplicate", "near_duplicate", "similar")
KEPT, DUPLICATE, NEAR_DUPLICATE, SIMILAR = range(4)
ITEMS = 8  # numbers of items reserved for each row; item n of row r is 8 r + n
ITSELF, FIRST_SIDE, FIRST_LABEL = 0, 1, 3  # numbers of items: the row, its sides (1, 2), its sides as labelled (3, 4)
BANDS = 5  # number of the item for the bands of the row
_HELD_OUT_SHARE = REASONS.index("held_out_share")
_LABELLED = REASONS.index("labelled")
COLUMNS = ("document", "equal", "near", "exact", "runs", "bands", "log_ratio", "drawn", "is_long")  # of staged rows
_KEY = np.dtype([("key", "<u8"), ("item", "<u4"), ("tag", "<u4")])
"""key: digest of an item's near keys and of the tables with which it is compared. tag: digest of the unchanged text."""


class Offer(NamedTuple):
    """Rows of a part that may be written to a table, unless a row before them has the same text."""

    item: int
    kind: str  # the folder of the table, or "labelled"
    languages: tuple[str, ...]
    sides: slice  # of the row that are written
    is_offered: np.ndarray  # (rows,)


def list_offers(job: Job, part: Part, rows: pa.Table, reasons: np.ndarray, is_duplicate: np.ndarray) -> Iterator[Offer]:
    """Yield the offers of a part: for each table, the rows that may be written to it.

    Args:
        job: the preparation.
        part: the part.
        rows: its staged rows.
        reasons: (rows,) numbers of the reasons to drop the rows, 0 for none.
        is_duplicate: (rows,) whether a row is known to be a duplicate, whose sides are not offered.
    """
    yield Offer(ITSELF, part.kind, part.languages, slice(None), reasons == 0)
    if part.kind != "pairs":
        return
    yield Offer(ITSELF, "held_out", part.languages, slice(None), reasons == _HELD_OUT_SHARE)
    is_training = (reasons == 0) & ~is_duplicate
    is_label = _find_labels(rows, reasons, is_training, read_reserved(job)) if job.config.labelled_share else None
    for side, language in enumerate(part.languages):
        only_side = slice(side, side + 1)
        if job.config.monolingual_from_pairs:
            yield Offer(FIRST_SIDE + side, "mono", (language,), only_side, is_training)
        if is_label is not None:
            yield Offer(FIRST_LABEL + side, "labelled", (language,), only_side, is_label[:, side])


def _find_labels(pairs: pa.Table, reasons: np.ndarray, is_training: np.ndarray, reserved: Reserved) -> np.ndarray:
    """Return whether each side of pairs is offered as labelled text, (rows, 2).

    Sides of training pairs are offered, and those of the labelled test set, unless several corpora contain the text.

    A text can be lost in a rare case, because labels are compared in the same phase as pairs. Assume that the first of
    two near duplicates is too short to be labelled only because it lacks punctuation. The second is dropped as a
    duplicate, and its sides, which were offered before that, hide equal sides of later pairs. A further phase would
    avoid this.
    """
    near = flatten_lists(pairs["near"]).reshape(-1, 2)
    is_long_training = is_training & pairs["is_long"].to_numpy()
    is_test = (reasons == _LABELLED) & reserved.contains("messages", near[:, 0])
    is_shared = reserved.contains("shared", near.ravel()).reshape(-1, 2)
    return (is_long_training | is_test)[:, None] & ~is_shared


def offer(job: Job, number: int) -> Record:
    """Drop the rows of a part that are reserved, unusual or not similar, and offer the others to be compared."""
    part = job.parts[number]
    rows = job.read_table(f"staged/{part.name}", COLUMNS)
    reasons = find_reasons(job, part, rows)
    similarity = job.config.cleaning.similarity
    if similarity and part.kind == "pairs":
        similarities = np.frombuffer(job.files.read(f"similarities/{part.name}"), np.float32)  # of the remaining rows
        remaining_rows = np.flatnonzero(reasons == 0)
        is_similar = similarities >= similarity.minimum
        reasons[remaining_rows[~is_similar]] = REASONS.index("not_similar")
    job.files.put(f"reasons/{part.name}", reasons.tobytes())
    if job.config.corpora[part.source].compares_documents:
        _put_keys(job, part.name, _make_keys_of_documents(part, rows))
        return {}
    no_duplicates = np.zeros(len(rows), bool)
    keys = [_make_keys(part, rows, offered) for offered in list_offers(job, part, rows, reasons, no_duplicates)]
    keys.append(_make_keys_of_bands(part, rows, reasons == 0))
    _put_keys(job, part.name, np.concatenate(keys))
    return {}


def find_reasons(job: Job, part: Part, rows: pa.Table) -> np.ndarray:
    """Return the number of the reason to drop each row, 0 for none, as far as it does not depend on similarities."""
    reasons = np.zeros(len(rows), np.uint8)
    if len(part.languages) == 2:
        median = job.medians["-".join(part.languages)]
        max_ratio = job.config.cleaning.max_length_ratio
        is_unusual = length_ratio.is_unusual(max_ratio, rows["log_ratio"].to_numpy(), median)
        reasons[is_unusual] = REASONS.index("length_ratio")
    if part.kind in HELD_OUT:
        return reasons
    is_drawn = rows["drawn"].to_numpy() == DRAWN_HELD_OUT
    reasons[(reasons == 0) & is_drawn] = _HELD_OUT_SHARE
    return reasons + read_reserved(job).find_reasons(rows, reasons > 0)


def _make_keys(part: Part, rows: pa.Table, offered: Offer) -> np.ndarray:
    """Return the keys of the items of an offer."""
    offered_rows = np.flatnonzero(offered.is_offered)
    near = flatten_lists(rows["near"]).reshape(-1, len(part.languages))
    exact = flatten_lists(rows["exact"]).reshape(-1, len(part.languages))
    keys = np.empty(len(offered_rows), _KEY)
    keys["key"] = _mix(cleaning.digest(offered.kind, *offered.languages), near[offered_rows, offered.sides])
    keys["item"] = offered_rows * ITEMS + offered.item
    keys["tag"] = _mix(0, exact[offered_rows, offered.sides]).astype(np.uint32)
    return keys


def _make_keys_of_bands(part: Part, rows: pa.Table, is_offered: np.ndarray) -> np.ndarray:
    """Return the keys of the bands of the offered rows. Their tags are equal, so that a part sends each band once."""
    offered_rows = np.flatnonzero(is_offered)
    bands = rows["bands"].filter(pa.array(is_offered))
    digests = flatten_lists(bands)
    keys = np.zeros(len(digests), _KEY)
    keys["key"] = _mix(cleaning.digest("bands", part.kind, *part.languages), digests[:, None])
    keys["item"] = np.repeat(offered_rows, pc.list_value_length(bands).to_numpy()) * ITEMS + BANDS
    return keys


def _make_keys_of_documents(part: Part, rows: pa.Table) -> np.ndarray:
    """Return a key for each document: the sum of digests of its rows and of their positions in the document."""
    document_of_row = find_documents(rows)
    first_rows = np.unique(document_of_row)
    positions = (np.arange(len(rows)) - document_of_row).astype(np.uint64)
    near = np.stack([flatten_lists(rows["near"]), positions], axis=1)
    exact = np.stack([flatten_lists(rows["exact"]), positions], axis=1)
    seed = cleaning.digest("documents", part.kind, *part.languages)
    keys = np.empty(len(first_rows), _KEY)
    keys["key"] = np.add.reduceat(_mix(seed, near), first_rows)
    keys["item"] = first_rows * ITEMS + ITSELF
    keys["tag"] = np.add.reduceat(_mix(0, exact), first_rows).astype(np.uint32)
    return keys


def find_documents(rows: pa.Table) -> np.ndarray:
    """Return for each row the number of the first row of its document, (rows,)."""
    return _find_first_positions(_is_first(rows["document"].to_numpy()))


def _mix(seed: int, digests: np.ndarray) -> np.ndarray:
    """Return a 64-bit digest of each row of digests, (rows, columns), by the function of SplitMix64."""
    mixed = np.full(len(digests), seed, np.uint64)
    for column in digests.T:
        mixed ^= column
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        mixed ^= mixed >> np.uint64(31)
    return mixed


def _put_keys(job: Job, part: str, keys: np.ndarray) -> None:
    """Store the keys of a part. Of items with equal keys and text, only the first is sent, to keep partitions small."""
    keys = keys[np.lexsort((keys["item"], keys["tag"], keys["key"]))]
    is_first = _is_first(keys["key"]) | _is_first(keys["tag"])
    first_items = keys["item"][_find_first_positions(is_first)]
    repeated_items = np.stack([keys["item"], first_items], axis=1)[~is_first]
    job.files.put(f"repeats/{part}", repeated_items.tobytes())
    first_keys = keys[is_first]
    first_keys = first_keys[np.argsort(first_keys["item"])]
    partitions = find_partitions(first_keys["key"], job.partition_count)
    job.put_slices(f"keys/{part}", first_keys, partitions, job.partition_count)


def _is_first(values: np.ndarray) -> np.ndarray:
    """Return whether each value differs from the value before it."""
    return np.append(np.ones(min(len(values), 1), bool), values[1:] != values[:-1])


def _find_first_positions(is_first: np.ndarray) -> np.ndarray:
    """Return for each position the nearest position, up to and including it, at which `is_first` is true."""
    return np.maximum.accumulate(np.where(is_first, np.arange(len(is_first)), 0))


def reduce(job: Job, number: int) -> Record:
    """Store which items of a partition are dropped. Of items with equal keys, only the first in the input remains."""
    slices = [job.read_slice(f"keys/{part.name}", _KEY, number, job.partition_count) for part in job.parts]
    keys = np.concatenate([np.empty(0, _KEY), *slices])
    slice_sizes = np.array([len(part_keys) for part_keys in slices], np.int64)
    part_numbers = np.repeat(np.arange(len(slices)), slice_sizes)
    order = np.argsort(keys["key"], kind="stable")
    keys = keys[order]
    part_numbers = part_numbers[order]
    is_first = _is_first(keys["key"])
    is_near = keys["tag"] != keys["tag"][_find_first_positions(is_first)]
    drops = 2 * keys["item"] + is_near  # the lowest bit tells a near duplicate from a duplicate
    job.put_slices(f"drops/{number}", drops[~is_first], part_numbers[~is_first], len(job.parts))
    return {}


def read_states(job: Job, number: int, row_count: int) -> np.ndarray:
    """Return the index in `STATES` of each item of a part, (rows, ITEMS). Items that were not offered are kept."""
    states = np.zeros(row_count * ITEMS, np.uint8)
    for partition in range(job.partition_count):
        drops = job.read_slice(f"drops/{partition}", np.uint32, number, len(job.parts))
        states[drops // 2] = DUPLICATE + drops % 2  # see `reduce`
    repeats = np.frombuffer(job.files.read(f"repeats/{job.parts[number].name}"), np.uint32)
    items, first_items = repeats.reshape(-1, 2).T
    states[items] = np.maximum(states[first_items], DUPLICATE)
    states_of_rows = states.reshape(-1, ITEMS)
    is_similar = (states_of_rows[:, ITSELF] == KEPT) & (states_of_rows[:, BANDS] != KEPT)
    states_of_rows[is_similar, ITSELF] = SIMILAR
    return states_of_rows
