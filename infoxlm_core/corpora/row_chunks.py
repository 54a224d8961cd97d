"""What preparation does to each row by itself, a chunk of rows at a time, on whatever machine: normalise, clean, key.

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
    """Collect rows as tables of at most CHUNK rows, and fewer if they are long."""
    some: list[Row] = []
    size = 0
    for row in rows:
        some.append(row)
        size += sum(map(len, row.texts))
        if len(some) == CHUNK or size > MAX_CHARACTERS:
            yield _table(some)
            some, size = [], 0
    if some:
        yield _table(some)


def _table(rows: list[Row]) -> pa.Table:
    return of_rows(_READ, [("-".join(row.languages), row.texts, row.file, row.dropped) for row in rows])


def clean_rows(chunk: pa.Table, languages: tuple[str, ...], rules: CleaningConfig, overlap: int = 0) -> pa.Table:
    """Normalise texts of `chunks`, say why a row is dropped, if it is, and give the others their keys.

    `overlap`: words of the runs among the keys, which take longest: none unless text is kept for evaluation.
    """
    cleaned = []
    for own, texts, file, dropped in rows_of(chunk):
        if not dropped:
            texts = [cleaning.normalise(text) for text in texts]
            dropped = cleaning.reason_to_drop_row(texts, own.split("-"), languages, rules)
        cleaned.append((own, texts, file, dropped, *(Keys((), (), ()) if dropped else keys(texts, overlap))))
    return of_rows(_CLEANED, cleaned)


def mark(chunk: pa.Table, overlap: int = 0) -> pa.Table:
    """Add the keys of each row's `texts` to a table."""
    found = [keys(texts, overlap) for texts in chunk["texts"].to_pylist()]
    for (name, kind), column in zip(KEYS, zip(*found, strict=True), strict=True):
        chunk = chunk.append_column(name, pa.array(column, kind))
    return chunk
