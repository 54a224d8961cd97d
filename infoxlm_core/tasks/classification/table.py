"""Read labelled text into one table with the columns text, text_pair (for pairs), label, language and split."""

import logging
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from infoxlm_core.data.sampling import make_rng
from infoxlm_core.errors import InputError
from infoxlm_core.languages import shorten, two_letters
from infoxlm_core.tasks.classification.files import HEADERS, LabelledFile, find_labelled_files, read_columns
from infoxlm_core.tasks.classification.task import ClassificationConfig
from infoxlm_core.tasks.task import SPLITS

logger = logging.getLogger(__name__)
COLUMNS = ("text", "text_pair", "label", "language", "split")
TEST_SHARE = 0.1  # share of the rows that becomes the test if no file has a split
NO_CONSENSUS = "-"  # label of rows on which annotators did not agree (SNLI, MultiNLI); usually left out
_LANGUAGE = re.compile("[a-z]{2,3}([-_][A-Za-z0-9]{2,4}){0,2}")
# Spelling in a public set -> our name.
_INFERENCE_LABELS = {name: name for name in ("entailment", "neutral", "contradiction")}
_INFERENCE_LABELS["contradictory"] = "contradiction"


def read_labelled(
    config: ClassificationConfig, corpus: Path | None, splits: Collection[str] = ("train", "dev", "test")
) -> pd.DataFrame:
    """Read the rows of some splits into one table of strings.

    Languages are shortened to two letters where possible, and labels of natural language inference have one spelling.
    If no file has a split, a tenth of the rows becomes the test set (see `draw_split`). A file is not read if its name
    contains another split, or if it has training text in a language that is not trained on.

    Args:
        config: which files and columns to read.
        corpus: the prepared corpus, whose labelled set is read if `config.data` is None.
        splits: the splits to read.

    Raises:
        InputError: a file is missing or not readable, lacks a column, or has an unusable row, named by file and line;
            or no split can be drawn.
    """
    files = list_files(config, corpus)
    selected_files = []
    for file in files:
        if file.split is None or (file.split in splits and not _is_unused(file, config)):
            selected_files.append(file)
    if not selected_files:
        raise InputError(
            f"{files[0].path.parent}: no row has the split {', '.join(splits)} (train_languages "
            f"{', '.join(config.train_languages)}). Name files like test-en.tsv."
        )
    table = _join_files(selected_files, config)
    if len(selected_files) == len(files) and len(table) and table["split"].isna().all():
        try:
            table["split"] = draw_split(table)
        except InputError as error:
            paths = ", ".join(sorted({str(file.path) for file in files}))
            raise InputError(
                f"{paths}: no row has a split, and {error}. Add a column {config.split!r}, with the same split for all "
                "translations of a row."
            ) from None
    table["split"] = table["split"].fillna("train")
    return table[table["split"].isin(splits)].reset_index(drop=True)


def read_test(config: ClassificationConfig) -> pd.DataFrame:
    """Read the test rows. With `translated_test`, translations replace the rows of every language but the source.

    A translated row has the language of its original.

    Raises:
        InputError: as `read_labelled`; or a language has no translations, or not as many as test rows.
    """
    test = read_labelled(config, None, ("test",))
    if test.empty:
        raise InputError(
            f"{config.data}: no row has the split test. Name a file test-LANGUAGE, or set the split of rows."
        )
    if not config.translated_test:
        return test
    source = two_letters(config.train_languages[0])
    translations = read_labelled(select_translations(config), None, ("test",))
    originals_by_language = split_by_language(test)
    translations_by_language = split_by_language(translations[translations["language"] != source])
    tables = []
    for language, originals in originals_by_language.items():
        rows = originals if language == source else translations_by_language.get(language, translations[:0])
        if len(rows) != len(originals):
            raise InputError(
                f"{', '.join(config.translated_test)}: {len(rows)} translated test rows for {language}, but "
                f"{len(originals)} test rows. Give a translation into {source} of each row, with the language of the "
                "original."
            )
        tables.append(rows)
    return pd.concat(tables, ignore_index=True)


def select_translations(config: ClassificationConfig) -> ClassificationConfig:
    """Return settings that read the translated test sets instead of the data."""
    return config.model_copy(update={"data": config.translated_test})


