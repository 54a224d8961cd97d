"""What the name of a file says about split and language, in the layouts that are published."""

import os

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from infoxlm_core.errors import InputError
from infoxlm_core.tasks.classification.files import LabelledFile, find_labelled_files, read_columns


@pytest.mark.parametrize(
    ("name", "split", "language"),
    [
        ("train-en.tsv", "train", "en"),
        ("xnli.dev.tsv", "dev", None),
        ("multinli.train.fr.tsv", "train", "fr"),
        ("fr/translated_train.tsv", "train", "fr"),
        ("fr/dev_2k.tsv", "dev", "fr"),
        ("deu_Latn/validation.tsv", "dev", "deu_Latn"),
        ("data/test.tsv", "test", None),
    ],
)
def test_split_and_language_are_read_off_the_name(tmp_path, name, split, language):
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text("a\tb\n")

    assert find_labelled_files(tmp_path) == [LabelledFile(tmp_path / name, split, language)]


def test_hidden_files_and_those_without_a_split_are_left_out_and_none_at_all_is_refused(tmp_path, caplog):
    for name in ("._train-en.tsv", "notes.tsv"):
        (tmp_path / name).write_text("a\tb\n")

    with pytest.raises(InputError, match="no labelled text in this folder"):
        find_labelled_files(tmp_path)
    assert "notes.tsv: ignored, because its name contains no split" in caplog.text and "._train" not in caplog.text


def test_what_is_no_table_of_text_is_refused_by_name(tmp_path):
    (tmp_path / "twice.csv").write_text("text,text,label\na,b,c\n")
    with pytest.raises(InputError, match=r"twice\.csv:1: column 'text' occurs twice"):
        read_columns(tmp_path / "twice.csv", ["text", "label"])

    os.mkfifo(tmp_path / "pipe.csv")
    with pytest.raises(InputError, match="is a named pipe"):
        read_columns(tmp_path / "pipe.csv", ["text", "label"])

    pq.write_table(pa.table({"text": pa.array([b"\xff"], pa.binary()), "label": [["x"]]}), tmp_path / "x.parquet")
    assert list(read_columns(tmp_path / "x.parquet", ["text", "label"]).columns) == [], "bytes and lists are no text"
