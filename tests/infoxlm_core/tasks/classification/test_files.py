"""Which files of a folder are labelled text. `test_table.py` reads the layouts of public sets."""

import pytest

from infoxlm_core.errors import InputError
from infoxlm_core.tasks.classification.files import LabelledFile, find_labelled_files


def test_hidden_files_and_files_without_a_split_are_ignored(tmp_path, caplog):
    for name in ("._train-en.tsv", "notes.tsv"):
        (tmp_path / name).write_text("a\tb\n")

    with pytest.raises(InputError, match="no labelled text in this directory"):
        find_labelled_files(tmp_path)
    assert "notes.tsv: ignored, because its name contains no split" in caplog.text
    assert "._train" not in caplog.text


def test_the_folder_of_a_file_may_not_be_a_language(tmp_path):
    path = tmp_path / "data/test.tsv"
    path.parent.mkdir()
    path.write_text("a\tb\n")

    assert find_labelled_files(tmp_path) == [LabelledFile(path, "test", None)]
