"""The lines and pairs that mining reads, and mined pairs that the corpus formats read back."""

import gzip
from pathlib import Path

import pytest

from infoxlm_core.config import CorpusSource
from infoxlm_core.corpora import formats
from infoxlm_core.errors import InputError
from infoxlm_core.tasks.mining import files
from infoxlm_core.tasks.mining.files import MinedPair

TEXTS = [
    "a <b>bold</b> & \"quoted\" 'text'",
    "a tab\tinside",
    "]]> &amp; <ph/>",
    "控制 \x0b\x00字符 \U0001f600 \ud7ff",
    "words",
]
PAIRS = [MinedPair(1.25 - row / 100, row + 1, 90 - row, text, f"Ü{text}") for row, text in enumerate(TEXTS)]


@pytest.mark.parametrize(
    ("file_format", "fields", "replaced", "expected_content"),
    [
        ("tmx", {}, "\x0b\x00", '<prop type="x-margin">1.25000</prop><tuv xml:lang="en">'),
        ("tsv", {"languages": ("en", "de"), "columns": (3, 4)}, "\t", "1.25000\t1\t90\ta <b>"),
        ("parquet", {}, "", ""),
    ],
)
def test_mined_pairs_are_read_by_the_corpus_formats(tmp_path, file_format, fields, replaced, expected_content):
    path = tmp_path / f"mined.{file_format}"
    files.write_pairs(path, ("en", "de"), PAIRS)

    source = CorpusSource(name="mined", format=file_format, path=str(path), **fields)
    rows = list(formats.read_rows(source, ["en", "de"], "en", [path]))

    spaces = str.maketrans(replaced, " " * len(replaced))  # for characters that the format does not allow
    assert [row.texts for row in rows] == [
        (pair.source.translate(spaces), pair.target.translate(spaces)) for pair in PAIRS
    ]
    assert all(row.languages == ("en", "de") and row.dropped is None for row in rows)
    assert expected_content.encode() in path.read_bytes()


def test_an_empty_parquet_file_of_pairs_is_readable(tmp_path):
    files.write_pairs(tmp_path / "none.parquet", ("en", "de"), [])

    assert files.read_pairs(tmp_path / "none.parquet", ("en", "de")) == []


@pytest.mark.parametrize("name", ["mined.tmx", "mined.parquet"])
def test_mined_pairs_can_calibrate_in_either_direction(tmp_path, name):
    pairs = [MinedPair(1, row, row, f"text {row}", f"Text {row}") for row in range(3)]
    files.write_pairs(tmp_path / name, ("en", "de"), [*pairs, pairs[0]])

    assert files.read_pairs(tmp_path / name, ("en", "de")) == [(pair.source, pair.target) for pair in pairs]
    assert files.read_pairs(tmp_path / name, ("de", "en")) == [(pair.target, pair.source) for pair in pairs]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("pairs.jsonl", b'{"translation": {"de": "Text", "en": "text"}}\n'),
        ("pairs.tsv.gz", gzip.compress(b"text\tText\n\tone side\n", mtime=0)),
    ],
)
def test_calibration_pairs_have_any_corpus_format(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)

    assert files.read_pairs(tmp_path / name, ("en", "de")) == [("text", "Text")]


def test_distinct_lines_are_read_and_others_counted_by_reason(tmp_path):
    content = b"one\r\ntwo\n\n one\nsch\xe9n\n" + b"x" * (1 << 20) + b"\ntwo\nthree"
    (tmp_path / "news.en.gz").write_bytes(gzip.compress(content))

    lines = files.read_distinct(tmp_path / "news.en.gz")

    assert lines.texts == ["one", "two", "three"]
    assert lines.numbers == [1, 2, 8]
    assert lines.dropped == {"empty": 1, "duplicate": 2, "invalid_utf8": 1, "too_long": 1}


@pytest.mark.parametrize(
    ("names", "languages"), [(("news.en", "de.txt.gz"), ("en", "de")), (("a.deu_Latn.txt", "b.fra"), ("de", "fr"))]
)
def test_languages_are_those_in_the_names_of_files(names, languages):
    assert files.infer_languages((Path(names[0]), Path(names[1]))) == languages


@pytest.mark.parametrize(
    ("names", "reason"),
    [
        (("news.txt", "news.de"), "news.txt: its name must contain one language"),
        (("en.de", "fr.txt"), "en.de: its name must contain one language"),
        (("a.en", "b.eng"), "languages en, en: give two different ones"),
    ],
)
def test_file_names_without_two_languages_are_refused(names, reason):
    with pytest.raises(InputError, match=reason):
        files.infer_languages((Path(names[0]), Path(names[1])))


def test_unusable_files_are_refused(tmp_path):
    (tmp_path / "empty.en").write_text("\n\n")

    with pytest.raises(InputError, match=r"empty\.en has 0 distinct lines of text"):
        files.read_distinct(tmp_path / "empty.en")
    with pytest.raises(InputError, match=r"'.xlsx' is not an output format: use .tsv"):
        files.check_output(tmp_path / "mined.xlsx")
    with pytest.raises(InputError, match="no such directory"):
        files.check_output(tmp_path / "no/mined.tsv")
    with pytest.raises(InputError, match=r"pairs\.csv: the format of its translations is unknown"):
        files.read_pairs(tmp_path / "pairs.csv", ("en", "de"))
    with pytest.raises(InputError, match="message catalogs are not supported for pairs"):
        files.read_pairs(tmp_path / "po.zip", ("en", "de"))
