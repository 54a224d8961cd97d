"""Every format gives a row for each line, and damaged files are refused."""

import gzip
import lzma
import os
import random
import re
import zipfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from infoxlm_core.config import CorpusSource
from infoxlm_core.corpora import formats, lines
from infoxlm_core.errors import CorpusTooSmall, InputError, ParallelMismatch


def read_rows(paths, format="text", languages=("de",), **fields) -> list[lines.Row]:
    """Return the rows of a corpus in a run of four languages."""
    paths = [paths] if isinstance(paths, Path) else list(paths)
    source = CorpusSource(name="c", format=format, path=tuple(map(str, paths)), languages=languages, **fields)
    return list(formats.read_rows(source, ("en", "de", "fr", "zh"), "en", paths))


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
    assert [row.texts[0] for row in read_rows(write(tmp_path / "x.txt", content))] == texts


@pytest.mark.item("B10")
@pytest.mark.parametrize(
    ("suffix", "pack"), [(".gz", gzip.compress), (".xz", lzma.compress), (".zst", zstandard.compress)]
)
def test_compressed_file_is_read_and_a_truncated_one_is_refused(tmp_path, suffix, pack):
    packed = pack("".join(f"{random.random()} Zeile {number}\n" for number in range(2000)).encode())

    assert len(read_rows(write(tmp_path / f"x.txt{suffix}", packed))) == 2000
    with pytest.raises(InputError, match=r"cut\.txt.* is damaged"):
        read_rows(write(tmp_path / f"cut.txt{suffix}", packed[:-200]))


@pytest.mark.item("B08")
def test_line_of_megabytes_is_one_dropped_row(tmp_path):
    rows = read_rows(write(tmp_path / "x.txt", b"a\n" + b"x" * (3 * lines.MAX_LINE) + b"\nb\n"))

    assert [(row.line, row.dropped) for row in rows] == [(1, None), (2, "too_long"), (3, None)]


@pytest.mark.item("B01")
def test_invalid_utf8_is_a_dropped_row_with_line_and_byte(tmp_path):
    path = write(tmp_path / "x.txt", b"gut\nschl\xe9cht\n\xed\xa0\x80\n")

    rows = read_rows(path)

    assert [row.dropped for row in rows] == [None, "invalid_utf8", "invalid_utf8"]
    assert rows[1].texts == (f"{path}:2:5",)


def test_tsv_has_literal_quotation_marks_and_the_pivot_comes_first(tmp_path):
    path = write(tmp_path / "x.tsv", 'id1\t"Hallo\t"Hello\nid2\tohne\n')

    rows = read_rows(path, "tsv", ("de", "en"), columns=(1, 2))

    assert [(row.languages, row.texts, row.dropped) for row in rows] == [
        (("en", "de"), ('"Hello', '"Hallo'), None),
        (("en", "de"), ("id2\tohne",), "missing_column"),
    ]


@pytest.mark.item("B03")
def test_moses_files_with_different_line_counts_are_refused(tmp_path):
    paths = write(tmp_path / "x.en", "a\nb\nc\n"), write(tmp_path / "x.fr", "a\nb\n")

    with pytest.raises(ParallelMismatch, match="en=3 fr=2"):
        read_rows(paths, "moses", ("en", "fr"))


@pytest.mark.item("B12")
def test_same_file_for_both_sides_is_refused(tmp_path):
    path = write(tmp_path / "x.en", "a\n")

    with pytest.raises(InputError, match="both sides"):
        read_rows((path, path), "moses", ("en", "fr"))


def draw_sides(seed: int, count: int = 3000) -> tuple[list[str], list[str]]:
    """Return the sides of pairs whose lengths correlate as those of translations do."""
    rng = random.Random(seed)
    word_counts = [rng.choice((2, 3, 5, 8, 13, 21)) for _ in range(count)]
    target_counts = [max(1, round(words * rng.uniform(0.7, 1.6))) for words in word_counts]
    return ["word " * words for words in word_counts], ["mot " * words for words in target_counts]


def shift(side: list[str], begin: int = 0, end: int | None = None) -> list[str]:
    """Move the lines from `begin` to `end` up by one, and the first of them to the end of the block."""
    end = len(side) if end is None else end
    return side[:begin] + side[begin + 1 : end] + side[begin : begin + 1] + side[end:]


def check_alignment(source: list[str], target: list[str]) -> int:
    """Return the number of pairs that pass the check."""
    pairs = enumerate(zip(source, target, strict=True), 1)
    rows = (lines.Row(("en", "fr"), texts, "x", number) for number, texts in pairs)
    return len(list(formats._check_alignment(rows)))


