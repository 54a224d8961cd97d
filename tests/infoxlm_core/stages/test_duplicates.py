"""`deduplicate: documents` compares documents as a whole; `near_duplicates: minhash` also drops similar long rows."""

import importlib.metadata
import json
from pathlib import Path
from pydoc_data import topics

import pyarrow.parquet as pq
import pytest

from infoxlm_core.config import PreparationConfig
from infoxlm_core.corpora.parallel import ProcessPoolMap, map_in_process
from infoxlm_core.corpora.phases import clean
from infoxlm_core.errors import ConfigError, InputError
from infoxlm_core.stages import preparation
from tests.helpers.files import Folder

HEADER = "This page belongs to the reference of the Python language"


def read_paragraphs() -> list[str]:
    """Return 50 unlike paragraphs of Python's reference with 250 to 900 letters."""
    paragraphs = (" ".join(text.split()) for topic in topics.topics.values() for text in topic.split("\n\n"))
    return [text for text in dict.fromkeys(paragraphs) if 250 <= sum(map(str.isalpha, text)) <= 900][:150:3]


def make_documents() -> list[list[str]]:
    """Return three documents: a line that all share, and three paragraphs."""
    paragraphs = read_paragraphs()
    return [[HEADER, *paragraphs[3 * number : 3 * number + 3]] for number in range(3)]


