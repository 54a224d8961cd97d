"""Summarise a sweep: statistics over seeds for every model, of its headline metrics and of each task.

Suites, ablations and evaluations share one summary format. An ablation has headline metrics but no tasks, because its
trials log only metrics.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from statistics import fmean
from types import MappingProxyType
from typing import Any, NamedTuple

from infoxlm_core import languages
from infoxlm_core.errors import InputError
from infoxlm_core.results import evidence, published, trials
from infoxlm_core.results.bootstrap import paired_bootstrap
from infoxlm_core.results.evidence import Outcomes
from infoxlm_core.results.protocol import compare_protocol, describe_rule, name_setting
from infoxlm_core.results.statistics import CONFIDENCE, Statistic, compare_seeds, is_share, summarise_seeds
from infoxlm_core.results.suite_config import SuiteConfig, SuiteTaskConfig
from infoxlm_core.results.trials import Trial
from infoxlm_core.tasks import task_of
from infoxlm_core.tasks.scores import Scores
from infoxlm_core.tasks.task import Fact, Task

Metrics = Mapping[str, Statistic]
OutcomesBySeed = Mapping[str, Mapping[int, Outcomes]]
"""Variant -> seed -> questions that the model answered correctly."""
COSTS = ("steps", "tokens_seen", "cost/cpu_hours/pretrain", "cost/gpu_hours/pretrain")
"""Metrics of the pre-training cost."""
_TASK_HEADLINES = ("served", "best", "centred", "no_overlap", "mean")  # in display order


@dataclass(frozen=True)
class Variant:
    """The headline metrics of one model or variant over its seeds."""

    what: str  # what a variant changes, or the location of a model
    seeds: tuple[int, ...]
    unfinished: tuple[int, ...]
    metrics: Metrics
    differences: Metrics = field(default_factory=dict)  # from the first variant, with intervals over seeds
    question_differences: Metrics = field(default_factory=dict)  # from the first variant, intervals over questions
    costs: Metrics = field(default_factory=dict)  # pre-training costs of an ablation's variant


@dataclass(frozen=True)
class GridPoint:
    """One combination of grid values, with its development scores."""

    grid: Mapping[str, Any]
    dev: float | None  # development score over all languages, averaged over finished seeds
    by: float | None  # development score by which grid points are compared, averaged over finished seeds
    seeds: tuple[int, ...]  # finished seeds


@dataclass(frozen=True)
class ModelResult:
    """The result of one model on one task, at the chosen grid point."""

    chosen: GridPoint
    grid: tuple[GridPoint, ...]
    rule: str
    tuned: Mapping[int, str | None]  # seed -> location of the fine-tuned model in the store
    steps: Mapping[int, Mapping[str, int]]
    languages: Mapping[str, Metrics]
    mean: Metrics
    transfer_gap: Metrics | None
    within: Statistic | None
    across: Statistic | None
    details: Mapping[str, Any]  # task-specific fields of the first seed's scores, such as retrieval's vectors
    metrics: Metrics  # by name in the tracker


@dataclass(frozen=True, kw_only=True)
class TaskSummary:
    """The results of all models on one task. A model without a finished trial is left out."""

    kind: str
    description: str
    main: str
    metrics: tuple[str, ...]
    table: str = "none"
    setting: str = "other"
    languages: tuple[str, ...]
    counts: Mapping[str, int]
    protocol: tuple[Fact, ...] = ()
    notes: tuple[str, ...]
    settings: Mapping[str, Any] = field(default_factory=dict)
    models: Mapping[str, ModelResult]


@dataclass(frozen=True)
class Summary:
    """The results of a sweep."""

    title: str
    model: str  # the model under test
    models: Mapping[str, str]  # name -> location of a model, or what a variant changes
    metrics: tuple[str, ...]  # names of the headline metrics
    variants: Mapping[str, Variant]
    unfinished: tuple[str, ...]  # trial names
    tasks: Mapping[str, TaskSummary]

    def to_dict(self) -> dict[str, Any]:
        """Return the content of suite.json or comparison.json."""
        content = asdict(self)
        for task in content["tasks"].values():
            task["protocol"] = [fact._asdict() for fact in task["protocol"]]
            for result in task["models"].values():
                result |= result.pop("details")
                del result["metrics"]
        return content

    def is_share(self, metric: str) -> bool:
        """Return whether a headline metric is a share from 0 to 1."""
        task_name, _, metric_name = metric.partition("/")
        task = self.tasks.get(task_name)
        # A suite may give a task any name, so look the metric up by the task's kind.
        kind = task.kind if task else task_name
        return is_share(f"{kind}/{metric_name}")

    def name_metrics(self) -> dict[str, float]:
        """Return the metrics for the tracker: the scores of a suite, or the headline metrics of an ablation.

        Scores have names such as `xnli/mean` and `xnli/en`. Except for the model under test, the model's name comes
        first. An ablation's metrics start with the variant: `full/retrieval/served`, followed by `/deviation` and `/n`.
        Differences from the first variant end in `/difference`, `/difference/low` and `/difference/high`.
        """
        values = self._list_scores() if self.tasks else self._list_headlines()
        return {name: value for name, value in values if value is not None}

    def _list_headlines(self) -> Iterator[tuple[str, float | None]]:
        """Yield the name and the value of every metric of an ablation."""
        for name, variant in self.variants.items():
            for metric, statistic in variant.metrics.items():
                yield f"{name}/{metric}", statistic.mean
                yield f"{name}/{metric}/deviation", statistic.deviation
                yield f"{name}/{metric}/n", statistic.n
            for metric, difference in variant.differences.items():
                low, high = difference.interval or (None, None)
                yield f"{name}/{metric}/difference", difference.mean
                yield f"{name}/{metric}/difference/low", low
                yield f"{name}/{metric}/difference/high", high

    def _list_scores(self) -> Iterator[tuple[str, float | None]]:
        """Yield the name and the value of every metric of a suite or an evaluation."""
        for name, task in self.tasks.items():
            for model, result in task.models.items():
                prefix = "" if model == self.model else f"{trials.slug(model)}/"
                for metric, statistic in result.metrics.items():
                    yield f"{prefix}{metric}", statistic.mean
                yield f"{prefix}{name}/deviation", result.mean[task.main].deviation
                yield f"{prefix}{name}/seeds", len(result.chosen.seeds)


# ---------------------------------------------------------------- ablations


def summarise_metrics(
    title: str,
    results: Iterable[tuple[Trial, Mapping[str, float]]],
    metrics: Sequence[str] = (),
    outcomes: OutcomesBySeed = MappingProxyType({}),
) -> Summary:
    """Summarise an ablation: every variant over its seeds, in the order of the results.

    Args:
        title: title of the page.
        results: trials with their metrics. An unfinished trial has no metrics.
        metrics: names of the metrics to compare; by default all logged headline metrics and the paper's tasks.
        outcomes: stored outcomes of finished trials by variant and seed.

    Raises:
        InputError: no trial logged one of the requested metrics.
    """
    results_by_variant: dict[str, list[tuple[Trial, Mapping[str, float]]]] = {}
    logged_metrics: set[str] = set()
    for trial, values in results:
        results_by_variant.setdefault(trial.model, []).append((trial, values))
        logged_metrics.update(values)
    headline_metrics = _select_headlines(metrics, logged_metrics)
    costs = [name for name in COSTS if name in logged_metrics]
    variants: dict[str, Variant] = {}
    unfinished_trials: list[str] = []
    for name, variant_results in results_by_variant.items():
        variants[name] = _summarise_variant(variant_results, headline_metrics, costs)
        unfinished_trials += [trial.name for trial, values in variant_results if not values]
    variants = _compare_with_first(variants, headline_metrics, outcomes)
    return Summary(
        title=title,
        model=next(iter(variants), ""),
        models={name: variant.what for name, variant in variants.items()},
        metrics=headline_metrics,
        variants=variants,
        unfinished=tuple(unfinished_trials),
        tasks={},
    )


def _compare_with_first(
    variants: Mapping[str, Variant], headline_metrics: Sequence[str], outcomes: OutcomesBySeed
) -> dict[str, Variant]:
    """Add to each variant its differences from the first variant, the baseline."""
    baseline = next(iter(variants), "")
    comparisons = len(variants) - 1
    compared = {}
    for name, variant in variants.items():
        if name == baseline:
            compared[name] = variant
            continue
        differences = {}
        for metric in headline_metrics:
            reference = variants[baseline].metrics[metric]
            differences[metric] = compare_seeds(variant.metrics[metric], reference, comparisons)
        question_differences = _compare_answers(
            outcomes.get(name, {}), outcomes.get(baseline, {}), headline_metrics, comparisons
        )
        compared[name] = replace(variant, differences=differences, question_differences=question_differences)
    return compared


def _select_headlines(requested: Sequence[str], logged_metrics: set[str]) -> tuple[str, ...]:
    """Return the requested metrics, or by default all headline metrics that a trial logged.

    Raises:
        InputError: no trial logged a requested metric.
    """
    for name in requested:
        if name not in logged_metrics:
            available = ", ".join(sorted(logged_metrics)) or "none"
            raise InputError(f"No trial has the metric {name!r}. Known metrics: {available}.")
    if requested:
        return tuple(requested)
    bleu_by_direction = sorted(name for name in logged_metrics if name.startswith("translation/bleu/"))
    candidates = (*trials.HEADLINES, *bleu_by_direction, *published.METRICS)
    return tuple(name for name in candidates if name in logged_metrics)


def _summarise_variant(
    results: Sequence[tuple[Trial, Mapping[str, float]]], headline_metrics: Sequence[str], costs: Sequence[str]
) -> Variant:
    """Summarise the trials of one variant. An unfinished trial has no metrics in `results`."""
    values_by_seed = {trial.seed: values for trial, values in results}
    first_trial, _ = results[0]
    return Variant(
        what=first_trial.what,
        seeds=tuple(sorted(trial.seed for trial, _ in results)),
        unfinished=tuple(sorted(trial.seed for trial, values in results if not values)),
        metrics=_compute_statistics(values_by_seed, headline_metrics),
        costs=_compute_statistics(values_by_seed, costs) if costs else {},
    )


def _compare_answers(
    candidate: Mapping[int, Outcomes], reference: Mapping[int, Outcomes], metrics: Sequence[str], comparisons: int
) -> Metrics:
    """Compare the accuracy of two variants. Return each metric's difference with its interval over the questions.

    The answers to a question are averaged over the seeds that both variants have.

    Args:
        candidate: the compared variant's answers by seed.
        reference: the baseline's answers by seed.
        metrics: metrics to compare. Metrics that are not shares of correct answers are left out.
        comparisons: number of variants compared with the baseline, for Bonferroni's correction.
    """
    seeds = sorted(candidate.keys() & reference.keys())
    if not seeds:
        return {}
    level = 1 - (1 - CONFIDENCE) / comparisons
    differences = {}
    for name in metrics:
        try:
            candidate_scores = evidence.average([candidate[seed] for seed in seeds], name)
            reference_scores = evidence.average([reference[seed] for seed in seeds], name)
            gain = paired_bootstrap(candidate_scores, reference_scores, level=level)
        except (InputError, ValueError):  # not a share of correct answers, or the variants answered different questions
            continue
        differences[name] = Statistic(gain.questions, gain.gain, interval=(gain.lower, gain.upper))
    return differences


# ---------------------------------------------------------------- suites and evaluations


def summarise(config: SuiteConfig, results: Mapping[str, Scores]) -> Summary:
    """Summarise the scores of a suite: statistics over seeds for every model and task.

    Args:
        config: config of the suite.
        results: scores of all finished trials by trial name.
    """
    planned_trials = [planned_trial.trial for planned_trial in trials.plan(config)]
    tasks = {}
    for name, suite_task in config.tasks.items():
        task_trials = [trial for trial in planned_trials if trial.task == name]
        tasks[name] = _summarise_suite_task(name, suite_task, task_trials, results)
    model, *peers = config.models
    title = f"{model} beside {', '.join(peers)}" if peers else model
    unfinished = tuple(trial.name for trial in planned_trials if trial.name not in results)
    return _join_tasks(title, config.models, tasks, unfinished)


def summarise_evaluation(
    title: str,
    models: Mapping[str, str],
    tasks: Iterable[tuple[Task[Any], Any]],
    scores: Mapping[str, Mapping[str, Scores]],
) -> Summary:
    """Summarise an evaluation. It measures each model once, on every task that the model supports.

    Args:
        title: title of the page.
        models: descriptions of the models by name. The first model is the one under test.
        tasks: tasks with their settings.
        scores: scores by model and task.
    """
    summaries = {}
    for task, settings in tasks:
        scores_of_task = []
        results = {}
        for model, scores_by_task in scores.items():
            model_scores = scores_by_task.get(task.name)
            if model_scores is None:
                continue
            scores_of_task.append(model_scores)
            scores_by_seed = {1: model_scores}  # an evaluation has no seeds and no grid
            grid_point = _summarise_grid_point({}, scores_by_seed)
            results[model] = _summarise_model(task, task.name, settings, scores_by_seed, grid_point, [grid_point])
        if results:
            summaries[task.name] = _summarise_task(task, results, scores_of_task)
    return _join_tasks(title, models, summaries, unfinished=())


def _join_tasks(
    title: str, models: Mapping[str, str], tasks: Mapping[str, TaskSummary], unfinished: tuple[str, ...]
) -> Summary:
    """Join the summaries of several tasks. The main metrics of every task are headline metrics.

    Args:
        title: title of the page.
        models: locations of the models by name. The first model is the one under test.
        tasks: task summaries by task name.
        unfinished: names of unfinished trials.
    """
    headline_metrics: dict[str, None] = {}  # an ordered set
    metrics_by_model: dict[str, dict[str, Statistic]] = {model: {} for model in models}
    for name, task in tasks.items():
        candidates = [f"{name}/{metric}" for metric in (*_TASK_HEADLINES, task.main, "transfer_gap")]
        for model, result in task.models.items():
            metrics_by_model[model] |= result.metrics
            headline_metrics |= dict.fromkeys(metric for metric in candidates if metric in result.metrics)
    missing = Statistic(0, None)
    variants = {}
    for model, location in models.items():
        statistics = {metric: metrics_by_model[model].get(metric, missing) for metric in headline_metrics}
        variants[model] = Variant(what=location, seeds=(), unfinished=(), metrics=statistics)
    model_under_test = next(iter(models))
    return Summary(title, model_under_test, dict(models), tuple(headline_metrics), variants, unfinished, tasks)


def _summarise_suite_task(
    name: str, suite_task: SuiteTaskConfig, planned_trials: Sequence[Trial], scores: Mapping[str, Scores]
) -> TaskSummary:
    """Summarise one task of a suite.

    Args:
        name: name of the task.
        suite_task: settings, grid and seeds of the task.
        planned_trials: all trials of the task.
        scores: scores of all finished trials by trial name.
    """
    task = task_of(suite_task.settings)
    notes = []
    results = {}
    for model in dict.fromkeys(trial.model for trial in planned_trials):
        trials_of_model = [trial for trial in planned_trials if trial.model == model]
        scores_of_points = _group_by_grid_point(trials_of_model, scores)
        grid_points = [_summarise_grid_point(point.grid, point.scores_by_seed) for point in scores_of_points]
        problem = _describe_excluded_points(grid_points)
        if problem:
            notes.append(f"{model}: {problem}")
        chosen = _choose_grid_point(grid_points)
        if chosen:
            chosen_scores = scores_of_points[grid_points.index(chosen)].scores_by_seed
            results[model] = _summarise_model(task, name, suite_task.settings, chosen_scores, chosen, grid_points)
    finished_scores = [scores[trial.name] for trial in planned_trials if trial.name in scores]
    summary = _summarise_task(task, results, finished_scores)
    return replace(
        summary,
        table=suite_task.table,
        setting=name_setting(suite_task, finished_scores),
        protocol=tuple(compare_protocol(suite_task, summary.counts, finished_scores)),
        notes=(*notes, *summary.notes),
        settings=trials.dump_settings(suite_task.settings),
    )


class _GridPointScores(NamedTuple):
    """The scores of one model's finished trials at one grid point."""

    grid: Mapping[str, Any]
    scores_by_seed: dict[int, Scores]