@pytest.mark.item("B04")
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("begin", [0, 1500])
def test_file_shifted_by_one_line_is_refused_and_an_aligned_file_is_read(tmp_path, seed, begin):
    english, french = draw_sides(seed)
    source = write(tmp_path / "x.en", "\n".join(english))
    aligned = write(tmp_path / "x.fr", "\n".join(french))
    shifted = write(tmp_path / "y.fr", "\n".join(shift(french, begin)))

    assert len(read_rows((source, aligned), "moses", ("en", "fr"))) == 3000
    with pytest.raises(ParallelMismatch, match="do not belong together"):
        read_rows((source, shifted), "moses", ("en", "fr"))


@pytest.mark.item("B04")
@pytest.mark.parametrize(("count", "begin", "end"), [(1500, 610, 1010), (300, 150, 300), (80, 0, 80)])
def test_shifted_block_is_refused_with_its_position(count, begin, end):
    for seed in range(20):
        english, french = draw_sides(seed, count)
        assert check_alignment(english, french) == count
        with pytest.raises(ParallelMismatch) as error:
            check_alignment(english, shift(french, begin, end))
        first, last = map(int, re.search(r"from line (\d+) to (\d+)", str(error.value)).groups())
        assert first < end
        assert last > begin


@pytest.mark.item("B04")
def test_shift_is_refused_if_neighbouring_lines_have_similar_lengths():
    rng = random.Random(1)
    lengths = [20 + 15 * (number % 100) for number in range(1000)]  # short lines are beside short ones
    english = ["x" * round(length * rng.uniform(0.6, 1.6)) for length in lengths]
    french = ["y" * round(len(text) * rng.uniform(0.8, 1.2)) for text in english]

    assert check_alignment(english, french) == 1000
    with pytest.raises(ParallelMismatch, match=r"target lines 1 further up: align"):
        check_alignment(english, shift(french))


TMX = """<?xml version="1.0" encoding="UTF-8"?><!DOCTYPE tmx SYSTEM "tmx14.dtd"><tmx version="1.4"><body>
<tu><tuv xml:lang="EN-us"><seg>Press <ph>{\\b}</ph>the <hi>red</hi> key</seg></tuv>
<tuv xml:lang="de"><seg>Rote Taste</seg></tuv><tuv xml:lang="fr"><seg>Touche rouge</seg></tuv></tu>
<tu><tuv xml:lang="en"><seg>Alone</seg></tuv></tu></body></tmx>"""


@pytest.mark.parametrize("namespace", ["", ' xmlns="http://www.lisa.org/tmx14"'])
def test_tmx_unit_is_a_pair_for_each_language_without_native_codes(tmp_path, namespace):
    content = TMX.replace('<tmx version="1.4"', f'<tmx version="1.4"{namespace}')

    rows = read_rows(write(tmp_path / "x.tmx", content), "tmx", ())

    assert [row.texts for row in rows[:2]] == [
        ("Press the red key", "Rote Taste"),
        ("Press the red key", "Touche rouge"),
    ]
    assert rows[2].dropped == "missing_side"


def test_jsonl_line_is_a_pair_for_each_translation_or_a_sentence(tmp_path):
    content = """\ufeff{"en": "Yes", "de": "Ja", "fr": null, "id": 7}
{"id": "1", "translation": {"en": "No", "de": "Nein", "fr": "Non"}}
{"de": "Ohne Übersetzung"}
{"sv": "Nej"}
"""
    rows = read_rows(write(tmp_path / "x.jsonl", content), "jsonl", ())

    assert [(row.languages, row.texts, row.line) for row in rows if not row.dropped] == [
        (("en", "de"), ("Yes", "Ja"), 1),
        (("en", "de"), ("No", "Nein"), 2),
        (("en", "fr"), ("No", "Non"), 2),
        (("de",), ("Ohne Übersetzung",), 3),
    ]
    assert [(row.line, row.dropped) for row in rows if row.dropped] == [(4, "missing_side")]


@pytest.mark.item("B02")
def test_empty_lines_of_jsonl_are_dropped_rows(tmp_path):
    pair, document = '{"en": "Yes", "de": "Ja"}', '{"text": "Ja"}'

    pairs = read_rows(write(tmp_path / "x.jsonl", f"{pair}\n\n{pair}\n  \n"), "jsonl", ())
    documents = read_rows(write(tmp_path / "x.jsonl", f"{document}\n\n{document}\n"), "jsonl", text_field="text")

    assert [(row.line, row.texts, row.dropped) for row in pairs] == [
        (1, ("Yes", "Ja"), None),
        (2, ("", ""), "empty"),
        (3, ("Yes", "Ja"), None),
        (4, ("", ""), "empty"),
    ]
    assert [(row.line, row.texts) for row in documents] == [(1, ("Ja",)), (2, ("",)), (3, ("Ja",))]


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
def test_jsonl_line_without_texts_is_refused_with_its_number(tmp_path, line, message):
    with pytest.raises(InputError, match=message):
        read_rows(write(tmp_path / "x.jsonl", f'{{"en": "a", "de": "b"}}\n{line}\n'), "jsonl", ())