def change_word(text: str) -> str:
    words = text.split()
    words[len(words) // 2] = "unaltered"
    return " ".join(words)


def write_text(path: Path, lines: list[str], **fields) -> dict:
    """Write a corpus of lines; a blank line ends a document, as in CC-100."""
    path.write_text("".join(f"{line}\n" for line in lines))
    return {"name": path.stem, "format": "text", "path": str(path), "languages": ["en"]} | fields


def write_jsonl(path: Path, documents: list[list[str]]) -> dict:
    """Write a corpus of documents, as in OSCAR."""
    path.write_text("".join(json.dumps({"text": "\n".join(document)}) + "\n" for document in documents))
    fields = {"format": "jsonl", "text_field": "text", "deduplicate": "documents"}
    return {"name": path.stem, "path": str(path), "languages": ["en"]} | fields


def prepare(folder: Path, corpora: list[dict], parallel_map=map_in_process, **cleaning) -> dict:
    languages = sorted({language for corpus in corpora for language in corpus["languages"]})
    config = PreparationConfig.parse({"languages": languages, "corpora": corpora, "cleaning": cleaning})
    return preparation.prepare(config, folder / "out", Folder(str(folder / "work")), parallel_map)


def read_rows(folder: Path, corpus: str) -> list[str]:
    return pq.read_table(folder / f"out/mono/en/{corpus}.parquet")["text"].to_pylist()


@pytest.mark.item("B06")
def test_repeated_documents_are_dropped_but_lines_that_documents_share_are_kept(tmp_path, monkeypatch):
    first, second, third = make_documents()
    first_in_capitals = [line.upper() for line in first]
    shorter_third = third[:-1]
    reordered_third = [third[0], third[2], third[1], third[3]]
    second_with_repetition = [HEADER, *second, HEADER]
    cc100 = [*first, "", *second, "", *first_in_capitals, "", *second_with_repetition, ""]
    corpora = [
        write_text(tmp_path / "cc100.txt", cc100, deduplicate="documents"),
        write_jsonl(tmp_path / "oscar.jsonl", [second, shorter_third, third, reordered_third]),
    ]

    report = prepare(tmp_path / "one part", corpora)
    monkeypatch.setattr(clean, "PART_ROWS", 5)  # most parts would begin inside a document
    report_of_small_parts = prepare(tmp_path / "small parts", corpora)

    for folder in (tmp_path / "one part", tmp_path / "small parts"):
        assert read_rows(folder, "cc100") == [*first, *second, *second_with_repetition]
        assert read_rows(folder, "oscar") == [*shorter_third, *third, *reordered_third]
    dropped = {file["corpus"]: file["dropped"] for file in report["files"]}
    assert dropped == {"cc100": {"empty": 4, "near_duplicate": 4}, "oscar": {"duplicate": 4}}
    assert report_of_small_parts == report


@pytest.mark.item("B06")
def test_documents_are_not_compared_with_lines_or_by_similar_lines(tmp_path):
    first, second, _ = make_documents()
    similar_to_first = [line.replace(" the ", " this ", 1) for line in first]
    documents = write_jsonl(tmp_path / "documents.jsonl", [first, similar_to_first])
    lines = write_text(tmp_path / "lines.txt", [*first, *second, change_word(second[1])])

    prepare(tmp_path / "one process", [documents, lines], near_duplicates="minhash")
    prepare(tmp_path / "two processes", [documents, lines], ProcessPoolMap(2), near_duplicates="minhash")

    assert read_rows(tmp_path / "one process", "documents") == [*first, *similar_to_first]
    assert read_rows(tmp_path / "one process", "lines") == [*first, *second[1:]]
    for name in ("mono/en/documents.parquet", "mono/en/lines.parquet", "report.json"):
        contents = {(tmp_path / folder / "out" / name).read_bytes() for folder in ("one process", "two processes")}
        assert len(contents) == 1, name


def test_document_without_end_is_refused_before_it_fills_the_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(clean, "PART_ROWS", 3)
    corpus = write_text(tmp_path / "cc100.txt", read_paragraphs(), deduplicate="documents")

    with pytest.raises(InputError, match=r"cc100\.txt: the document that begins on line 1 has over 3 lines"):
        prepare(tmp_path, [corpus])


def test_format_without_documents_is_refused():
    corpus = {"name": "web", "format": "tsv", "path": "web.tsv", "languages": ["en"], "deduplicate": "documents"}

    with pytest.raises(ConfigError, match=r"deduplicate \(documents\) needs text_field, or the format text"):
        PreparationConfig.parse({"languages": ["en"], "corpora": [corpus]})


@pytest.mark.item("B06")
def test_similar_long_rows_are_dropped_and_the_first_is_kept(tmp_path):
    paragraphs = read_paragraphs()
    similar = [change_word(text) for text in paragraphs]
    short = "This sentence is short enough to be kept beside a sentence that is similar to it"
    corpora = [
        write_text(tmp_path / "first.txt", [*paragraphs[:30], *similar[:10], short, f"{short} today"]),
        write_text(tmp_path / "second.txt", [*similar[10:30], *paragraphs[30:]]),
    ]

    report_without_minhash = prepare(tmp_path / "off", corpora)
    report = prepare(tmp_path / "on", corpora, near_duplicates="minhash")

    assert report_without_minhash["totals"]["mono"] == {"kept": 82, "read": 82}
    assert report["totals"]["mono"] == {"kept": 52, "read": 82, "similar": 30}
    assert read_rows(tmp_path / "on", "first") == [*paragraphs[:30], short, f"{short} today"]
    assert read_rows(tmp_path / "on", "second") == paragraphs[30:]


def test_sides_of_a_dropped_similar_pair_remain_monolingual_text(tmp_path):
    [source, target, *_] = read_paragraphs()
    (tmp_path / "pairs.tsv").write_text(f"{source}\t{target}\n{change_word(source)}\t{target}\n")
    pairs = {"name": "pairs", "format": "tsv", "path": str(tmp_path / "pairs.tsv"), "languages": ["en", "fr"]}

    report = prepare(tmp_path, [pairs], near_duplicates="minhash", min_identified_characters=10_000)

    assert report["totals"]["pairs"] == {"kept": 1, "read": 2, "similar": 1}
    assert report["languages"]["mono"] == {"en": 2, "fr": 1}


def test_minhash_without_its_library_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.4.1")
    corpus = write_text(tmp_path / "first.txt", ["A sentence."])

    with pytest.raises(InputError, match=r"needs rensa 0\.5\.0: install infoxlm-pipeline\[fuzzy\]"):
        prepare(tmp_path, [corpus], near_duplicates="minhash")


@pytest.mark.parametrize(("near_duplicates", "version"), [("same_letters", None), ("minhash", "0.5.0")])
def test_artifact_key_contains_the_library_of_minhash_only_if_it_is_used(near_duplicates, version):
    corpora = [{"name": "first", "format": "text", "path": "first.txt", "languages": ["en"]}]
    cleaning = {"near_duplicates": near_duplicates}
    config = PreparationConfig.parse({"languages": ["en"], "corpora": corpora, "cleaning": cleaning})

    assert config.result_fields().get("rensa") == version
