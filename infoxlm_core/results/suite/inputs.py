"""What a task reads, looked at before anything is trained: a wrong path or an empty set is found in seconds."""

from collections.abc import Callable, Sequence
from pathlib import Path

import pandas as pd

from infoxlm_core.config import AnsweringConfig, FinetuningConfig, MeasureConfig, RetrievalConfig
from infoxlm_core.errors import InputError
from infoxlm_core.languages import two_letters
from infoxlm_core.results.suite.measuring import data_by_role
from infoxlm_core.results.suite.points import Settings
from infoxlm_core.tasks import aligned_files, labelled_files, reading, squad
from infoxlm_core.tasks.answers import cleaner
from infoxlm_core.tasks.classifying import check_aligned, known_rows
from infoxlm_core.tasks.labelled import read_labelled
from infoxlm_core.training import selection

Fetch = Callable[[str], str]
"""A path or a URI -> a path on this machine."""


def localise(settings: Settings, fetch: Fetch) -> Settings:
    """The same settings with every place of data on this machine."""
    if isinstance(settings, AnsweringConfig):
        named = {name: tuple(map(fetch, getattr(settings, name))) for name in ("train", "dev", "test")}
        return settings.model_copy(update=named)
    data = settings.data
    if data is None:  # the labelled set of the prepared corpus
        return settings
    return settings.model_copy(update={"data": fetch(data) if isinstance(data, str) else tuple(map(fetch, data))})


def check(task: str, measure: MeasureConfig, settings: Settings) -> None:
    """Read all sets of a task once, its paths local.

    Raises:
        InputError: a set is missing, not readable, or lacks what the task needs of it; the line names the task.
    """
    try:
        if isinstance(settings, RetrievalConfig):
            aligned_files.read(Path(settings.data), settings.pivot, settings.languages)
        elif isinstance(settings, AnsweringConfig):
            _check_questions(settings)
        else:
            _check_labelled(measure, settings)
    except InputError as error:
        raise type(error)(f"tasks.{task}: {error}") from None


def _check_questions(settings: AnsweringConfig) -> None:
    """Training, development and test files can be read, judged by the rule, and their answers compared."""
    squad.read_training(settings.train)
    tested = squad.read_cells(settings.test, "test", settings.mixed)
    developed = squad.read_cells(settings.dev, "dev") if settings.dev else {}
    for language in dict.fromkeys(context for context, _ in (*developed, *tested)):
        cleaner(settings.normaliser, language)
    selection.check(settings.selection.rule, reading.source(settings), [context for context, _ in developed])


def _check_labelled(measure: MeasureConfig, settings: FinetuningConfig) -> None:
    """Rows to learn from, to test on and, where something is chosen by them, to develop on; all with known labels."""
    labels, found = _read(settings)
    parts = {split: found[found["split"] == split] for split in ("dev", "test")}
    where = ", ".join(data_by_role(settings)["data"])
    remedy = "add a split, or settings.data"
    if not labels:
        raise InputError(f"{where}: no train rows in {', '.join(settings.train_languages)}: {remedy}")
    if len(labels) < 2:
        raise InputError(f"{where}: the train rows have one label alone, {min(labels)!r}: there is nothing to learn")
    chosen = settings.selection.rule != "last" or any(len(values) > 1 for values in measure.grid.values())
    for split in ("dev", "test") if chosen else ("test",):
        if parts[split].empty:
            raise InputError(f"{where}: no {split} rows: {remedy}")
    dev, test = (known_rows(part, sorted(labels), split) for split, part in parts.items())
    source = two_letters(settings.train_languages[0])
    selection.check(settings.selection.rule, source, sorted(dev["language"].unique()))
    if settings.mixed:
        rows = test.groupby("language")
        check_aligned({str(language): part.reset_index(drop=True) for language, part in rows})


def _read(settings: FinetuningConfig) -> tuple[set[str], pd.DataFrame]:
    """Labels of the training rows, and at least all development and test rows.

    Training files, which may be large, are read one at a time, and only those in a language of training.
    """
    languages = [two_letters(language) for language in settings.train_languages]
    places = [place for path in data_by_role(settings)["data"] for place in labelled_files.find(Path(path))]
    if any(place.split is None for place in places):  # a column says it, or nothing does
        found = read_labelled(settings, None)
        return _learned(found[found["split"] == "train"], languages), found
    labels: set[str] = set()
    for place in places:
        if place.split == "train" and (place.language is None or two_letters(place.language) in languages):
            alone = settings.model_copy(update={"data": str(place.path)})
            labels |= _learned(read_labelled(alone, None, ("train",)), languages)
    return labels, read_labelled(settings, None, ("dev", "test"))


def _learned(table: pd.DataFrame, languages: Sequence[str]) -> set[str]:
    return set(table.loc[table["language"].isin(languages), "label"])
