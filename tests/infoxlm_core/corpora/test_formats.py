"""Reading: every format gives rows, every line is a row, damaged files are refused with one clear line."""

import gzip
import lzma
import os
import random
import re
import zipfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from infoxlm_core.config import CorpusSource
from infoxlm_core.corpora import formats, lines
from infoxlm_core.errors import CorpusTooSmall, InputError, ParallelMismatch


def rows_of(paths, format="text", languages=("de",), run=("en", "de", "fr", "zh"), **fields):
    paths = [paths] if isinstance(paths, Path) else list(paths)
    source = CorpusSource(name="c", format=format, path=tuple(map(str, paths)), languages=languages, **fields)
    return list(formats.read(source, run, "en", paths))


def write(path: Path, content: bytes | str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


@pytest.mark.item("B03")
@pytest.mark.parametrize(
    ("content", "texts"),
    [
        (b"a\nb\n", ["a", "b"]),
        (b"a\nb", ["a", "b"]),
        (b"a\r\nb\r\n", ["a", "b"]),
        (b"\xef\xbb\xbfa\nb\n", ["a", "b"]),
        (b"a\n\nb\n", ["a", "", "b"]),
        (b"a\rb\nc\n", ["a\rb", "c"]),
        ("a\u2028b\x85c\n".encode(), ["a\u2028b\x85c"]),
        (b"a\x0bb\x0cc\x1cd\n", ["a\x0bb\x0cc\x1cd"]),
    ],
)
def test_only_a_line_feed_ends_a_line(tmp_path, content, texts):
    assert [row.texts[0] for row in rows_of(write(tmp_path / "x.txt", content))] == texts


@pytest.mark.item("B10")
@pytest.mark.parametrize(
    ("suffix", "pack"), [(".gz", gzip.compress), (".xz", lzma.compress), (".zst", zstandard.compress)]
)
def test_a_compressed_file_reads_like_the_plain_one_and_a_cut_one_is_refused(tmp_path, suffix, pack):
    packed = pack("".join(f"{random.random()} Zeile {i}\n" for i in range(2000)).encode())

    assert len(rows_of(write(tmp_path / f"x.txt{suffix}", packed))) == 2000
    with pytest.raises(InputError, match=r"cut\.txt.* is damaged"):
        rows_of(write(tmp_path / f"cut.txt{suffix}", packed[:-200]))


@pytest.mark.item("B08")
def test_a_line_longer_than_memory_should_hold_is_one_dropped_row(tmp_path):
    rows = rows_of(write(tmp_path / "x.txt", b"a\n" + b"x" * (3 * lines.MAX_LINE) + b"\nb\n"))

    assert [(row.line, row.dropped) for row in rows] == [(1, None), (2, "too_long"), (3, None)]


@pytest.mark.item("B01")
def test_invalid_utf8_is_a_dropped_row_that_tells_where_it_is(tmp_path):
    path = write(tmp_path / "x.txt", b"gut\nschl\xe9cht\n\xed\xa0\x80\n")

    assert [row.dropped for row in rows_of(path)] == [None, "invalid_utf8", "invalid_utf8"]
    assert rows_of(path)[1].texts == (f"{path}:2:5",)


def test_tsv_knows_no_quotation_marks_and_puts_the_pivot_first(tmp_path):
    path = write(tmp_path / "x.tsv", 'id1\t"Hallo\t"Hello\nid2\tohne\n')

    rows = rows_of(path, "tsv", ("de", "en"), columns=(1, 2))

    assert [(row.languages, row.texts, row.dropped) for row in rows] == [
        (("en", "de"), ('"Hello', '"Hallo'), None),
        (("en", "de"), ("id2\tohne",), "missing_column"),
    ]


@pytest.mark.item("B03")
def test_moses_files_of_different_length_are_refused_with_both_counts(tmp_path):
    paths = write(tmp_path / "x.en", "a\nb\nc\n"), write(tmp_path / "x.fr", "a\nb\n")

    with pytest.raises(ParallelMismatch, match="en=3 fr=2"):
        rows_of(paths, "moses", ("en", "fr"))


@pytest.mark.item("B12")
def test_one_file_as_both_sides_is_refused(tmp_path):
    path = write(tmp_path / "x.en", "a\n")

    with pytest.raises(InputError, match="both sides"):
        rows_of((path, path), "moses", ("en", "fr"))


def sentences(seed: int, n: int = 3000) -> tuple[list[str], list[str]]:
    """Pairs whose lengths agree as those of translations do."""
    draw = random.Random(seed)
    words = [draw.choice((2, 3, 5, 8, 13, 21)) for _ in range(n)]
    return ["word " * k for k in words], ["mot " * max(1, round(k * draw.uniform(0.7, 1.6))) for k in words]


@pytest.mark.item("B04")
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("start", [0, 1500])
def test_sides_shifted_by_one_line_are_refused_and_aligned_ones_are_not(tmp_path, seed, start):
    en, fr = sentences(seed)
    shifted = fr[:start] + fr[start + 1 :] + fr[start : start + 1]
    source, good, bad = (
        write(tmp_path / name, "\n".join(side)) for name, side in (("x.en", en), ("x.fr", fr), ("y.fr", shifted))
    )

    assert len(rows_of((source, good), "moses", ("en", "fr"))) == 3000
    with pytest.raises(ParallelMismatch, match="do not belong together"):
        rows_of((source, bad), "moses", ("en", "fr"))


@pytest.mark.item("B04")
@pytest.mark.parametrize(("size", "begin", "end"), [(1500, 610, 1010), (300, 150, 300), (80, 0, 80)])
def test_a_block_of_shifted_lines_is_found_in_a_large_file_and_in_a_small_one(size, begin, end):
    refused = []
    for seed in range(20):
        en, fr = sentences(seed, size)
        bad = fr[:begin] + fr[begin + 1 : end] + fr[begin : begin + 1] + fr[end:]
        assert len(list(formats._check_alignment(paired(en, fr), "x"))) == size  # 0 of 20 good ones
        try:
            list(formats._check_alignment(paired(en, bad), "x"))
        except ParallelMismatch as error:
            refused.append(str(error))

    assert len(refused) == 20, "of 20 bad ones"
    for said in refused:
        first, last = map(int, re.search(r"from line (\d+) to (\d+)", said).groups())
        assert first < end and last > begin


def paired(en: list[str], fr: list[str]) -> Iterator[lines.Row]:
    return (lines.Row(("en", "fr"), pair, "x", n) for n, pair in enumerate(zip(en, fr, strict=True), 1))


@pytest.mark.item("B04")
def test_neighbours_of_like_length_do_not_hide_a_shift():
    rng = random.Random(1)
    base = [20 + 15 * (n % 100) for n in range(1000)]  # paragraphs: short lines beside short ones
    en = ["x" * round(length * rng.uniform(0.6, 1.6)) for length in base]
    fr = ["y" * round(len(text) * rng.uniform(0.8, 1.2)) for text in en]

    assert len(list(formats._check_alignment(paired(en, fr), "x"))) == 1000
    with pytest.raises(ParallelMismatch, match=r"target lines 1 further up: align"):
        list(formats._check_alignment(paired(en, fr[1:] + fr[:1]), "x"))


TMX = """<?xml version="1.0" encoding="UTF-8"?><!DOCTYPE tmx SYSTEM "tmx14.dtd"><tmx version="1.4"><body>
<tu><tuv xml:lang="EN-us"><seg>Press <ph>{\\b}</ph>the <hi>red</hi> key</seg></tuv>
<tuv xml:lang="de"><seg>Rote Taste</seg></tuv><tuv xml:lang="fr"><seg>Touche rouge</seg></tuv></tu>
<tu><tuv xml:lang="en"><seg>Alone</seg></tuv></tu></body></tmx>"""


def test_a_tmx_unit_is_a_pair_for_each_language_without_native_codes(tmp_path):
    rows = rows_of(write(tmp_path / "x.tmx", TMX), "tmx", ())

    assert [row.texts for row in rows[:2]] == [
        ("Press the red key", "Rote Taste"),
        ("Press the red key", "Touche rouge"),
    ]
    assert rows[2].dropped == "missing_side"


def test_a_line_of_jsonl_is_a_pair_for_each_translation_or_a_sentence(tmp_path):
    content = """\ufeff{"en": "Yes", "de": "Ja", "fr": null, "id": 7}
{"id": "1", "translation": {"en": "No", "de": "Nein", "fr": "Non"}}
{"de": "Ohne Übersetzung"}
{"sv": "Nej"}
"""
    rows = rows_of(write(tmp_path / "x.jsonl", content), "jsonl", ())

    assert [(row.languages, row.texts, row.line) for row in rows if not row.dropped] == [
        (("en", "de"), ("Yes", "Ja"), 1),
        (("en", "de"), ("No", "Nein"), 2),
        (("en", "fr"), ("No", "Non"), 2),
        (("de",), ("Ohne Übersetzung",), 3),
    ]
    assert [(row.line, row.dropped) for row in rows if row.dropped] == [(4, "missing_side")]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("[1, 2]", r"x\.jsonl:2 cannot be read .*: write an object with a key for each language"),
        ('{"en": "Yes"', r"x\.jsonl:2 cannot be read"),
        ('{"en": ["Yes"], "de": "Ja"}', r"x\.jsonl:2: en: Input should be a valid string: write the text"),
        ('{"translation": "Ja"}', r"x\.jsonl:2: translation: Input should be"),
        ('{"en": "\\ud800"}', r"x\.jsonl:2 cannot be read"),
    ],
)
def test_a_line_of_jsonl_without_texts_is_named(tmp_path, line, message):
    with pytest.raises(InputError, match=message):
        rows_of(write(tmp_path / "x.jsonl", f'{{"en": "a", "de": "b"}}\n{line}\n'), "jsonl", ())


