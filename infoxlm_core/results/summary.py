"""Summarise a sweep: the statistics of every model over its seeds, of the headlines and of each task.

A suite, an ablation and an evaluation have summaries of one form. An ablation has headlines and no tasks, because its
trials log only metrics.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from statistics import fmean
from typing import Any

from infoxlm_core.errors import InputError
from infoxlm_core.results import published, trials
from infoxlm_core.results.protocol import compare_protocol, describe_rule, name_setting
from infoxlm_core.results.statistics import Statistic, is_share, over_seeds, paired_difference
from infoxlm_core.results.suite_config import SuiteConfig, SuiteTaskConfig
from infoxlm_core.results.trials import Trial
from infoxlm_core.tasks import task_of
from infoxlm_core.tasks.scores import Scores
from infoxlm_core.tasks.task import Fact, Task

Metrics = Mapping[str, Statistic]
_LEADING = ("served", "best", "centred", "no_overlap", "mean")  # metrics of a task that are headlines, in this order


@dataclass(frozen=True)
class Variant:
    """The headlines of one model over its seeds."""

    what: str  # what a variant changes, or the location of a model
    seeds: tuple[int, ...]
    unfinished: tuple[int, ...]
    metrics: Metrics
    differences: Metrics = field(default_factory=dict)  # to the first variant of an ablation


@dataclass(frozen=True)
class GridPoint:
    """One point of a model's grid."""

    grid: Mapping[str, Any]
    dev: float | None  # mean over finished seeds of the development score over all languages
    by: float | None  # mean over finished seeds of the development score by which points are compared
    seeds: tuple[int, ...]  # the finished seeds


@dataclass(frozen=True)
class ModelResult:
    """One model on one task, at the chosen point of its grid."""

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
    details: Mapping[str, Any]  # of the first seed: fields of this task only, such as retrieval's vectors
    metrics: Metrics  # by metric name in the tracker


@dataclass(frozen=True)
class TaskSummary:
    """All models on one task; a model without a finished trial has no row."""

    kind: str
    description: str
    main: str
    metrics: tuple[str, ...]
    table: str
    setting: str
    languages: tuple[str, ...]
    counts: Mapping[str, int]
    protocol: tuple[Fact, ...]
    notes: tuple[str, ...]
    settings: Mapping[str, Any]
    models: Mapping[str, ModelResult]


@dataclass(frozen=True)
class Summary:
    """The results of a sweep."""

    title: str
    model: str  # the model under test
    models: Mapping[str, str]  # name -> location of a model, or what a variant changes
    metrics: tuple[str, ...]  # names of the headlines
    variants: Mapping[str, Variant]
    unfinished: tuple[str, ...]  # names of trials
    tasks: Mapping[str, TaskSummary]

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, as suite.json and comparison.json hold them."""
        plain = asdict(self)
        for task in plain["tasks"].values():
            task["protocol"] = [fact._asdict() for fact in task["protocol"]]
            for result in task["models"].values():
                result |= result.pop("details")
                del result["metrics"]
        return plain

    def is_share(self, metric: str) -> bool:
        """Return whether a headline is a share. Its name begins with the task's name, not with its kind."""
        task, _, name = metric.partition("/")
        kind = self.tasks[task].kind if task in self.tasks else task
        return is_share(f"{kind}/{name}")

    def name_headlines(self) -> dict[str, float]:
        """Return the headlines for the tracker: `full/retrieval/served`, with `/deviation` and `/n`.

        A variant that is compared with the first one also has `/difference`, `/difference/low` and `/difference/high`.
        """
        named: dict[str, float | None] = {}
        for model, variant in self.variants.items():
            for metric, statistic in variant.metrics.items():
                name = f"{model}/{metric}"
                named |= {name: statistic.mean, f"{name}/deviation": statistic.deviation, f"{name}/n": statistic.n}
            for metric, difference in variant.differences.items():
                name = f"{model}/{metric}/difference"
                low, high = difference.interval or (None, None)
                named |= {name: difference.mean, f"{name}/low": low, f"{name}/high": high}
        return {name: value for name, value in named.items() if value is not None}

    def name_scores(self) -> dict[str, float]:
        """Return the means of all scores for the tracker: `xnli/mean`, `xnli/en`, for other models `NAME/xnli/mean`."""
        named: dict[str, float | None] = {}
        for name, task in self.tasks.items():
            for model, result in task.models.items():
                prefix = "" if model == self.model else f"{trials.slug(model)}/"
                named |= {f"{prefix}{metric}": statistic.mean for metric, statistic in result.metrics.items()}
                named[f"{prefix}{name}/deviation"] = result.mean[task.main].deviation
                named[f"{prefix}{name}/seeds"] = len(result.chosen.seeds)
        return {name: value for name, value in named.items() if value is not None}


