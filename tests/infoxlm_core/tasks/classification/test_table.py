"""Labelled text: named columns, folders of public sets, automatic splits, and refusals by file and line."""

from pathlib import Path

import pandas as pd
import pytest

from infoxlm_core.config import RegistrationConfig
from infoxlm_core.errors import InputError
from infoxlm_core.tasks.classification.table import read_labelled
from infoxlm_core.tasks.classification.task import ClassificationConfig
from tests.toys.text import messages

ROW = ("Er schläft.", "Er ist wach.", "contradiction")
XNLI_HEADER = ("language", "gold_label", "sentence1_parse", "sentence1", "sentence2", "pairID", "label1")
PAWS_X_HEADER = ("id", "sentence1", "sentence2", "label")
SIB_HEADER = ("index_id", "category", "text")


def write(path: Path, *rows: tuple[str, ...]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join("\t".join(row) + "\n" for row in rows), encoding="utf-8")
    return path


def read(*paths: Path, **changes) -> pd.DataFrame:
    values = {"data": [str(path) for path in paths], "train_languages": ["en", "fr"]}
    return read_labelled(ClassificationConfig.parse(values | changes), None)


def list_rows(table: pd.DataFrame) -> list[tuple[str, ...]]:
    return [tuple(row) for row in table.itertuples(index=False)]


@pytest.mark.item("A21")
@pytest.mark.parametrize(
    ("rows_by_file", "expected_rows"),
    [
        ({"train-en.tsv": [('A "b".', "C.", "neutral")], "dev-de.tsv": [ROW],
          "test-zh.tsv": [("一", "二", "entailment")], ".hidden.tsv": [("a", "b", "c")], "README.md": [("a",)]},
         [(*ROW, "de", "dev"), ("一", "二", "entailment", "zh", "test"), ('A "b".', "C.", "neutral", "en", "train")]),
        ({"xnli.dev.tsv": [XNLI_HEADER, ("de", "contradiction", "x", "Eins", "Zwei", "1", "neutral"),
                           ("ar", "neutral", "x", "واحد", "اثنان", "1", "x")],
          "xnli.test.tsv": [XNLI_HEADER, ("fr", "-", "x", "Un", "Deux", "1", "neutral"),
                            ("fr", "entailment", "x", "Un", "Deux", "1", "neutral")],
          "xnli.dev.jsonl": [("{}",)]},
         [("Eins", "Zwei", "contradiction", "de", "dev"), ("واحد", "اثنان", "neutral", "ar", "dev"),
          ("Un", "Deux", "entailment", "fr", "test")]),
        ({"multinli/multinli.train.fr.tsv": [("premise", "hypo", "label"), ("Trois", "Quatre", "contradictory"),
                                             ("Trois", "", "neutral")],
          "multinli/multinli.train.en.tsv": [("premise", "hypo", "label"), ("Five", "Six", "neutral")]},
         [("Five", "Six", "neutral", "en", "train"), ("Trois", "Quatre", "contradiction", "fr", "train")]),
        ({"fr/translated_train.tsv": [PAWS_X_HEADER, ("1", "Un.", "Une.", "0")],
          "fr/dev_2k.tsv": [PAWS_X_HEADER, ("1", "Deux.", "Deux.", "1")],
          "fr/test_2k.tsv": [PAWS_X_HEADER, ("1", "Trois.", "Quatre.", "0"), ("2", "", "Quatre.", "0")]},
         [("Deux.", "Deux.", "1", "fr", "dev"), ("Trois.", "Quatre.", "0", "fr", "test"),
          ("Un.", "Une.", "0", "fr", "train")]),
        ({f"{code}/test.tsv": [SIB_HEADER, ("12", "sports", code)] for code in ("zho_Hant", "zho_Hans", "eng_Latn")},
         [("eng_Latn", "sports", "en", "test"), ("zho_Hans", "sports", "zh", "test"),
          ("zho_Hant", "sports", "zho_Hant", "test")]),  # two scripts are two languages
    ],
    ids=["XTREME", "XNLI", "XNLI-MT", "PAWS-X", "SIB-200"],
)  # fmt: skip
def test_folders_of_public_sets_are_read(tmp_path, rows_by_file, expected_rows):
    for name, rows in rows_by_file.items():
        write(tmp_path / name, *rows)

    assert list_rows(read(tmp_path)) == expected_rows