def test_parquet_has_a_column_a_language(tmp_path):
    pq.write_table(pa.table({"de": ["Ja", None], "en": ["Yes", "No"], "id": [1, 2]}), tmp_path / "x.parquet")

    assert [row.texts for row in rows_of(tmp_path / "x.parquet", "parquet", ())] == [("Yes", "Ja"), ("No", "")]


@pytest.mark.item("B12")
def test_missing_empty_and_foreign_files_are_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path, said in (("none.txt", "no such file"), (".", "not a file"), ("pipe", "not a file")):
        with pytest.raises(InputError, match=said):
            rows_of(tmp_path / path)
    with pytest.raises(CorpusTooSmall, match="have=0 need=1"):
        rows_of(write(tmp_path / "empty.txt", b""))
    for format in ("gettext", "parquet", "tmx", "xliff", "jsonl"):
        with pytest.raises(InputError, match="other"):
            rows_of(write(tmp_path / "other", b"something else"), format, ())
    with pytest.raises(InputError, match="sw is not among"):
        rows_of(write(tmp_path / "x.txt", b"a"), languages=("sw",))


@pytest.mark.parametrize("kind", [pa.large_string(), pa.dictionary(pa.int32(), pa.string())], ids=str)
def test_text_of_any_kind_is_read_alike(tmp_path, kind):
    pq.write_table(pa.table({"de": pa.array(["Ja", None, "Ja"]).cast(kind)}), tmp_path / "x.parquet")

    assert [row.texts for row in rows_of(tmp_path / "x.parquet", "parquet")] == [("Ja",), ("",), ("Ja",)]


