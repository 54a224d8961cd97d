"""What an evaluation found: models on the three tasks of a prepared corpus."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from infoxlm_core.tasks.task import Scores, finite


@dataclass(frozen=True)
class Evaluated:
    """One model."""

    encoder: Mapping[str, Any] = field(default_factory=dict)
    """Its sizes; empty of one of which only a classifier is known."""

    tasks: Mapping[str, Scores] = field(default_factory=dict)
    """`retrieval`, `perplexity`, `classification`: what it could be measured on."""

    curves: Mapping[str, Sequence[Sequence[float]]] = field(default_factory=dict)
    """Of its training: metric -> (step, value) points."""


@dataclass(frozen=True)
class Evaluation:
    """The model under test, and the floors to compare it with, on the same questions."""

    model: str
    pivot: str
    test_set: str
    pairs: Mapping[str, Mapping[str, int]]
    """Language -> pairs `held_out`, `drawn`, and with `no_overlap`."""

    models: Mapping[str, Evaluated]
    corpus: Mapping[str, Any] | None
    """The cleaning report of the text."""

    settings: Mapping[str, Any]

    def of(self, task: str) -> dict[str, Scores]:
        """The scores of all models that have some, the one under test first."""
        return {name: one.tasks[task] for name, one in self.models.items() if task in one.tasks}

    def count_pairs(self) -> dict[str, dict[str, int]]:
        """Pairs by kind and language, for a table."""
        kinds = {"drawn": "all pairs", "no_overlap": "that share no token"}
        return {said: {code: row[kind] for code, row in self.pairs.items()} for kind, said in kinds.items()}

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as scores.json holds them."""
        models = {
            name: {
                "encoder": dict(one.encoder),
                "tasks": {task: scores.to_dict() for task, scores in one.tasks.items()},
                "curves": dict(one.curves),
            }
            for name, one in self.models.items()
        }
        names = ("model", "pivot", "test_set", "pairs", "corpus", "settings")
        return {name: getattr(self, name) for name in names} | {"models": models}

    def flatten(self) -> dict[str, float]:
        """As metrics, such as `retrieval/best`; those of a floor carry its name in front."""
        flat: dict[str, Any] = {}
        for name, one in self.models.items():
            prefix = "" if name == self.model else re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") + "/"
            for task, scores in one.tasks.items():
                flat |= {f"{prefix}{task}/{key}": value for key, value in _NAMES[task](scores, self.pivot).items()}
        return finite(flat)


def _name_retrieval(scores: Scores, pivot: str) -> dict[str, Any]:
    mean, details = scores.mean, scores.details
    named = {"best": mean["mean"], "best_layer": details["best"]["layer"], "chance": details["chance"]}
    named |= {f"xx_{pivot}": mean["to_pivot"], f"{pivot}_xx": mean["from_pivot"], "no_overlap": mean["no_overlap"]}
    named |= {"contrast": (details["contrast"] or {}).get("mean")}
    return named | {code: row["mean"] for code, row in scores.languages.items()}


def _name_perplexity(scores: Scores, _: str) -> dict[str, Any]:
    return {"mean": scores.mean["perplexity"]} | {code: row["perplexity"] for code, row in scores.languages.items()}


def _name_classification(scores: Scores, _: str) -> dict[str, Any]:
    named = {"mean": scores.mean["accuracy"], "transfer_gap": (scores.transfer_gap or {}).get("accuracy")}
    return named | {code: row["accuracy"] for code, row in scores.languages.items()}


_NAMES = {"retrieval": _name_retrieval, "perplexity": _name_perplexity, "classification": _name_classification}