def test_parquet_files_of_the_hub_are_read(tmp_path):
    (tmp_path / "de").mkdir()
    table = pd.DataFrame({"premise": ["Eins"], "hypothesis": ["Zwei"], "label": [2]})
    table.to_parquet(tmp_path / "de/validation-00000-of-00001.parquet")

    assert list_rows(read(tmp_path)) == [("Eins", "Zwei", "2", "de", "dev")]


def test_the_config_names_own_columns(tmp_path):
    (tmp_path / "x.csv").write_text(
        'topic,body,lang,part,id\nnews,"one, two",en,validation,1\nsport,three,deu,train,2\nnews,four,pt-BR,valid,3\n'
    )

    table = read(tmp_path / "x.csv", text="body", label="topic", language="lang", split="part")

    assert list_rows(table) == [
        ("one, two", "news", "en", "dev"), ("three", "sport", "de", "train"), ("four", "news", "pt", "dev")
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "row", "expected"),
    [
        ("test-de.tsv", ROW, (*ROW, "de", "test")),
        ("train-en.tsv", ("Goal!", "sports"), ("Goal!", "sports", "en", "train")),
    ],
)
def test_columns_of_a_single_file_without_a_header_are_read_by_position(tmp_path, name, row, expected):
    assert list_rows(read(write(tmp_path / name, row))) == [expected]


def test_a_word_after_the_split_in_a_file_name_does_not_hide_the_column_with_the_language(tmp_path):
    for split in ("train", "test"):
        (tmp_path / f"{split}-set.csv").write_text(f"text,label,language\nOne.,{split},en\nEins.,{split},de\n")

    assert list_rows(read(tmp_path)) == [
        ("One.", "test", "en", "test"), ("Eins.", "test", "de", "test"),
        ("One.", "train", "en", "train"), ("Eins.", "train", "de", "train"),
    ]  # fmt: skip


def test_files_without_a_split_are_training_text_if_another_file_has_one(tmp_path):
    (tmp_path / "x.csv").write_text("text,label,language\n" + "a,b,en\n" * 50)
    test_file = write(tmp_path / "test-en.tsv", ("c", "b"))

    assert read(tmp_path / "x.csv", test_file)["split"].tolist() == ["train"] * 50 + ["test"]


def write_translations(path: Path) -> list[str]:
    """Write a table of 1,440 English messages with their German translations; return the rows' lines."""
    lines = []
    for english, german in messages(0):
        label = english.split()[0]
        lines += [f"{english},{label},en\n", f"{german},{label},de\n"]
    path.write_text("text,label,language\n" + "".join(lines))
    return lines


def test_the_automatic_split_is_fixed_and_keeps_translations_together(tmp_path):
    write_translations(tmp_path / "x.csv")

    table = read(tmp_path / "x.csv", seed=1)
    table_of_other_seed = read(tmp_path / "x.csv", seed=2)

    english = table[table["language"] == "en"]["split"].tolist()
    german = table[table["language"] == "de"]["split"].tolist()
    assert english == german
    assert set(english) == {"train", "test"}
    assert 0.05 < english.count("test") / len(english) < 0.15
    assert table["split"].equals(table_of_other_seed["split"])


@pytest.mark.parametrize("change", ["remove a row", "swap two rows"])
def test_rows_that_do_not_translate_each_other_need_a_split(tmp_path, change):
    lines = write_translations(tmp_path / "x.csv")
    if change == "remove a row":
        del lines[-1]
    else:
        lines[1], lines[-1] = lines[-1], lines[1]  # both German
    (tmp_path / "x.csv").write_text("text,label,language\n" + "".join(lines))

    with pytest.raises(InputError, match=r"x\.csv: no row has a split, and .* Add a column 'split'"):
        read(tmp_path / "x.csv")