def test_parquet_has_a_column_for_each_language(tmp_path):
    pq.write_table(pa.table({"de": ["Ja", None], "en": ["Yes", "No"], "id": [1, 2]}), tmp_path / "x.parquet")

    assert [row.texts for row in read_rows(tmp_path / "x.parquet", "parquet", ())] == [("Yes", "Ja"), ("No", "")]


@pytest.mark.item("B12")
@pytest.mark.parametrize(
    ("name", "problem"), [("none.txt", "no such file"), (".", "not a file"), ("pipe", "not a file")]
)
def test_missing_files_directories_and_pipes_are_refused(tmp_path, name, problem):
    os.mkfifo(tmp_path / "pipe")

    with pytest.raises(InputError, match=problem):
        read_rows(tmp_path / name)


@pytest.mark.parametrize("format", ["gettext", "parquet", "tmx", "xliff", "jsonl"])
def test_file_of_another_format_is_refused(tmp_path, format):
    with pytest.raises(InputError, match="other"):
        read_rows(write(tmp_path / "other", b"something else"), format, ())


def test_empty_files_and_unknown_languages_are_refused(tmp_path):
    with pytest.raises(CorpusTooSmall, match="is empty: replace it"):
        read_rows(write(tmp_path / "empty.txt", b""))
    with pytest.raises(InputError, match="sw is not among"):
        read_rows(write(tmp_path / "x.txt", b"a"), languages=("sw",))


@pytest.mark.parametrize("kind", [pa.large_string(), pa.dictionary(pa.int32(), pa.string())], ids=str)
def test_text_of_any_arrow_type_is_read(tmp_path, kind):
    pq.write_table(pa.table({"de": pa.array(["Ja", None, "Ja"]).cast(kind)}), tmp_path / "x.parquet")

    assert [row.texts for row in read_rows(tmp_path / "x.parquet", "parquet")] == [("Ja",), ("",), ("Ja",)]


def test_parquet_file_of_a_repeated_sentence_is_not_refused(tmp_path):
    pq.write_table(pa.table({"de": ["Ja, " * 25] * 60_000}), tmp_path / "x.parquet")

    assert len(read_rows(tmp_path / "x.parquet", "parquet")) == 60_000  # 6 MB of text in a file of 2 kB


@pytest.mark.item("B10")
def test_small_parquet_file_of_gigabytes_is_refused_in_little_memory(tmp_path):
    long = pa.DictionaryArray.from_arrays(pa.array(np.zeros(20_000, np.int32)), pa.array(["word " * 200_000]))
    pq.write_table(pa.table({"en": long, "de": long}), tmp_path / "x.parquet", compression="zstd")
    pa.default_memory_pool().release_unused()

    before = pa.default_memory_pool().max_memory()
    with pytest.raises(InputError, match="DecompressionLimit: unpacks to over 100 times"):
        read_rows(tmp_path / "x.parquet", "parquet", ())
    assert pa.default_memory_pool().max_memory() - before < 1 << 28, "40 GB of text were not"


@pytest.mark.item("B10")
def test_compression_bomb_is_refused_before_its_first_line(tmp_path):
    packed = write(tmp_path / "x.txt.gz", gzip.compress(b"ein kurzer Satz\n" * 20_000_000))

    with pytest.raises(InputError, match="DecompressionLimit"):
        next(lines.read_lines(packed))


OSCAR = (  # OSCAR 23.01: crate oscar-io, type Document
    '{"content": "Erste Zeile\\nZweite Zeile", "warc_headers": {"warc-record-id": "<urn:uuid:1>"}, "metadata": '
    '{"identification": {"label": "de", "prob": 0.9}, "sentence_identifications": [null, null]}}\n'
)
MADLAD = '{"text": "Erste Zeile\\\\nZweite Zeile"}\n'


@pytest.mark.parametrize(
    ("name", "content", "field"),
    [
        ("de_part_1.jsonl.zst", zstandard.compress(OSCAR.encode()), "content"),
        ("de_clean_0000.jsonl.gz", gzip.compress(MADLAD.encode(), mtime=0), "text"),
    ],
)
def test_each_line_of_a_published_document_is_a_row(tmp_path, name, content, field):
    rows = read_rows(write(tmp_path / name, content), "jsonl", text_field=field)

    assert [(row.texts, row.line) for row in rows] == [(("Erste Zeile",), 1), (("Zweite Zeile",), 1)]
    with pytest.raises(
        InputError, match=rf"{name}:1: body: Input should be .*: set text_field to one of its keys \({field}"
    ):
        read_rows(tmp_path / name, "jsonl", text_field="body")