def _group_by_grid_point(trials_of_model: Sequence[Trial], scores: Mapping[str, Scores]) -> list[_GridPointScores]:
    """Group the scores of a model's trials by grid point. A grid point without a finished trial has no scores."""
    points: dict[str, _GridPointScores] = {}
    for trial in trials_of_model:
        description = trials.describe_grid_point(trial.grid)  # a mapping cannot be a key
        point = points.setdefault(description, _GridPointScores(trial.grid, {}))
        if trial.name in scores:
            point.scores_by_seed[trial.seed] = scores[trial.name]
    return list(points.values())


def _summarise_task(
    task: Task[Any], results: Mapping[str, ModelResult], finished_scores: Sequence[Scores]
) -> TaskSummary:
    """Summarise the results of all models on one task.

    Args:
        task: the task.
        results: results by model.
        finished_scores: scores of all finished trials.
    """
    notes = []
    for model, result in results.items():
        files = result.details.get("not_reserved")
        if files:
            notes.append(
                f"{model} may have been trained on this test: {len(files)} of its files were not removed from the "
                f"training text ({files[0]}, …). See preparation.evaluation_sets."
            )
    if len({scores.test_set for scores in finished_scores}) > 1:
        notes.append("The trials have different test sets. Do not compare their scores.")
    question_counts = {}
    for scores in finished_scores:
        for code in scores.languages:
            question_counts[code] = scores.counts[code]
    codes = languages.sort_codes(question_counts, task.order)
    metrics = task.metrics[:1]
    if finished_scores:
        metrics = tuple(dict.fromkeys((*task.metrics, *finished_scores[0].mean)))  # an ordered set
    return TaskSummary(
        kind=task.name,
        description=(task.__doc__ or "").splitlines()[0],
        main=task.metrics[0],
        metrics=metrics,
        languages=tuple(codes),
        counts={code: question_counts[code] for code in codes},
        notes=tuple(notes),
        models=results,
    )


