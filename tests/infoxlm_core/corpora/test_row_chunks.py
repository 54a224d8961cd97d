"""What preparation does to a chunk of rows: normalise, clean, key."""

import pytest

from infoxlm_core.config import CleaningConfig
from infoxlm_core.corpora import fingerprints, row_chunks, tables
from infoxlm_core.corpora.lines import Row
from infoxlm_core.corpora.parallel import CHUNK

ROWS = [
    Row(("en", "de"), ("Open the file now", "Öffne die Da\u00adtei jetzt"), "a.tsv", 1),
    Row(("en", "de"), ("Open the file now", "Open the file now"), "a.tsv", 1),
    Row(("en", "de"), ("", ""), "a.tsv", 3, "damaged"),
]


def test_a_clean_row_is_normalised_and_keyed_and_another_says_why_it_goes():
    (chunk,) = row_chunks.chunks(ROWS)

    clean, untranslated, damaged = tables.rows_of(row_chunks.clean_rows(chunk, ("en", "de"), CleaningConfig(), 3))

    texts = ["Open the file now", "Öffne die Datei jetzt"]
    assert clean == ("en-de", texts, "a.tsv", None, *map(list, fingerprints.keys(texts, 3)))
    assert len(clean[-1]) == 4  # two runs of three words on each side
    assert untranslated[3:] == ("untranslated", [], [], [], [])
    assert damaged[3:] == ("damaged", [], [], [], [])


@pytest.mark.item("B08")
def test_rows_are_collected_in_order_and_in_chunks_of_bounded_size():
    rows = [Row(("en",), (f"line {number}",), "a.txt", number) for number in range(CHUNK + 1)]

    found = list(row_chunks.chunks(rows))

    assert [len(chunk) for chunk in found] == [CHUNK, 1]
    assert found[1]["texts"].to_pylist() == [[f"line {CHUNK}"]]
