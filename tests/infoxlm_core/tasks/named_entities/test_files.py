"""Files of tagged words: both layouts give the same sentences, and ambiguous folders are refused."""

import itertools

import pytest

from infoxlm_core.errors import InputError
from infoxlm_core.tasks.named_entities.files import Sentence, read_tagged
from tests.toys.entities import sentences, settings, write


def test_the_layouts_of_xtreme_and_wikiann_give_the_same_sentences(tmp_path):
    rows = sentences(5, 1)
    for split, language in itertools.product(("train", "dev", "test"), ("en", "de")):
        write(tmp_path / "xtreme" / f"{split}-{language}.tsv", rows)
        write(tmp_path / "wikiann" / language / split, rows, prefix=f"{language}:")
    (tmp_path / "wikiann/README.md").write_text("about the set")

    xtreme, wikiann = (read_tagged(settings(tmp_path / name)) for name in ("xtreme", "wikiann"))

    assert xtreme == wikiann
    assert xtreme["test"] == {"de": rows, "en": rows}
    assert list(xtreme["train"]) == ["en"]  # the only training language


def test_only_the_language_prefix_of_wikiann_is_removed_from_words(tmp_path):
    rows = [Sentence(("we", "en:gb", ":"), ("O", "O", "O"))]

    assert read_tagged(settings(write(tmp_path / "test-en.tsv", rows)))["test"]["en"] == rows
    assert read_tagged(settings(write(tmp_path / "en/test", rows, "en:")))["test"]["en"] == rows


def test_folders_without_one_file_per_split_and_language_are_refused(tmp_path):
    with pytest.raises(InputError, match=r"no such file or directory\. Give XTREME's files"):
        read_tagged(settings(tmp_path / "nowhere"))
    (tmp_path / "words.txt").write_text("we\tO\n")
    with pytest.raises(InputError, match="no file name contains a split and a language"):
        read_tagged(settings(tmp_path))
    write(tmp_path / "test-en.tsv", sentences(1, 1))
    write(tmp_path / "en/test", sentences(1, 1))
    with pytest.raises(InputError, match=r"both have test sentences in en\. Keep one"):
        read_tagged(settings(tmp_path))


@pytest.mark.parametrize("content", ["", "\n\n"])
def test_a_file_without_sentences_is_refused(tmp_path, content):
    write(tmp_path / "test-en.tsv", sentences(1, 1))
    (tmp_path / "test-de.tsv").write_text(content)

    with pytest.raises(InputError, match=r"test-de\.tsv: the file has no sentences\. Remove the file or copy it again"):
        read_tagged(settings(tmp_path))