def test_a_sentence_that_repeats_makes_no_bomb_of_a_parquet_file(tmp_path):
    pq.write_table(pa.table({"de": ["Ja, " * 25] * 60_000}), tmp_path / "x.parquet")

    assert len(rows_of(tmp_path / "x.parquet", "parquet")) == 60_000  # 6 MB of text in a file of 2 kB


@pytest.mark.item("B10")
def test_a_small_parquet_file_of_gigabytes_is_refused_before_they_are_held(tmp_path):
    long = pa.DictionaryArray.from_arrays(pa.array(np.zeros(20_000, np.int32)), pa.array(["word " * 200_000]))
    pq.write_table(pa.table({"en": long, "de": long}), tmp_path / "x.parquet", compression="zstd")
    pa.default_memory_pool().release_unused()

    before = pa.default_memory_pool().max_memory()
    with pytest.raises(InputError, match="DecompressionLimit: unpacks to over 100 times"):
        rows_of(tmp_path / "x.parquet", "parquet", ())
    assert pa.default_memory_pool().max_memory() - before < 1 << 28, "40 GB of text were not"


@pytest.mark.item("B10")
def test_a_bomb_is_refused_before_a_line_of_it_is_used(tmp_path):
    packed = write(tmp_path / "x.txt.gz", gzip.compress(b"ein kurzer Satz\n" * 20_000_000))

    with pytest.raises(InputError, match="DecompressionLimit"):
        next(lines.read(packed))


