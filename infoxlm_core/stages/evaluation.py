"""Stage evaluate: models and held-out text -> scores, tables, figures, a model card.

The first encoder is the one under test; the others (an untrained one, a baseline) are floors to compare it with.
Every model answers the same questions: the same pairs, and, with the same tokenizer, the same gaps.
"""

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from infoxlm_core import outside
from infoxlm_core.config import EvaluationConfig
from infoxlm_core.errors import InputError
from infoxlm_core.results import evidence, report
from infoxlm_core.results.summary import summarise_evaluation
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
    """Score models and write scores.json, items.parquet, model_card.md and the report into `output`.

    Args:
        config: settings of the evaluation.
        corpus: a prepared corpus with held_out/<pivot>-<language>/*.parquet; its report.json is shown if it has one.
        encoders: name -> Hugging Face directory, the model under test first.
        classifiers: name -> directory of the classifier that was fine-tuned from the encoder of that name, with its
            test.parquet; may be empty.
        output: directory for the files.

    Returns:
        Metrics such as `retrieval/served` (shares from 0 to 1); those of a floor begin with its name.

    Raises:
        InputError: there are no held-out pairs, a model is missing, or a test set does not fit its classifier.
    """
    if not encoders:
        raise InputError("No encoder to evaluate. Give at least one model directory.")
    corpus, model = Path(corpus), next(iter(encoders))
    questions = draw_questions(corpus, encoders[model], config)
    scores: dict[str, dict[str, Scores]] = {}
    for task in EVALUATED:
        for name, directory in (classifiers if task.trained else encoders).items():
            measured = task.measure_held_out(questions, directory, config)
            if measured is not None:
                scores.setdefault(name, {})[task.name] = measured
    test_files = sorted((corpus / "held_out").glob("*/*.parquet"))
    models: dict[str, dict[str, Any]] = {}
    for name, by_task in scores.items():
        encoder = encoders.get(name)
        missing = unreserved.find(encoder, test_files, corpus) if encoder else []
        models[name] = {
            "encoder": dict(by_task["retrieval"].details["encoder"]) if encoder else {},
            "tasks": {task: task_scores.to_dict() for task, task_scores in by_task.items()},
            "curves": read_curves(encoder) if encoder else {},
            **({"not_reserved": missing} if missing else {}),
        }
    cleaning = corpus / "report.json"
    plain = {
        "model": model,
        "pivot": questions.pivot,
        "test_set": questions.digest,
        "pairs": {
            language: {
                "held_out": questions.counts[language],
                "drawn": len(pairs),
                "no_overlap": int(questions.unshared[language].sum()),
            }
            for language, pairs in questions.pairs.items()
        },
        "corpus": outside.read_json(cleaning, dict[str, Any], "prepare again") if cleaning.is_file() else None,
        "settings": config.model_dump(),
        "models": models,
    }
    title = f"{model}: how well it carries meaning across languages"
    descriptions = {name: report.describe_encoder(result["encoder"]) for name, result in models.items()}
    tasks_with_settings = [(task, questions) for task in EVALUATED]
    report.write(output, plain, summarise_evaluation(title, descriptions, tasks_with_settings, scores))
    outcomes = {}
    for name, by_task in scores.items():
        outcomes[name] = [task_scores.outcomes for task_scores in by_task.values() if task_scores.outcomes is not None]
    evidence.write(output / evidence.FILE, outcomes)
    return _name_metrics(scores, questions)


def _name_metrics(scores: Mapping[str, Mapping[str, Scores]], questions: Questions) -> dict[str, float]:
    """Return the scores of all models as metrics; names of the first model's metrics have no prefix."""
    metrics: dict[str, float] = {}
    for rank, (name, by_task) in enumerate(scores.items()):
        prefix = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") + "/" if rank else ""
        for task in EVALUATED:
            if task.name in by_task:
                metrics |= task.name_metrics(by_task[task.name], questions, prefix + task.name)
    return metrics


def read_curves(encoder: Path) -> dict[str, list[Sequence[float]]]:
    """Read the training curves beside an encoder: metric -> points (step, value), at most about `CURVE_POINTS` each."""
    path = encoder / "metrics.jsonl"
    curves: dict[str, list[Sequence[float]]] = {}
    for step, values in tracker.read(path) if path.is_file() else ():
        for name, value in values.items():
            if name.startswith("loss/") or name in ("xlco/accuracy", "probe/retrieval"):  # without those by language
                curves.setdefault(name, []).append((step, value))
    return {name: points[:: math.ceil(len(points) / CURVE_POINTS)] for name, points in curves.items()}
