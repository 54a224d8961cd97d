"""Phases write_keys and find_duplicates: find duplicate rows by comparing 16-byte entries instead of text.

A row is compared in up to six ways: as a whole row, by each side as a sentence, by each side as labelled text, and by
the bands of its MinHash signature. Each way has a number in the row, its slot. An entry stands for one comparison of a
row. It contains the slot, a key, and a digest of the exact text. Among entries with equal keys, the first in input
order is kept, and the others are duplicates. Among rows that share a MinHash band, only the first is kept. If documents
are compared, a document's first row has an entry for the whole document.

reasons/PART     reason to drop each row, as a one-byte index in `REASONS`
keys/PART        entries of the part, in slices by partition
repeats/PART     pairs of slots: an entry that repeats the key and text of an earlier entry, and the earlier entry
duplicates/P     slots of the duplicates in partition P, in slices by part
"""

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from infoxlm_core.corpora import cleaning, length_ratio
from infoxlm_core.corpora.phases.clean import DRAWN_HELD_OUT, find_partitions, flatten_lists
from infoxlm_core.corpora.phases.job import Job, Part, Record
from infoxlm_core.corpora.phases.reserve import NO_REASON, REASONS, ReservedText, load_reserved_text
from infoxlm_core.corpora.tables import HELD_OUT

STATES = ("kept", "duplicate", "near_duplicate", "similar")
KEPT, DUPLICATE, NEAR_DUPLICATE, SIMILAR = range(4)
WHOLE_ROW = 0
FIRST_SIDE = 1  # slots 1 and 2: the sides of a pair as sentences
FIRST_LABELLED_SIDE = 3  # slots 3 and 4: the sides of a pair as labelled text
MINHASH_BANDS = 5
SLOTS_PER_ROW = 8  # slot s of row r has number 8 r + s in its part
COMPARED_COLUMNS = (
    "document_line", "casefolded", "letters", "exact", "ngrams", "minhash_bands", "log_ratio", "drawn", "is_long"
)  # fmt: skip
"""Columns of staged rows that this module reads."""
_HELD_OUT_SHARE_REASON = REASONS.index("held_out_share")
_LABELLED_REASON = REASONS.index("labelled")
_ENTRY = np.dtype([("key", "<u8"), ("slot", "<u4"), ("text", "<u4")])
"""An entry. key: digest of the letters and the table · slot: slot number in the part · text: digest of the unchanged
text, to find near-duplicates. It needs neither 64 bits nor a seed, because it is compared only among equal keys."""


@dataclass(frozen=True)
class TableRows:
    """Selection of a part's rows for one output table. Duplicates are removed later."""

    slot: int  # slot by which the rows are compared
    kind: str  # table directory, or "labelled"
    languages: tuple[str, ...]
    sides: list[int]  # indices of the row's texts to write
    is_selected: np.ndarray  # (rows,)


def select_table_rows(
    job: Job, part: Part, rows: pa.Table, reasons: np.ndarray, is_duplicate: np.ndarray
) -> list[TableRows]:
    """Select rows of a part for each output table. Duplicates are removed later.

    No row is selected both for training pairs and for held-out pairs, so these selections have the same slot.

    Args:
        job: job of the preparation.
        part: part that contains the rows.
        rows: staged rows of the part.
        reasons: reasons to drop the rows (rows,), as indices in `REASONS`.
        is_duplicate: mask of known duplicates (rows,). Their sides are not selected separately.
    """
    all_sides = list(range(len(part.languages)))
    selections = [TableRows(WHOLE_ROW, part.kind, part.languages, all_sides, reasons == NO_REASON)]
    if part.kind != "pairs":
        return selections
    selections.append(TableRows(WHOLE_ROW, "held_out", part.languages, all_sides, reasons == _HELD_OUT_SHARE_REASON))
    is_training = (reasons == NO_REASON) & ~is_duplicate
    if job.config.monolingual_from_pairs:
        for side, language in enumerate(part.languages):
            selections.append(TableRows(FIRST_SIDE + side, "mono", (language,), [side], is_training))
    if job.config.labelled_share:
        is_labelled = _select_labelled_sides(rows, reasons, is_training, load_reserved_text(job))
        for side, language in enumerate(part.languages):
            labelled_slot = FIRST_LABELLED_SIDE + side
            selections.append(TableRows(labelled_slot, "labelled", (language,), [side], is_labelled[:, side]))
    return selections


def _select_labelled_sides(
    pairs: pa.Table, reasons: np.ndarray, is_training: np.ndarray, reserved_text: ReservedText
) -> np.ndarray:
    """Return a mask (rows, 2) of the sides that are labelled text. Duplicates are removed later.

    Labelled text consists of the sides of long training pairs and of the labelled test set, which also has only long
    pairs: the targets of short ones are not reserved (`clean._draw_message`). Text in several corpora has no label.

    Known limitation: sides are compared before duplicate pairs are known. A pair may be too short for a label, while a
    later duplicate is long enough because of additional punctuation. The duplicate is dropped with its sides. Sides of
    later pairs with the same text still count as duplicates of these sides, so the text is lost as labelled text.
    """
    side_digests = flatten_lists(pairs["letters"]).reshape(-1, 2)
    is_test = (reasons == _LABELLED_REASON) & reserved_text.contains("labelled_messages", side_digests[:, 0])
    is_shared = reserved_text.contains("shared", side_digests.ravel()).reshape(-1, 2)
    is_labelled_pair = (is_training | is_test) & pairs["is_long"].to_numpy()
    return is_labelled_pair[:, None] & ~is_shared