def _summarise_grid_point(grid: Mapping[str, Any], scores_by_seed: Mapping[int, Scores]) -> GridPoint:
    """Average the development scores of a grid point over its seeds. Without development sets, the scores are None."""
    scores_with_dev = [scores for scores in scores_by_seed.values() if scores.dev]
    means = [scores.dev["mean"] for scores in scores_with_dev if scores.dev]
    selection_scores = [_find_selection_score(scores) for scores in scores_with_dev]
    return GridPoint(
        grid=grid,
        dev=fmean(means) if means else None,
        by=fmean(selection_scores) if selection_scores else None,
        seeds=tuple(scores_by_seed),
    )


def _find_selection_score(scores: Scores) -> float:
    """Return the development score by which grid points are compared.

    If checkpoints are chosen by the source language, use only the score of the source language. Scores of other
    languages would tune the model on these languages, and the test would no longer be zero-shot.
    """
    dev = scores.dev or {}
    score: float = dev["mean"]
    if scores.selection and scores.selection["rule"] == "source" and scores.trained_on:
        source_language = scores.trained_on[0]
        score = dev["languages"].get(source_language, score)
    return score


def _choose_grid_point(grid_points: Sequence[GridPoint]) -> GridPoint | None:
    """Choose the grid point with the best development score; the first point wins a tie. Test scores are never used.

    Only points with the most finished seeds compete, so that one lucky seed does not beat a mean of five seeds.
    Return None if no seed is finished, or if a finished point of a grid has no development score.
    """
    measured = [grid_point for grid_point in grid_points if grid_point.seeds]
    if not measured:
        return None
    if len(grid_points) == 1:
        return measured[0]
    if any(grid_point.by is None for grid_point in measured):
        return None
    most_seeds = max(len(grid_point.seeds) for grid_point in measured)
    complete = [grid_point for grid_point in measured if len(grid_point.seeds) == most_seeds]
    return max(complete, key=lambda grid_point: grid_point.by or 0.0)


