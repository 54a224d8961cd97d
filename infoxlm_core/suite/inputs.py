"""What a task reads, looked at before anything is trained: a wrong path or an empty set is found in seconds."""

from collections.abc import Callable
from pathlib import Path

from infoxlm_core.config import AnsweringConfig, FinetuningConfig, MeasureConfig, RetrievalConfig
from infoxlm_core.data import aligned, squad
from infoxlm_core.data.labelled import read_labelled
from infoxlm_core.data.languages import two_letters
from infoxlm_core.errors import InputError
from infoxlm_core.suite.measuring import list_data
from infoxlm_core.suite.points import Settings

Fetch = Callable[[str], str]
"""A path or a URI -> a path on this machine."""


def localise(settings: Settings, fetch: Fetch) -> Settings:
    """The same settings with every place of data on this machine."""
    if isinstance(settings, AnsweringConfig):
        named = {name: tuple(map(fetch, getattr(settings, name))) for name in ("train", "dev", "test")}
        return settings.model_copy(update=named)
    data = settings.data
    return settings.model_copy(update={"data": fetch(data) if isinstance(data, str) else tuple(map(fetch, data or ()))})


def check(task: str, measure: MeasureConfig, settings: Settings) -> None:
    """Read all sets of a task once, its paths local.

    Raises:
        InputError: a set is missing, not readable, or lacks what the task needs of it; the line names the task.
    """
    try:
        if isinstance(settings, RetrievalConfig):
            aligned.read(Path(settings.data), settings.pivot, settings.languages)
        elif isinstance(settings, AnsweringConfig):
            squad.read_training(settings.train)
            squad.read_cells(settings.test, "test", settings.mixed)
            if settings.dev:
                squad.read_cells(settings.dev, "dev")
        else:
            _check_labelled(measure, settings)
    except InputError as error:
        raise type(error)(f"tasks.{task}: {error}") from None


def _check_labelled(measure: MeasureConfig, settings: FinetuningConfig) -> None:
    """Rows to learn from, to test on and, where something is chosen by them, to develop on."""
    found = read_labelled(settings, None)
    split = found["split"]
    source = found["language"].isin([two_letters(language) for language in settings.train_languages])
    needed = {"train": (split == "train") & source, "test": split == "test"}
    if settings.selection.rule != "last" or any(len(values) > 1 for values in measure.grid.values()):
        needed["dev"] = split == "dev"
    for name, rows in needed.items():
        if not rows.any():
            where = f" in {', '.join(settings.train_languages)}" if name == "train" else ""
            raise InputError(f"{', '.join(list_data(settings))}: no {name} rows{where}: add a split, or settings.data")
