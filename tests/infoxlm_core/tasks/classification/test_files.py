"""What the name of a file says about split and language, in the layouts that are published."""

import pytest

from infoxlm_core.errors import InputError
from infoxlm_core.tasks.classification.files import LabelledFile, find_labelled_files


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
