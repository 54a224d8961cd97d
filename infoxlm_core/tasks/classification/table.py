"""Labelled text of any language: one table of text, text_pair (if there is one), label, language and split."""

import logging
import re
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from infoxlm_core.data.sampling import generator
from infoxlm_core.errors import InputError
from infoxlm_core.languages import shorten
from infoxlm_core.tasks.classification.files import HEADERS, SPLITS, Place, find, read
from infoxlm_core.tasks.classification.settings import ClassificationConfig

logger = logging.getLogger(__name__)
XNLI_LABELS = ("entailment", "neutral", "contradiction")  # in the order of the Hub's numbers
_LANGUAGE = re.compile("[a-z]{2,3}([-_][A-Za-z0-9]{2,4}){0,2}")
NO_CONSENSUS = "-"  # where annotators did not agree (SNLI, MultiNLI): all who use these sets leave such rows out


def read_labelled(
    config: ClassificationConfig, corpus: Path | None, splits: Collection[str] = ("train", "dev", "test")
) -> pd.DataFrame:
    """Read labelled text into string columns text, text_pair (if there is one), label, language, split.

    Languages become two letters where there are such, splits train, dev or test, labels of natural language inference
    their names. If no file says any split, a tenth of the rows is set aside as a test, the same one every time. Without
    `config.data` it is the labelled set of the prepared corpus. Files of other splits than those that are wanted are
    not read, if their names say so.

    Raises:
        InputError: a file is missing or not readable, lacks a column, or has a row that is not usable: file and line.
    """
    found = [place for path in paths(config, corpus) for place in find(path)]
    places = [place for place in found if place.split is None or place.split in splits]
    if not places:
        raise InputError(f"{found[0].path.parent}: no row is of split {', '.join(splits)}: name files so (test-en.tsv)")
    tables = [_read(place, config) for place in places]
    paired = ["text_pair" in table for table in tables]
    if any(paired) and not all(paired):
        alone, other = (places[paired.index(value)].path for value in (False, True))
        raise InputError(f"{alone} has single texts, {other} has pairs: give files of one kind, all with labels")
    table = pd.concat(tables, ignore_index=True)
    if len(places) == len(found) and table["split"].isna().all():
        uniform = generator("split").random(len(table))
        table["split"] = pd.Series(np.where(uniform < 0.1, "test", "train"), dtype="string")
    names = by_name(table["label"].unique(), ", ".join(sorted({str(place.path.parent) for place in places})))
    for language in table["language"].unique():
        if not _LANGUAGE.fullmatch(language):  # it becomes part of the names of scores, files and figures
            where = ", ".join(sorted({str(place.path) for place in places}))
            raise InputError(f"{where}: {language!r:.80} is no code of a language: write it as de, deu_Latn or zh-CN")
    codes = shorten(table["language"].unique())
    table = table.assign(
        split=table["split"].fillna("train"),
        label=table["label"].map(names).astype("string"),
        language=table["language"].map(codes).astype("string"),
    )
    return table[table["split"].isin(splits)].reset_index(drop=True)


def paths(config: ClassificationConfig, corpus: Path | None) -> list[Path]:
    """The files and folders that a config names, or the labelled set of the prepared corpus."""
    if config.data is None:
        path = (corpus or Path()) / "labelled.parquet"
        if not path.is_file():
            raise InputError(f"{path}: no such file: set preparation.labelled_share above 0 or data")
        return [path]
    return [Path(path) for path in ([config.data] if isinstance(config.data, str) else config.data)]


def _read(place: Place, config: ClassificationConfig) -> pd.DataFrame:
    found = read(place.path, [config.text, config.text_pair or config.text, config.label, config.language])
    columns = _columns(place, list(found.columns), config)
    table = pd.DataFrame({name: found[column] for name, column in columns.items()})
    if columns["label"] == "gold_label":
        table = table[table["label"] != NO_CONSENSUS]
    if "language" not in table:
        table["language"] = pd.Series(place.language, index=table.index, dtype="string")
    if "split" not in table:
        table["split"] = pd.Series(place.split, index=table.index, dtype="string")
    own, paws = columns["text"] == config.text, columns["text"] == "sentence1" and columns["label"] == "label"
    table = _without_empty(table, place.path, not own and (place.split == "train" or paws))
    unknown = ~table["split"].isin(SPLITS) & table["split"].notna()
    if unknown.any():
        line = unknown.idxmax()
        raise InputError(
            f"{place.path}:{line}: {config.split} is {table.at[line, 'split']!r}: use train, dev or test, or remove "
            "the row"
        )
    order = [name for name in ("text", "text_pair", "label", "language", "split") if name in table]
    return table.assign(split=table["split"].map(SPLITS)).astype("string")[order]


