"""The interface of a task: settings, data, training, measurement, and the names of its metrics.

Config files are read together with this module, so it must not import torch, pandas or transformers. A subclass imports
them inside the methods that need them. See docs/extending.md for how to add a task.
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
"""Name of a split in files and columns -> its name in this project."""


class Fact(NamedTuple):
    """One aspect of a protocol, here and in the paper."""

    what: str
    ours: str
    paper: str = ""


class Preset(NamedTuple):
    """A well-known test set: the published table that a report shows beside our scores, and the settings it needs."""

    table: str = "none"
    settings: Mapping[str, Any] = MappingProxyType({})


class Task(Generic[Settings]):
    """A kind of task. Subclasses override the defaults that do not fit.

    By default, the functions `check`, `list_test_files`, `read_training` and `measure` are those of the module `run` in
    the folder of the task.
    """

    name: ClassVar[str]
    settings: type[Settings]
    metrics: ClassVar[tuple[str, ...]]  # figures show the first one, which also chooses among grid points
    unit: ClassVar[str] = "questions"  # what `counts` of the scores count
    order: ClassVar[Sequence[str]] = ()  # language codes in the order of the paper's table
    tables: ClassVar[tuple[str, ...]] = ()  # names of published tables that a suite may show beside our scores
    presets: ClassVar[Mapping[str, Preset]] = {}  # by name on the command line of `evaluate`
    head: ClassVar[Head | None] = None  # the head to fine-tune; None if the encoder is measured as it is
    data_fields: ClassVar[tuple[str, ...]] = ("data",)  # fields of the settings that contain paths of data
    test_only_fields: ClassVar[tuple[str, ...]] = ()  # fields that change tests but not the fine-tuned model

    @property
    def is_finetuned(self) -> bool:
        """Whether an encoder is fine-tuned for the task."""
        return self.head is not None

    def has_training_text(self, settings: Settings, corpus_files: Collection[str]) -> bool:  # noqa: ARG002
        """Return whether there is text to fine-tune on.

        Args:
            settings: settings of the task.
            corpus_files: names of the files of the prepared corpus of the run.
        """
        return True

    def list_data(self, settings: Settings) -> dict[str, list[str]]:
        """Return the paths in each data field of the settings, by the name of the field."""
        paths_by_field: dict[str, list[str]] = {}
        for name in self.data_fields:
            value = getattr(settings, name)
            if value is None:
                value = ()
            elif isinstance(value, str):
                value = (value,)
            # Fields of later versions are left out if they are empty, so that digests of earlier results still match.
            if value or name not in settings.added_later:
                paths_by_field[name] = list(value)
        return paths_by_field

    @property
    def run_module(self) -> Any:
        """The module `run` in the task's folder. It is imported when it is used, because it imports torch."""
        return importlib.import_module(f"infoxlm_core.tasks.{self.name}.run")

    def list_test_files(self, settings: Settings) -> list[Path]:
        """Return the local files with test questions, without files of training text."""
        return self.run_module.list_test_files(settings)

    def localise(self, settings: Settings, fetch: Fetch) -> Settings:
        """Return the settings with local paths. `fetch` maps each path or URI to a path on this machine."""
        local_values: dict[str, Any] = {}
        for name in self.data_fields:
            value = getattr(settings, name)
            if isinstance(value, str):
                local_values[name] = fetch(value)
            elif value is not None:
                local_values[name] = tuple(fetch(path) for path in value)
        return settings.model_copy(update=local_values)

    def without_data(self, settings: Settings) -> Settings:
        """Return the settings without paths, for artifact keys, which identify data by digests."""
        return _clear_fields(settings, self.data_fields)

    def check_plan(self, settings: Settings, grid_points: int, where: str) -> None:
        """Raise ConfigError if a suite cannot measure these settings. No data are read.

        Args:
            settings: settings of the task.
            grid_points: number of grid points that the suite tries.
            where: location of the settings in the suite, for the message.
        """

    def check(self, settings: Settings, has_grid: bool) -> None:
        """Read all training, development and test sets once, so that a mistake is found before hours of training.

        Args:
            settings: settings with local paths.
            has_grid: whether the suite tries several grid points, which are compared on development sets.

        Raises:
            InputError: a set is missing, not readable or incomplete.
        """
        self.run_module.check(settings, has_grid)

    def build_test_settings(self, data: str) -> dict[str, Any]:
        """Return settings, as plain values, that measure any fine-tuned model on the test sets at `data`."""
        return {name: data for name in self.data_fields if name not in self.test_only_fields}

    def select_training_inputs(self, settings: Settings) -> tuple[Settings, dict[str, list[str]]]:
        """Return the settings and the data that a fine-tuned model depends on, without those for tests.

        The data are paths by the name of their field.
        """
        data = self.list_data(settings)
        training_data = {name: paths for name, paths in data.items() if name not in self.test_only_fields}
        return _clear_fields(settings, self.test_only_fields), training_data

    def depends_on_workers(self, settings: Settings, encoder: Path) -> bool:
        """Return whether the trained weights depend on the number of workers.

        They do if each worker draws dropout masks for its own tokens. This is the case in the encoder, in heads that
        classify tokens, and in models that run in Hugging Face's code.
        """
        from infoxlm_core.model.huggingface import pretrained

        if self.head is None:
            return False
        head_draws_by_example = not self.head.is_per_token and pretrained.can_run_packed(
            pretrained.read_config(encoder)
        )
        encoder_dropout = getattr(settings, "dropout", 0.0)
        head_dropout = getattr(settings, "head_dropout", 0.0)
        return encoder_dropout > 0 or (head_dropout > 0 and not head_draws_by_example)

    def read_training(self, settings: Settings, encoder: Path, corpus: Path | None) -> "Training":
        """Read and tokenise the training text. `corpus` is a prepared corpus for settings that name no data.

        Raises:
            InputError: a set is missing or not usable.
            CorpusTooSmall: there is no text to train on.
        """
        return self.run_module.read_training(settings, encoder, corpus)

    def list_training_languages(self, settings: Settings) -> list[str]:
        """Return the languages of the training text, the source first. All paths are local."""
        return self.list_declared_languages(settings)

    def list_declared_languages(self, settings: Settings) -> list[str]:
        """Return the languages of the training text that the settings name, or none if only the data shows them."""
        codes = [languages.two_letters(code) for code in getattr(settings, "train_languages", ())]
        return list(dict.fromkeys(codes))  # without duplicates, in the same order

    def measure(self, settings: Settings, model: Path, output: Path) -> Scores:
        """Measure an encoder, or a fine-tuned model, and write its predictions to `output`.

        Raises:
            InputError: the model or a set is missing or not usable.
        """
        return self.run_module.measure(settings, model, output)

    def measure_held_out(self, questions: "Questions", model: Path, config: "EvaluationConfig") -> Scores | None:
        """Measure a model on the held-out text of a prepared corpus. Return None if the model cannot do the task.

        Only the tasks of the stage `evaluate` implement it.
        """
        raise NotImplementedError

    def describe(self, settings: Settings, table: str) -> dict[str, str]:  # noqa: ARG002
        """Return settings that decide whether scores are comparable with a published table: name -> value."""
        return {}

    def name_metrics(self, scores: Scores, settings: Any, prefix: str) -> dict[str, float]:  # noqa: ARG002
        """Return the scores as metrics for the tracking server, without those that are missing or not finite.

        The names are `PREFIX/mean` and `PREFIX/en`. If a task has several metrics, its names contain the metric:
        `PREFIX/f1` (the mean) and `PREFIX/f1/en`.

        Args:
            scores: the scores.
            settings: the settings of `measure`, or the `Questions` of an evaluation.
            prefix: start of each name.
        """
        values: dict[str, Any] = self._name_shared_metrics(scores, prefix)
        has_one_metric = len(self.metrics) == 1
        for metric in self.metrics:
            metric_prefix = prefix if has_one_metric else f"{prefix}/{metric}"
            mean_name = f"{prefix}/mean" if has_one_metric else metric_prefix
            values[mean_name] = scores.mean[metric]
            for language, language_scores in scores.languages.items():
                values[f"{metric_prefix}/{language}"] = language_scores[metric]
        return select_finite(values)

    def _name_shared_metrics(self, scores: Scores, prefix: str) -> dict[str, Any]:
        """Return the metrics that any task may have: development score, transfer gap, and means of mixed languages."""
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
    """Return the settings with each of the fields set to the empty value of its type, such as () or ""."""
    empty_values = {name: type(getattr(settings, name))() for name in fields}
    return settings.model_copy(update=empty_values)


class SelectedModel(NamedTuple):
    """A fine-tuned model, and the languages that it was selected for."""

    directory: Path
    model: "TaskModel"
    languages: list[str]


def load_selected_models(models: Path, head: Head, languages: Iterable[str]) -> Iterator[SelectedModel]:
    """Load the fine-tuned models that were selected for the languages, one after the other to save memory.

    Args:
        models: directory of the fine-tuned models.
        head: the head of the models.
        languages: each model is loaded once for all of these languages that it was selected for.
    """
    from infoxlm_core.model import task_models

    languages_by_directory: dict[Path, list[str]] = {}
    for language in dict.fromkeys(languages):  # without duplicates
        directory = selection.find_directory(models, language)
        languages_by_directory.setdefault(directory, []).append(language)
    for directory, model_languages in languages_by_directory.items():
        yield SelectedModel(directory, task_models.load(directory, head), model_languages)