def summarise_metrics(
    title: str, results: Iterable[tuple[Trial, Mapping[str, float]]], metrics: Sequence[str] = ()
) -> Summary:
    """Summarise an ablation: every variant over its seeds, in the order of the results.

    Args:
        title: title of the page.
        results: the trials with their metrics, which are empty for an unfinished trial.
        metrics: names of the metrics to compare; by default the headlines and the paper's tasks, if any trial has them.

    Raises:
        InputError: no trial has a metric that `metrics` names.
    """
    groups: dict[str, list[tuple[Trial, Mapping[str, float]]]] = {}
    known: set[str] = set()
    for trial, values in results:
        groups.setdefault(trial.model, []).append((trial, values))
        known.update(values)
    for name in metrics:
        if name not in known:
            raise InputError(f"No trial has the metric {name!r}. Known metrics: {', '.join(sorted(known)) or 'none'}.")
    defaults = (*trials.HEADLINES, *published.METRICS)
    chosen = tuple(metrics) or tuple(name for name in defaults if name in known)
    variants: dict[str, Variant] = {}
    for model, group in groups.items():
        statistics = _over_seeds_each({trial.seed: values for trial, values in group}, chosen)
        first_variant = next(iter(variants.values()), None)
        differences = {}
        if first_variant:
            for name, reference in first_variant.metrics.items():
                differences[name] = paired_difference(statistics[name], reference, len(groups) - 1)
        variants[model] = Variant(
            what=group[0][0].what,
            seeds=tuple(sorted(trial.seed for trial, _ in group)),
            unfinished=tuple(sorted(trial.seed for trial, values in group if not values)),
            metrics=statistics,
            differences=differences,
        )
    unfinished = tuple(trial.name for group in groups.values() for trial, values in group if not values)
    models = {model: variant.what for model, variant in variants.items()}
    return Summary(title, next(iter(models), ""), models, chosen, variants, unfinished, {})


def summarise(config: SuiteConfig, results: Mapping[str, Scores]) -> Summary:
    """Summarise a suite.

    Args:
        config: the suite.
        results: trial name -> scores, for all finished trials.
    """
    planned = [item.trial for item in trials.plan(config)]
    tasks = {
        name: _summarise_suite_task(name, measure, [trial for trial in planned if trial.task == name], results)
        for name, measure in config.tasks.items()
    }
    model, *peers = config.models
    title = f"{model} beside {', '.join(peers)}" if peers else model
    unfinished = tuple(trial.name for trial in planned if trial.name not in results)
    return _join_tasks(title, config.models, tasks, unfinished)


def summarise_evaluation(
    title: str,
    models: Mapping[str, str],
    tasks: Iterable[tuple[Task[Any], Any]],
    scores: Mapping[str, Mapping[str, Scores]],
) -> Summary:
    """Summarise an evaluation: a suite in which every model has one trial on each task that it can be measured on.

    Args:
        title: title of the page.
        models: name -> description; the first is the model under test.
        tasks: the tasks with their settings.
        scores: model -> task -> scores.
    """
    summaries = {}
    for task, settings in tasks:
        measured = {model: by_task[task.name] for model, by_task in scores.items() if task.name in by_task}
        results = {}
        for model, model_scores in measured.items():
            point = _ScoredPoint.of({}, {1: model_scores})
            results[model] = _summarise_model(task, task.name, settings, point, [point])
        if results:
            summaries[task.name] = _summarise_task(task, results, list(measured.values()), [])
    return _join_tasks(title, models, summaries, ())


