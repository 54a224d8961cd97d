"""What an evaluation found: models on the three tasks of a prepared corpus."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from infoxlm_core.tasks.scores import Scores


@dataclass(frozen=True)
class Evaluated:
    """One model."""

    tasks: Mapping[str, Scores] = field(default_factory=dict)  # what it could be measured on
    curves: Mapping[str, Sequence[Sequence[float]]] = field(default_factory=dict)  # metric -> (step, value) points
    not_reserved: tuple[str, ...] = ()  # files of the test that were not taken out of its training text

    @property
    def encoder(self) -> Mapping[str, Any]:
        """Its sizes; none of one of which only a classifier is known."""
        found: Mapping[str, Any] = self.tasks["retrieval"].details["encoder"] if "retrieval" in self.tasks else {}
        return found


@dataclass(frozen=True)
class Evaluation:
    """The model under test, and the floors to compare it with, on the same questions."""

    model: str
    pivot: str
    test_set: str
    pairs: Mapping[str, Mapping[str, int]]  # language -> pairs `held_out`, `drawn`, and with `no_overlap`
    models: Mapping[str, Evaluated]
    corpus: Mapping[str, Any] | None  # the cleaning report of the text
    settings: Mapping[str, Any]

    def of(self, task: str) -> dict[str, Scores]:
        """The scores of all models that have some, the one under test first."""
        return {name: one.tasks[task] for name, one in self.models.items() if task in one.tasks}

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as scores.json holds them."""
        models = {
            name: {
                "encoder": dict(one.encoder),
                "tasks": {task: scores.to_dict() for task, scores in one.tasks.items()},
                "curves": dict(one.curves),
                **({"not_reserved": list(one.not_reserved)} if one.not_reserved else {}),
            }
            for name, one in self.models.items()
        }
        names = ("model", "pivot", "test_set", "pairs", "corpus", "settings")
        return {name: getattr(self, name) for name in names} | {"models": models}
