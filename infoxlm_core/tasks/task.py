"""What a task is: its settings, what it reads, how it is learned, how it is measured, how its scores are called.

A new task is a file with a subclass of `Task`, and a line in `TASKS`. These files are read whenever a config is, so
they import what is heavy (torch, pandas, readers) where it is used. Tasks that only an evaluation asks, of a prepared
corpus, are in no config: their lines are in `stages/evaluation.py`, and they import what they like.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Generic, NamedTuple, NotRequired, Self, TypeVar

from typing_extensions import TypedDict

from infoxlm_core import languages, outside
from infoxlm_core.config.base import StageConfig
from infoxlm_core.errors import InputError
from infoxlm_core.model.task_head import Head
from infoxlm_core.training.finetuning import selection

if TYPE_CHECKING:
    from infoxlm_core.model.task_models import TaskModel
    from infoxlm_core.training.finetuning.task_learner import Training

Settings = TypeVar("Settings", bound=StageConfig)
Fetch = Callable[[str], str]  # a path or a URI -> a path on this machine
ByLanguage = Mapping[str, Mapping[str, float]]  # language -> metric -> share


class _Development(TypedDict):
    languages: dict[str, float]
    mean: float


@outside.with_more
class _Said(TypedDict):
    """What scores.json says, of whatever task."""

    task: str
    languages: dict[str, dict[str, float]]
    mean: dict[str, float]
    counts: dict[str, int]
    test_set: str
    transfer_gap: NotRequired[dict[str, float] | None]
    dev: NotRequired[_Development | None]
    selection: NotRequired[dict[str, Any] | None]
    mixed: NotRequired[dict[str, Any] | None]
    trained_on: NotRequired[list[str]]
    training: NotRequired[dict[str, Any]]


@dataclass(frozen=True)
class Scores:
    """How a model did on a task; shares are from 0 to 1, means weigh every language alike."""

    task: str
    languages: ByLanguage
    mean: Mapping[str, float]
    counts: Mapping[str, int]  # questions of each language
    test_set: str  # digest of what was asked
    transfer_gap: Mapping[str, float] | None = None  # of each metric; None where there is none
    dev: Mapping[str, Any] | None = None  # development scores of the model, {"languages", "mean"}
    selection: Mapping[str, Any] | None = None  # the content of selection.json
    mixed: Mapping[str, Any] | None = None  # both texts in one language, or in two: {"within", "across", "cells"}
    trained_on: Sequence[str] = ()  # languages of the training text, the source first
    training: Mapping[str, Any] = field(default_factory=dict)  # steps, examples, where the model is
    details: Mapping[str, Any] = field(default_factory=dict)  # what a kind of task has alone: the vectors of retrieval
    outcomes: Any = field(default=None, compare=False, repr=False)  # question by question; not in scores.json

    @classmethod
    def over(cls, task: str, languages: ByLanguage, source: str, tuned: Path | None = None, **others: Any) -> Self:
        """From the scores of each language: means, transfer gap, and how the step of a `tuned` model was chosen."""
        mean, gaps = mean_over(languages), None
        if source in languages and len(languages) > 1:
            gaps = {name: transfer_gap({code: row[name] for code, row in languages.items()}, source) for name in mean}
        if tuned:
            others |= {"dev": selection.development(tuned), "selection": selection.read(tuned)}
        return cls(task=task, languages=languages, mean=mean, transfer_gap=gaps, **others)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as scores.json holds them: `details` stand beside the others."""
        names = ("task", "languages", "mean", "transfer_gap", "counts", "test_set", "dev", "selection", "mixed")
        plain = {name: getattr(self, name) for name in names}
        return plain | dict(self.details) | {"training": dict(self.training), "trained_on": list(self.trained_on)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], where: str = "scores.json") -> Self:
        """Read what `to_dict` gave, today or before; InputError if it is something else."""
        known = set(cls.__dataclass_fields__) - {"details", "outcomes"}
        needed = ("task", "languages", "mean", "counts", "test_set")
        if missing := [name for name in needed if not values.get(name)]:
            raise InputError(f"{where} has no {', '.join(missing)}: measure again")
        outside.check(dict(values), _Said, where, "measure again")
        details = {name: value for name, value in values.items() if name not in known}
        return cls(**{name: value for name, value in values.items() if name in known}, details=details)


class Fact(NamedTuple):
    """How something was done here, and how the paper did it; `same` is None where that is nothing to compare."""

    what: str
    ours: str
    paper: str = ""
    same: bool | None = None


