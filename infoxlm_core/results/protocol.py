"""How a task was measured, beside how the InfoXLM paper did it: only what was done alike may be compared.

Source: Chi et al. 2020, arXiv 2007.07834v1 (fine-tuning grids); the sets' own papers (sizes); see published.yaml.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from infoxlm_core import languages
from infoxlm_core.results.published import protocols, tables
from infoxlm_core.results.suite_config import SuiteTaskConfig
from infoxlm_core.tasks import task_of
from infoxlm_core.tasks.scores import Scores
from infoxlm_core.tasks.task import Fact

XNLI_TRAINING_PAIRS = 392_702
SQUAD_QUESTIONS = 87_599  # of the training set of SQuAD v1.1; a long paragraph gives a question several examples
SQUAD_EXAMPLES = 1.2 * SQUAD_QUESTIONS  # windows of 384 tokens are some 3 % more; more than this are of further text
_RULES = {"last": "1, last step", "source": "1, dev of the source", "joint": "1, joint dev", "each": "N, own dev"}
_SEEDS = 5


def describe_rule(selection: Mapping[str, Any] | None, chosen_by: Collection[str] = ()) -> str:
    """#M: how many checkpoints there are, what chose them, and which languages' development sets chose among a grid."""
    if not selection:
        return "–"
    text = _RULES[selection["rule"]]
    if not chosen_by or selection["rule"] in ("source", "joint"):  # which say it
        return text
    return f"{text}; grid by {'joint dev' if len(chosen_by) > 1 else f'dev of {next(iter(chosen_by))}'}"


def name_setting(measure: SuiteTaskConfig, finished: Iterable[Scores]) -> str:
    """Which of the paper's training sets these are: `zero-shot` (English), `translate-train-all` (all 15), `other`."""
    trained_on = set(_list_trained(measure, finished))
    if trained_on <= {"en"}:
        return "zero-shot"
    return "translate-train-all" if trained_on == set(tables()["xnli"].columns) else "other"


def _list_trained(measure: SuiteTaskConfig, finished: Iterable[Scores]) -> list[str]:
    """Languages of the training text; where settings do not say them, only finished trials know."""
    declared = task_of(measure.settings).declared_languages(measure.settings)
    return declared or list(dict.fromkeys(language for scores in finished for language in scores.trained_on))


def compare_protocol(measure: SuiteTaskConfig, counts: Mapping[str, int], finished: Sequence[Scores]) -> list[Fact]:
    """What decides whether numbers may be compared: test sets (what was asked by language), training, choice, seeds."""
    settings: Any = measure.settings  # the fields of a training are read of trained tasks alone
    task, paper = task_of(settings), protocols().get(measure.table, {})
    asked = {languages.two_letters(code): number for code, number in counts.items()}
    facts = [_compare_test(measure.table, task.unit, asked), *task.describe(settings, measure.table)]
    if not task.trained:
        return facts
    facts += [_compare_languages(measure, finished), _compare_training(measure, finished)]
    rates = set(measure.grid.get("optimization.learning_rate", (settings.optimization.learning_rate,)))
    known = paper.get("rates", ())
    grids = "; large models: ".join(map(join, known))
    facts.append(_fact("learning rates tried", join(rates), grids, any(rates == set(row) for row in known)))
    rule, wanted = settings.selection.rule, paper.get("rule")
    grid = any(len(values) > 1 for values in measure.grid.values())
    judged = {code for scores in finished if grid and scores.dev for code in scores.dev["languages"]}
    ours = describe_rule({"rule": rule}, judged)
    facts.append(_fact("checkpoint (#M)", ours, _RULES[wanted] if wanted else None, rule == wanted))
    seeds = len(measure.seeds)
    facts.append(_fact("seeds", str(seeds), str(_SEEDS) if wanted else None, seeds == _SEEDS))
    return facts


def find_differences(facts: Iterable[Fact]) -> list[str]:
    """What was not done as the paper did it."""
    return [fact.what for fact in facts if fact.same is False]


