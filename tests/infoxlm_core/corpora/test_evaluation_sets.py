"""Every sentence of a test set is read, whatever its layout."""

import gzip
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from infoxlm_core.corpora import evaluation_sets
from infoxlm_core.errors import EncodingError, InputError

SENTENCE, OTHER = "Der Zug fährt morgen früh um sieben.", "Danach kommt niemand mehr."


def write_squad(path: Path) -> None:
    paragraph = {"context": f"{SENTENCE} {OTHER}", "qas": [{"id": "1", "question": SENTENCE, "answers": []}]}
    path.write_text(json.dumps({"data": [{"paragraphs": [paragraph]}]}))


def write_parquet(path: Path) -> None:
    pq.write_table(pa.table({"label": [0, 1], "premise": [SENTENCE, OTHER], "ids": [["a"], ["b"]]}), path)


LAYOUTS = {
    "test-context-de-question-de.json": write_squad,
    "test.parquet": write_parquet,
    "test.csv": lambda path: path.write_text(f'text,label\n"{SENTENCE}",x\n"{OTHER}",y\n', encoding="utf-8"),
    "xnli.test.tsv": lambda path: path.write_text(f"de\tneutral\t{SENTENCE}\t{OTHER}\n", encoding="utf-8"),
    "tatoeba.deu-eng.deu": lambda path: path.write_bytes(f"\ufeff{SENTENCE}\r\n{OTHER}".encode()),
    "test": lambda path: path.write_text(
        "".join("".join(f"de:{word}\tO\n" for word in text.split()) + "\n" for text in (SENTENCE, OTHER)),
        encoding="utf-8",
    ),
    "test.jsonl": lambda path: path.write_text("".join(f"{json.dumps({'a': [x]})}\n" for x in (SENTENCE, OTHER))),
    "TEST.JSON": write_squad,
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
def test_every_sentence_of_a_layout_is_read(tmp_path, name):
    LAYOUTS[name](tmp_path / name)

    assert {SENTENCE, OTHER} <= {text.strip() for text in evaluation_sets.read_texts(tmp_path / name)}


def test_files_of_a_set_are_visible_and_identified_by_content(tmp_path):
    for name in ("b/one.txt", "two.txt", ".git/config", "b/.DS_Store"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(SENTENCE)

    files = evaluation_sets.list_files(tmp_path)

    assert [path.name for path in files] == ["one.txt", "two.txt"]
    assert len({evaluation_sets.digest(path) for path in files}) == 1
    assert evaluation_sets.list_files(files[0]) == files[:1]


def test_link_to_a_directory_is_refused_because_its_files_are_not_listed(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere/test.de").write_text(SENTENCE)
    (tmp_path / "sets").mkdir()
    (tmp_path / "sets/test.en").write_text(OTHER)
    (tmp_path / "sets/more").symlink_to(tmp_path / "elsewhere")

    with pytest.raises(InputError, match=r"sets/more is a link to a directory: list the directory itself"):
        evaluation_sets.list_files(tmp_path / "sets")
    assert len(evaluation_sets.list_files(tmp_path / "sets/more")) == 1


@pytest.mark.parametrize(
    ("name", "content", "error", "message"),
    [
        ("bad.tsv", b"gut\n\xff\n", EncodingError, r"bad\.tsv:2:1: not UTF-8"),
        ("bad.json", b"{", InputError, r"bad\.json cannot be read .*: give a test set as JSON"),
        ("bad.parquet", b"PAR1", InputError, r"bad\.parquet cannot be read .*: give a test set as JSON"),
        ("set.zip", b"", InputError, r"set\.zip is packed, .*: unpack it"),
        ("set.parquet.gz", b"", InputError, r"set\.parquet\.gz is packed, .*: unpack it"),
        ("set.tar.gz", b"", InputError, r"set\.tar\.gz is packed, .*: unpack it"),
    ],
)
def test_unreadable_file_is_refused(tmp_path, name, content, error, message):
    (tmp_path / name).write_bytes(content)

    with pytest.raises(error, match=message):
        list(evaluation_sets.read_texts(tmp_path / name))


def test_parquet_file_without_text_is_refused(tmp_path):
    pq.write_table(pa.table({"audio": [b"1"], "label": [1]}), tmp_path / "audio.parquet")

    with pytest.raises(InputError, match=r"audio\.parquet has no column of text: give"):
        list(evaluation_sets.read_texts(tmp_path / "audio.parquet"))


def test_empty_and_missing_directories_are_refused(tmp_path):
    (tmp_path / "empty").mkdir()

    for name in ("empty", "missing"):
        with pytest.raises(InputError, match=f"{name}: .*: check preparation.evaluation_sets"):
            evaluation_sets.list_files(tmp_path / name)
