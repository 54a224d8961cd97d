"""Normalise, clean and digest single rows during preparation, in chunks that any machine can process.

("en-de", ["Hello", "Hal\\u00adlo"], "x.tsv", None)  ->  ("en-de", ["Hello", "Hallo"], "x.tsv", None, keys …)
("en-de", ["Hello", "Hello"], "x.tsv", None)       ->  ("en-de", ["Hello", "Hello"], "x.tsv", "untranslated", …)
"""

from collections.abc import Iterable, Iterator

import pyarrow as pa

from infoxlm_core.config import CleaningConfig
from infoxlm_core.corpora import cleaning
from infoxlm_core.corpora.fingerprints import Keys, keys
from infoxlm_core.corpora.lines import Row
from infoxlm_core.corpora.parallel import CHUNK
from infoxlm_core.corpora.tables import of_rows, rows_of

TEXTS = ("texts", pa.list_(pa.string()))
MAX_CHARACTERS = 1 << 26  # of a chunk
FILE = ("file", pa.string())
KEYS = tuple((name, pa.list_(pa.uint64())) for name in Keys._fields)
_READ = pa.schema([("languages", pa.string()), TEXTS, FILE, ("dropped", pa.string())])
_CLEANED = pa.schema([*_READ, *KEYS])


def chunks(rows: Iterable[Row]) -> Iterator[pa.Table]:
    """Yield tables of at most CHUNK rows and about MAX_CHARACTERS characters."""
    chunk: list[Row] = []
    characters = 0
    for row in rows:
        chunk.append(row)
        characters += sum(len(text) for text in row.texts)
        if len(chunk) == CHUNK or characters > MAX_CHARACTERS:
            yield _make_table(chunk)
            chunk = []
            characters = 0
    if chunk:
        yield _make_table(chunk)


def _make_table(rows: list[Row]) -> pa.Table:
    return of_rows(_READ, [("-".join(row.languages), row.texts, row.file, row.dropped) for row in rows])


def clean_rows(chunk: pa.Table, languages: tuple[str, ...], rules: CleaningConfig, overlap: int = 0) -> pa.Table:
    """Normalise texts, decide which rows are dropped, and compute the keys of the others.

    Args:
        chunk: a table of `chunks`.
        languages: the languages of the run.
        rules: what is dropped.
        overlap: length of the runs of words among the keys; 0 skips them, which saves most of the time.
    """
    cleaned = []
    for languages_of_row, texts, file, dropped in rows_of(chunk):
        if not dropped:
            texts = [cleaning.normalise(text) for text in texts]
            dropped = cleaning.reason_to_drop_row(texts, languages_of_row.split("-"), languages, rules)
        row_keys = Keys((), (), ()) if dropped else keys(texts, overlap)
        cleaned.append((languages_of_row, texts, file, dropped, *row_keys))
    return of_rows(_CLEANED, cleaned)


def mark(chunk: pa.Table, overlap: int = 0) -> pa.Table:
    """Add the keys of each row's `texts` to a table."""
    row_keys = [keys(texts, overlap) for texts in chunk["texts"].to_pylist()]
    for name, column_type in KEYS:
        column = [getattr(keys_of_row, name) for keys_of_row in row_keys]
        chunk = chunk.append_column(name, pa.array(column, column_type))
    return chunk
