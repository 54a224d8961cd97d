"""The task interface: settings, data, training, measurement and metric names.

Reading a config file imports this module, so it must not import torch, pandas or transformers. Subclasses import these
packages inside methods. See docs/extending.md for how to add a task.
"""

import importlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Generic, NamedTuple, TypeVar

from infoxlm_core import languages
from infoxlm_core.config.base import StageConfig
from infoxlm_core.model.task_head import Head
from infoxlm_core.tasks.scores import Scores, select_finite
from infoxlm_core.training.finetuning import selection

if TYPE_CHECKING:
    from infoxlm_core.config import EvaluationConfig
    from infoxlm_core.model.task_models import TaskModel
    from infoxlm_core.tasks.questions import Questions
    from infoxlm_core.training.finetuning.task_learner import Training

Settings = TypeVar("Settings", bound=StageConfig)
Fetch = Callable[[str], str]  # a path or URI -> a path on this machine
SPLITS = {"train": "train", "dev": "dev", "valid": "dev", "validation": "dev", "test": "test"}
"""Mapping from a split's name in files and columns to its name in this project."""


class Fact(NamedTuple):
    """One aspect of an evaluation protocol, with our value and the paper's."""

    what: str
    ours: str
    paper: str = ""


class Preset(NamedTuple):
    """A well-known test set: its settings, and the published table that reports show next to our scores."""

    table: str = "none"
    settings: Mapping[str, Any] = MappingProxyType({})