def join(numbers: Iterable[Any]) -> str:
    """`5e-6, 1e-5`: numbers of a grid, smallest first."""
    return ", ".join(f"{float(number):g}".replace("e-0", "e-") for number in sorted(numbers))


def _fact(what: str, ours: str, paper: str | None, same: bool | None) -> Fact:
    return Fact(what, ours, paper or "–", same if paper else None)


def _compare_test(table: str, unit: str, counts: Mapping[str, int]) -> Fact:
    ours, paper = _describe_counts(counts, unit), protocols().get(table)
    if paper is None:
        return _fact("test set", ours, None, None)
    if table == "tatoeba":
        whole = any(set(group) <= set(counts) for group in (languages.COVERED, languages.UNCOVERED))
        same = whole and all(paper["test"].get(code) in (None, n) for code, n in counts.items())
        return _fact("test set", ours, "1,000 pairs in each of 14 and 22 languages; fewer in eight of them", same)
    if counts and counts.items() <= paper["dev"].items():
        ours += ": so many have its development sets"
    return _fact("test set", ours, _describe_counts(paper["test"], unit), counts == paper["test"])


def _describe_counts(counts: Mapping[str, int], unit: str) -> str:
    if not counts:
        return "nothing is finished"
    low, high = min(counts.values()), max(counts.values())
    if len(counts) == 1:
        return f"{low:,} {unit} in {next(iter(counts))}"
    if low == high:
        return f"{low:,} {unit} in each of {len(counts)} languages"
    return f"{low:,} to {high:,} {unit} in each of {len(counts)} languages"


def _compare_languages(measure: SuiteTaskConfig, finished: Sequence[Scores]) -> Fact:
    """A table has rows that were trained on English, XNLI's also such that were trained on all its languages."""
    setting, ours = name_setting(measure, finished), ", ".join(_list_trained(measure, finished)) or "not known"
    known = protocols().get(measure.table, {}).get("settings", {})
    return _fact("training languages", ours, "; ".join(known.values()), setting in known)


def _compare_training(measure: SuiteTaskConfig, finished: Sequence[Scores]) -> Fact:
    """How long was trained, and on how much: a training that is not of the paper's size is not the paper's."""
    settings: Any = measure.settings  # of a task that is trained
    batches = measure.grid.get("batch_size", (settings.batch_size,))
    passes = measure.grid.get("epochs", (settings.epochs,) if settings.epochs else ())
    known = [scores.training for scores in finished if scores.training]
    examples = max((int(training["examples"]) for training in known), default=0)
    long = f"{join(passes)} epochs" if passes else f"{settings.optimization.steps:,} steps"
    ours = long + f" of {examples:,} examples" * bool(examples) + f", batches of {join(batches)}"
    if measure.table == "xnli":
        number = len(_list_trained(measure, finished))
        wanted = XNLI_TRAINING_PAIRS * number
        sets = f" in each of {number} languages" if number > 1 else ""
        paper = f"10 epochs of {XNLI_TRAINING_PAIRS:,} pairs{sets}, batches of 32"
        seen = [training["steps"] * settings.batch_size / wanted for training in known]  # epochs of the paper's set
        return _fact("training", ours, paper, _near(examples, wanted) and all(_near(times, 10) for times in seen))
    if measure.table == "mlqa":
        paper = f"2, 3, 4 epochs of SQuAD v1.1 ({SQUAD_QUESTIONS:,} questions), batches of 16, 32 (large: 32)"
        one = SQUAD_QUESTIONS <= examples <= SQUAD_EXAMPLES
        same = set(passes) == {2, 3, 4} and set(batches) <= {16, 32} and one
        return _fact("training", ours, paper, same)
    return _fact("training", ours, None, None)


def _near(found: float, wanted: float) -> bool:
    """A few rows may be left out."""
    return abs(found - wanted) <= 0.02 * wanted
