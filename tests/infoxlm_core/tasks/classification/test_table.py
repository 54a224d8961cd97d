"""Labelled text: tables with named columns, folders of public sets, and what is wrong with a row, by file and line."""

from pathlib import Path

import pandas as pd
import pytest

from infoxlm_core.config import RegistrationConfig
from infoxlm_core.errors import InputError
from infoxlm_core.tasks.classification.table import read_labelled
from infoxlm_core.tasks.classification.task import ClassificationConfig
from tests.toys.text import messages

ROW = ("Er schläft.", "Er ist wach.", "contradiction")


def write(path: Path, *rows: tuple[str, ...]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join("\t".join(row) + "\n" for row in rows), encoding="utf-8")


def read(*paths: Path, **changes) -> pd.DataFrame:
    values = {"data": [str(path) for path in paths], "train_languages": ["en", "fr"]}
    return read_labelled(ClassificationConfig.parse(values | changes), None)


def rows_of(table: pd.DataFrame) -> list[tuple[str, ...]]:
    return [tuple(row) for row in table.itertuples(index=False)]


def test_xtreme_says_split_and_language_in_file_names_and_has_no_header(tmp_path):
    write(tmp_path / "train-en.tsv", ('A "b".', "C.", "neutral"))
    write(tmp_path / "dev-de.tsv", ROW)
    write(tmp_path / "test-zh.tsv", ("一", "二", "entailment"))
    for name in ("LICENSE", ".hidden.tsv", "README.md", "._train-en.tsv"):
        (tmp_path / name).write_text("nothing\tfor\tus\n")

    found = read(tmp_path)

    assert list(found.columns) == ["text", "text_pair", "label", "language", "split"]
    assert set(rows_of(found)) == {
        ("A \"b\".", "C.", "neutral", "en", "train"), (*ROW, "de", "dev"), ("一", "二", "entailment", "zh", "test")
    }  # fmt: skip


@pytest.mark.item("A21")
def test_xnli_and_its_translations_are_read_by_their_headers_and_labels_by_name(tmp_path):
    header = ("language", "gold_label", "sentence1_parse", "sentence1", "sentence2", "pairID", "label1")
    write(
        tmp_path / "XNLI-1.0/xnli.dev.tsv", header,
        ("de", "contradiction", "x", "Eins", "Zwei", "1", "neutral"), ("ar", "neutral", "x", "واحد", "اثنان", "1", "x"),
    )  # fmt: skip
    write(tmp_path / "XNLI-1.0/xnli.test.tsv", header, ("fr", "-", "x", "Un", "Deux", "1", "neutral"),
          ("fr", "entailment", "x", "Un", "Deux", "1", "neutral"))  # fmt: skip
    (tmp_path / "XNLI-1.0/xnli.dev.jsonl").write_text("{}\n")
    write(tmp_path / "XNLI-MT-1.0/multinli/multinli.train.fr.tsv", ("premise", "hypo", "label"),
          ("Trois", "Quatre", "contradictory"), ("Trois", "", "neutral"))  # fmt: skip

    found = read(tmp_path / "XNLI-1.0", tmp_path / "XNLI-MT-1.0")

    assert rows_of(found) == [
        ("Eins", "Zwei", "contradiction", "de", "dev"),
        ("واحد", "اثنان", "neutral", "ar", "dev"),
        ("Un", "Deux", "entailment", "fr", "test"),
        ("Trois", "Quatre", "contradiction", "fr", "train"),
    ]


def test_paws_x_has_a_folder_a_language_and_an_id_in_front(tmp_path):
    header = ("id", "sentence1", "sentence2", "label")
    write(tmp_path / "fr/translated_train.tsv", header, ("1", "Un.", "Une.", "0"))
    write(tmp_path / "fr/dev_2k.tsv", header, ("1", "Deux.", "Deux.", "1"))
    write(tmp_path / "fr/test_2k.tsv", header, ("1", "Trois.", "Quatre.", "0"))

    assert rows_of(read(tmp_path)) == [
        ("Deux.", "Deux.", "1", "fr", "dev"),
        ("Trois.", "Quatre.", "0", "fr", "test"),
        ("Un.", "Une.", "0", "fr", "train"),
    ]


