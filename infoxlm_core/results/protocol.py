"""Describe how a task was measured, side by side with how the InfoXLM paper measured it.

Readers decide from it which numbers they may compare. The paper's protocol is in published.yaml.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from infoxlm_core.results import published
from infoxlm_core.results.suite_config import SuiteTaskConfig
from infoxlm_core.tasks import task_of
from infoxlm_core.tasks.scores import Scores
from infoxlm_core.tasks.task import Fact

# Selection rule -> number of checkpoints, and the development sets that chose them.
_RULES = {"last": "1, last step", "source": "1, dev of the source", "joint": "1, joint dev", "each": "N, own dev"}


def describe_rule(selection: Mapping[str, Any] | None, dev_languages: Collection[str] = ()) -> str:
    """Describe how checkpoints were chosen: their number (#M), and the development sets that decided.

    Args:
        selection: content of selection.json; None for a task that trains nothing.
        dev_languages: languages whose development sets chose among the points of a grid, if there was a grid.
    """
    if not selection:
        return "–"
    rule = selection["rule"]
    if not dev_languages or rule in ("source", "joint"):  # the same sets chose the grid point
        return _RULES[rule]
    chosen_by = "joint dev" if len(dev_languages) > 1 else f"dev of {next(iter(dev_languages))}"
    return f"{_RULES[rule]}; grid by {chosen_by}"


def name_setting(suite_task: SuiteTaskConfig, finished_scores: Iterable[Scores]) -> str:
    """Return the paper's name of how a task crosses languages, or `other`.

    zero-shot: trained on English · translate-train-all: trained on all languages of the table · translate-test: trained
    on English and tested on translations into English.
    """
    training_languages = set(_list_training_languages(suite_task, finished_scores))
    if training_languages <= {"en"}:
        return "translate-test" if getattr(suite_task.settings, "translated_test", ()) else "zero-shot"
    return "translate-train-all" if training_languages == set(task_of(suite_task.settings).order) else "other"


def _list_training_languages(suite_task: SuiteTaskConfig, finished_scores: Iterable[Scores]) -> list[str]:
    """Return the training languages that the settings declare, or else those of finished trials."""
    declared = task_of(suite_task.settings).list_declared_languages(suite_task.settings)
    return declared or list(dict.fromkeys(language for scores in finished_scores for language in scores.trained_on))


def compare_protocol(
    suite_task: SuiteTaskConfig, counts: Mapping[str, int], finished_scores: Sequence[Scores]
) -> list[Fact]:
    """Describe everything that decides whether our numbers compare with the paper's, beside the paper's choice.

    Args:
        suite_task: the task with its settings.
        counts: language -> number of questions.
        finished_scores: the scores of finished trials.
    """
    settings: Any = suite_task.settings  # the fields of a training run are read only for trained tasks
    task = task_of(settings)
    ours = {"test set": _describe_counts(counts, task.unit), **task.describe(settings, suite_task.table)}
    if task.trained:
        rates = suite_task.grid.get("optimization.learning_rate", (settings.optimization.learning_rate,))
        dev_languages: set[str] = set()  # languages whose development sets chose the grid point
        if any(len(values) > 1 for values in suite_task.grid.values()):
            for scores in finished_scores:
                dev_languages.update(scores.dev["languages"] if scores.dev else ())
        ours |= {
            "setting": name_setting(suite_task, finished_scores),
            "training languages": ", ".join(_list_training_languages(suite_task, finished_scores)) or "unknown",
            "training": _describe_training(suite_task, finished_scores),
            "learning rates tried": _format_sorted(rates),
            "checkpoint (#M)": describe_rule({"rule": settings.selection.rule}, dev_languages),
            "seeds": str(len(suite_task.seeds)),
        }
    paper = published.protocols().get(suite_task.table, {})
    return [Fact(aspect, description, paper.get(aspect, "")) for aspect, description in ours.items()]


def _describe_counts(counts: Mapping[str, int], unit: str) -> str:
    """Describe the size of a test set, such as `1,000 to 2,000 rows in each of 15 languages`."""
    if not counts:
        return "no trial has finished"
    fewest = min(counts.values())
    most = max(counts.values())
    amount = f"{fewest:,}" if fewest == most else f"{fewest:,} to {most:,}"
    if len(counts) == 1:
        (language,) = counts
        return f"{amount} {unit} in {language}"
    return f"{amount} {unit} in each of {len(counts)} languages"


def _describe_training(suite_task: SuiteTaskConfig, finished_scores: Sequence[Scores]) -> str:
    """Describe the length of the training, the number of examples and the batch sizes."""
    settings: Any = suite_task.settings
    description = f"{settings.optimization.steps:,} steps"
    if "epochs" in suite_task.grid:
        description = f"{_format_sorted(suite_task.grid['epochs'])} epochs"
    elif settings.epochs:
        description = f"{_format_sorted((settings.epochs,))} epochs"
    examples = max((int(scores.training["examples"]) for scores in finished_scores if scores.training), default=0)
    if examples:
        description += f" of {examples:,} examples"
    batch_sizes = suite_task.grid.get("batch_size", (settings.batch_size,))
    return f"{description}, batches of {_format_sorted(batch_sizes)}"


def _format_sorted(values: Iterable[Any]) -> str:
    """Return numbers as text, smallest first: `5e-6, 1e-5`."""
    return ", ".join(f"{float(value):g}".replace("e-0", "e-") for value in sorted(values))
