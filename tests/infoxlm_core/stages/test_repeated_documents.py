"""`deduplicate: documents` drops repeated documents as a whole and keeps the lines that different documents share."""

import json
from pathlib import Path
from pydoc_data import topics

import pyarrow.parquet as pq
import pytest

from infoxlm_core.config import PreparationConfig
from infoxlm_core.corpora.parallel import in_process, in_processes
from infoxlm_core.corpora.phases import clean
from infoxlm_core.errors import ConfigError, InputError
from infoxlm_core.stages import preparation
from tests.helpers.files import Folder

HEADER = "This page belongs to the reference of the Python language"
TOPICS = ("assignment", "attribute-access", "atom-identifiers")


def read_documents() -> list[list[str]]:
    """Return three pages of Python's reference: a line that all share, and three paragraphs."""
    documents = []
    for topic in TOPICS:
        paragraphs = [" ".join(text.split()) for text in topics.topics[topic].split("\n\n")]
        long_paragraphs = [text for text in paragraphs if 100 <= sum(map(str.isalpha, text)) <= 900]
        documents.append([HEADER, *long_paragraphs[:3]])
    return documents


def write_cc100(path: Path, documents: list[list[str]], **fields) -> dict:
    path.write_text("".join("\n".join(document) + "\n\n" for document in documents))
    return {"name": path.stem, "format": "text", "path": str(path), "languages": ["en"]} | fields


def write_jsonl(path: Path, documents: list[list[str]], **fields) -> dict:
    path.write_text("".join(json.dumps({"text": "\n".join(document)}) + "\n" for document in documents))
    corpus = {"name": path.stem, "format": "jsonl", "path": str(path), "languages": ["en"], "text_field": "text"}
    return corpus | fields


def prepare(folder: Path, corpora: list[dict], parallel_map=in_process, **cleaning) -> dict:
    config = PreparationConfig.parse({"languages": ["en"], "corpora": corpora, "cleaning": cleaning})
    return preparation.prepare(config, folder / "out", Folder(str(folder / "work")), parallel_map)


def read_rows(folder: Path, corpus: str) -> list[str]:
    return pq.read_table(folder / f"out/mono/en/{corpus}.parquet")["text"].to_pylist()


@pytest.mark.item("B06")
def test_repeated_documents_are_dropped_and_lines_that_documents_share_are_kept(tmp_path, monkeypatch):
    first, second, third = read_documents()
    nearly_first = [line.upper() for line in first]
    shorter_third = third[:-1]
    reordered_third = [third[0], third[2], third[1], third[3]]
    repeating = [HEADER, *second, HEADER]
    corpora = [
        write_cc100(tmp_path / "cc100.txt", [first, second, nearly_first, repeating], deduplicate="documents"),
        write_jsonl(tmp_path / "oscar.jsonl", [second, shorter_third, third, reordered_third], deduplicate="documents"),
    ]

    report = prepare(tmp_path / "default", corpora)
    prepare(tmp_path / "processes", corpora, in_processes(2))
    monkeypatch.setattr(clean, "PART_ROWS", 5)  # most parts would begin inside a document
    report_of_small_parts = prepare(tmp_path / "small_parts", corpora)

    for folder in (tmp_path / "default", tmp_path / "small_parts"):
        assert read_rows(folder, "cc100") == [*first, *second, *repeating]
        assert read_rows(folder, "oscar") == [*shorter_third, *third, *reordered_third]
    counts = {file["corpus"]: file["dropped"] for file in report["files"]}
    assert counts == {"cc100": {"empty": 4, "near_duplicate": 4}, "oscar": {"duplicate": 4}}
    assert report_of_small_parts == report
    for name in ("mono/en/cc100.parquet", "mono/en/oscar.parquet", "report.json"):
        assert (tmp_path / "default/out" / name).read_bytes() == (tmp_path / "processes/out" / name).read_bytes()


def test_documents_are_not_compared_with_lines_nor_by_their_similar_lines(tmp_path):
    first, second, _ = read_documents()
    similar_first = [line.replace(" the ", " this ", 1) for line in first]
    documents = write_jsonl(tmp_path / "documents.jsonl", [first, similar_first], deduplicate="documents")
    sentences = write_cc100(tmp_path / "sentences.txt", [first, second])

    prepare(tmp_path, [documents, sentences], near_duplicates="minhash")

    assert read_rows(tmp_path, "documents") == [*first, *similar_first]
    assert read_rows(tmp_path, "sentences") == [*first, *second[1:]]


def test_text_without_blank_lines_is_refused_before_it_fills_the_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(clean, "PART_ROWS", 3)
    lines = [line for document in read_documents() for line in document]
    corpus = write_cc100(tmp_path / "cc100.txt", [lines], deduplicate="documents")

    with pytest.raises(InputError, match=r"cc100\.txt: the document that begins on line 1 has over 3 lines"):
        prepare(tmp_path, [corpus])


def test_documents_need_a_format_that_has_them():
    corpus = {"name": "web", "format": "tsv", "path": "web.tsv", "languages": ["en"]}
    documents = corpus | {"deduplicate": "documents"}
    config = PreparationConfig.parse({"languages": ["en"], "corpora": [corpus]})

    assert "deduplicate" not in config.result_fields()["corpora"][0]
    with pytest.raises(ConfigError, match="documents needs text_field, or the format text"):
        PreparationConfig.parse({"languages": ["en"], "corpora": [documents]})
