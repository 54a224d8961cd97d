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
from infoxlm_core.languages import shorten_codes, two_letters
from infoxlm_core.tasks.classification.files import HEADERS, LabelledFile, find_labelled_files, read_columns
from infoxlm_core.tasks.classification.task import ClassificationConfig
from infoxlm_core.tasks.task import SPLITS

logger = logging.getLogger(__name__)
COLUMNS = ("text", "text_pair", "label", "language", "split")
TEST_SHARE = 0.1  # share of the rows that becomes the test set if no row has a split
NO_CONSENSUS = "-"  # label of rows on which annotators did not agree (SNLI, MultiNLI); usually left out
_LANGUAGE = re.compile("[a-z]{2,3}([-_][A-Za-z0-9]{2,4}){0,2}")
# Spelling in a public set, in lower case -> spelling in tables and scores.
_INFERENCE_LABELS = {name: name for name in ("entailment", "neutral", "contradiction")}
_INFERENCE_LABELS["contradictory"] = "contradiction"


def read_labelled(
    config: ClassificationConfig, corpus: Path | None, splits: Collection[str] = ("train", "dev", "test")
) -> pd.DataFrame:
    """Read the rows of some splits into one table of strings, with the columns `COLUMNS`.

    Languages are shortened to two letters where possible, and labels of natural language inference have one spelling.
    If no row has a split, about a tenth of the rows becomes the test set. A file is not read if its name contains
    another split, or if it has training text in a language that is not trained on.

    Args:
        config: which files and columns to read.
        corpus: the prepared corpus, whose labelled set is read if `config.data` is None.
        splits: the splits to read.

    Raises:
        InputError: a file is missing or not readable, lacks a column, or has an unusable row, named by file and line;
            or no split can be drawn.
    """
    files = list_files(config, corpus)
    needed_files = [file for file in files if _is_needed(file, splits, config.train_languages)]
    if not needed_files:
        raise InputError(
            f"{files[0].path.parent}: no row has the split {', '.join(splits)} (train_languages "
            f"{', '.join(config.train_languages)}). Name files like test-en.tsv."
        )
    table = _join_files(needed_files, config)
    # Files that were skipped have a split in their names.
    has_no_split = len(needed_files) == len(files) and table["split"].isna().all()
    if has_no_split and len(table):
        table["split"] = _draw_split(table, files, config.split)
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
    tables = []
    for language, originals in split_by_language(test).items():
        if language == source:
            tables.append(originals)
            continue
        translated_rows = translations[translations["language"] == language]
        if len(translated_rows) != len(originals):
            raise InputError(
                f"{', '.join(config.translated_test)}: {len(translated_rows)} translated test rows for {language}, but "
                f"{len(originals)} test rows. Give a translation into {source} of each row, with the language of the "
                "original."
            )
        tables.append(translated_rows)
    return pd.concat(tables, ignore_index=True)


def select_translations(config: ClassificationConfig) -> ClassificationConfig:
    """Return settings that read the translated test sets instead of the data."""
    return config.model_copy(update={"data": config.translated_test})


def _draw_split(table: pd.DataFrame, files: Sequence[LabelledFile], split_column: str) -> np.ndarray:
    """Assign each row to train or, with probability `TEST_SHARE`, to test: (N,) strings.

    Row i of a language must translate row i of every other language, and all its translations are in the same split.
    Otherwise the test could contain translations of training rows, and its scores would measure memorization.

    Raises:
        InputError: the languages have different numbers of rows, or different labels.
    """
    difference = describe_difference(split_by_language(table))
    if difference:
        raise InputError(
            f"{_join_paths(files)}: no row has a split, and the rows of the languages do not translate each other in "
            f"order: {difference}. Add a column {split_column!r}, with the same split for all translations of a row."
        )
    positions = table.groupby("language").cumcount().to_numpy()  # of each row within its language
    random_values = make_rng("split").random(positions.max() + 1)  # one for all translations of a row
    return np.where(random_values[positions] < TEST_SHARE, "test", "train")


def _join_paths(files: Sequence[LabelledFile]) -> str:
    """Return the paths of files as text for messages."""
    return ", ".join(sorted({str(file.path) for file in files}))