def _describe_excluded_points(grid_points: Sequence[GridPoint]) -> str:
    """Explain which grid points could not be chosen. Return "" if all points could be chosen."""
    measured = [grid_point for grid_point in grid_points if grid_point.seeds]
    if not measured or len(grid_points) == 1:
        return ""
    without_dev = [grid_point for grid_point in measured if grid_point.by is None]
    if without_dev:
        names = _describe_grid_points(without_dev)
        return f"no grid point is chosen, because {names} have no development scores. Add development sets."
    most_seeds = max(len(grid_point.seeds) for grid_point in measured)
    incomplete = [grid_point for grid_point in measured if len(grid_point.seeds) < most_seeds]
    if incomplete:
        names = _describe_grid_points(incomplete)
        return f"{names} cannot be chosen, because fewer than {most_seeds} seeds are finished."
    return ""


def _describe_grid_points(grid_points: Iterable[GridPoint]) -> str:
    """List the values of grid points as text."""
    return ", ".join(trials.describe_grid_point(grid_point.grid) for grid_point in grid_points)


def _summarise_model(
    task: Task[Any],
    task_name: str,
    settings: Any,
    scores_by_seed: Mapping[int, Scores],
    chosen: GridPoint,
    grid_points: Sequence[GridPoint],
) -> ModelResult:
    """Summarise one model on one task over the seeds of the chosen grid point.

    Args:
        task: the task.
        task_name: name of the task in the suite. The names of its metrics start with it.
        settings: settings of the task.
        scores_by_seed: scores at the chosen grid point by seed.
        chosen: chosen grid point.
        grid_points: all grid points.
    """
    first_scores = next(iter(scores_by_seed.values()))
    has_grid = len(grid_points) > 1
    grid_dev_languages = first_scores.dev["languages"] if first_scores.dev and has_grid else ()
    statistics_by_language = {}
    for code in languages.sort_codes(first_scores.languages, task.order):
        language_scores = {seed: scores.languages[code] for seed, scores in scores_by_seed.items()}
        statistics_by_language[code] = _compute_statistics(language_scores)
    # Scores of mixed pairs also contain a table of all language pairs. No statistic is computed from this table.
    mixed_scores = {seed: scores.mixed for seed, scores in scores_by_seed.items() if scores.mixed}
    mixed = _compute_statistics(mixed_scores, ("within", "across")) if mixed_scores else {}
    selections = {seed: scores.selection or {} for seed, scores in scores_by_seed.items()}
    gaps = {seed: scores.transfer_gap or {} for seed, scores in scores_by_seed.items()}
    metrics = {seed: task.name_metrics(scores, settings, task_name) for seed, scores in scores_by_seed.items()}
    return ModelResult(
        chosen=chosen,
        grid=tuple(grid_points),
        rule=describe_rule(first_scores.selection, grid_dev_languages),
        tuned={seed: scores.training.get("tuned") for seed, scores in scores_by_seed.items()},
        steps={seed: selection.get("chosen", {}) for seed, selection in selections.items()},
        languages=statistics_by_language,
        mean=_compute_statistics({seed: scores.mean for seed, scores in scores_by_seed.items()}),
        transfer_gap=_compute_statistics(gaps) or None,
        within=mixed.get("within"),
        across=mixed.get("across"),
        details=first_scores.details,
        metrics=_compute_statistics(metrics),
    )


def _compute_statistics(
    metrics_by_seed: Mapping[int, Mapping[str, Any]], names: Iterable[str] = ()
) -> dict[str, Statistic]:
    """Compute the statistic of each metric over the seeds that have a value of it.

    Args:
        metrics_by_seed: values by seed and metric.
        names: names of the metrics; by default all.
    """
    selected_names = list(names)
    if not selected_names:
        for metrics in metrics_by_seed.values():
            selected_names += metrics
    statistics = {}
    for name in dict.fromkeys(selected_names):
        values = {seed: metrics[name] for seed, metrics in metrics_by_seed.items() if name in metrics}
        statistics[name] = summarise_seeds(values)
    return statistics
