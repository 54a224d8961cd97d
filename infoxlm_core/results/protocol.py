"""Describe our protocol for a task beside the protocol of the InfoXLM paper.

Readers use the description to decide which scores are comparable. The paper's protocol is in published.yaml.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from infoxlm_core.results import published
from infoxlm_core.results.suite_config import SuiteTaskConfig
from infoxlm_core.tasks import task_of
from infoxlm_core.tasks.scores import Scores
from infoxlm_core.tasks.task import Fact

# Selection rule -> number of checkpoints, and the development sets used to choose them.
_RULES = {"last": "1, last step", "source": "1, dev of the source", "joint": "1, joint dev", "each": "N, own dev"}


def describe_rule(selection: Mapping[str, Any] | None, dev_languages: Collection[str] = ()) -> str:
    """Describe how checkpoints were chosen: their number and the development sets, such as `1, dev of the source`.

    Args:
        selection: content of selection.json; None for a task without training.
        dev_languages: languages of the development sets used to choose grid values; empty without a grid.
    """
    if not selection:
        return "–"
    rule = selection["rule"]
    uses_same_sets = rule in ("source", "joint")  # checkpoints and grid values are chosen on the same sets
    if not dev_languages or uses_same_sets:
        return _RULES[rule]
    chosen_by = "joint dev" if len(dev_languages) > 1 else f"dev of {next(iter(dev_languages))}"
    return f"{_RULES[rule]}; grid by {chosen_by}"


def name_setting(suite_task: SuiteTaskConfig, finished_scores: Iterable[Scores]) -> str:
    """Return the paper's name for a task's transfer between languages.

    Returns:
        `zero-shot` if the model is trained on English; `translate-test` if it is also tested on translations into
        English; `translate-train-all` if it is trained on all languages of the task; otherwise `other`.
    """
    training_languages = set(_list_training_languages(suite_task, finished_scores))
    task_languages = set(task_of(suite_task.settings).order)
    if training_languages <= {"en"}:  # empty if the settings declare none and no trial has finished
        is_test_translated = bool(getattr(suite_task.settings, "translated_test", ()))
        return "translate-test" if is_test_translated else "zero-shot"
    return "translate-train-all" if training_languages == task_languages else "other"


def _list_training_languages(suite_task: SuiteTaskConfig, finished_scores: Iterable[Scores]) -> list[str]:
    """Return the training languages declared in the settings. Without declaration, take those of finished trials."""
    declared_languages = task_of(suite_task.settings).list_declared_languages(suite_task.settings)
    if declared_languages:
        return declared_languages
    trained_languages: dict[str, None] = {}  # an ordered set
    for scores in finished_scores:
        trained_languages |= dict.fromkeys(scores.trained_on)
    return list(trained_languages)


def compare_protocol(
    suite_task: SuiteTaskConfig, counts: Mapping[str, int], finished_scores: Sequence[Scores]
) -> list[Fact]:
    """List the choices that influence a task's scores, ours beside those of the paper.

    Scores are comparable only as far as these choices agree.

    Args:
        suite_task: the task with its settings.
        counts: number of questions by language.
        finished_scores: scores of finished trials.
    """
    settings = suite_task.settings
    task = task_of(settings)
    ours = {"test set": _describe_counts(counts, task.unit), **task.describe(settings, suite_task.table)}
    if task.is_finetuned:
        ours |= _describe_fine_tuning(suite_task, finished_scores)
    paper = published.protocols().get(suite_task.table, {})
    return [Fact(aspect, description, paper.get(aspect, "")) for aspect, description in ours.items()]


def _describe_fine_tuning(suite_task: SuiteTaskConfig, finished_scores: Sequence[Scores]) -> dict[str, str]:
    """Describe the fine-tuning of a task: aspect -> choice."""
    settings: Any = suite_task.settings  # only settings of fine-tuned tasks have these fields
    learning_rates = suite_task.grid.get("optimization.learning_rate", (settings.optimization.learning_rate,))
    has_grid = any(len(values) > 1 for values in suite_task.grid.values())
    grid_dev_languages: set[str] = set()
    for scores in finished_scores:
        if has_grid and scores.dev:
            grid_dev_languages.update(scores.dev["languages"])
    return {
        "setting": name_setting(suite_task, finished_scores),
        "training languages": ", ".join(_list_training_languages(suite_task, finished_scores)) or "unknown",
        "training": _describe_training(suite_task, finished_scores),
        "learning rates tried": _format_sorted(learning_rates),
        "checkpoint (#M)": describe_rule({"rule": settings.selection.rule}, grid_dev_languages),  # the paper's term
        "seeds": str(len(suite_task.seeds)),
    }


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
    """Describe the training: its length, number of examples and batch sizes."""
    settings: Any = suite_task.settings
    if "epochs" in suite_task.grid:
        description = f"{_format_sorted(suite_task.grid['epochs'])} epochs"
    elif settings.epochs:
        description = f"{_format_sorted((settings.epochs,))} epochs"
    else:
        tried_steps = suite_task.grid.get("optimization.steps", (settings.optimization.steps,))
        description = " or ".join(f"{steps:,.0f} steps" for steps in sorted(tried_steps))
    examples = max((int(scores.training["examples"]) for scores in finished_scores if scores.training), default=0)
    if examples:
        description += f" of {examples:,} examples"
    batch_sizes = suite_task.grid.get("batch_size", (settings.batch_size,))
    return f"{description}, batches of {_format_sorted(batch_sizes)}"


def _format_sorted(values: Iterable[Any]) -> str:
    """Format numbers in ascending order: `5e-6, 1e-5`."""
    return ", ".join(f"{float(value):g}".replace("e-0", "e-") for value in sorted(values))