def test_parquet_of_the_hub_is_read_by_its_columns(tmp_path):
    (tmp_path / "de").mkdir()
    table = pd.DataFrame({"premise": ["Eins"], "hypothesis": ["Zwei"], "label": [2]})
    table.to_parquet(tmp_path / "de/validation-00000-of-00001.parquet")

    assert rows_of(read(tmp_path)) == [("Eins", "Zwei", "2", "de", "dev")]


def test_own_columns_and_splits_are_named_in_the_config(tmp_path):
    (tmp_path / "x.csv").write_text(
        'topic,body,lang,part,id\nnews,"one, two",en,validation,1\nsport,three,deu,train,2\nnews,four,pt-BR,valid,3\n'
    )

    found = read(tmp_path / "x.csv", text="body", label="topic", language="lang", split="part")

    assert rows_of(found) == [
        ("one, two", "news", "en", "dev"), ("three", "sport", "de", "train"), ("four", "news", "pt", "dev")
    ]  # fmt: skip


def test_a_file_without_a_header_is_taken_by_place_and_may_stand_alone(tmp_path):
    write(tmp_path / "test-de.tsv", ROW)
    write(tmp_path / "train-en.tsv", ("Goal!", "sports"))

    assert rows_of(read(tmp_path / "test-de.tsv")) == [(*ROW, "de", "test")]
    assert rows_of(read(tmp_path / "train-en.tsv")) == [("Goal!", "sports", "en", "train")]


def test_files_that_say_no_split_are_training_text_if_others_say_one(tmp_path):
    (tmp_path / "x.csv").write_text("text,label,language\n" + "a,b,en\n" * 50)
    write(tmp_path / "test-en.tsv", ("c", "b"))

    assert read(tmp_path / "x.csv", tmp_path / "test-en.tsv")["split"].tolist() == ["train"] * 50 + ["test"]


def test_without_any_split_a_tenth_is_set_aside_the_same_for_every_seed(tmp_path):
    (tmp_path / "x.csv").write_text("text,label,language\n" + "a,b,en\n" * 1000)

    one, two = (read(tmp_path / "x.csv", seed=seed)["split"] for seed in (1, 2))

    assert 0.05 < (one == "test").mean() < 0.15 and set(one) == {"train", "test"}
    assert one.equals(two)


def write_translations(path: Path) -> list[str]:
    """Write a table of 1,440 English messages with their German translations; return the rows' lines."""
    rows = [
        f"{text},{english.split()[0]},{language}\n"
        for english, german in messages(0)
        for language, text in (("en", english), ("de", german))
    ]
    path.write_text("text,label,language\n" + "".join(rows))
    return rows


def test_the_automatic_split_keeps_all_translations_of_a_row_together(tmp_path):
    write_translations(tmp_path / "x.csv")

    table = read(tmp_path / "x.csv")

    english, german = (table[table["language"] == language]["split"].tolist() for language in ("en", "de"))
    assert english == german and 0.05 < english.count("test") / len(english) < 0.15


@pytest.mark.parametrize("change", ["remove a row", "swap two rows"])
def test_rows_in_several_languages_that_do_not_translate_each_other_need_a_split(tmp_path, change):
    header, *rows = ["text,label,language\n", *write_translations(tmp_path / "x.csv")]
    if change == "remove a row":
        rows = rows[:-1]
    else:
        rows[1], rows[-1] = rows[-1], rows[1]  # both German
    (tmp_path / "x.csv").write_text("".join([header, *rows]))

    with pytest.raises(InputError, match=r"x\.csv: no row has a split, and .* Add a column 'split'") as refusal:
        read(tmp_path / "x.csv")
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("name", "content", "changes", "said"),
    [
        ("x.csv", "text,label\na,b\n", {}, r"no column 'language' \(language\)\. Its columns are text, label"),
        ("x.csv", 'text,label,language\n"a\nb",c,en\nd,,en\n', {}, r"x\.csv:4: label is empty"),
        ("x.csv", "text,label,language\na,b,en\n", {"text_pair": "hypothesis"}, "no column 'hypothesis'"),
        ("x.tsv", "a\tb\tc\n", {}, r"x\.tsv: no column 'language' .* and its name contains no language"),
        ("test-en.tsv", "alone\n", {}, r"test-en\.tsv:1: 1 fields\. Give text, text_pair and label"),
        ("dev-en.tsv", "a\tb\tneutral\na\t \tneutral\n", {}, r"dev-en\.tsv:2: text_pair is empty"),
        ("dev-en.tsv", "a\tb\tneutral\na\tb\t0\n", {}, r"some labels are names, others numbers \(0\)"),
        ("x.json", "{}", {}, "give labelled text as"),
    ],
)  # fmt: skip
def test_what_cannot_be_used_is_named_in_one_line(tmp_path, name, content, changes, said):
    (tmp_path / name).write_text(content)

    with pytest.raises(InputError, match=said) as refusal:
        read(tmp_path / name, **changes)
    assert "\n" not in str(refusal.value)