def test_documents_of_culturax_are_read_from_their_column(tmp_path):
    document = {"text": ["Ein Satz\nNoch einer"], "timestamp": ["2020/01/01"], "url": ["https://a"], "source": ["mC4"]}
    pq.write_table(pa.table(document), tmp_path / "de_part_00000.parquet")

    rows = read_rows(tmp_path / "de_part_00000.parquet", "parquet", text_field="text")
    assert [row.texts for row in rows] == [("Ein Satz",), ("Noch einer",)]
    with pytest.raises(InputError, match=r"no column content: set text_field to one of its columns \(text, timestamp"):
        read_rows(tmp_path / "de_part_00000.parquet", "parquet", text_field="content")


def test_document_of_megabytes_is_one_dropped_row(tmp_path):
    long = '{"text": "' + "x" * (2 * lines.MAX_LINE) + '"}\n'

    rows = read_rows(write(tmp_path / "x.jsonl", long + MADLAD), "jsonl", text_field="text")
    assert [row.dropped for row in rows] == ["too_long", None, None]


def write_opus_zip(path: Path, scores: str = "1.21\n1.05\n") -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("README", "CCMatrix")
        archive.writestr("LICENSE.de", "Lizenz")
        archive.writestr("CCMatrix.de-en.de", "Ja\nNein\n")
        archive.writestr("CCMatrix.de-en.en", "Yes\nNo\n")
        archive.writestr("CCMatrix.de-en.scores", scores)
    return path


def test_moses_zip_of_opus_is_read_with_its_scores(tmp_path):
    path = write_opus_zip(tmp_path / "de-en.txt.zip")

    rows = read_rows(path, "moses", ("de", "en"))
    assert [(row.texts, row.dropped) for row in rows] == [(("Yes", "Ja"), None), (("No", "Nein"), None)]
    assert rows[0].file == "CCMatrix.de-en.en CCMatrix.de-en.de"
    scored_rows = read_rows(path, "moses", ("de", "en"), minimum_score=1.06)
    assert [row.dropped for row in scored_rows] == [None, "low_score"]


def test_moses_zip_without_a_file_for_each_side_is_refused(tmp_path):
    path = write_opus_zip(tmp_path / "de-en.txt.zip")

    with pytest.raises(
        InputError,
        match=r"de-en\.txt\.zip has 0 files whose names end in \.fr, .*README, LICENSE\.de, CCMatrix\.de-en\.de",
    ):
        read_rows(path, "moses", ("en", "fr"))
    with pytest.raises(ParallelMismatch, match="en=2 de=2 scores=1"):
        read_rows(write_opus_zip(path, "1.2\n"), "moses", ("en", "de"), minimum_score=1)
    path.write_bytes(path.read_bytes()[:-30])
    with pytest.raises(InputError, match=r"is not a Moses zip file of OPUS, nor a list of two paths"):
        read_rows(path, "moses", ("en", "de"))


@pytest.mark.item("B10")
def test_damaged_file_and_compression_bomb_in_a_zip_are_refused(tmp_path):
    path = write_opus_zip(tmp_path / "x.zip", "1.2\n" * 1_000_000)
    with pytest.raises(InputError, match=r"x\.zip/CCMatrix\.de-en\.scores: DecompressionLimit"):
        read_rows(path, "moses", ("en", "de"), minimum_score=1)
    content = bytearray(path.read_bytes())
    content[content.index(b"CCMatrix.de-en.de") + 20] ^= 0xFF
    path.write_bytes(content)
    with pytest.raises(InputError, match=r"CCMatrix\.de-en\.de is damaged"):
        read_rows(path, "moses", ("en", "de"))


@pytest.mark.parametrize(
    ("line", "columns", "score_column"),
    [
        ("{}\tHallo\tHello\n", (1, 2), 0),  # CCMatrix: score, source, target
        ("Hallo\tHello\t{}\t0.99\t0.98\tcc\thttps://a\tcc\thttps://b\n", (0, 1), 2),  # allenai/nllb
    ],
)
def test_mined_pairs_with_a_low_score_are_dropped(tmp_path, line, columns, score_column):
    settings = {"format": "tsv", "languages": ("de", "en"), "columns": columns, "score_column": score_column}
    path = write(tmp_path / "de-en.tsv.gz", gzip.compress((line.format("1.2") + line.format("1.05999")).encode()))

    rows = read_rows(path, **settings, minimum_score=1.06)
    assert [row.texts for row in rows] == [("Hello", "Hallo")] * 2
    assert [row.dropped for row in rows] == [None, "low_score"]
    write(path, gzip.compress(line.format("good").encode()))
    with pytest.raises(InputError, match=r"de-en\.tsv\.gz:1: the score 'good' is not a number: check score_column"):
        read_rows(path, **settings, minimum_score=1.06)
