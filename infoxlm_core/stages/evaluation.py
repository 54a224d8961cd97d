"""Stage evaluate: models and held-out text -> scores, tables, figures and a model card.

The first encoder is the model under test. Further encoders, such as the start model or an untrained model, show how
much training has improved it. All models answer the same questions: the same pairs and, if they share a tokenizer, the
same masked tokens.
"""

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from infoxlm_core import languages, user_files
from infoxlm_core.config import EvaluationConfig
from infoxlm_core.errors import InputError
from infoxlm_core.model.huggingface import origin
from infoxlm_core.results import before_after, evidence, report
from infoxlm_core.results.summaries.suite import Summary, summarise_evaluation
from infoxlm_core.tasks import TASKS, unreserved
from infoxlm_core.tasks.perplexity import Perplexity
from infoxlm_core.tasks.questions import Questions, draw_questions
from infoxlm_core.tasks.retrieval.guard import Guard
from infoxlm_core.tasks.scores import Scores
from infoxlm_core.tasks.task import Task
from infoxlm_core.training import tracker

EVALUATED_TASKS: tuple[Task[Any], ...] = (TASKS["retrieval"], Guard(), Perplexity(), TASKS["classification"])

MAX_CURVE_POINTS = 400  # per training curve in scores.json


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
        config: evaluation settings.
        corpus: a prepared corpus with held_out/<pivot>-<language>/*.parquet. The report includes its report.json.
        encoders: mapping from model name to Hugging Face directory. The first entry is the model under test. It is
            compared in detail with the entry `evidence.PUBLIC_START`, the model before its training, if given.
        classifiers: mapping from encoder name to the directory of its fine-tuned classifier and test.parquet; may be
            empty.
        output: directory for the files.
        hours: costs of the run so far, such as {"cost/cpu_hours/all": 0.5}, for the report.

    Returns:
        Metrics of the model under test, such as `retrieval/served`. Metrics of other models have the model's name as
        prefix.

    Raises:
        InputError: there are no held-out pairs, a model is missing, or a test set does not match its classifier.
    """
    if not encoders:
        raise InputError("No encoder to evaluate. Give at least one model directory.")
    tested_model = next(iter(encoders))
    questions = draw_questions(corpus, encoders[tested_model], config)
    scores = _measure_models(config, questions, encoders, classifiers)
    outcomes = _collect_outcomes(scores)
    record = _build_record(config, corpus, questions, encoders, scores)
    sections = []
    if evidence.PUBLIC_START in encoders and tested_model != evidence.PUBLIC_START:
        start_outcomes = outcomes[evidence.PUBLIC_START]
        tested_outcomes = outcomes[tested_model]
        record["before_after"] = _compare_with_start(start_outcomes, tested_outcomes, questions, record["corpus"])
        examples = before_after.find_examples(questions, start_outcomes, tested_outcomes)
        sections = before_after.build_sections(tested_model, record["before_after"], examples, hours or {})
    report.write_evaluation_report(output, record, _summarise(record, questions, scores), sections)
    evidence.write(output / evidence.FILE, outcomes)
    return _name_metrics(scores, questions)


def _measure_models(
    config: EvaluationConfig, questions: Questions, encoders: Mapping[str, Path], classifiers: Mapping[str, Path]
) -> dict[str, dict[str, Scores]]:
    """Measure each model on every task that supports it. Return a mapping: model -> task -> scores."""
    scores: dict[str, dict[str, Scores]] = {}
    for task in EVALUATED_TASKS:
        models = classifiers if task.is_finetuned else encoders
        for name, directory in models.items():
            task_scores = task.measure_held_out(questions, directory, config)
            if task_scores is not None:
                scores.setdefault(name, {})[task.name] = task_scores
    return scores


def _collect_outcomes(scores: Mapping[str, Mapping[str, Scores]]) -> dict[str, pd.DataFrame]:
    """Collect each model's outcomes of all questions in one table, for all tasks that record outcomes."""
    outcomes = {}
    for name, scores_by_task in scores.items():
        tables = [task_scores.outcomes for task_scores in scores_by_task.values() if task_scores.outcomes is not None]
        outcomes[name] = pd.concat(tables, ignore_index=True)
    return outcomes


def _build_record(
    config: EvaluationConfig,
    corpus: Path,
    questions: Questions,
    encoders: Mapping[str, Path],
    scores: Mapping[str, Mapping[str, Scores]],
) -> dict[str, Any]:
    """Build the content of scores.json, except for the comparison with the start model."""
    models = {}
    for name, scores_by_task in scores.items():
        models[name] = _describe_model(scores_by_task, encoders[name], corpus)
    counts_by_language = {}
    for language, pairs in questions.pairs.items():
        counts_by_language[language] = {
            "held_out": questions.counts[language],
            "drawn": len(pairs),
            "no_overlap": int(questions.unshared[language].sum()),  # pairs without a shared token
        }
    report_path = corpus / "report.json"
    corpus_report = None
    if report_path.is_file():
        corpus_report = user_files.read_json(report_path, dict[str, Any], remedy="prepare again")
    return {
        "model": next(iter(encoders)),  # the model under test
        "pivot": questions.pivot,
        "test_set": questions.digest,
        "pairs": counts_by_language,
        "corpus": corpus_report,
        "settings": config.result_fields(),
        "models": models,
    }


def _summarise(record: Mapping[str, Any], questions: Questions, scores: Mapping[str, Mapping[str, Scores]]) -> Summary:
    """Compute the report's means, confidence intervals and comparisons."""
    title = f"{record['model']}: how well it carries meaning across languages"
    descriptions = {name: report.describe_encoder(result["encoder"]) for name, result in record["models"].items()}
    tasks_with_settings = [(task, questions) for task in EVALUATED_TASKS]
    return summarise_evaluation(title, descriptions, tasks_with_settings, scores)


def _compare_with_start(
    start_outcomes: pd.DataFrame,
    tested_outcomes: pd.DataFrame,
    questions: Questions,
    corpus_report: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """Compare the outcomes of the start model and the model under test.

    On the guard, a general test set, training languages are compared separately from all other languages.
    """
    # The pivot and the held-out languages count as training languages, even if the corpus has no report.
    language_codes = {questions.pivot, *questions.pairs}
    for file in (corpus_report or {}).get("files", ()):
        is_training_file = file["kept"] and not file["kind"].startswith("held_out")
        if is_training_file:
            language_codes.add(file["language"])
    trained_languages = {languages.two_letters(code) for code in language_codes}
    before = evidence.Outcomes(start_outcomes, questions.pivot)
    after = evidence.Outcomes(tested_outcomes, questions.pivot)
    return before_after.compare_outcomes(before, after, trained_languages)


def _describe_model(scores_by_task: Mapping[str, Scores], encoder: Path, corpus: Path) -> dict[str, Any]:
    """Build a model's entry in scores.json: size, origin, scores and training curves."""
    description: dict[str, Any] = {
        "encoder": dict(scores_by_task["retrieval"].details["encoder"]),
        "origin": origin.read(encoder),
        "tasks": {task: task_scores.to_dict() for task, task_scores in scores_by_task.items()},
        "curves": _read_curves(encoder),
    }
    manifest = unreserved.load_pretraining_manifest(encoder)
    if manifest and "merge" in manifest["facts"]:
        description["merge"] = manifest["facts"]["merge"]
    test_files = sorted((corpus / "held_out").glob("*/*.parquet"))
    unreserved_files = unreserved.find_unreserved_files(encoder, test_files, corpus)
    if unreserved_files:
        description["not_reserved"] = unreserved_files
    return description