class Preset(NamedTuple):
    """A well-known set of a task: the published table beside it, and settings that are its own."""

    table: str = "none"
    settings: Mapping[str, Any] = MappingProxyType({})


class Task(Generic[Settings]):
    """One kind of task; what most tasks have in common is the default."""

    name: ClassVar[str]
    settings: type[Settings]
    metrics: ClassVar[tuple[str, ...]]  # the first is the main one: of figures, of the choice of a grid point
    unit: ClassVar[str] = "questions"  # what is counted
    order: ClassVar[Sequence[str]] = ()  # languages as the paper's table has them
    tables: ClassVar[tuple[str, ...]] = ()  # published numbers that may stand beside ours, as a suite names them
    presets: ClassVar[Mapping[str, Preset]] = {}  # name on the command line of `evaluate` -> how settings begin
    head: ClassVar[Head | None] = None  # what stands on the encoder; None: the encoder is measured as it is
    roles: ClassVar[tuple[str, ...]] = ("data",)  # the fields of the settings that say where data are
    only_tested: ClassVar[tuple[str, ...]] = ()  # the fields of the settings that training does not depend on

    @property
    def trained(self) -> bool:
        """Whether an encoder is fine-tuned for it."""
        return self.head is not None

    def data(self, settings: Settings) -> dict[str, list[str]]:
        """Every place of data that settings name, by its role."""
        named = {role: getattr(settings, role) for role in self.roles}
        return {role: [found] if isinstance(found, str) else list(found or ()) for role, found in named.items()}

    def tests(self, settings: Settings) -> list[Path]:
        """The files that hold what is asked, on this machine; no training text."""
        raise NotImplementedError

    def localise(self, settings: Settings, fetch: Fetch) -> Settings:
        """The same settings with every place of data on this machine."""
        named = {role: getattr(settings, role) for role in self.roles if getattr(settings, role) is not None}
        local = {role: fetch(at) if isinstance(at, str) else tuple(map(fetch, at)) for role, at in named.items()}
        return settings.model_copy(update=local)

    def without_data(self, settings: Settings) -> Settings:
        """Settings as they belong to a key: where the data lie does not matter, digests say what they are."""
        return _emptied(settings, self.roles)

    def check_plan(self, settings: Settings, grid_points: int, where: str) -> None:
        """Refuse settings that a suite cannot measure, before it looks at data: ConfigError that names `where`."""

    def check(self, settings: Settings, chosen: bool) -> None:
        """Read all sets once, also those of development if something is chosen by them; paths are local.

        Raises:
            InputError: a set is missing, not readable, or lacks what the task needs of it.
        """
        raise NotImplementedError

    def for_testing(self, data: str) -> dict[str, Any]:
        """Settings, as plain values, that measure a model on test sets, whoever has trained it."""
        return {role: data for role in self.roles}

    def training_part(self, settings: Settings) -> tuple[Settings, dict[str, list[str]]]:
        """What a fine-tuned model depends on, and its data by role: not on how it is tested afterwards."""
        data = {role: found for role, found in self.data(settings).items() if role not in self.only_tested}
        return _emptied(settings, self.only_tested), data

    def depends_on_workers(self, settings: Settings, encoder: Path) -> bool:
        """Whether training draws dropout by worker: in the encoder, on tokens, and in models of Hugging Face."""
        from infoxlm_core.model.huggingface import pretrained

        if self.head is None:
            return False
        drawn_outside = not self.head.by_token and pretrained.is_ours(pretrained.read_config(encoder))
        dropout, head_dropout = (getattr(settings, name, 0.0) for name in ("dropout", "head_dropout"))
        return dropout > 0 or (head_dropout > 0 and not drawn_outside)

    def training(self, settings: Settings, encoder: Path, corpus: Path | None) -> "Training":
        """Read and tokenise what an encoder shall learn: of a prepared corpus if the settings name no data.

        Raises:
            InputError: a set is missing or not usable.
            CorpusTooSmall: there is no text to train on.
        """
        raise NotImplementedError

    def training_languages(self, settings: Settings) -> list[str]:
        """Languages of the training text, the source first; data are on this machine."""
        return self.declared_languages(settings)

    def declared_languages(self, settings: Settings) -> list[str]:
        """Those of `training_languages` that settings say without a look at the data."""
        return list(dict.fromkeys(map(languages.two_letters, getattr(settings, "train_languages", ()))))

    def suits(self, model: Path) -> bool:  # noqa: ARG002 - for those that ask for something
        """Whether a model has what the task needs of it."""
        return True

    def measure(self, settings: Settings, model: Path, output: Path) -> Scores:
        """Measure an encoder, or a model that was fine-tuned from one; `output` gets the predictions.

        Raises:
            InputError: the model or a set is missing or not usable.
        """
        raise NotImplementedError

    def describe(self, settings: Settings, table: str) -> list[Fact]:  # noqa: ARG002 - for those that have some
        """What else than test set and training decides whether numbers may be compared with a published table."""
        return []

    def sort(self, codes: Iterable[str]) -> list[str]:
        """Languages in the paper's order, the others after them by name."""
        ranks = {code: rank for rank, code in enumerate(self.order)}
        return sorted(codes, key=lambda code: (ranks.get(languages.two_letters(code), len(ranks)), code))

    def name_metrics(self, scores: Scores, settings: Settings, prefix: str) -> dict[str, float]:  # noqa: ARG002
        """Scores as metrics of a tracking server: `PREFIX/mean`, `PREFIX/en`; of several metrics with their names.

        What was not measured, or is no number, is left out.
        """
        flat: dict[str, Any] = self.name_common(scores, prefix)
        for metric in self.metrics:
            under = prefix if len(self.metrics) == 1 else f"{prefix}/{metric}"
            flat[f"{under}/mean" if len(self.metrics) == 1 else under] = scores.mean[metric]
            flat |= {f"{under}/{code}": cell[metric] for code, cell in scores.languages.items()}
        return finite(flat)

    def name_common(self, scores: Scores, prefix: str) -> dict[str, Any]:
        """The metrics that all tasks call alike."""
        flat = {f"{prefix}/dev": (scores.dev or {}).get("mean")}
        flat[f"{prefix}/transfer_gap"] = (scores.transfer_gap or {}).get(self.metrics[0])
        return flat | {f"{prefix}/{name}": (scores.mixed or {}).get(name) for name in ("within", "across")}