def _columns(place: Place, names: Sequence[Any], config: ClassificationConfig) -> dict[str, Any]:
    """Our column -> the one in the file: as the config says, as a public set calls it, or by its place."""
    path, wanted = place.path, {"text": config.text, "label": config.label}
    wanted |= {"text_pair": config.text_pair} if config.text_pair else {}
    if not names or isinstance(names[0], int):  # no header
        if len(names) < 2:
            raise InputError(f"{path}:1: {len(names)} fields: give text, text_pair and label, or text and label")
        found: dict[str, Any] = {"text": 0, "label": len(names) - 1} | ({"text_pair": 1} if len(names) > 2 else {})
    else:
        fitting = [known for known in (wanted, *HEADERS) if set(known.values()) <= set(names)]
        if not fitting:
            field, column = next(item for item in wanted.items() if item[1] not in names)
            raise InputError(f"{path}: no column {column!r} ({field}); there are {', '.join(names)}")
        found = dict(fitting[0])
    more = {"language": config.language, "split": config.split}
    found |= {name: column for name, column in more.items() if column in names}
    if "language" not in found and place.language is None:
        there = ", ".join(map(str, names))
        raise InputError(
            f"{path}: no column {config.language!r} (language); there are {there}; and its name says no "
            "language (train-en.tsv)"
        )
    return found


def _without_empty(table: pd.DataFrame, path: Path, expected: bool) -> pd.DataFrame:
    """The rows whose cells are all filled; others are refused, unless they are to be `expected`.

    That is in training text of public sets, and in all of PAWS-X, where some translations are missing.
    """
    cells = table.drop(columns="split")
    empty = cells.isna() | (cells.apply(lambda column: column.str.strip()) == "")
    bad = empty.any(axis=1)
    if not bad.any():
        return table
    if not expected or bad.all():
        line = bad.idxmax()
        raise InputError(f"{path}:{line}: {empty.loc[line].idxmax()} is empty: fill it or remove the row")
    logger.warning("%s: %d of %d rows have an empty cell: left out", path, bad.sum(), len(table))
    return table[~bad]


def by_name(labels: Iterable[str], where: str) -> dict[str, str]:
    """Labels -> names: of natural language inference in one spelling; any others as they are, without spaces around.

    Raises:
        InputError: some labels of natural language inference are names, some numbers.
    """
    names = {label: label.strip() for label in labels}
    inference = {name for name in names.values() if name.lower() in (*XNLI_LABELS, "contradictory")}
    numbers = {name for name in names.values() if name.isdecimal()}
    if len({xnli_label(name) for name in inference}) < 2 and not (inference and numbers):
        return names
    if numbers:
        raise InputError(f"{where}: labels are names and numbers ({min(numbers)}): write the names everywhere")
    return {label: xnli_label(name) if name in inference else name for label, name in names.items()}


def xnli_label(label: str | int, order: Sequence[str] = XNLI_LABELS) -> str:
    """Name of an XNLI label, from its name (`contradictory` too) or from its number in the file's own order.

    Numbers mean nothing by themselves: the Hub counts from entailment, XTREME from contradiction.

    Raises:
        InputError: it is none of the three.
    """
    name = str(label).strip().lower()
    name = order[int(name)] if name.isdecimal() and int(name) < len(order) else name
    name = {"contradictory": "contradiction"}.get(name, name)
    if name not in XNLI_LABELS:
        raise InputError(f"{str(label)!r} is no XNLI label: give one of {', '.join(XNLI_LABELS)}, or 0, 1, 2")
    return name
