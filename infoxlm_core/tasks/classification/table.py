"""Read labelled text into one table with the columns text, text_pair (optional), label, language and split."""

import logging
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from infoxlm_core.data.sampling import make_rng
from infoxlm_core.errors import InputError
from infoxlm_core.languages import is_known, shorten_codes, two_letters
from infoxlm_core.tasks.classification.files import HEADERS, LabelledFile, find_labelled_files, read_columns
from infoxlm_core.tasks.classification.task import ClassificationConfig
from infoxlm_core.tasks.task import SPLITS

logger = logging.getLogger(__name__)
COLUMNS = ("text", "text_pair", "label", "language", "split")
TEST_SHARE = 0.1  # share of the rows drawn as the test set if no row has a split
NO_CONSENSUS = "-"  # gold label of SNLI and MultiNLI rows on which the annotators disagree; usually dropped
_LANGUAGE = re.compile("[a-z]{2,3}([-_][A-Za-z0-9]{2,4}){0,2}")
# Spelling in public sets, in lower case -> our spelling
_INFERENCE_LABELS = {name: name for name in ("entailment", "neutral", "contradiction")}
_INFERENCE_LABELS["contradictory"] = "contradiction"


def read_labelled(
    config: ClassificationConfig, corpus: Path | None, splits: Collection[str] = ("train", "dev", "test")
) -> pd.DataFrame:
    """Read the rows of the given splits into one table of strings with the columns `COLUMNS`.

    Language codes are shortened to two letters where possible. Labels of natural language inference get one spelling.
    If no row has a split, about a tenth of the rows is drawn as the test set. Files are skipped if their names show
    another split, or training text in a language that is not in `train_languages`.

    Args:
        config: settings that name the files and columns.
        corpus: prepared corpus, the source of labelled text if `config.data` is None.
        splits: the splits to read.

    Raises:
        InputError: a file is missing or not readable, lacks a column or has an unusable row, or no split can be drawn.
    """
    files = list_files(config, corpus)
    needed_files = [file for file in files if _is_needed(file, splits, config.train_languages)]
    if not needed_files:
        raise InputError(
            f"{files[0].path.parent}: no row has the split {', '.join(splits)} (train_languages "
            f"{', '.join(config.train_languages)}). Name files like test-en.tsv."
        )
    table = _join_files(needed_files, config)
    # A skipped file has a split in its name, so then no split is drawn.
    has_no_split = len(needed_files) == len(files) and table["split"].isna().all()
    if has_no_split and len(table):
        table["split"] = _draw_split(table, files, config.split)
    table["split"] = table["split"].fillna("train")
    return table[table["split"].isin(splits)].reset_index(drop=True)


def read_test(config: ClassificationConfig) -> pd.DataFrame:
    """Read the test rows.

    With `translated_test`, each row in a language other than the source is replaced by its translation into the source.
    The language of the translated row remains that of the original, so that scores are still reported by language.

    Raises:
        InputError: a file is not usable (see `read_labelled`), or a language has more or fewer translations than rows.
    """
    test = read_labelled(config, None, ("test",))
    if test.empty:
        raise InputError(
            f"{config.data}: no row has the split test. Name a file test-LANGUAGE, or set the rows' split."
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
                f"{len(originals)} test rows. Translate every row into {source}, and keep the language of the original."
            )
        tables.append(translated_rows)
    return pd.concat(tables, ignore_index=True)


def select_translations(config: ClassificationConfig) -> ClassificationConfig:
    """Return the settings with the translated test sets in place of the data."""
    return config.model_copy(update={"data": config.translated_test})


def _draw_split(table: pd.DataFrame, files: Sequence[LabelledFile], split_column: str) -> np.ndarray:
    """Draw the split of each row, `test` with probability `TEST_SHARE` and otherwise `train`.

    All translations of a row get the same split. A test row that translates a training row would measure memorization.
    Translations are found by position: row i of each language must translate row i of every other language.

    Raises:
        InputError: the languages differ in their number of rows or in their labels.
    """
    difference = describe_difference(split_by_language(table))
    if difference:
        raise InputError(
            f"{_join_paths(files)}: no row has a split, and the rows of the languages do not translate each other in "
            f"order: {difference}. Add a column {split_column!r}, with the same split for all translations of a row."
        )
    positions = table.groupby("language").cumcount().to_numpy()  # each row's position within its language
    # One value for all translations of a row. No setting affects the values, so that every run has the same test set.
    random_values = make_rng("split").random(positions.max() + 1)
    return np.where(random_values[positions] < TEST_SHARE, "test", "train")


