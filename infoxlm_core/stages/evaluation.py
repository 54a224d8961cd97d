"""Stage: models and held-out text -> scores, tables, figures, a model card.

The first encoder is the one under test; the others (an untrained one, a baseline) are floors to compare it with.
Every model answers the same questions: the same pairs, and, with the same tokenizer, the same gaps.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from infoxlm_core import outside
from infoxlm_core.config import EvaluationConfig
from infoxlm_core.errors import InputError
from infoxlm_core.results import evaluation_page, evidence
from infoxlm_core.results.evaluation import Evaluated, Evaluation
from infoxlm_core.tasks import TASKS, unreserved
from infoxlm_core.tasks.perplexity import Perplexity
from infoxlm_core.tasks.questions import Questions, draw_questions
from infoxlm_core.tasks.scores import Scores
from infoxlm_core.tasks.task import Task
from infoxlm_core.training import tracker

EVALUATED: tuple[Task[Any], ...] = (TASKS["retrieval"], Perplexity(), TASKS["classification"])

CURVE_POINTS = 400


def evaluate(
    config: EvaluationConfig, corpus: Path, encoders: Mapping[str, Path], classifiers: Mapping[str, Path], output: Path
) -> dict[str, float]:
    """Score models and write scores.json, items.parquet, report.html, figures/ and model_card.md into `output`.

    `corpus` is a prepared one with held_out/<pivot>-<language>/*.parquet; its report.json is shown if there is one.
    `encoders` are Hugging Face directories by name, the model under test first; `classifiers` those of fine-tuned
    models by the same names, each with its test.parquet, or none. Returns one flat mapping of metrics such as
    "retrieval/best" (shares from 0 to 1); a floor's carry its name in front. Raises InputError: no held-out pairs, no
    model where one should be, or a test set that does not fit its classifier.
    """
    corpus = Path(corpus)
    if not encoders:
        raise InputError("no encoder to evaluate: give at least one model directory")
    model = next(iter(encoders))
    asked = draw_questions(corpus, encoders[model], config)
    scores: dict[str, dict[str, Scores]] = {}
    for task in EVALUATED:
        for name, directory in (classifiers if task.trained else encoders).items():
            measured = task.measure_held_out(asked, directory, config)
            if measured is not None:
                scores.setdefault(name, {})[task.name] = measured
    tests = sorted((corpus / "held_out").glob("*/*.parquet"))
    missing = {name: unreserved.find(directory, tests, corpus) for name, directory in encoders.items()}

    report = corpus / "report.json"
    found = Evaluation(
        model=model,
        pivot=asked.pivot,
        test_set=asked.digest,
        pairs={
            language: {
                "held_out": asked.counts[language],
                "drawn": len(drawn),
                "no_overlap": int(asked.unshared[language].sum()),
            }
            for language, drawn in asked.pairs.items()
        },
        models={
            name: Evaluated(own, read_curves(encoders.get(name)), tuple(missing.get(name, ())))
            for name, own in scores.items()
        },
        corpus=outside.read_json(report, dict[str, Any], "prepare again") if report.is_file() else None,
        settings=config.model_dump(),
    )
    evaluation_page.write(output, found)
    parts = {name: [one.outcomes for one in own.values() if one.outcomes is not None] for name, own in scores.items()}
    evidence.write(output / evidence.FILE, parts)
    return name_metrics(found, asked)


def name_metrics(found: Evaluation, questions: Questions) -> dict[str, float]:
    """Scores as metrics, such as `retrieval/best`; those of a floor carry its name in front."""
    flat: dict[str, float] = {}
    for name, one in found.models.items():
        prefix = "" if name == found.model else re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") + "/"
        for task in EVALUATED:
            if task.name in one.tasks:
                flat |= task.name_metrics(one.tasks[task.name], questions, prefix + task.name)
    return flat


def read_curves(directory: Path | None) -> dict[str, list[Sequence[float]]]:
    """Training curves beside an encoder: (step, value) points by metric, thinned to what a figure can show."""
    path = directory and directory / "metrics.jsonl"
    curves: dict[str, list[Sequence[float]]] = {}
    for step, values in tracker.read(path) if path and path.is_file() else ():
        for name, value in values.items():
            if name.startswith("loss/") or name in ("xlco/accuracy", "probe/retrieval"):  # not those by language
                curves.setdefault(name, []).append((step, value))
    return {name: points[:: -(-len(points) // CURVE_POINTS)] for name, points in curves.items()}