class Task(Generic[Settings]):
    """Base class of all tasks.

    The methods `check`, `list_test_files`, `read_training` and `measure` call the function of the same name in the
    module `run` of the task's directory. Subclasses override defaults as needed.
    """

    name: ClassVar[str]
    settings: type[Settings]
    metrics: ClassVar[tuple[str, ...]]  # the first metric appears in figures and selects grid points
    unit: ClassVar[str] = "questions"  # unit of `Scores.counts`
    order: ClassVar[Sequence[str]] = ()  # language codes in the order of the InfoXLM paper's table
    tables: ClassVar[tuple[str, ...]] = ()  # names of published tables that a suite may show next to our scores
    presets: ClassVar[Mapping[str, Preset]] = {}  # presets by their name on the command line of `evaluate`
    head: ClassVar[Head | None] = None  # the head to fine-tune; None if the task needs no fine-tuning
    data_fields: ClassVar[tuple[str, ...]] = ("data",)  # settings fields with data paths
    test_only_fields: ClassVar[tuple[str, ...]] = ()  # settings fields that do not affect the fine-tuned model

    @property
    def is_finetuned(self) -> bool:
        """Whether the task fine-tunes the encoder."""
        return self.head is not None

    def has_training_text(self, settings: Settings, corpus_files: Collection[str]) -> bool:  # noqa: ARG002
        """Return whether there is text to fine-tune on. `corpus_files` are the file names of the prepared corpus."""
        return True

    def list_data(self, settings: Settings) -> dict[str, list[str]]:
        """Return a mapping from each data field's name to its paths."""
        paths_by_field: dict[str, list[str]] = {}
        for name in self.data_fields:
            value = getattr(settings, name)
            if value is None:
                value = ()
            elif isinstance(value, str):
                value = (value,)
            # Omit empty fields that were added in later versions, so that the digests of earlier results still match.
            if value or name not in settings.added_later:
                paths_by_field[name] = list(value)
        return paths_by_field

    @property
    def run_module(self) -> Any:
        """The module `run` in the task's directory. It is imported on first use, because it imports torch."""
        return importlib.import_module(f"infoxlm_core.tasks.{self.name}.run")

    def list_test_files(self, settings: Settings) -> list[Path]:
        """List the local files with test questions, without the training files."""
        return self.run_module.list_test_files(settings)

    def localise(self, settings: Settings, fetch: Fetch) -> Settings:
        """Return the settings with local paths. `fetch` maps a path or URI to a path on this machine."""
        local_values: dict[str, Any] = {}
        for name in self.data_fields:
            value = getattr(settings, name)
            if isinstance(value, str):
                local_values[name] = fetch(value)
            elif value is not None:
                local_values[name] = tuple(fetch(path) for path in value)
        return settings.model_copy(update=local_values)

    def without_data(self, settings: Settings) -> Settings:
        """Return the settings without data paths, for artifact keys that identify the data by digest."""
        return _clear_fields(settings, self.data_fields)

    def check_plan(self, settings: Settings, grid_points: int, where: str) -> None:
        """Raise ConfigError if a suite cannot measure these settings. Read no data.

        Args:
            settings: settings of the task.
            grid_points: number of grid points in the suite.
            where: location of the settings in the suite, for the message.
        """

    def check(self, settings: Settings, has_grid: bool) -> None:
        """Check all training, development and test sets, so that mistakes are found before hours of training.

        Args:
            settings: settings with local paths.
            has_grid: whether the suite has several grid points, and therefore needs development sets.

        Raises:
            InputError: a set is missing, not readable or incomplete.
        """
        self.run_module.check(settings, has_grid)

    def build_test_settings(self, data: str) -> dict[str, Any]:
        """Build settings, as plain values, for measuring any fine-tuned model on the test sets at `data`."""
        return {name: data for name in self.data_fields if name not in self.test_only_fields}

    def select_training_inputs(self, settings: Settings) -> tuple[Settings, dict[str, list[str]]]:
        """Select the settings and data that determine a fine-tuned model.

        Returns:
            The settings with empty test-only fields, and a mapping from each other data field's name to its paths.
        """
        data = self.list_data(settings)
        training_data = {name: paths for name, paths in data.items() if name not in self.test_only_fields}
        return _clear_fields(settings, self.test_only_fields), training_data

    def depends_on_workers(self, settings: Settings, encoder: Path) -> bool:
        """Return whether the trained weights depend on the number of workers.

        They do if each worker draws the dropout masks of its own tokens. The encoder and token-classification heads do
        so, and all heads of models that run in Hugging Face's code because they cannot run on packed batches.
        """
        from infoxlm_core.model.huggingface import pretrained

        if self.head is None:
            return False
        head_draws_by_token = self.head.is_per_token or not pretrained.can_run_packed(pretrained.read_config(encoder))
        encoder_dropout = getattr(settings, "dropout", 0.0)
        head_dropout = getattr(settings, "head_dropout", 0.0)
        return encoder_dropout > 0 or (head_dropout > 0 and head_draws_by_token)

    def read_training(self, settings: Settings, encoder: Path, corpus: Path | None) -> "Training":
        """Read and tokenise the training text. Settings without data use the prepared corpus `corpus`.

        Raises:
            InputError: a training or development set is missing or not usable.
            CorpusTooSmall: the training set has too little text.
        """
        return self.run_module.read_training(settings, encoder, corpus)

    def list_training_languages(self, settings: Settings) -> list[str]:
        """List the languages of the training text, the source language first. All paths must be local."""
        return self.list_declared_languages(settings)

    def list_declared_languages(self, settings: Settings) -> list[str]:
        """List the training languages in the settings. The list is empty if only the data show the languages."""
        codes = [languages.two_letters(code) for code in getattr(settings, "train_languages", ())]
        return list(dict.fromkeys(codes))  # removes duplicates and keeps the order

    def measure(self, settings: Settings, model: Path, output: Path) -> Scores:
        """Measure an encoder or a fine-tuned model, and write its predictions to `output`.

        Raises:
            InputError: the model or a test set is missing or not usable.
        """
        return self.run_module.measure(settings, model, output)

    def measure_held_out(self, questions: "Questions", model: Path, config: "EvaluationConfig") -> Scores | None:
        """Measure a model on a prepared corpus's held-out text. Return None if the model cannot do the task.

        Only tasks of the stage `evaluate` implement this method.
        """
        raise NotImplementedError

    def describe(self, settings: Settings, table: str) -> dict[str, str]:  # noqa: ARG002
        """Return the settings on which the comparability with a published table depends, as a mapping."""
        return {}

    def name_metrics(self, scores: Scores, settings: Any, prefix: str) -> dict[str, float]:  # noqa: ARG002
        """Return the scores by metric name for the tracking server, without missing and non-finite values.

        Names are `PREFIX/mean` and `PREFIX/en`. For a task with several metrics, the name also contains the metric:
        `PREFIX/f1` (the mean) and `PREFIX/f1/en`.

        Args:
            scores: the scores to name.
            settings: settings of `measure`, or the `Questions` of an evaluation; used by subclasses only.
            prefix: first part of every name.
        """
        values: dict[str, Any] = self._name_shared_metrics(scores, prefix)
        for metric in self.metrics:
            if len(self.metrics) == 1:
                metric_prefix, mean_name = prefix, f"{prefix}/mean"
            else:
                metric_prefix = mean_name = f"{prefix}/{metric}"
            values[mean_name] = scores.mean[metric]
            for language, language_scores in scores.languages.items():
                values[f"{metric_prefix}/{language}"] = language_scores[metric]
        return select_finite(values)

    def _name_shared_metrics(self, scores: Scores, prefix: str) -> dict[str, Any]:
        """Return the metrics of all tasks: development score, transfer gap, and means within and across languages."""
        values: dict[str, Any] = {}
        if scores.dev:
            values[f"{prefix}/dev"] = scores.dev.get("mean")
        if scores.transfer_gap:
            values[f"{prefix}/transfer_gap"] = scores.transfer_gap.get(self.metrics[0])
        if scores.mixed:
            values[f"{prefix}/within"] = scores.mixed.get("within")
            values[f"{prefix}/across"] = scores.mixed.get("across")
        return values


def _clear_fields(settings: Settings, fields: Iterable[str]) -> Settings:
    """Return the settings with each given field set to the empty value of its type, such as () or ""."""
    empty_values = {name: type(getattr(settings, name))() for name in fields}
    return settings.model_copy(update=empty_values)


class SelectedModel(NamedTuple):
    """A fine-tuned model and the languages for which it was selected."""

    directory: Path
    model: "TaskModel"
    languages: list[str]


def load_selected_models(models: Path, head: Head, languages: Iterable[str]) -> Iterator[SelectedModel]:
    """Yield the fine-tuned models selected for the languages, each loaded only when it is needed.

    Languages with the same selected model are yielded together.
    """
    from infoxlm_core.model import task_models

    languages_by_directory: dict[Path, list[str]] = {}
    for language in dict.fromkeys(languages):  # removes duplicates
        directory = selection.find_directory(models, language)
        languages_by_directory.setdefault(directory, []).append(language)
    for directory, model_languages in languages_by_directory.items():
        yield SelectedModel(directory, task_models.load(directory, head), model_languages)