OSCAR = (  # OSCAR 23.01: crate oscar-io, type Document
    '{"content": "Erste Zeile\\nZweite Zeile", "warc_headers": {"warc-record-id": "<urn:uuid:1>"}, "metadata": '
    '{"identification": {"label": "de", "prob": 0.9}, "sentence_identifications": [null, null]}}\n'
)
MADLAD = '{"text": "Erste Zeile\\\\nZweite Zeile"}\n'


@pytest.mark.parametrize(
    ("name", "content", "field"),
    [
        ("de_part_1.jsonl.zst", zstandard.compress(OSCAR.encode()), "content"),
        ("de_clean_0000.jsonl.gz", gzip.compress(MADLAD.encode()), "text"),
    ],
)
def test_each_line_of_a_published_document_is_a_row(tmp_path, name, content, field):
    rows = rows_of(write(tmp_path / name, content), "jsonl", text_field=field)

    assert [(row.texts, row.line) for row in rows] == [(("Erste Zeile",), 1), (("Zweite Zeile",), 1)]
    with pytest.raises(
        InputError, match=rf"{name}:1: body: Input should be .*: set text_field to one of its keys \({field}"
    ):
        rows_of(tmp_path / name, "jsonl", text_field="body")


def test_documents_of_culturax_are_read_from_their_column(tmp_path):
    document = {"text": ["Ein Satz\nNoch einer"], "timestamp": ["2020/01/01"], "url": ["https://a"], "source": ["mC4"]}
    pq.write_table(pa.table(document), tmp_path / "de_part_00000.parquet")

    rows = rows_of(tmp_path / "de_part_00000.parquet", "parquet", text_field="text")
    assert [row.texts for row in rows] == [("Ein Satz",), ("Noch einer",)]
    with pytest.raises(InputError, match=r"no column content: set text_field to one of its columns \(text, timestamp"):
        rows_of(tmp_path / "de_part_00000.parquet", "parquet", text_field="content")


def test_a_document_that_is_too_long_is_one_dropped_row(tmp_path):
    long = '{"text": "' + "x" * (2 * lines.MAX_LINE) + '"}\n'

    rows = rows_of(write(tmp_path / "x.jsonl", long + MADLAD), "jsonl", text_field="text")
    assert [row.dropped for row in rows] == ["too_long", None, None]


def test_blank_lines_between_the_documents_of_cc100_are_empty_rows(tmp_path):
    rows = rows_of(write(tmp_path / "de.txt.xz", lzma.compress(b"Ein Satz.\nNoch einer.\n\nAnderes.\n\n")))

    assert [row.texts[0] for row in rows] == ["Ein Satz.", "Noch einer.", "", "Anderes.", ""]