def write_keys(job: Job, part_number: int) -> Record:
    """Find a part's rows with reserved text, unusual lengths or dissimilar sides, and write the keys of all other rows.

    Rows with equal keys are duplicates.
    """
    part = job.parts[part_number]
    rows = job.read_table(f"staged/{part.name}", COMPARED_COLUMNS)
    reasons = find_reasons(job, part, rows)
    similarity_filter = job.config.cleaning.similarity
    if similarity_filter and part.kind == "pairs":
        remaining_rows = np.flatnonzero(reasons == NO_REASON)
        similarities = np.frombuffer(job.files.read(f"similarities/{part.name}"), np.float32)  # (remaining rows,)
        is_similar = similarities >= similarity_filter.minimum
        reasons[remaining_rows[~is_similar]] = REASONS.index("not_similar")
    job.files.put(f"reasons/{part.name}", reasons.tobytes())
    if job.config.corpora[part.source_number].compares_documents:
        _put_entries(job, part.name, _make_document_entries(part, rows))
        return {}
    is_duplicate = np.zeros(len(rows), bool)  # unknown until the next phase has run
    entries = [_make_minhash_entries(part, rows, reasons == NO_REASON)]
    for table_rows in select_table_rows(job, part, rows, reasons, is_duplicate):
        entries.append(_make_entries(part, rows, table_rows))
    _put_entries(job, part.name, np.concatenate(entries))
    return {}


def find_reasons(job: Job, part: Part, rows: pa.Table) -> np.ndarray:
    """Return the reason to drop each staged row (rows,), as an index in `REASONS`. Similarity is not checked."""
    reasons = np.zeros(len(rows), np.uint8)
    if len(part.languages) == 2:
        median = job.medians["-".join(part.languages)]
        max_ratio = job.config.cleaning.max_length_ratio
        is_unusual = length_ratio.is_unusual(max_ratio, rows["log_ratio"].to_numpy(), median)
        reasons[is_unusual] = REASONS.index("length_ratio")
    if part.kind in HELD_OUT:  # these rows are themselves reserved text
        return reasons
    is_drawn = rows["drawn"].to_numpy() == DRAWN_HELD_OUT
    reasons[(reasons == NO_REASON) & is_drawn] = _HELD_OUT_SHARE_REASON
    return np.where(reasons == NO_REASON, load_reserved_text(job).find_reasons(rows), reasons)


def _make_entries(part: Part, rows: pa.Table, table_rows: TableRows) -> np.ndarray:
    """Return an entry for each of a table's rows, by which the row is compared with other rows."""
    row_numbers = np.flatnonzero(table_rows.is_selected)
    letter_digests = flatten_lists(rows["letters"]).reshape(-1, len(part.languages))
    text_digests = flatten_lists(rows["exact"]).reshape(-1, len(part.languages))
    seed = cleaning.digest(table_rows.kind, *table_rows.languages)  # rows of different tables are never duplicates
    entries = np.empty(len(row_numbers), _ENTRY)
    entries["key"] = _hash_rows(seed, letter_digests[row_numbers][:, table_rows.sides])
    entries["slot"] = row_numbers * SLOTS_PER_ROW + table_rows.slot
    entries["text"] = _hash_rows(0, text_digests[row_numbers][:, table_rows.sides]).astype(np.uint32)
    return entries


def _make_minhash_entries(part: Part, rows: pa.Table, is_selected: np.ndarray) -> np.ndarray:
    """Return an entry for each MinHash band of the selected rows."""
    bands = rows["minhash_bands"].filter(pa.array(is_selected))
    row_numbers = np.repeat(np.flatnonzero(is_selected), pc.list_value_length(bands).to_numpy())
    digests = flatten_lists(bands)
    entries = np.zeros(len(digests), _ENTRY)  # `text` stays 0, so that a part sends each band only once
    entries["key"] = _hash_rows(cleaning.digest("bands", part.kind, *part.languages), digests[:, None])
    entries["slot"] = row_numbers * SLOTS_PER_ROW + MINHASH_BANDS
    return entries


def _make_document_entries(part: Part, rows: pa.Table) -> np.ndarray:
    """Return an entry for each document. Its key is the sum of the hashes of the document's rows.

    Each hash includes the row's position, so that documents with the same lines in another order have different keys.
    """
    first_row_of_document = find_documents(rows)
    document_starts = np.unique(first_row_of_document)
    positions = (np.arange(len(rows)) - first_row_of_document).astype(np.uint64)
    letter_digests = np.stack([flatten_lists(rows["letters"]), positions], axis=1)
    text_digests = np.stack([flatten_lists(rows["exact"]), positions], axis=1)
    seed = cleaning.digest("documents", part.kind, *part.languages)
    entries = np.empty(len(document_starts), _ENTRY)
    entries["key"] = np.add.reduceat(_hash_rows(seed, letter_digests), document_starts)
    entries["slot"] = document_starts * SLOTS_PER_ROW + WHOLE_ROW
    entries["text"] = np.add.reduceat(_hash_rows(0, text_digests), document_starts).astype(np.uint32)
    return entries


