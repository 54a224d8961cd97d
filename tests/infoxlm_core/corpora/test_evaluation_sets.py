"""Test sets are read whatever their layout is: each sentence of theirs is among the texts."""

import gzip
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from infoxlm_core.corpora import evaluation_sets
from infoxlm_core.errors import EncodingError, InputError

SENTENCE, OTHER = "Der Zug fährt morgen früh um sieben.", "Danach kommt niemand mehr."


def as_squad(path: Path) -> None:
    about = {"context": f"{SENTENCE} {OTHER}", "qas": [{"id": "1", "question": SENTENCE, "answers": []}]}
    path.write_text(json.dumps({"data": [{"paragraphs": [about]}]}))


def as_parquet(path: Path) -> None:
    pq.write_table(pa.table({"label": [0, 1], "premise": [SENTENCE, OTHER], "ids": [["a"], ["b"]]}), path)


LAYOUTS = {
    "test-context-de-question-de.json": as_squad,
    "test.parquet": as_parquet,
    "test.csv": lambda path: path.write_text(f'text,label\n"{SENTENCE}",x\n"{OTHER}",y\n', encoding="utf-8"),
    "xnli.test.tsv": lambda path: path.write_text(f"de\tneutral\t{SENTENCE}\t{OTHER}\n", encoding="utf-8"),
    "tatoeba.deu-eng.deu": lambda path: path.write_bytes(f"\ufeff{SENTENCE}\r\n{OTHER}".encode()),
    "test": lambda path: path.write_text(
        "".join("".join(f"de:{word}\tO\n" for word in text.split()) + "\n" for text in (SENTENCE, OTHER)),
        encoding="utf-8",
    ),
    "test.jsonl": lambda path: path.write_text("".join(f"{json.dumps({'a': [x]})}\n" for x in (SENTENCE, OTHER))),
    "TEST.JSON": as_squad,
    "squad.json.gz": lambda path: path.write_bytes(gzip.compress(json.dumps([SENTENCE, OTHER]).encode())),
    "test.csv.gz": lambda path: path.write_bytes(gzip.compress(f'"{SENTENCE}","{OTHER}"\n'.encode())),
    "nested.parquet": lambda path: pq.write_table(
        pa.table({"premise": [{"de": SENTENCE}], "hypothesis": [[{"translation": OTHER}]], "label": [0]}), path
    ),
    "categories.parquet": lambda path: pq.write_table(
        pa.table({"text": pa.array([SENTENCE, OTHER]).dictionary_encode()}), path
    ),
    "paragraphs.parquet": lambda path: pq.write_table(pa.table({"context": [f"{SENTENCE} {OTHER}"]}), path),
    "paragraphs.txt": lambda path: path.write_text(f"{SENTENCE} {OTHER}\n", encoding="utf-8"),
    "newstest.sgm": lambda path: path.write_text(f'<seg id="1">{SENTENCE}</seg>\n<seg id="2">{OTHER}</seg>\n'),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_sentence_of_a_set_is_read(tmp_path, name):
    LAYOUTS[name](tmp_path / name)

    assert {SENTENCE, OTHER} <= {text.strip() for text in evaluation_sets.read(tmp_path / name)}


def test_the_files_of_a_set_are_those_that_are_not_hidden_and_known_by_their_content(tmp_path):
    for name in ("b/one.txt", "two.txt", ".git/config", "b/.DS_Store"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(SENTENCE)

    found = evaluation_sets.list_files(tmp_path)

    assert [path.name for path in found] == ["one.txt", "two.txt"]
    assert len({evaluation_sets.digest(path) for path in found}) == 1
    assert evaluation_sets.list_files(found[0]) == found[:1]


def test_what_is_no_set_is_refused_in_one_line(tmp_path):
    (tmp_path / "bad.tsv").write_bytes(b"gut\n\xff\n")
    (tmp_path / "bad.json").write_text("{")
    (tmp_path / "bad.parquet").write_text("PAR1")
    pq.write_table(pa.table({"audio": [b"1"], "label": [1]}), tmp_path / "mute.parquet")
    for name in ("sets.zip", "a.parquet.gz", "sets.tar.gz"):
        (tmp_path / name).write_bytes(b"")
    (tmp_path / "empty").mkdir()

    for name, error, said in (
        ("bad.tsv", EncodingError, r"bad\.tsv:2:1: not UTF-8"),
        ("bad.json", InputError, r"bad\.json cannot be read .*: give a test set as JSON"),
        ("bad.parquet", InputError, r"bad\.parquet cannot be read .*: give a test set as JSON"),
        ("mute.parquet", InputError, r"mute\.parquet has no column of text: give"),
        ("sets.zip", InputError, r"sets\.zip is packed, .*: unpack it"),
        ("a.parquet.gz", InputError, r"a\.parquet\.gz is packed, .*: unpack it"),
        ("sets.tar.gz", InputError, r"sets\.tar\.gz is packed, .*: unpack it"),
    ):
        with pytest.raises(error, match=said):
            list(evaluation_sets.read(tmp_path / name))
    for name in ("empty", "nowhere"):
        with pytest.raises(InputError, match=f"{name}: .*: check preparation.evaluation_sets"):
            evaluation_sets.list_files(tmp_path / name)
