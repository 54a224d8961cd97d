"""Phase write: write the remaining rows, count all rows, and prove that the training text contains no reserved text.

tables/NUMBER/mono/de/web.parquet, …   the rows of a part for each table of the corpus
"""

from collections import Counter, defaultdict

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from infoxlm_core.corpora import fingerprints, tables
from infoxlm_core.corpora.phases.clean import KEYS
from infoxlm_core.corpora.phases.deduplicate import (
    ITSELF,
    KEPT,
    SIMILAR,
    STATES,
    find_documents,
    list_offers,
    read_states,
)
from infoxlm_core.corpora.phases.job import FileKey, Job, Part, Record, RowCounts, counts_to_json
from infoxlm_core.corpora.phases.reserve import REASONS, Reserved, read_reserved
from infoxlm_core.corpora.tables import HELD_OUT, LABELLED
from infoxlm_core.errors import EvaluationLeak

LABELLED_TABLE = "labelled.parquet"


def write(job: Job, number: int) -> Record:
    """Write the remaining rows of a part to their tables, and check the training tables for reserved text."""
    part = job.parts[number]
    rows = job.read_table(f"staged/{part.name}", ("texts", "file", "document", "near", "is_long"))
    reasons = np.frombuffer(job.files.read(f"reasons/{part.name}"), np.uint8)
    states = read_states(job, number, len(rows))
    if job.config.corpora[part.source].compares_documents:
        states = states[find_documents(rows)]
    counts: RowCounts = defaultdict(Counter)
    file_key = FileKey(part.corpus, part.languages[-1], part.kind, "")
    for reason_number, reason in enumerate(REASONS[1:], start=1):
        _count(counts, file_key, rows, reason, reasons == reason_number)
    tables_of_part: dict[str, pa.Table] = {}
    is_labelled = np.zeros((len(rows), 2), bool)
    is_duplicate = ~np.isin(states[:, ITSELF], (KEPT, SIMILAR))  # the sides of a similar pair are offered
    for offer in list_offers(job, part, rows, reasons, is_duplicate):
        item_states = states[:, offer.item]
        is_written = offer.is_offered & (item_states == KEPT)
        if offer.kind == "labelled":
            is_labelled[:, offer.sides] = is_written[:, None]
            continue
        file_key = FileKey(part.corpus, offer.languages[-1], offer.kind, "")
        if offer.kind != part.kind:  # count the rows again, as input of another table
            _count(counts, file_key, rows, "read", offer.is_offered)
        for state_number, state in enumerate(STATES):
            _count(counts, file_key, rows, state, offer.is_offered & (item_states == state_number))
        texts = rows["texts"].filter(pa.array(is_written))
        sides = range(len(part.languages))[offer.sides]
        column_names = ["text"] if len(sides) == 1 else ["source", "target"]
        name = f"{offer.kind}/{'-'.join(offer.languages)}/{part.corpus}.parquet"
        tables_of_part[name] = pa.table([pc.list_element(texts, side) for side in sides], names=column_names)
    if is_labelled.any():
        tables_of_part[LABELLED_TABLE] = _make_labelled_table(part, rows, reasons, is_labelled)
    names = [name for name, table in tables_of_part.items() if len(table)]
    for name in names:
        job.put_table(f"tables/{number}/{name}", tables_of_part[name])
        if not name.startswith(HELD_OUT):
            check_leaks(job.read_table(f"tables/{number}/{name}"), name, read_reserved(job))
    return {"counts": counts_to_json(counts), "tables": names}


def _count(counts: RowCounts, file_key: FileKey, rows: pa.Table, outcome: str, is_selected: np.ndarray) -> None:
    """Add the selected rows of each file to `counts` under an outcome. The file of `file_key` is left empty."""
    for file_count in pc.value_counts(rows["file"].filter(pa.array(is_selected))).to_pylist():
        counts[file_key._replace(file=file_count["values"])][outcome] += file_count["counts"]


def _make_labelled_table(part: Part, pairs: pa.Table, reasons: np.ndarray, is_labelled: np.ndarray) -> pa.Table:
    """Return the sides of pairs that are labelled text, (rows, 2), with their corpus as the label."""
    row_numbers, sides = np.nonzero(is_labelled)  # row by row, as in `texts`
    texts = pc.list_flatten(pairs["texts"]).filter(pa.array(is_labelled.ravel()))
    languages = np.array(part.languages)[sides]
    splits = np.where(reasons[row_numbers] == 0, "train", "test")
    columns = [texts, pa.array([part.corpus] * len(texts)), pa.array(languages), pa.array(splits)]
    return pa.table(columns, schema=tables.make_text_schema(*LABELLED))


def check_leaks(table: pa.Table, path: str, reserved: Reserved) -> None:
    """Raise EvaluationLeak if a table of training text contains reserved text."""
    columns = [table["text"]] if "text" in table.column_names else [table["source"], table["target"]]
    rows = list(zip(*(column.to_pylist() for column in columns), strict=True))
    keys = tables.make_table(pa.schema(KEYS), [fingerprints.compute_keys(texts, reserved.overlap) for texts in rows])
    reasons = reserved.find_reasons(keys, np.zeros(len(rows), bool))
    is_leak = reasons > 0
    if "split" in table.column_names:  # a labelled test set is reserved itself
        is_test = pc.equal(table["split"], "test").to_numpy()
        is_leak &= ~is_test | (reasons < REASONS.index("labelled"))
    if is_leak.any():
        row = int(np.argmax(is_leak))
        raise EvaluationLeak(
            f"{path} row {row + 1} is reserved for evaluation ({REASONS[reasons[row]]}): {rows[row][0]!r:.80}: report "
            "this as a bug"
        )
