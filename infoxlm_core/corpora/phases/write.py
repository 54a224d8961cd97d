"""Phase write_tables: write the remaining rows, count all rows, and check training text for reserved text.

tables/NUMBER/mono/de/web.parquet, …   rows of part NUMBER for each table of the part's corpus
"""

from collections import Counter, defaultdict

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from infoxlm_core.corpora import fingerprints, tables
from infoxlm_core.corpora.phases.clean import KEY_COLUMNS
from infoxlm_core.corpora.phases.deduplicate import (
    DUPLICATE,
    KEPT,
    NEAR_DUPLICATE,
    STATES,
    WHOLE_ROW,
    TableRows,
    find_documents,
    read_states,
    select_table_rows,
)
from infoxlm_core.corpora.phases.job import FileKey, Job, Part, Record, RowCounts, counts_to_json
from infoxlm_core.corpora.phases.reserve import NO_REASON, REASONS, ReservedText, load_reserved_text
from infoxlm_core.corpora.tables import HELD_OUT, LABELLED
from infoxlm_core.errors import EvaluationLeak

LABELLED_TABLE = "labelled.parquet"


def write_tables(job: Job, part_number: int) -> Record:
    """Write a part's remaining rows to tables, and check the training tables for reserved text."""
    part = job.parts[part_number]
    rows = job.read_table(f"staged/{part.name}", ("texts", "file", "document_line", "letters", "is_long"))
    reasons = np.frombuffer(job.files.read(f"reasons/{part.name}"), np.uint8)
    states = read_states(job, part_number, len(rows))  # (rows, slots), see `deduplicate`
    if job.config.corpora[part.source_number].compares_documents:
        states = states[find_documents(rows)]  # a document's rows share the state of its first row
    counts: RowCounts = defaultdict(Counter)
    key_of_part = FileKey(part.corpus, part.languages[-1], part.kind, file="")
    for reason_number, reason in enumerate(REASONS[1:], start=1):
        _count_rows(counts, key_of_part, rows, reason, reasons == reason_number)
    tables_by_name: dict[str, pa.Table] = {}
    is_labelled = np.zeros((len(rows), 2), bool)
    # A pair in the state `similar` is dropped, but its sides are new text. The sides of a duplicate are not.
    is_duplicate = np.isin(states[:, WHOLE_ROW], (DUPLICATE, NEAR_DUPLICATE))
    for table_rows in select_table_rows(job, part, rows, reasons, is_duplicate):
        slot_states = states[:, table_rows.slot]
        is_written = table_rows.is_selected & (slot_states == KEPT)
        if table_rows.kind == "labelled":  # labelled text is not counted by file
            is_labelled[:, table_rows.sides] = is_written[:, None]
            continue
        _count_states(counts, part, rows, table_rows, slot_states)
        name = f"{table_rows.kind}/{'-'.join(table_rows.languages)}/{part.corpus}.parquet"
        tables_by_name[name] = _make_table(rows, table_rows.sides, is_written)
    if is_labelled.any():
        tables_by_name[LABELLED_TABLE] = _make_labelled_table(part, rows, reasons, is_labelled)
    written_names = []
    for name, table in tables_by_name.items():
        if not len(table):
            continue
        job.put_table(f"tables/{part_number}/{name}", table)
        written_names.append(name)
        if not name.startswith(HELD_OUT):
            # Read the table again, so that the check also covers the writing.
            check_leaks(job.read_table(f"tables/{part_number}/{name}"), name, load_reserved_text(job))
    return {"counts": counts_to_json(counts), "tables": written_names}


def _count_states(
    counts: RowCounts, part: Part, rows: pa.Table, table_rows: TableRows, slot_states: np.ndarray
) -> None:
    """Count a table's selected rows by state."""
    key_of_table = FileKey(part.corpus, table_rows.languages[-1], table_rows.kind, file="")
    if table_rows.kind != part.kind:  # the rows were read for a different table, so also count them as read here
        _count_rows(counts, key_of_table, rows, "read", table_rows.is_selected)
    for state_number, state in enumerate(STATES):
        _count_rows(counts, key_of_table, rows, state, table_rows.is_selected & (slot_states == state_number))


def _count_rows(
    counts: RowCounts, key_without_file: FileKey, rows: pa.Table, outcome: str, is_selected: np.ndarray
) -> None:
    """Add the selected rows of each file to the counts of an outcome, such as `duplicate`."""
    for file_count in pc.value_counts(rows["file"].filter(pa.array(is_selected))).to_pylist():
        file_key = key_without_file._replace(file=file_count["values"])
        counts[file_key][outcome] += file_count["counts"]


def _make_table(rows: pa.Table, sides: list[int], is_written: np.ndarray) -> pa.Table:
    """Return a table of the rows to write. Its columns are `text`, or `source` and `target`."""
    texts = rows["texts"].filter(pa.array(is_written))
    column_names = ["text"] if len(sides) == 1 else ["source", "target"]
    return pa.table([pc.list_element(texts, side) for side in sides], names=column_names)


def _make_labelled_table(part: Part, pairs: pa.Table, reasons: np.ndarray, is_labelled: np.ndarray) -> pa.Table:
    """Return a table of labelled text. Its label is the corpus. Rows with the reason `labelled` are the test split.

    Args:
        part: part that contains the pairs.
        pairs: staged rows of the part.
        reasons: reasons to drop the rows (rows,), as indices in `REASONS`.
        is_labelled: mask of labelled sides (rows, 2).
    """
    row_numbers, sides = np.nonzero(is_labelled)  # one element per labelled side, in the order of `texts`
    texts = pc.list_flatten(pairs["texts"]).filter(pa.array(is_labelled.ravel()))
    languages = np.array(part.languages)[sides]
    splits = np.where(reasons[row_numbers] == NO_REASON, "train", "test")
    columns = [texts, pa.array([part.corpus] * len(texts)), pa.array(languages), pa.array(splits)]
    return pa.table(columns, schema=tables.make_text_schema(*LABELLED))


def check_leaks(table: pa.Table, path: str, reserved_text: ReservedText) -> None:
    """Raise EvaluationLeak if a table of training text contains reserved text."""
    text_columns = [name for name in ("text", "source", "target") if name in table.column_names]
    rows = list(zip(*(table[name].to_pylist() for name in text_columns), strict=True))
    keys_of_rows = [fingerprints.compute_keys(texts, reserved_text.ngram_length) for texts in rows]
    reasons = reserved_text.find_reasons(tables.make_table(pa.schema(KEY_COLUMNS), keys_of_rows))
    is_leak = reasons != NO_REASON
    if "split" in table.column_names:
        # The labelled test set is itself reserved text, and may quote other reserved text (`overlap`). Whole texts of
        # other evaluations are leaks. Their reasons precede `labelled` in `REASONS`.
        is_test = pc.equal(table["split"], "test").to_numpy()
        is_allowed = is_test & (reasons >= REASONS.index("labelled"))
        is_leak &= ~is_allowed
    if is_leak.any():
        row = int(np.argmax(is_leak))
        raise EvaluationLeak(
            f"{path} row {row + 1} is reserved for evaluation ({REASONS[reasons[row]]}): {rows[row][0]!r:.80}: report "
            "this as a bug"
        )