def draw_split(table: pd.DataFrame) -> np.ndarray:
    """Return the split of each row, train or test. About a tenth of the rows, the same in all languages, is the test.

    Row i of a language must translate row i of every other language. Otherwise the test could contain translations of
    training rows, and its scores would measure memorization.

    Raises:
        InputError: the languages have different numbers of rows, or different labels.
    """
    difference = describe_difference(split_by_language(table))
    if difference:
        raise InputError(f"the rows of the languages do not translate each other in order: {difference}")
    positions = table.groupby("language").cumcount().to_numpy()  # of each row within its language
    uniform = make_rng("split").random(positions.max() + 1)  # one draw for all translations of a row
    return np.where(uniform[positions] < TEST_SHARE, "test", "train")


def split_by_language(table: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """Return the rows of each language, numbered from 0."""
    return {str(language): rows.reset_index(drop=True) for language, rows in table.groupby("language")}


def describe_difference(rows: Mapping[str, pd.DataFrame]) -> str | None:
    """Describe how two languages differ in the number of rows or in the label of a row, or return None.

    If they differ, row i of one language cannot translate row i of the other.
    """
    (first_language, first_rows), *other_languages = rows.items()
    for language, other_rows in other_languages:
        if len(other_rows) != len(first_rows):
            return f"{first_language} has {len(first_rows)} rows, but {language} has {len(other_rows)}"
        differs = other_rows["label"] != first_rows["label"]
        if differs.any():
            return f"row {differs.idxmax() + 1} has another label in {first_language} than in {language}"
    return None


def list_files(config: ClassificationConfig, corpus: Path | None) -> list[LabelledFile]:
    """Return the configured files, or the labelled set of the prepared corpus."""
    if config.data is None:
        path = (corpus or Path()) / "labelled.parquet"
        if not path.is_file():
            raise InputError(f"{path}: no such file. Set preparation.labelled_share above 0, or data.")
        return find_labelled_files(path)
    paths = [config.data] if isinstance(config.data, str) else config.data
    return [file for path in paths for file in find_labelled_files(Path(path))]


def _is_unused(file: LabelledFile, config: ClassificationConfig) -> bool:
    """Return whether a file has training text in a language that is not trained on, according to its name."""
    if file.split != "train" or file.language is None:
        return False
    return two_letters(file.language) not in [two_letters(language) for language in config.train_languages]


def _join_files(files: Sequence[LabelledFile], config: ClassificationConfig) -> pd.DataFrame:
    """Read files into one table, with one spelling of each label and each language."""
    tables = [_read_file(file, config) for file in files]
    files_of_texts = [file.path for file, table in zip(files, tables, strict=True) if "text_pair" not in table]
    files_of_pairs = [file.path for file, table in zip(files, tables, strict=True) if "text_pair" in table]
    if files_of_texts and files_of_pairs:
        raise InputError(
            f"{files_of_texts[0]} has single texts, but {files_of_pairs[0]} has pairs. Give files of one kind, with "
            "labels."
        )
    table = pd.concat(tables, ignore_index=True)
    folders = ", ".join(sorted({str(file.path.parent) for file in files}))
    labels = normalise_labels(table["label"].unique(), folders)
    languages = table["language"].unique()
    for language in languages:
        if not _LANGUAGE.fullmatch(language):  # it becomes part of the names of scores, files and figures
            paths = ", ".join(sorted({str(file.path) for file in files}))
            raise InputError(f"{paths}: {language!r:.80} is not a language code. Write it like de, deu_Latn or zh-CN.")
    return table.assign(
        label=table["label"].map(labels).astype("string"),
        language=table["language"].map(shorten(languages)).astype("string"),
    )


def _read_file(file: LabelledFile, config: ClassificationConfig) -> pd.DataFrame:
    """Read one file into a table with our column names. Raise InputError for unknown splits and empty cells."""
    content = read_columns(file.path, {config.text, config.text_pair or config.text, config.label, config.language})
    columns = _choose_columns(file, list(content.columns), config)
    table = pd.DataFrame({name: content[column] for name, column in columns.items()})
    if columns["label"] == "gold_label":
        table = table[table["label"] != NO_CONSENSUS]
    for name, value in (("language", file.language), ("split", file.split)):
        if name not in table:
            table[name] = pd.Series(value, index=table.index, dtype="string")
    is_public_set = columns["text"] != config.text
    is_paws_x = columns["text"] == "sentence1" and columns["label"] == "label"
    # Training text of public sets and every split of PAWS-X lack some sentences.
    may_have_empty_cells = is_public_set and (file.split == "train" or is_paws_x)
    table = _drop_empty(table, file.path, allowed=may_have_empty_cells)
    has_unknown_split = ~table["split"].isin(SPLITS) & table["split"].notna()
    if has_unknown_split.any():
        line = has_unknown_split.idxmax()
        raise InputError(
            f"{file.path}:{line}: {config.split} is {table.at[line, 'split']!r}. Use train, dev or test, or remove the "
            "row."
        )
    table = table.assign(split=table["split"].map(SPLITS)).astype("string")
    return table[[name for name in COLUMNS if name in table]]


def _choose_columns(file: LabelledFile, names: Sequence[Any], config: ClassificationConfig) -> dict[str, Any]:
    """Return the file's column for each of our columns.

    The columns have the configured names or those of a public set. Without a header, they are chosen by position.
    """
    columns: dict[str, Any] = {"text": config.text, "label": config.label}
    if config.text_pair:
        columns["text_pair"] = config.text_pair
    if not names or isinstance(names[0], int):  # no header
        if len(names) < 2:
            raise InputError(f"{file.path}:1: {len(names)} fields. Give text, text_pair and label, or text and label.")
        columns = {"text": 0, "label": len(names) - 1}
        if len(names) > 2:
            columns["text_pair"] = 1
    else:
        matching_headers = [header for header in (columns, *HEADERS) if set(header.values()) <= set(names)]
        if not matching_headers:
            missing_columns = {field: column for field, column in columns.items() if column not in names}
            field, column = next(iter(missing_columns.items()))
            raise InputError(f"{file.path}: no column {column!r} ({field}). Its columns are {', '.join(names)}.")
        columns = dict(matching_headers[0])
    for name, column in (("language", config.language), ("split", config.split)):
        if column in names:
            columns[name] = column
    if "language" not in columns and file.language is None:
        raise InputError(
            f"{file.path}: no column {config.language!r} (language). Its columns are {', '.join(map(str, names))}, and "
            "its name contains no language (train-en.tsv)."
        )
    return columns


def _drop_empty(table: pd.DataFrame, path: Path, allowed: bool) -> pd.DataFrame:
    """Drop rows with an empty cell. Raise InputError if they are not `allowed`, or if no other row remains."""
    cells = table.drop(columns="split")  # the split may be missing
    is_empty = cells.fillna("").apply(lambda column: column.str.strip()) == ""
    is_incomplete = is_empty.any(axis=1)
    if not is_incomplete.any():
        return table
    if not allowed or is_incomplete.all():
        line = is_incomplete.idxmax()
        raise InputError(f"{path}:{line}: {is_empty.loc[line].idxmax()} is empty. Fill it or remove the row.")
    logger.warning("%s: %d of %d rows have an empty cell and are left out", path, is_incomplete.sum(), len(table))
    return table[~is_incomplete]


def normalise_labels(labels: Iterable[str], where: str) -> dict[str, str]:
    """Map each label to its name without outer spaces.

    Labels of natural language inference, which public sets spell differently, get the same names in all sets.
    """
    names = {label: label.strip() for label in labels}
    inference_names = {}
    for label, name in names.items():
        if name.lower() in _INFERENCE_LABELS:
            inference_names[label] = _INFERENCE_LABELS[name.lower()]
    numeric_names = [name for name in names.values() if name.isdecimal()]
    if inference_names and numeric_names:  # label 0 is entailment on the Hub, but contradiction in XTREME
        raise InputError(f"{where}: some labels are names, others numbers ({min(numeric_names)}). Use only names.")
    # A set with only one of these labels may be another task, whose label happens to have the same name.
    is_inference = len(set(inference_names.values())) > 1
    return names | inference_names if is_inference else names
