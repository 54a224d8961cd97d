"""Choose the weights that a fine-tuning run exports, and find them in a fine-tuned model.

tuned/                 the chosen model; for rule `each`, the best model on average, for languages without a dev set
tuned/steps/4000/      only for rule `each`: the model for languages with their best score after 4000 steps
tuned/selection.json   {"rule", "looks": [{"step", "languages", "mean"}], "chosen": {"*": step, language: step}}
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from infoxlm_core import manifests, user_files
from infoxlm_core.errors import InputError

FILE = "selection.json"
ALL = "*"  # key for all languages without their own step


@dataclass(frozen=True)
class DevScores:
    """Development scores (0 to 1) by language after a number of optimizer steps."""

    step: int
    languages: Mapping[str, float]

    @property
    def mean(self) -> float:
        """The unweighted mean over languages."""
        return fmean(self.languages.values())


def check_dev_languages(rule: str, source_language: str, dev_languages: Sequence[str]) -> None:
    """Raise InputError if there is no development set for the selection rule."""
    requirement = ""
    if rule == "source" and source_language not in dev_languages:
        requirement = f"a development set in {source_language}"
    elif rule != "last" and not dev_languages:
        requirement = "development sets"
    if requirement:
        available = ", ".join(dev_languages) or "none"
        raise InputError(f"selection.rule {rule} needs {requirement}; available: {available}")


def choose(evaluations: Sequence[DevScores], rule: str, source_language: str, last_step: int) -> dict[str, int]:
    """Choose the step whose weights are exported for each language. Among equal scores, the earliest step wins.

    Args:
        evaluations: development scores in the order of steps.
        rule: last, source, joint or each.
        source_language: language of the training text.
        last_step: number of steps so far.

    Returns:
        Mapping from language to step. Rule `each` has a step for every language, all other rules only for "*".
    """
    if rule == "last":
        return {ALL: last_step}
    if rule == "source":  # of equal scores, `max` returns the first, which is the earliest
        return {ALL: max(evaluations, key=lambda scores: scores.languages[source_language]).step}
    chosen = {ALL: max(evaluations, key=lambda scores: scores.mean).step}
    if rule == "each":
        for language in evaluations[0].languages:
            chosen[language] = max(evaluations, key=lambda scores: scores.languages[language]).step
    return chosen


def write(directory: Path, rule: str, evaluations: Sequence[DevScores], chosen: Mapping[str, int]) -> None:
    """Write selection.json: the rule, the scores of all evaluations, and the chosen steps."""
    looks = []  # the file's name for evaluations
    for scores in evaluations:
        looks.append({"step": scores.step, "languages": dict(scores.languages), "mean": scores.mean})
    content = {"rule": rule, "looks": looks, "chosen": dict(chosen)}
    manifests.write_atomically(directory / FILE, json.dumps(content, indent=1) + "\n")


def read(tuned: Path) -> dict[str, Any] | None:
    """Read selection.json. Return None for a model from another program."""
    path = tuned / FILE
    if not path.is_file():
        return None
    content: dict[str, Any] = user_files.read_json(path, dict[str, Any], "fine-tune again, or remove it")
    return content


def directory_of(tuned: Path, chosen: Mapping[str, int], step: int) -> Path:
    """Return the directory of the model from a chosen step."""
    return tuned if step == chosen[ALL] else tuned / "steps" / str(step)


def find_directory(tuned: Path, language: str) -> Path:
    """Return the directory of the model chosen for a language."""
    content = read(tuned)
    chosen: dict[str, int] = content["chosen"] if content else {ALL: 0}  # other programs export a single model
    return directory_of(tuned, chosen, chosen.get(language, chosen[ALL]))


def read_development_scores(tuned: Path) -> dict[str, Any] | None:
    """Return a fine-tuned model's development scores as {"languages", "mean"}, or None without evaluations."""
    content = read(tuned)
    if not content or not content["looks"]:  # the file's name for evaluations
        return None
    chosen_steps = content["chosen"]  # language -> step
    scores_by_step = {evaluation["step"]: evaluation["languages"] for evaluation in content["looks"]}
    scores_by_language = {}
    for language in scores_by_step[chosen_steps[ALL]]:
        step = chosen_steps.get(language, chosen_steps[ALL])
        scores_by_language[language] = scores_by_step[step][language]
    return {"languages": scores_by_language, "mean": fmean(scores_by_language.values())}