def zip_of_opus(path: Path, scores: str = "1.21\n1.05\n") -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("README", "CCMatrix")
        archive.writestr("LICENSE.de", "Lizenz")
        archive.writestr("CCMatrix.de-en.de", "Ja\nNein\n")
        archive.writestr("CCMatrix.de-en.en", "Yes\nNo\n")
        archive.writestr("CCMatrix.de-en.scores", scores)
    return path


def test_the_moses_zip_of_opus_is_read_with_its_scores(tmp_path):
    path = zip_of_opus(tmp_path / "de-en.txt.zip")

    rows = rows_of(path, "moses", ("de", "en"))
    assert [(row.texts, row.dropped) for row in rows] == [(("Yes", "Ja"), None), (("No", "Nein"), None)]
    assert rows[0].file == "CCMatrix.de-en.en CCMatrix.de-en.de"
    scored_rows = rows_of(path, "moses", ("de", "en"), minimum_score=1.06)
    assert [row.dropped for row in scored_rows] == [None, "low_score"]


def test_a_moses_zip_without_one_file_for_each_column_is_refused(tmp_path):
    path = zip_of_opus(tmp_path / "de-en.txt.zip")

    with pytest.raises(
        InputError,
        match=r"de-en\.txt\.zip has 0 files whose names end in \.fr, .*README, LICENSE\.de, CCMatrix\.de-en\.de",
    ):
        rows_of(path, "moses", ("en", "fr"))
    with pytest.raises(ParallelMismatch, match="en=2 de=2 scores=1"):
        rows_of(zip_of_opus(path, "1.2\n"), "moses", ("en", "de"), minimum_score=1)
    path.write_bytes(path.read_bytes()[:-30])
    with pytest.raises(InputError, match=r"is not a Moses zip file of OPUS, nor a list of two paths"):
        rows_of(path, "moses", ("en", "de"))


@pytest.mark.item("B10")
def test_a_damaged_file_or_a_bomb_in_a_zip_is_refused(tmp_path):
    path = zip_of_opus(tmp_path / "x.zip", "1.2\n" * 1_000_000)
    with pytest.raises(InputError, match=r"x\.zip/CCMatrix\.de-en\.scores: DecompressionLimit"):
        rows_of(path, "moses", ("en", "de"), minimum_score=1)
    content = bytearray(path.read_bytes())
    content[content.index(b"CCMatrix.de-en.de") + 20] ^= 0xFF
    path.write_bytes(content)
    with pytest.raises(InputError, match=r"CCMatrix\.de-en\.de is damaged"):
        rows_of(path, "moses", ("en", "de"))


@pytest.mark.parametrize(
    ("line", "columns", "score_column"),
    [
        ("{}\tHallo\tHello\n", (1, 2), 0),  # CCMatrix: score, source, target
        ("Hallo\tHello\t{}\t0.99\t0.98\tcc\thttps://a\tcc\thttps://b\n", (0, 1), 2),  # allenai/nllb
    ],
)
def test_pairs_of_mined_text_with_a_low_score_are_dropped(tmp_path, line, columns, score_column):
    settings = {"format": "tsv", "languages": ("de", "en"), "columns": columns, "score_column": score_column}
    path = write(tmp_path / "de-en.tsv.gz", gzip.compress((line.format("1.2") + line.format("1.05999")).encode()))

    rows = rows_of(path, **settings, minimum_score=1.06)
    assert [(row.texts, row.dropped) for row in rows] == [(("Hello", "Hallo"), d) for d in (None, "low_score")]
    write(path, gzip.compress(line.format("good").encode()))
    with pytest.raises(InputError, match=r"de-en\.tsv\.gz:1: the score 'good' is not a number: check score_column"):
        rows_of(path, **settings, minimum_score=1.06)
