"""Which weights of a fine-tuning are exported, and where: the rules, and the directories of a fine-tuned model.

tuned/                 the model of the rule (of `each`: the best on average, for languages without a development set)
tuned/steps/4000/      of `each`: the model of the languages that were best after 4000 steps
tuned/selection.json   {"rule", "looks": [{"step", "languages", "mean"}], "chosen": {"*": step, language: step}}
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from typing_extensions import TypedDict

from infoxlm_core import manifests, outside
from infoxlm_core.errors import DataCorrupt, InputError

FILE = "selection.json"
ALL = "*"  # every language that has no step of its own


class _Look(TypedDict):
    step: int
    languages: dict[str, float]
    mean: float


class Selection(TypedDict):
    """The content of selection.json."""

    rule: str
    looks: list[_Look]
    chosen: dict[str, int]


@dataclass(frozen=True)
class DevScores:
    """Development scores after some optimizer steps, by language, from 0 to 1."""

    step: int
    languages: Mapping[str, float]

    @property
    def mean(self) -> float:
        """Every language weighs the same."""
        return fmean(self.languages.values())


def check(rule: str, source: str, development: Sequence[str]) -> None:
    """Refuse a rule that asks for development sets (of these languages) that are not there: InputError."""
    if (rule != "last" and not development) or (rule == "source" and source not in development):
        wanted = f"a development set in {source}" if rule == "source" else "development sets"
        raise InputError(f"selection.rule {rule} needs {wanted}; there are {', '.join(development) or 'none'}")


def choose(evaluations: Sequence[DevScores], rule: str, source: str, last: int) -> dict[str, int]:
    """The step of each language by a rule of `SelectionConfig`; of equals the first: {"*": step}, and for `each` also a
    step for every language. `last` is how many steps the training has had so far."""
    if rule == "last":
        return {ALL: last}
    if rule == "source":
        return {ALL: max(evaluations, key=lambda one: one.languages[source]).step}
    chosen = {ALL: max(evaluations, key=lambda one: one.mean).step}
    if rule == "each":
        for language in evaluations[0].languages:
            chosen[language] = max(evaluations, key=lambda one: one.languages[language]).step
    return chosen


def check_alike(evaluations: Sequence[DevScores], where: object) -> None:
    """Refuse curves that are not those of one run: DataCorrupt, if not every evaluation was of the same languages."""
    if not _are_alike([one.languages for one in evaluations]):
        raise DataCorrupt(f"{where}: development scores of other languages than before: restore it, or train again")


def write(directory: Path, rule: str, evaluations: Sequence[DevScores], chosen: Mapping[str, int]) -> None:
    """Write selection.json."""
    rows = [{"step": one.step, "languages": dict(one.languages), "mean": one.mean} for one in evaluations]
    content = {"rule": rule, "looks": rows, "chosen": dict(chosen)}
    manifests.write_atomically(directory / FILE, json.dumps(content, indent=1) + "\n")


def read(tuned: Path) -> dict[str, Any] | None:
    """The content of selection.json; None for a model that was fine-tuned elsewhere."""
    path = tuned / FILE
    if not path.is_file():
        return None
    found: dict[str, Any] = outside.read_json(path, Selection, "fine-tune again, or give the model alone")
    chosen, steps = found["chosen"], {look["step"] for look in found["looks"]}
    if ALL not in chosen or (steps and not steps.issuperset(chosen.values())):
        raise InputError(f"{path}: a chosen step is not among its looks: fine-tune again, or give the model alone")
    if not _are_alike([look["languages"] for look in found["looks"]]):
        raise InputError(f"{path}: its looks differ in their languages: fine-tune again, or give the model alone")
    return found


def _are_alike(looks: Sequence[Mapping[str, float]]) -> bool:
    """Whether all looks were at the same languages, at one at least."""
    return all(looks) and len({frozenset(look) for look in looks}) <= 1


def directory_of(tuned: Path, chosen: Mapping[str, int], step: int) -> Path:
    """Where the model after a step that was chosen lies."""
    return tuned if step == chosen[ALL] else tuned / "steps" / str(step)


def directories(tuned: Path) -> Callable[[str], Path]:
    """Language -> directory of the model that was chosen for it."""
    chosen = (read(tuned) or {"chosen": {ALL: 0}})["chosen"]
    return lambda language: directory_of(tuned, chosen, chosen.get(language, chosen[ALL]))


def development(tuned: Path) -> dict[str, Any] | None:
    """Development scores at the chosen steps, {"languages", "mean"}: what a grid is chosen by; None without any."""
    found = read(tuned)
    if not found or not found["looks"]:
        return None
    scores, chosen = {one["step"]: one["languages"] for one in found["looks"]}, found["chosen"]
    names = scores[chosen[ALL]]
    languages = {name: scores[chosen.get(name, chosen[ALL])][name] for name in names}
    return {"languages": languages, "mean": fmean(languages.values())}