def test_pairs_and_single_texts_do_not_mix(tmp_path):
    """XTREME's own test files hold no labels: their hypotheses would be taken for labels."""
    write(tmp_path / "train-en.tsv", ROW)
    write(tmp_path / "test-en.tsv", ROW[:2])

    with pytest.raises(InputError, match=r"test-en\.tsv has single texts, .*train-en\.tsv has pairs\. .* with labels"):
        read(tmp_path)


def test_two_scripts_of_a_language_are_two_languages(tmp_path):
    header = ("index_id", "category", "text")
    for folder in ("zho_Hant", "zho_Hans", "arb_Latn", "arb_Arab", "eng_Latn"):
        write(tmp_path / folder / "test.tsv", header, ("12", "sports", folder))

    assert {(row[0], row[2]) for row in rows_of(read(tmp_path))} == {
        ("zho_Hans", "zh"), ("zho_Hant", "zho_Hant"), ("arb_Arab", "ar"), ("arb_Latn", "arb_Latn"), ("eng_Latn", "en")
    }  # fmt: skip


def test_one_odd_label_does_not_keep_the_others_from_being_spelled_alike(tmp_path):
    rows = [("a", "b", label) for label in ("contradictory", "entailment", "neutral", "hidden")]
    write(tmp_path / "train-en.tsv", *rows)
    write(tmp_path / "test-en.tsv", ROW)

    assert set(read(tmp_path)["label"]) == {"contradiction", "entailment", "neutral", "hidden"}


def test_only_files_of_the_wanted_splits_and_training_languages_are_read(tmp_path):
    for name in ("train-en.tsv", "train-de.tsv"):
        (tmp_path / name).write_text("broken")
    write(tmp_path / "test-en.tsv", ROW)
    config = ClassificationConfig.parse({"data": str(tmp_path)})

    assert rows_of(read_labelled(config, None, ("test",))) == [(*ROW, "en", "test")]
    write(tmp_path / "train-en.tsv", ROW)
    assert rows_of(read_labelled(config, None)) == [(*ROW, "en", "test"), (*ROW, "en", "train")]


@pytest.mark.parametrize("given", ["multinli.train.fr.tsv", ""])
def test_empty_cells_of_public_training_text_are_left_out_whether_a_file_or_its_folder_is_given(tmp_path, given):
    write(tmp_path / "multinli.train.fr.tsv", ("premise", "hypo", "label"), ROW, ("Trois", "", "neutral"))

    assert rows_of(read(tmp_path / given)) == [(*ROW, "fr", "train")]


def test_paws_x_lacks_some_translations_in_its_test_sets(tmp_path):
    header = ("id", "sentence1", "sentence2", "label")
    write(tmp_path / "fr/test_2k.tsv", header, ("1", "Trois.", "Quatre.", "0"), ("2", "", "Quatre.", "0"))

    assert rows_of(read(tmp_path)) == [("Trois.", "Quatre.", "0", "fr", "test")]


def test_missing_data_says_what_to_set(tmp_path):
    with pytest.raises(InputError, match=r"Set preparation\.labelled_share above 0, or data"):
        read_labelled(ClassificationConfig(), tmp_path)
    with pytest.raises(InputError, match=r"nowhere\.tsv: no such file or folder"):
        read(tmp_path / "nowhere.tsv")


@pytest.mark.parametrize("language", ["es-419", "zh-Hant-TW", "sr_Latn_RS"])
def test_a_language_with_script_and_region_is_a_code_and_its_score_may_decide(tmp_path, language):
    (tmp_path / "x.csv").write_text(f"text,label,language\nHello,a,en\nHola,a,{language}\n")

    read(tmp_path / "x.csv")

    metric = f"classification/{language}"
    assert RegistrationConfig.parse({"metric": metric}).metric == metric
