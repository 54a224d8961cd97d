"""What is read, and that the corpus formats read what is written."""

import gzip
from pathlib import Path

import pytest

from infoxlm_core.config import CorpusSource
from infoxlm_core.corpora import formats
from infoxlm_core.errors import InputError
from infoxlm_core.tasks.mining import files
from infoxlm_core.tasks.mining.files import MinedPair

TRICKY = [
    "a <b>bold</b> & \"quoted\" 'text'",
    "a tab\tinside",
    "]]> &amp; <ph/>",
    "控制 \x0b\x00字符 \U0001f600 \ud7ff",
    "plain",
]
PAIRS = [MinedPair(1.25 - row / 100, row + 1, 90 - row, text, f"Ü{text}") for row, text in enumerate(TRICKY)]


def read_back(path: Path, kind: str, **fields) -> list[tuple[str, ...]]:
    source = CorpusSource(name="mined", format=kind, path=str(path), **fields)
    rows = list(formats.read(source, ["en", "de"], "en", [path]))
    assert all(row.languages == ("en", "de") and row.dropped is None for row in rows)
    return [row.texts for row in rows]


def test_a_tmx_file_is_read_by_our_reader(tmp_path):
    files.write_pairs(tmp_path / "mined.tmx", ("en", "de"), PAIRS)

    texts = read_back(tmp_path / "mined.tmx", "tmx")

    assert texts == [(p.source.translate({11: " ", 0: " "}), p.target.translate({11: " ", 0: " "})) for p in PAIRS]
    assert '<prop type="x-margin">1.25000</prop><tuv xml:lang="en">' in (tmp_path / "mined.tmx").read_text("utf-8")


def test_a_tsv_file_is_read_by_our_reader(tmp_path):
    files.write_pairs(tmp_path / "mined.tsv", ("en", "de"), PAIRS)

    texts = read_back(tmp_path / "mined.tsv", "tsv", languages=("en", "de"), columns=(3, 4))

    assert texts == [(pair.source.replace("\t", " "), pair.target.replace("\t", " ")) for pair in PAIRS]
    assert (tmp_path / "mined.tsv").read_text("utf-8").startswith("1.25000\t1\t90\ta <b>")


def test_a_parquet_file_is_read_by_our_reader(tmp_path):
    for name, pairs in (("mined.parquet", PAIRS), ("none.parquet", [])):
        files.write_pairs(tmp_path / name, ("en", "de"), pairs)

        assert read_back(tmp_path / name, "parquet") == [(pair.source, pair.target) for pair in pairs]


def test_pairs_for_calibration_are_read_from_what_was_mined(tmp_path):
    plain = [MinedPair(1, row, row, f"text {row}", f"Text {row}") for row in range(3)]
    for name in ("mined.tmx", "mined.parquet"):
        files.write_pairs(tmp_path / name, ("en", "de"), [*plain, plain[0]])
        assert files.read_pairs(tmp_path / name, ("en", "de")) == [(pair.source, pair.target) for pair in plain]
        assert files.read_pairs(tmp_path / name, ("de", "en")) == [(pair.target, pair.source) for pair in plain]
    (tmp_path / "pairs.jsonl").write_text('{"translation": {"de": "Text", "en": "text"}}\n')
    assert files.read_pairs(tmp_path / "pairs.jsonl", ("en", "de")) == [("text", "Text")]
    (tmp_path / "pairs.tsv.gz").write_bytes(gzip.compress(b"text\tText\n\tone side\n"))
    assert files.read_pairs(tmp_path / "pairs.tsv.gz", ("en", "de")) == [("text", "Text")]


def test_lines_are_read_once_and_counted(tmp_path):
    content = b"one\r\ntwo\n\n one\nsch\xe9n\n" + b"x" * (1 << 20) + b"\ntwo\nthree"
    (tmp_path / "news.en.gz").write_bytes(gzip.compress(content))

    lines = files.read_distinct(tmp_path / "news.en.gz")

    assert (lines.texts, lines.numbers) == (["one", "two", "three"], [1, 2, 8])
    assert lines.dropped == {"empty": 1, "duplicate": 2, "invalid_utf8": 1, "too_long": 1}


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (("news.en", "de.txt.gz"), ("en", "de")),
        (("a.deu_Latn.txt", "b.fra"), ("de", "fr")),
        (("news.txt", "news.de"), "news.txt: its name does not tell its language"),
        (("en.de", "fr.txt"), "en.de: its name does not tell its language"),
        (("a.en", "b.eng"), "languages en, en: give --languages with two"),
    ],
)
def test_languages_are_those_in_the_names_of_files(names, expected):
    paths = (Path(names[0]), Path(names[1]))
    if isinstance(expected, tuple):
        assert files.name_languages(paths) == expected
        return
    with pytest.raises(InputError, match=expected):
        files.name_languages(paths)


def test_input_that_cannot_be_used_is_refused_in_one_line(tmp_path):
    (tmp_path / "empty.en").write_text("\n\n")

    for refused, reason in (
        (lambda: files.read_distinct(tmp_path / "empty.en"), "empty.en has 0 distinct lines of text"),
        (lambda: files.check_output(tmp_path / "mined.xlsx"), r"pairs are not written as '.xlsx': give a file of .tsv"),
        (lambda: files.check_output(tmp_path / "no/mined.tsv"), "no such folder"),
        (
            lambda: files.read_pairs(tmp_path / "pairs.csv", ("en", "de")),
            "pairs.csv: its name does not tell the format",
        ),
        (lambda: files.read_pairs(tmp_path / "po.zip", ("en", "de")), "pairs are not read from message cat"),
        (lambda: files.check_languages(["en"]), "languages en: give --languages with two"),
        (lambda: files.read_pairs(tmp_path / "no.tmx", ("en", "de")), "no such file"),
    ):
        with pytest.raises(InputError, match=reason):
            refused()