def _join_tasks(
    title: str, models: Mapping[str, str], tasks: Mapping[str, TaskSummary], unfinished: tuple[str, ...]
) -> Summary:
    """Return the summary of several tasks; its headlines are the leading metrics of each task."""
    headlines: dict[str, None] = {}  # an ordered set
    metrics: dict[str, dict[str, Statistic]] = {model: {} for model in models}
    for name, task in tasks.items():
        leading = [f"{name}/{metric}" for metric in (*_LEADING, task.main, "transfer_gap")]
        for model, result in task.models.items():
            metrics[model] |= result.metrics
            headlines |= {metric: None for metric in leading if metric in result.metrics}
    missing = Statistic(0, None)
    variants = {}
    for model, location in models.items():
        model_headlines = {name: metrics[model].get(name, missing) for name in headlines}
        variants[model] = Variant(what=location, seeds=(), unfinished=(), metrics=model_headlines)
    return Summary(title, next(iter(models)), dict(models), tuple(headlines), variants, unfinished, tasks)


def _summarise_suite_task(
    name: str, measure: SuiteTaskConfig, planned: Sequence[Trial], scores: Mapping[str, Scores]
) -> TaskSummary:
    """Summarise one task of a suite from its planned trials and the scores of the finished ones."""
    task = task_of(measure.settings)
    notes: list[str] = []
    results: dict[str, ModelResult] = {}
    for model in dict.fromkeys(trial.model for trial in planned):
        points = _group_by_point([trial for trial in planned if trial.model == model], scores)
        chosen = _choose(points, model, notes)
        if chosen:
            results[model] = _summarise_model(task, name, measure.settings, chosen, points)
    finished = [scores[trial.name] for trial in planned if trial.name in scores]
    summary = _summarise_task(task, results, finished, notes)
    return replace(
        summary,
        table=measure.table,
        setting=name_setting(measure, finished),
        protocol=tuple(compare_protocol(measure, summary.counts, finished)),
        settings=trials.dump(measure.settings),
    )


def _summarise_task(
    task: Task[Any], results: Mapping[str, ModelResult], finished: Sequence[Scores], notes: Sequence[str]
) -> TaskSummary:
    """Summarise the results of all models on one task, without the protocol, which only a suite has."""
    warnings = list(notes)
    for model, result in results.items():
        files = result.details.get("not_reserved")
        if files:
            warnings.append(
                f"{model} may have been trained on this test: {len(files)} of its files were not removed from the "
                f"training text ({files[0]}, …). See preparation.evaluation_sets."
            )
    if len({scores.test_set for scores in finished}) > 1:
        warnings.append("The trials have different test sets. Do not compare their scores.")
    counts = {code: scores.counts[code] for scores in finished for code in scores.languages}
    languages = task.sort(counts)
    metrics = task.metrics[:1]
    if finished:
        metrics = tuple(dict.fromkeys((*task.metrics, *finished[0].mean)))
    return TaskSummary(
        kind=task.name,
        description=(task.__doc__ or "").splitlines()[0],
        main=task.metrics[0],
        metrics=metrics,
        table="none",
        setting="other",
        languages=tuple(languages),
        counts={code: counts[code] for code in languages},
        protocol=(),
        notes=tuple(warnings),
        settings={},
        models=results,
    )


@dataclass(frozen=True)
class _ScoredPoint:
    """A point of a model's grid with the scores of its finished seeds."""

    summary: GridPoint
    scores: Mapping[int, Scores]

    @classmethod
    def of(cls, grid: Mapping[str, Any], scores: Mapping[int, Scores]) -> "_ScoredPoint":
        """Compute the development scores of a point, which are None if no seed has development sets."""
        means = [seed_scores.dev["mean"] for seed_scores in scores.values() if seed_scores.dev]
        compared = [_selection_score(seed_scores) for seed_scores in scores.values() if seed_scores.dev]
        point = GridPoint(
            grid, dev=fmean(means) if means else None, by=fmean(compared) if compared else None, seeds=tuple(scores)
        )
        return cls(point, scores)


def _group_by_point(planned: Sequence[Trial], scores: Mapping[str, Scores]) -> list[_ScoredPoint]:
    """Return the points of one model's grid, in the order of its trials."""
    grids = {trials.describe(trial.grid): trial.grid for trial in planned}
    scores_by_point: dict[str, dict[int, Scores]] = {name: {} for name in grids}
    for trial in planned:
        if trial.name in scores:
            scores_by_point[trials.describe(trial.grid)][trial.seed] = scores[trial.name]
    return [_ScoredPoint.of(grid, scores_by_point[name]) for name, grid in grids.items()]