@pytest.mark.parametrize(
    ("name", "content", "changes", "reason"),
    [
        ("x.csv", "text,label\na,b\n", {}, r"no column 'language' \(language\)\. Its columns are text, label"),
        ("x.csv", 'text,label,language\n"a\nb",c,en\nd,,en\n', {}, r"x\.csv:4: label is empty"),
        ("x.csv", "text,label,language\na,b,en\n", {"text_pair": "hypothesis"}, "no column 'hypothesis'"),
        ("x.tsv", "a\tb\tc\n", {}, r"x\.tsv: no column 'language' .* and its name contains no language"),
        ("test-en.tsv", "alone\n", {}, r"test-en\.tsv:1: 1 fields\. Give text, text_pair and label"),
        ("test-en.tsv", "text\tlabel\n", {}, r"test-en\.tsv: the file has a header but no rows\. Remove the file or"),
        ("dev-en.tsv", "a\tb\tneutral\na\t \tneutral\n", {}, r"dev-en\.tsv:2: text_pair is empty"),
        ("dev-en.tsv", "a\tb\tneutral\na\tb\t0\n", {}, r"some labels are names, others numbers \(0\)"),
        ("x.json", "{}", {}, "give labelled text as"),
    ],
)
def test_unusable_files_are_refused(tmp_path, name, content, changes, reason):
    (tmp_path / name).write_text(content)

    with pytest.raises(InputError, match=reason):
        read(tmp_path / name, **changes)


def test_pairs_and_single_texts_do_not_mix(tmp_path):
    """XTREME's own test files have no labels, so their hypotheses would be taken for labels."""
    write(tmp_path / "train-en.tsv", ROW)
    write(tmp_path / "test-en.tsv", ROW[:2])

    with pytest.raises(
        InputError, match=r"test-en\.tsv has single texts, .*train-en\.tsv has pairs\. Give labelled files of one kind"
    ):
        read(tmp_path)


def test_inference_labels_have_one_spelling_beside_other_labels(tmp_path):
    rows = [("a", "b", label) for label in ("contradictory", "entailment", "neutral", "hidden")]
    write(tmp_path / "train-en.tsv", *rows)
    write(tmp_path / "test-en.tsv", ROW)

    assert set(read(tmp_path)["label"]) == {"contradiction", "entailment", "neutral", "hidden"}


def test_only_files_of_the_requested_splits_and_languages_are_read(tmp_path):
    for name in ("train-en.tsv", "train-de.tsv"):
        (tmp_path / name).write_text("broken")
    write(tmp_path / "test-en.tsv", ROW)
    config = ClassificationConfig.parse({"data": str(tmp_path)})

    assert list_rows(read_labelled(config, None, ("test",))) == [(*ROW, "en", "test")]
    write(tmp_path / "train-en.tsv", ROW)
    assert list_rows(read_labelled(config, None)) == [(*ROW, "en", "test"), (*ROW, "en", "train")]


def test_missing_data_is_refused(tmp_path):
    with pytest.raises(InputError, match=r"Set preparation\.labelled_share above 0, or data"):
        read_labelled(ClassificationConfig(), tmp_path)
    with pytest.raises(InputError, match=r"nowhere\.tsv: no such file or directory"):
        read(tmp_path / "nowhere.tsv")


@pytest.mark.parametrize("language", ["es-419", "zh-Hant-TW", "sr_Latn_RS"])
def test_languages_with_script_and_region_are_accepted_here_and_by_the_gate(tmp_path, language):
    (tmp_path / "x.csv").write_text(f"text,label,language\nHello,a,en\nHola,a,{language}\n")

    read(tmp_path / "x.csv")

    metric = f"classification/{language}"
    assert RegistrationConfig.parse({"metric": metric}).metric == metric
