"""Digests of what a config names change with the content, and not with the place."""

from pathlib import Path

import pytest

from infoxlm_core.training.input_digests import digest_inputs, digest_inputs_by_role


def test_the_content_of_a_given_model_belongs_to_the_key(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"a")
    first = digest_inputs(str(tmp_path))
    (tmp_path / "model.safetensors").write_bytes(b"b")

    assert len(first) == 1 and digest_inputs(str(tmp_path)) != first
    assert digest_inputs(None) == digest_inputs(str(tmp_path / "missing")) == []


def test_the_names_and_contents_of_a_folder_of_data_belong_to_the_key_but_not_where_it_lies(tmp_path):
    for folder, name in (("a", "test.de"), ("b", "test.de"), ("c", "test.fr")):
        (tmp_path / folder / "in").mkdir(parents=True)
        (tmp_path / folder / "in" / name).write_text("text")
    (tmp_path / "d").mkdir()
    first, same, renamed, empty = (digest_inputs(str(tmp_path / folder)) for folder in "abcd")

    assert first == same and len({*first, *renamed, *empty}) == 3
    assert digest_inputs([str(tmp_path / "a"), str(tmp_path / "c")]) == [*first, *renamed]


def write(path: Path, text: str = "text") -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return str(path)


def test_the_name_of_a_file_and_of_a_languages_folder_belong_to_the_key_but_not_where_they_lie(tmp_path):
    german, moved, spanish = (write(tmp_path / name) for name in ("a/b.de.json", "elsewhere/b.de.json", "a/b.es.json"))
    folders = [write(tmp_path / name) for name in ("x/fr/dev_2k.tsv", "y/fr/dev_2k.tsv", "x/de/dev_2k.tsv")]

    assert digest_inputs(german) == digest_inputs(moved) != digest_inputs(spanish)
    for paths in (folders, [str(Path(path).parent) for path in folders]):
        french, same, other = map(digest_inputs, paths)
        assert french == same != other


def test_the_same_files_in_other_roles_are_other_inputs(tmp_path):
    a, b, c = (write(tmp_path / f"{name}.json", name) for name in ("one", "two", "three"))

    assert digest_inputs_by_role({"train": [a, b], "dev": [c]}) == digest_inputs_by_role({"dev": [c], "train": [a, b]})
    assert digest_inputs_by_role({"train": [a, b], "dev": [c]}) != digest_inputs_by_role({"train": [a], "dev": [b, c]})


@pytest.mark.parametrize("name", ["vocab.txt", "merges.txt", "steps/4/model.safetensors"])
def test_a_models_words_and_its_models_of_single_languages_belong_to_the_key(tmp_path, name):
    for file in ("model.safetensors", "selection.json", name):
        write(tmp_path / "model" / file, "first")
    before = digest_inputs(str(tmp_path / "model"))

    write(tmp_path / "model" / name, "second")

    assert digest_inputs(str(tmp_path / "model")) != before


def test_of_a_model_what_is_loaded_belongs_to_the_key_and_nothing_else(tmp_path):
    for name in ("model.safetensors", "tokenizer.json", "manifest.json", "README.md"):
        (tmp_path / name).write_text("first")
    before = digest_inputs(str(tmp_path))
    for name in ("manifest.json", "README.md"):
        (tmp_path / name).write_text("second")
    assert digest_inputs(str(tmp_path)) == before

    (tmp_path / "tokenizer.json").write_text("second")
    assert digest_inputs(str(tmp_path)) != before