def _join_paths(files: Sequence[LabelledFile]) -> str:
    """Join the files' paths for a message."""
    return ", ".join(sorted({str(file.path) for file in files}))


def split_by_language(table: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """Return a mapping from language to rows, each table numbered from 0."""
    return {str(language): rows.reset_index(drop=True) for language, rows in table.groupby("language")}


def describe_difference(rows_by_language: Mapping[str, pd.DataFrame]) -> str | None:
    """Describe the first difference in row counts or labels between two languages. Return None if there is none.

    A difference shows that row i of one language does not translate row i of the other.
    """
    (first_language, first_rows), *other_languages = rows_by_language.items()
    for language, rows in other_languages:
        if len(rows) != len(first_rows):
            return f"{first_language} has {len(first_rows)} rows, but {language} has {len(rows)}"
        labels_differ = rows["label"] != first_rows["label"]
        if labels_differ.any():
            # Rows are numbered from 0, and idxmax finds the first difference.
            return f"row {labels_differ.idxmax() + 1} has different labels in {first_language} and {language}"
    return None


def list_files(config: ClassificationConfig, corpus: Path | None) -> list[LabelledFile]:
    """List the configured files, or else the prepared corpus's labelled set."""
    if config.data is None:
        path = (corpus or Path()) / "labelled.parquet"
        if not path.is_file():
            raise InputError(f"{path}: no such file. Set preparation.labelled_share above 0, or data.")
        return find_labelled_files(path)
    paths = [config.data] if isinstance(config.data, str) else config.data
    return [file for path in paths for file in find_labelled_files(Path(path))]


def _is_needed(file: LabelledFile, splits: Collection[str], train_languages: Iterable[str]) -> bool:
    """Return whether a file, judged by its name, may have rows of the splits. Skip training text in other languages."""
    # An unknown code, such as `set` in train-set.csv, may be a word: the file may have a column with the language.
    if file.split == "train" and file.language and is_known(file.language):
        train_codes = [two_letters(language) for language in train_languages]
        if two_letters(file.language) not in train_codes:
            return False
    return file.split is None or file.split in splits


def _join_files(files: Sequence[LabelledFile], config: ClassificationConfig) -> pd.DataFrame:
    """Read files into one table with uniform labels and language codes."""
    tables = [_read_file(file, config) for file in files]
    has_pairs = ["text_pair" in table for table in tables]
    if any(has_pairs) and not all(has_pairs):
        text_path = files[has_pairs.index(False)].path
        pair_path = files[has_pairs.index(True)].path
        raise InputError(f"{text_path} has single texts, but {pair_path} has pairs. Give labelled files of one kind.")
    rows = pd.concat(tables, ignore_index=True)
    directories = ", ".join(sorted({str(file.path.parent) for file in files}))
    normalised_by_label = normalise_labels(rows["label"].unique(), directories)
    languages = rows["language"].unique()
    for language in languages:
        if not _LANGUAGE.fullmatch(language):  # the names of scores, files and figures contain the code
            raise InputError(
                f"{_join_paths(files)}: {language!r:.80} is not a language code. Write it like de, deu_Latn or zh-CN."
            )
    return rows.assign(
        label=rows["label"].map(normalised_by_label).astype("string"),
        language=rows["language"].map(shorten_codes(languages)).astype("string"),
    )


def _read_file(file: LabelledFile, config: ClassificationConfig) -> pd.DataFrame:
    """Read one file into a table with `COLUMNS`.

    Raises:
        InputError: a row has an unknown split or an empty cell, or a file with a split in its name has no rows.
    """
    # For single texts, `text_pair` is None: repeat `text`, which does not change the set.
    configured_columns = {config.text, config.text_pair or config.text, config.label, config.language}
    content = read_columns(file.path, configured_columns)
    columns = _choose_columns(file, list(content.columns), config)
    table = pd.DataFrame({name: content[column] for name, column in columns.items()})
    if file.split and table.empty:  # otherwise, the scores would lack the file's language without a message
        raise InputError(f"{file.path}: the file has a header but no rows. Remove the file or copy it again.")
    if columns["label"] == "gold_label":  # the column's name in SNLI and MultiNLI
        table = table[table["label"] != NO_CONSENSUS]
    for name, value_in_file_name in (("language", file.language), ("split", file.split)):
        if name not in table:
            table[name] = pd.Series(value_in_file_name, index=table.index, dtype="string")
    is_public_set = columns["text"] != config.text  # the file has a public set's columns, not the configured ones
    is_paws_x = columns["text"] == "sentence1" and columns["label"] == "label"
    # Some sentences are missing in the training text of public sets, and in every split of PAWS-X.
    may_have_empty_cells = is_public_set and (file.split == "train" or is_paws_x)
    table = _drop_empty_rows(table, file.path, may_have_empty_cells)
    has_unknown_split = ~table["split"].isin(SPLITS) & table["split"].notna()
    if has_unknown_split.any():
        line = has_unknown_split.idxmax()
        split = table.at[line, "split"]
        raise InputError(f"{file.path}:{line}: {config.split} is {split!r}. Use train, dev or test, or remove the row.")
    table = table.assign(split=table["split"].map(SPLITS)).astype("string")
    return table[[name for name in COLUMNS if name in table]]


def _choose_columns(file: LabelledFile, file_columns: Sequence[Any], config: ClassificationConfig) -> dict[str, Any]:
    """Return a mapping from the names in `COLUMNS` to the file's columns.

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
    """Choose the configured columns if all exist, or else the columns of the first public set that matches."""
    configured_columns = {"text": config.text, "label": config.label}
    if config.text_pair:
        configured_columns["text_pair"] = config.text_pair
    for columns in (configured_columns, *HEADERS):
        if set(columns.values()) <= set(file_columns):
            return dict(columns)
    missing_name = next(name for name, column in configured_columns.items() if column not in file_columns)
    raise InputError(
        f"{path}: no column {configured_columns[missing_name]!r} ({missing_name}). Its columns are "
        f"{', '.join(file_columns)}."
    )


def _choose_columns_by_position(path: Path, num_columns: int) -> dict[str, Any]:
    """Choose the columns of a file without a header: text first, label last, and text_pair second of three or more."""
    if num_columns < 2:
        raise InputError(f"{path}:1: {num_columns} fields. Give text, text_pair and label, or text and label.")
    if num_columns == 2:
        return {"text": 0, "label": 1}
    return {"text": 0, "label": num_columns - 1, "text_pair": 1}


def _drop_empty_rows(table: pd.DataFrame, path: Path, may_have_empty_cells: bool) -> pd.DataFrame:
    """Drop rows with an empty cell. Raise InputError if empty cells are not allowed, or if no row remains."""
    cells = table.drop(columns="split")  # the split may be missing
    is_empty = cells.fillna("").apply(lambda column: column.str.strip()) == ""
    is_incomplete = is_empty.any(axis=1)
    if not is_incomplete.any():
        return table
    if not may_have_empty_cells or is_incomplete.all():
        line = is_incomplete.idxmax()  # the first line with an empty cell
        raise InputError(f"{path}:{line}: {is_empty.loc[line].idxmax()} is empty. Fill it or remove the row.")
    logger.warning("%s: dropped %d of %d rows with an empty cell", path, is_incomplete.sum(), len(table))
    return table[~is_incomplete]


def normalise_labels(labels: Iterable[str], where: str) -> dict[str, str]:
    """Return a mapping from each label to its normalised spelling.

    Outer spaces are removed. Labels of natural language inference get the same spelling for all public sets.

    Args:
        labels: labels in the spelling of a public set or user.
        where: the labels' files or model, for the error message.

    Raises:
        InputError: the inference labels mix names and numbers.
    """
    spellings = {label: label.strip() for label in labels}
    inference_spellings = {}
    for label, spelling in spellings.items():
        if spelling.lower() in _INFERENCE_LABELS:
            inference_spellings[label] = _INFERENCE_LABELS[spelling.lower()]
    numbers = [spelling for spelling in spellings.values() if spelling.isdecimal()]
    if inference_spellings and numbers:  # the number 0 means entailment on the Hub, but contradiction in XTREME
        raise InputError(f"{where}: some labels are names, others numbers ({min(numbers)}). Use only names.")
    # A single inference label may belong to a different task and have the same name by chance.
    is_inference = len(set(inference_spellings.values())) > 1
    return spellings | inference_spellings if is_inference else spellings