def find_documents(rows: pa.Table) -> np.ndarray:
    """Return the number of the document's first row for each row (rows,)."""
    return _find_group_starts(_starts_group(rows["document_line"].to_numpy()))


def _hash_rows(seed: int, digests: np.ndarray) -> np.ndarray:
    """Return a 64-bit SplitMix64 hash of each row in a matrix of digests (rows, columns)."""
    hashes = np.full(len(digests), seed, np.uint64)
    for column in digests.T:
        hashes ^= column
        hashes = (hashes ^ (hashes >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        hashes = (hashes ^ (hashes >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        hashes ^= hashes >> np.uint64(31)
    return hashes


def _put_entries(job: Job, part_name: str, entries: np.ndarray) -> None:
    """Store a part's entries. Entries that repeat an earlier key and text are stored separately.

    Partitions thus remain small, even if a part repeats a text millions of times.
    """
    entries = entries[np.lexsort((entries["slot"], entries["text"], entries["key"]))]  # by key, then text, then slot
    is_first = _starts_group(entries["key"]) | _starts_group(entries["text"])
    first_slots = entries["slot"][_find_group_starts(is_first)]
    repeated_and_first_slots = np.stack([entries["slot"], first_slots], axis=1)[~is_first]
    job.files.put(f"repeats/{part_name}", repeated_and_first_slots.tobytes())
    first_entries = entries[is_first]
    first_entries = first_entries[np.argsort(first_entries["slot"])]  # in input order, as `find_duplicates` needs them
    partitions = find_partitions(first_entries["key"], job.partition_count)
    job.put_slices(f"keys/{part_name}", first_entries, partitions, job.partition_count)


def _starts_group(sorted_values: np.ndarray) -> np.ndarray:
    """Return a mask of the values that differ from their predecessor and thus start a group of equal values."""
    return np.append(np.ones(min(len(sorted_values), 1), bool), sorted_values[1:] != sorted_values[:-1])


def _find_group_starts(starts_group: np.ndarray) -> np.ndarray:
    """Return the start position of each position's group."""
    return np.maximum.accumulate(np.where(starts_group, np.arange(len(starts_group)), 0))


def find_duplicates(job: Job, partition: int) -> Record:
    """Write the slots of a partition's duplicates: of all entries with equal keys except the first in input order."""
    entries_of_parts = [
        job.read_slice(f"keys/{part.name}", _ENTRY, partition, job.partition_count) for part in job.parts
    ]
    entries = np.concatenate([np.empty(0, _ENTRY), *entries_of_parts])  # also valid without parts
    entry_counts = np.array([len(part_entries) for part_entries in entries_of_parts], np.int64)
    part_numbers = np.repeat(np.arange(len(job.parts)), entry_counts)
    order = np.argsort(entries["key"], kind="stable")  # a stable sort keeps equal keys in input order
    entries = entries[order]
    part_numbers = part_numbers[order]
    is_first = _starts_group(entries["key"])
    text_of_first = entries["text"][_find_group_starts(is_first)]
    is_near_duplicate = entries["text"] != text_of_first
    duplicates = 2 * entries["slot"] + is_near_duplicate  # the lowest bit marks near duplicates
    job.put_slices(f"duplicates/{partition}", duplicates[~is_first], part_numbers[~is_first], len(job.parts))
    return {}


def read_states(job: Job, part_number: int, row_count: int) -> np.ndarray:
    """Return the state of each slot (rows, slots) as an index in `STATES`. Unused slots count as kept."""
    states = np.zeros(row_count * SLOTS_PER_ROW, np.uint8)
    for partition in range(job.partition_count):
        duplicates = job.read_slice(f"duplicates/{partition}", np.uint32, part_number, len(job.parts))
        slots = duplicates // 2
        is_near_duplicate = duplicates % 2
        states[slots] = DUPLICATE + is_near_duplicate
    repeats = np.frombuffer(job.files.read(f"repeats/{job.parts[part_number].name}"), np.uint32)
    repeated_slots, first_slots = repeats.reshape(-1, 2).T
    # An entry that repeats an earlier entry of the part has the same state, but is at least a duplicate. The maximum is
    # right because KEPT < DUPLICATE < NEAR_DUPLICATE.
    states[repeated_slots] = np.maximum(states[first_slots], DUPLICATE)
    states_of_rows = states.reshape(-1, SLOTS_PER_ROW)
    # Only the state of the whole row decides whether the row is written, so copy the result of MinHash to it.
    is_similar = (states_of_rows[:, WHOLE_ROW] == KEPT) & (states_of_rows[:, MINHASH_BANDS] != KEPT)
    states_of_rows[is_similar, WHOLE_ROW] = SIMILAR
    return states_of_rows