def _name_metrics(scores: Mapping[str, Mapping[str, Scores]], questions: Questions) -> dict[str, float]:
    """Return all scores as metrics. The names of models other than the one under test are prefixes."""
    metrics: dict[str, float] = {}
    tested_model = next(iter(scores))  # the first, as in the argument `encoders` of `evaluate`
    for name, scores_by_task in scores.items():
        prefix = ""
        if name != tested_model:
            # MLflow does not accept every character in a metric name.
            metric_safe_name = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
            prefix = f"{metric_safe_name}/"
        for task in EVALUATED_TASKS:
            if task.name in scores_by_task:
                metrics |= task.name_metrics(scores_by_task[task.name], questions, prefix + task.name)
    return metrics


def _read_curves(encoder: Path) -> dict[str, list[Sequence[float]]]:
    """Read an encoder's training curves for the report: metric -> list of (step, value)."""
    path = encoder / "metrics.jsonl"
    if not path.is_file():
        return {}
    curves: dict[str, list[Sequence[float]]] = {}
    for step, values in tracker.read(path):
        for name, value in values.items():
            is_shown = name.startswith("loss/") or name in ("xlco/accuracy", "probe/retrieval")
            if is_shown:
                curves.setdefault(name, []).append((step, value))
    for name, curve in curves.items():  # thin out long curves, so that the report stays small
        spacing = math.ceil(len(curve) / MAX_CURVE_POINTS)
        curves[name] = curve[::spacing]
    return curves
