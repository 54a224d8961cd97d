"""Stage evaluate: models and held-out text -> scores, tables, figures, a model card.

The first encoder is the one under test; the others (an untrained one, a baseline) are floors to compare it with.
Every model answers the same questions: the same pairs, and, with the same tokenizer, the same gaps.
"""

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from infoxlm_core import languages, outside
from infoxlm_core.config import EvaluationConfig
from infoxlm_core.errors import InputError
from infoxlm_core.model.huggingface import origin
from infoxlm_core.results import before_after, evidence, report
from infoxlm_core.results.summary import summarise_evaluation
from infoxlm_core.tasks import TASKS, unreserved
from infoxlm_core.tasks.perplexity import Perplexity
from infoxlm_core.tasks.questions import Questions, draw_questions
from infoxlm_core.tasks.retrieval.guard import Guard
from infoxlm_core.tasks.scores import Scores
from infoxlm_core.tasks.task import Task
from infoxlm_core.training import tracker

EVALUATED: tuple[Task[Any], ...] = (TASKS["retrieval"], Guard(), Perplexity(), TASKS["classification"])

CURVE_POINTS = 400


def evaluate(
    config: EvaluationConfig,
    corpus: Path,
    encoders: Mapping[str, Path],
    classifiers: Mapping[str, Path],
    output: Path,
    hours: Mapping[str, float] | None = None,
) -> dict[str, float]:
    """Score models and write scores.json, items.parquet, model_card.md and the report into `output`.

    Args:
        config: settings of the evaluation.
        corpus: a prepared corpus with held_out/<pivot>-<language>/*.parquet; its report.json is shown if it has one.
        encoders: name -> Hugging Face directory, the model under test first. The report compares it in detail with the
            model named `start`, if there is one.
        classifiers: name -> directory of the classifier that was fine-tuned from the encoder of that name, with its
            test.parquet; may be empty.
        output: directory for the files.
        hours: costs of the run up to this evaluation, such as {"cost/cpu_hours/all": 0.5}, for the report.

    Returns:
        Metrics of the model under test, such as `retrieval/served` (shares from 0 to 1). The metrics of the other
        models begin with the name of the model.

    Raises:
        InputError: there are no held-out pairs, a model is missing, or a test set does not fit its classifier.
    """
    if not encoders:
        raise InputError("No encoder to evaluate. Give at least one model directory.")
    corpus = Path(corpus)
    tested_model = next(iter(encoders))
    questions = draw_questions(corpus, encoders[tested_model], config)
    scores = _measure(config, questions, encoders, classifiers)
    models: dict[str, dict[str, Any]] = {}
    for name, scores_by_task in scores.items():
        models[name] = _describe_model(scores_by_task, encoders.get(name), corpus)
    corpus_report = _read_corpus_report(corpus)
    record: dict[str, Any] = {
        "model": tested_model,
        "pivot": questions.pivot,
        "test_set": questions.digest,
        "pairs": _count_pairs(questions),
        "corpus": corpus_report,
        "settings": config.result_fields(),
        "models": models,
    }
    outcomes = _collect_outcomes(scores)
    sections = []
    if evidence.PUBLIC_START in encoders and tested_model != evidence.PUBLIC_START:
        start = outcomes[evidence.PUBLIC_START]
        tested = outcomes[tested_model]
        record["before_after"] = _compare_with_start(start, tested, questions, corpus_report)
        examples = before_after.find_examples(questions, start, tested)
        sections = before_after.lay_out(tested_model, record["before_after"], examples, hours or {})
    title = f"{tested_model}: how well it carries meaning across languages"
    descriptions = {name: report.describe_encoder(result["encoder"]) for name, result in models.items()}
    tasks_with_settings = [(task, questions) for task in EVALUATED]
    summary = summarise_evaluation(title, descriptions, tasks_with_settings, scores)
    report.write(output, record, summary, sections)
    evidence.write(output / evidence.FILE, outcomes)
    return _name_metrics(scores, questions)


def _collect_outcomes(scores: Mapping[str, Mapping[str, Scores]]) -> dict[str, pd.DataFrame]:
    """Return one table of outcomes for each model."""
    outcomes = {}
    for name, scores_by_task in scores.items():
        all_outcomes = [task_scores.outcomes for task_scores in scores_by_task.values()]
        tables = [task_outcomes for task_outcomes in all_outcomes if task_outcomes is not None]
        outcomes[name] = pd.concat(tables, ignore_index=True)
    return outcomes


