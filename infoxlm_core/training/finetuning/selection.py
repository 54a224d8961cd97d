"""Choose which weights of a fine-tuning are exported, and find them in a fine-tuned model.

tuned/                 the model chosen by the rule; for `each`, the best on average, for languages without a dev set
tuned/steps/4000/      only for `each`: the model for the languages whose score was best after 4000 steps
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
ALL = "*"  # every language that has no step of its own


@dataclass(frozen=True)
class DevScores:
    """Development scores after some optimizer steps, by language, from 0 to 1."""

    step: int
    languages: Mapping[str, float]

    @property
    def mean(self) -> float:
        """The unweighted mean over languages."""
        return fmean(self.languages.values())


def check_dev_languages(rule: str, source_language: str, dev_languages: Sequence[str]) -> None:
    """Raise InputError if a rule needs a development set in a language that has none."""
    requirement = ""
    if rule == "source" and source_language not in dev_languages:
        requirement = f"a development set in {source_language}"
    elif rule != "last" and not dev_languages:
        requirement = "development sets"
    if requirement:
        available = ", ".join(dev_languages) or "none"
        raise InputError(f"selection.rule {rule} needs {requirement}; available: {available}")


def choose(evaluations: Sequence[DevScores], rule: str, source_language: str, last_step: int) -> dict[str, int]:
    """Return the step whose weights are exported for each language. Among equal scores, the earliest step wins.

    Args:
        evaluations: development scores of the run, in the order of steps.
        rule: last, source, joint or each.
        source_language: the language of the training text.
        last_step: steps of the training so far.

    Returns:
        {"*": step}, and for `each` also a step for every language.
    """
    if rule == "last":
        return {ALL: last_step}
    if rule == "source":
        return {ALL: max(evaluations, key=lambda scores: scores.languages[source_language]).step}
    chosen = {ALL: max(evaluations, key=lambda scores: scores.mean).step}
    if rule == "each":
        for language in evaluations[0].languages:
            chosen[language] = max(evaluations, key=lambda scores: scores.languages[language]).step
    return chosen


def write(directory: Path, rule: str, evaluations: Sequence[DevScores], chosen: Mapping[str, int]) -> None:
    """Write selection.json: the rule, the scores of all evaluations, and the chosen steps."""
    looks = []
    for scores in evaluations:
        looks.append({"step": scores.step, "languages": dict(scores.languages), "mean": scores.mean})
    content = {"rule": rule, "looks": looks, "chosen": dict(chosen)}
    manifests.write_atomically(directory / FILE, json.dumps(content, indent=1) + "\n")


def read(tuned: Path) -> dict[str, Any] | None:
    """Return the content of selection.json, or None for a model that another program fine-tuned."""
    path = tuned / FILE
    if not path.is_file():
        return None
    content: dict[str, Any] = user_files.read_json(path, dict[str, Any], "fine-tune again, or remove it")
    return content


def directory_of(tuned: Path, chosen: Mapping[str, int], step: int) -> Path:
    """Return the directory of the model after a chosen step."""
    return tuned if step == chosen[ALL] else tuned / "steps" / str(step)


def find_directory(tuned: Path, language: str) -> Path:
    """Return the directory of the model that was chosen for a language."""
    content = read(tuned)
    chosen: dict[str, int] = content["chosen"] if content else {ALL: 0}
    return directory_of(tuned, chosen, chosen.get(language, chosen[ALL]))


def read_development_scores(tuned: Path) -> dict[str, Any] | None:
    """Return the development scores of a fine-tuned model as {"languages", "mean"}, or None if it was not evaluated."""
    content = read(tuned)
    if not content or not content["looks"]:
        return None
    chosen_steps = content["chosen"]  # by language
    scores_by_step = {evaluation["step"]: evaluation["languages"] for evaluation in content["looks"]}
    scores_by_language = {}
    for language in scores_by_step[chosen_steps[ALL]]:
        step = chosen_steps.get(language, chosen_steps[ALL])
        scores_by_language[language] = scores_by_step[step][language]
    return {"languages": scores_by_language, "mean": fmean(scores_by_language.values())}