def finite(values: Mapping[str, Any]) -> dict[str, float]:
    """The values that are numbers."""
    return {name: float(value) for name, value in values.items() if value is not None and math.isfinite(value)}


def _emptied(settings: Settings, fields: Iterable[str]) -> Settings:
    return settings.model_copy(update={name: type(getattr(settings, name))() for name in fields})


def load_chosen(tuned: Path, head: Head, languages: Iterable[str]) -> Iterator[tuple[Path, "TaskModel", list[str]]]:
    """The models that were chosen, one after the other, each with its directory and the languages that it is for."""
    from infoxlm_core.model import task_models

    place_of, codes = selection.directories(tuned), list(dict.fromkeys(languages))
    for place in dict.fromkeys(map(place_of, codes)):
        yield place, task_models.load(place, head), [code for code in codes if place_of(code) == place]


def mean_over(languages: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Of each score the unweighted mean over the languages that have it; None where none has."""
    first = next(iter(languages.values()))
    known = {name: [row[name] for row in languages.values() if row[name] is not None] for name in first}
    return {name: fmean(values) if values else None for name, values in known.items()}


def transfer_gap(scores: Mapping[str, float], source: str = "en") -> float:
    """Score of the source language minus the mean of the others: what is lost on the way (lower is better)."""
    return scores[source] - fmean(score for language, score in scores.items() if language != source)


def mix(cells: Mapping[tuple[str, str], Mapping[str, float]], metric: str) -> dict[str, Any]:
    """`Scores.mixed` of scores by (language of premise or paragraph, language of hypothesis or question)."""
    within, across = within_and_across({cell: scores[metric] for cell, scores in cells.items()})
    return {"within": within, "across": across, "cells": {"-".join(cell): scores for cell, scores in cells.items()}}


def within_and_across(cells: Mapping[tuple[str, str], float]) -> tuple[float, float]:
    """Means over languages: of the cell where both texts are in it; of those where one of two is (paper, section 6).

    Cells are (language of one text, of the other) -> score; some may be missing.
    """
    languages = dict.fromkeys(first for first, second in cells if first == second)
    others = [
        [score for pair, score in cells.items() if language in pair and pair[0] != pair[1]] for language in languages
    ]
    within = fmean(cells[language, language] for language in languages)
    return within, fmean(fmean(scores) for scores in others if scores)