def _selection_score(scores: Scores) -> float:
    """Return the development score by which grid points are compared.

    Under the rule `source` it is the score of the source language alone. With any other score, the test would not be
    zero-shot.
    """
    dev = scores.dev or {}
    mean: float = dev["mean"]
    if not scores.selection or scores.selection["rule"] != "source" or not scores.trained_on:
        return mean
    source_score: float = dev["languages"].get(scores.trained_on[0], mean)
    return source_score


def _choose(points: Sequence[_ScoredPoint], model: str, notes: list[str]) -> _ScoredPoint | None:
    """Return the point with the best development score, or the first of several; test scores are never used.

    Only points with the most finished seeds compete, so that one lucky seed does not beat a mean of five. Points that
    cannot be chosen are added to `notes`.
    """
    finished = [point for point in points if point.scores]
    if not finished:
        return None
    if len(points) == 1:
        return finished[0]
    without_dev = [point for point in finished if point.summary.dev is None]
    if without_dev:
        notes.append(
            f"{model}: no grid point is chosen, because {_list_points(without_dev)} have no development scores. "
            "Add development sets."
        )
        return None
    seed_count = max(len(point.scores) for point in finished)
    complete = [point for point in finished if len(point.scores) == seed_count]
    incomplete = [point for point in finished if len(point.scores) < seed_count]
    if incomplete:
        notes.append(
            f"{model}: {_list_points(incomplete)} cannot be chosen, because fewer than {seed_count} seeds are finished."
        )
    return max(complete, key=lambda point: point.summary.by or 0.0)


def _list_points(points: Iterable[_ScoredPoint]) -> str:
    return ", ".join(trials.describe(point.summary.grid) for point in points)


def _summarise_model(
    task: Task[Any], name: str, settings: Any, chosen: _ScoredPoint, points: Sequence[_ScoredPoint]
) -> ModelResult:
    """Summarise one model on one task over the seeds of the chosen point of its grid."""
    by_seed = chosen.scores
    first = next(iter(by_seed.values()))
    grid_dev_languages = first.dev["languages"] if first.dev and len(points) > 1 else ()
    languages = {}
    for code in task.sort(first.languages):
        languages[code] = _over_seeds_each({seed: scores.languages[code] for seed, scores in by_seed.items()})
    gaps = {seed: scores.transfer_gap for seed, scores in by_seed.items() if scores.transfer_gap}
    mixed = {seed: scores.mixed for seed, scores in by_seed.items() if scores.mixed}
    mixed_statistics = _over_seeds_each(mixed, ("within", "across"))
    named_metrics = {seed: task.name_metrics(scores, settings, name) for seed, scores in by_seed.items()}
    metric_names = dict.fromkeys(metric for metrics in named_metrics.values() for metric in metrics)
    return ModelResult(
        chosen=chosen.summary,
        grid=tuple(point.summary for point in points),
        rule=describe_rule(first.selection, grid_dev_languages),
        tuned={seed: scores.training.get("tuned") for seed, scores in by_seed.items()},
        steps={seed: (scores.selection or {}).get("chosen", {}) for seed, scores in by_seed.items()},
        languages=languages,
        mean=_over_seeds_each({seed: scores.mean for seed, scores in by_seed.items()}),
        transfer_gap=_over_seeds_each(gaps) if gaps else None,
        within=mixed_statistics["within"] if mixed else None,
        across=mixed_statistics["across"] if mixed else None,
        details=first.details,
        metrics=_over_seeds_each(named_metrics, metric_names),
    )


def _over_seeds_each(by_seed: Mapping[int, Mapping[str, Any]], names: Iterable[str] = ()) -> dict[str, Statistic]:
    """Return the statistic of each named metric, by default of all metrics of the first seed."""
    metrics = tuple(names) or tuple(next(iter(by_seed.values())))
    statistics = {}
    for metric in metrics:
        statistics[metric] = over_seeds({seed: values[metric] for seed, values in by_seed.items() if metric in values})
    return statistics