def _compare_with_start(
    start: pd.DataFrame, tested: pd.DataFrame, questions: Questions, corpus_report: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Compare the outcomes before and after the training, apart for languages that were not in its text.

    The cleaning report tells which languages were in the text.
    """
    codes = {questions.pivot, *questions.pairs}
    if corpus_report:
        for file in corpus_report.get("files", ()):
            if file["kept"] and not file["kind"].startswith("held_out"):
                codes.add(file["language"])
    trained_languages = {languages.two_letters(code) for code in codes}
    outcomes_of_start = evidence.Outcomes(start, questions.pivot)
    return before_after.compare(outcomes_of_start, evidence.Outcomes(tested, questions.pivot), trained_languages)


def _measure(
    config: EvaluationConfig, questions: Questions, encoders: Mapping[str, Path], classifiers: Mapping[str, Path]
) -> dict[str, dict[str, Scores]]:
    """Return the scores of each model in each task that can measure it: name -> task -> scores."""
    scores: dict[str, dict[str, Scores]] = {}
    for task in EVALUATED:
        models = classifiers if task.trained else encoders
        for name, directory in models.items():
            task_scores = task.measure_held_out(questions, directory, config)
            if task_scores is not None:
                scores.setdefault(name, {})[task.name] = task_scores
    return scores


def _describe_model(scores_by_task: Mapping[str, Scores], encoder: Path | None, corpus: Path) -> dict[str, Any]:
    """Return the entry of a model in scores.json. A classifier without an encoder has only its scores."""
    description: dict[str, Any] = {
        "encoder": {},
        "origin": {},
        "tasks": {task: task_scores.to_dict() for task, task_scores in scores_by_task.items()},
        "curves": {},
    }
    if encoder is None:
        return description
    description["encoder"] = dict(scores_by_task["retrieval"].details["encoder"])
    description["origin"] = origin.read(encoder)
    description["curves"] = read_curves(encoder)
    manifest = unreserved.trained_by_us(encoder)
    if manifest and "merge" in manifest["facts"]:
        description["merge"] = manifest["facts"]["merge"]
    test_files = sorted((corpus / "held_out").glob("*/*.parquet"))
    not_reserved = unreserved.find(encoder, test_files, corpus)
    if not_reserved:
        description["not_reserved"] = not_reserved
    return description


def _count_pairs(questions: Questions) -> dict[str, dict[str, int]]:
    """Return the numbers of held-out pairs, of drawn pairs, and of drawn pairs whose sides share no token."""
    counts = {}
    for language, pairs in questions.pairs.items():
        counts[language] = {
            "held_out": questions.counts[language],
            "drawn": len(pairs),
            "no_overlap": int(questions.unshared[language].sum()),
        }
    return counts


def _read_corpus_report(corpus: Path) -> dict[str, Any] | None:
    path = corpus / "report.json"
    if not path.is_file():
        return None
    report_of_cleaning: dict[str, Any] = outside.read_json(path, dict[str, Any], "prepare again")
    return report_of_cleaning


def _name_metrics(scores: Mapping[str, Mapping[str, Scores]], questions: Questions) -> dict[str, float]:
    """Return the scores of all models as metrics. Names of the first model's metrics have no prefix."""
    metrics: dict[str, float] = {}
    for rank, (name, scores_by_task) in enumerate(scores.items()):
        name_in_metrics = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
        prefix = f"{name_in_metrics}/" if rank else ""
        for task in EVALUATED:
            if task.name in scores_by_task:
                metrics |= task.name_metrics(scores_by_task[task.name], questions, prefix + task.name)
    return metrics


def read_curves(encoder: Path) -> dict[str, list[Sequence[float]]]:
    """Read the training curves beside an encoder: metric -> points (step, value), at most about `CURVE_POINTS` each."""
    path = encoder / "metrics.jsonl"
    curves: dict[str, list[Sequence[float]]] = {}
    if not path.is_file():
        return curves
    for step, values in tracker.read(path):
        for name, value in values.items():
            if name.startswith("loss/") or name in ("xlco/accuracy", "probe/retrieval"):  # without those by language
                curves.setdefault(name, []).append((step, value))
    thinned_curves = {}
    for name, curve in curves.items():
        every = math.ceil(len(curve) / CURVE_POINTS)
        thinned_curves[name] = curve[::every]
    return thinned_curves
