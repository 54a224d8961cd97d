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


def name_setting(measure: SuiteTaskConfig, finished: Iterable[Scores]) -> str:
    """Return which of the paper's training sets was used: `zero-shot`, `translate-train-all` or `other`."""
    trained_on = set(_list_trained(measure, finished))
    if trained_on <= {"en"}:
        return "zero-shot"
    return "translate-train-all" if trained_on == set(published.tables()["xnli"].columns) else "other"


def _list_trained(measure: SuiteTaskConfig, finished: Iterable[Scores]) -> list[str]:
    """Return the training languages that the settings declare, or else those of finished trials."""
    declared = task_of(measure.settings).list_declared_languages(measure.settings)
    return declared or list(dict.fromkeys(language for scores in finished for language in scores.trained_on))


def compare_protocol(measure: SuiteTaskConfig, counts: Mapping[str, int], finished: Sequence[Scores]) -> list[Fact]:
    """Describe everything that decides whether our numbers compare with the paper's, beside the paper's choice.

    Args:
        measure: the task with its settings.
        counts: language -> number of questions.
        finished: scores of finished trials.
    """
    settings: Any = measure.settings  # the fields of a training are read only for trained tasks
    task = task_of(settings)
    ours = {"test set": _describe_counts(counts, task.unit), **task.describe(settings, measure.table)}
    if task.trained:
        rates = measure.grid.get("optimization.learning_rate", (settings.optimization.learning_rate,))
        has_grid = any(len(values) > 1 for values in measure.grid.values())
        dev_languages = {code for scores in finished if has_grid and scores.dev for code in scores.dev["languages"]}
        ours |= {
            "training languages": ", ".join(_list_trained(measure, finished)) or "unknown",
            "training": _describe_training(measure, finished),
            "learning rates tried": _join(rates),
            "checkpoint (#M)": describe_rule({"rule": settings.selection.rule}, dev_languages),
            "seeds": str(len(measure.seeds)),
        }
    paper = published.protocols().get(measure.table, {})
    return [Fact(what, text, paper.get(what, "")) for what, text in ours.items()]


def _describe_counts(counts: Mapping[str, int], unit: str) -> str:
    if not counts:
        return "no trial has finished"
    low, high = min(counts.values()), max(counts.values())
    numbers = f"{low:,}" if low == high else f"{low:,} to {high:,}"
    where = next(iter(counts)) if len(counts) == 1 else f"each of {len(counts)} languages"
    return f"{numbers} {unit} in {where}"


def _describe_training(measure: SuiteTaskConfig, finished: Sequence[Scores]) -> str:
    settings: Any = measure.settings
    epochs = measure.grid.get("epochs", (settings.epochs,) if settings.epochs else ())
    length = f"{_join(epochs)} epochs" if epochs else f"{settings.optimization.steps:,} steps"
    examples = max((int(scores.training["examples"]) for scores in finished if scores.training), default=0)
    if examples:
        length += f" of {examples:,} examples"
    return f"{length}, batches of {_join(measure.grid.get('batch_size', (settings.batch_size,)))}"


def _join(numbers: Iterable[Any]) -> str:
    """Return numbers as text, smallest first: `5e-6, 1e-5`."""
    return ", ".join(f"{float(number):g}".replace("e-0", "e-") for number in sorted(numbers))