def split_by_language(table: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """Return the rows of each language, numbered from 0."""
    return {str(language): rows.reset_index(drop=True) for language, rows in table.groupby("language")}


def describe_difference(rows_by_language: Mapping[str, pd.DataFrame]) -> str | None:
    """Return the first sign that row i of one language does not translate row i of another, or None.

    The signs are a different number of rows, or a row with another label.
    """
    languages = list(rows_by_language)
    first_language = languages[0]
    first_rows = rows_by_language[first_language]
    for language in languages[1:]:
        rows = rows_by_language[language]
        if len(rows) != len(first_rows):
            return f"{first_language} has {len(first_rows)} rows, but {language} has {len(rows)}"
        has_other_label = rows["label"] != first_rows["label"]
        if has_other_label.any():
            return f"row {has_other_label.idxmax() + 1} has another label in {first_language} than in {language}"
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


def _is_needed(file: LabelledFile, splits: Collection[str], train_languages: Iterable[str]) -> bool:
    """Return whether a file may contain rows of the splits, according to its name.

    Training text is only needed in the training languages.
    """
    if file.split is None:
        return True
    if file.split not in splits:
        return False
    if file.split != "train" or file.language is None:
        return True
    return two_letters(file.language) in [two_letters(language) for language in train_languages]


def _join_files(files: Sequence[LabelledFile], config: ClassificationConfig) -> pd.DataFrame:
    """Read files into one table, with one spelling of each label and each language."""
    tables = []
    paths_of_texts = []
    paths_of_pairs = []
    for file in files:
        table = _read_file(file, config)
        tables.append(table)
        if "text_pair" in table:
            paths_of_pairs.append(file.path)
        else:
            paths_of_texts.append(file.path)
    if paths_of_texts and paths_of_pairs:
        raise InputError(
            f"{paths_of_texts[0]} has single texts, but {paths_of_pairs[0]} has pairs. Give files of one kind, with "
            "labels."
        )
    rows = pd.concat(tables, ignore_index=True)
    folders = ", ".join(sorted({str(file.path.parent) for file in files}))
    spelling_of_label = normalise_labels(rows["label"].unique(), folders)
    languages = rows["language"].unique()
    for language in languages:
        if not _LANGUAGE.fullmatch(language):  # it becomes part of the names of scores, files and figures
            raise InputError(
                f"{_join_paths(files)}: {language!r:.80} is not a language code. Write it like de, deu_Latn or zh-CN."
            )
    return rows.assign(
        label=rows["label"].map(spelling_of_label).astype("string"),
        language=rows["language"].map(shorten_codes(languages)).astype("string"),
    )


def _read_file(file: LabelledFile, config: ClassificationConfig) -> pd.DataFrame:
    """Read one file into a table with columns of `COLUMNS`. Raise InputError for unknown splits and empty cells."""
    configured_columns = {config.text, config.text_pair or config.text, config.label, config.language}
    content = read_columns(file.path, configured_columns)
    columns = _choose_columns(file, list(content.columns), config)
    table = pd.DataFrame({name: content[column] for name, column in columns.items()})
    if columns["label"] == "gold_label":
        table = table[table["label"] != NO_CONSENSUS]
    for name, value_in_file_name in (("language", file.language), ("split", file.split)):
        if name not in table:
            table[name] = pd.Series(value_in_file_name, index=table.index, dtype="string")
    is_public_set = columns["text"] != config.text
    is_paws_x = columns["text"] == "sentence1" and columns["label"] == "label"
    # Training text of public sets and every split of PAWS-X lack some sentences.
    may_have_empty_cells = is_public_set and (file.split == "train" or is_paws_x)
    table = _drop_empty_rows(table, file.path, may_have_empty_cells)
    has_unknown_split = ~table["split"].isin(SPLITS) & table["split"].notna()
    if has_unknown_split.any():
        line = has_unknown_split.idxmax()
        raise InputError(
            f"{file.path}:{line}: {config.split} is {table.at[line, 'split']!r}. Use train, dev or test, or remove the "
            "row."
        )
    table = table.assign(split=table["split"].map(SPLITS)).astype("string")
    return table[[name for name in COLUMNS if name in table]]


def _choose_columns(file: LabelledFile, file_columns: Sequence[Any], config: ClassificationConfig) -> dict[str, Any]:
    """Return which column of a file contains the text, text_pair, label, language and split, by these names.

    `file_columns` are the names in the header, or numbers if the file has no header.
    """
    has_header = len(file_columns) > 0 and not isinstance(file_columns[0], int)
    if has_header:
        columns = _choose_columns_by_name(file.path, file_columns, config)
    else:
        columns = _choose_columns_by_position(file.path, len(file_columns))
    if config.language in file_columns:
        columns["language"] = config.language
    elif file.language is None:
        raise InputError(
            f"{file.path}: no column {config.language!r} (language). Its columns are "
            f"{', '.join(map(str, file_columns))}, and its name contains no language (train-en.tsv)."
        )
    if config.split in file_columns:
        columns["split"] = config.split
    return columns


def _choose_columns_by_name(path: Path, file_columns: Sequence[str], config: ClassificationConfig) -> dict[str, Any]:
    """Return the columns with the configured names, or else those of the first public set whose names all occur."""
    configured_columns = {"text": config.text, "label": config.label}
    if config.text_pair:
        configured_columns["text_pair"] = config.text_pair
    for columns in (configured_columns, *HEADERS):
        if set(columns.values()) <= set(file_columns):
            return dict(columns)
    missing_names = [name for name, column in configured_columns.items() if column not in file_columns]
    missing_name = missing_names[0]
    raise InputError(
        f"{path}: no column {configured_columns[missing_name]!r} ({missing_name}). Its columns are "
        f"{', '.join(file_columns)}."
    )


def _choose_columns_by_position(path: Path, num_columns: int) -> dict[str, Any]:
    """Return the columns of a file without a header: text, text_pair if there are at least three, and label last."""
    if num_columns < 2:
        raise InputError(f"{path}:1: {num_columns} fields. Give text, text_pair and label, or text and label.")
    if num_columns == 2:
        return {"text": 0, "label": 1}
    return {"text": 0, "label": num_columns - 1, "text_pair": 1}


def _drop_empty_rows(table: pd.DataFrame, path: Path, may_have_empty_cells: bool) -> pd.DataFrame:
    """Drop rows with an empty cell. Raise InputError if the file must not have any, or if no row remains."""
    cells = table.drop(columns="split")  # the split may be missing
    is_empty = cells.fillna("").apply(lambda column: column.str.strip()) == ""
    is_incomplete = is_empty.any(axis=1)
    if not is_incomplete.any():
        return table
    if not may_have_empty_cells or is_incomplete.all():
        line = is_incomplete.idxmax()
        raise InputError(f"{path}:{line}: {is_empty.loc[line].idxmax()} is empty. Fill it or remove the row.")
    logger.warning("%s: %d of %d rows have an empty cell and are left out", path, is_incomplete.sum(), len(table))
    return table[~is_incomplete]


def normalise_labels(labels: Iterable[str], where: str) -> dict[str, str]:
    """Map each label to one spelling: without outer spaces and, for natural language inference, the same in all sets.

    Args:
        labels: labels as public sets or users spell them.
        where: the files or the model with these labels, for the error message.

    Raises:
        InputError: some labels of natural language inference are names, others numbers.
    """
    spellings = {label: label.strip() for label in labels}
    inference_spellings = {}
    for label, spelling in spellings.items():
        if spelling.lower() in _INFERENCE_LABELS:
            inference_spellings[label] = _INFERENCE_LABELS[spelling.lower()]
    numbers = [spelling for spelling in spellings.values() if spelling.isdecimal()]
    if inference_spellings and numbers:  # label 0 is entailment on the Hub, but contradiction in XTREME
        raise InputError(f"{where}: some labels are names, others numbers ({min(numbers)}). Use only names.")
    # A set with only one of these labels may be another task, whose label happens to have the same name.
    is_inference = len(set(inference_spellings.values())) > 1
    return spellings | inference_spellings if is_inference else spellings
