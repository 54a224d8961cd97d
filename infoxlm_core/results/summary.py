"""Summarise a sweep: the statistics of every model over its seeds, of the headlines and of each task.

A suite, an ablation and an evaluation have summaries of one form. An ablation has headlines and no tasks, because its
trials log only metrics.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from statistics import fmean
from types import MappingProxyType
from typing import Any

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
"""Variant -> seed -> which questions the model answered correctly."""
COSTS = ("steps", "tokens_seen", "cost/cpu_hours/pretrain", "cost/gpu_hours/pretrain")
"""Metrics of the cost of a pre-training."""
_TASK_HEADLINES = ("served", "best", "centred", "no_overlap", "mean")  # in the order in which a page shows them


@dataclass(frozen=True)
class Variant:
    """The headlines of one model over its seeds."""

    what: str  # what a variant changes, or the location of a model
    seeds: tuple[int, ...]
    unfinished: tuple[int, ...]
    metrics: Metrics
    differences: Metrics = field(default_factory=dict)  # to the first variant of an ablation, over the seeds
    question_differences: Metrics = field(default_factory=dict)  # the same over the held-out questions
    costs: Metrics = field(default_factory=dict)  # of the pre-training of an ablation's variant


@dataclass(frozen=True)
class GridPoint:
    """One combination of grid values, with its development scores."""

    grid: Mapping[str, Any]
    dev: float | None  # mean over finished seeds of the development score over all languages
    by: float | None  # mean over finished seeds of the development score by which grid points are compared
    seeds: tuple[int, ...]  # the finished seeds


@dataclass(frozen=True)
class ModelResult:
    """One model on one task, with the chosen grid values."""

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


@dataclass(frozen=True, kw_only=True)
class TaskSummary:
    """All models on one task. A model without a finished trial has no row."""

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
    metrics: tuple[str, ...]  # names of the headlines
    variants: Mapping[str, Variant]
    unfinished: tuple[str, ...]  # names of trials
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
        """Return whether a headline is a share from 0 to 1."""
        task_name, _, metric_name = metric.partition("/")
        task = self.tasks.get(task_name)
        # A suite may give a task any name, so the type of the metric is known only by the task's kind.
        kind = task.kind if task else task_name
        return is_share(f"{kind}/{metric_name}")

    def name_metrics(self) -> dict[str, float]:
        """Return the metrics for the tracker: the scores of a suite, or the headlines of an ablation.

        Names of scores are such as `xnli/mean` and `xnli/en`. Those of other models begin with the model's name.
        Names of headlines begin with the variant: `full/retrieval/served`, with `/deviation` and `/n`. A variant that
        is compared with the first one also has `/difference`, `/difference/low` and `/difference/high`.
        """
        values = self._list_scores() if self.tasks else self._list_headlines()
        return {name: value for name, value in values if value is not None}

    def _list_headlines(self) -> Iterator[tuple[str, float | None]]:
        """Yield name and value of the metrics of an ablation."""
        for model, variant in self.variants.items():
            for metric, statistic in variant.metrics.items():
                yield f"{model}/{metric}", statistic.mean
                yield f"{model}/{metric}/deviation", statistic.deviation
                yield f"{model}/{metric}/n", statistic.n
            for metric, difference in variant.differences.items():
                low, high = difference.interval or (None, None)
                yield f"{model}/{metric}/difference", difference.mean
                yield f"{model}/{metric}/difference/low", low
                yield f"{model}/{metric}/difference/high", high

    def _list_scores(self) -> Iterator[tuple[str, float | None]]:
        """Yield name and value of the metrics of a suite or an evaluation."""
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
        results: the trials with their metrics, which are empty for an unfinished trial.
        metrics: names of the metrics to compare; by default the headlines and the paper's tasks, if any trial has them.
        outcomes: variant -> seed -> the outcomes of a finished trial by question, as far as they are stored.

    Raises:
        InputError: no trial has a metric that `metrics` names.
    """
    results_by_variant: dict[str, list[tuple[Trial, Mapping[str, float]]]] = {}
    logged_metrics: set[str] = set()
    for trial, values in results:
        results_by_variant.setdefault(trial.model, []).append((trial, values))
        logged_metrics.update(values)
    headlines = _select_headlines(metrics, logged_metrics)
    costs = [name for name in COSTS if name in logged_metrics]
    variants: dict[str, Variant] = {}
    unfinished_trials: list[str] = []
    for name, variant_results in results_by_variant.items():
        variants[name] = _summarise_variant(variant_results, headlines, costs)
        unfinished_trials += [trial.name for trial, values in variant_results if not values]
    baseline = next(iter(variants), "")  # the variant with which all others are compared
    comparisons = len(variants) - 1
    for name, variant in variants.items():
        if name == baseline:
            continue
        differences = {}
        for metric in headlines:
            reference = variants[baseline].metrics[metric]
            differences[metric] = compare_seeds(variant.metrics[metric], reference, comparisons)
        question_differences = _compare_answers(
            outcomes.get(name, {}), outcomes.get(baseline, {}), headlines, comparisons
        )
        variants[name] = replace(variant, differences=differences, question_differences=question_differences)
    return Summary(
        title=title,
        model=baseline,
        models={name: variant.what for name, variant in variants.items()},
        metrics=headlines,
        variants=variants,
        unfinished=tuple(unfinished_trials),
        tasks={},
    )


def _select_headlines(requested: Sequence[str], logged_metrics: set[str]) -> tuple[str, ...]:
    """Return the requested metrics, by default the logged headlines. Raise InputError if one was not logged."""
    for name in requested:
        if name not in logged_metrics:
            available = ", ".join(sorted(logged_metrics)) or "none"
            raise InputError(f"No trial has the metric {name!r}. Known metrics: {available}.")
    if requested:
        return tuple(requested)
    directions = sorted(name for name in logged_metrics if name.startswith("translation/bleu/"))
    return tuple(name for name in (*trials.HEADLINES, *directions, *published.METRICS) if name in logged_metrics)


def _summarise_variant(
    results: Sequence[tuple[Trial, Mapping[str, float]]], headlines: Sequence[str], costs: Sequence[str]
) -> Variant:
    """Summarise the trials of one variant."""
    values_by_seed = {trial.seed: values for trial, values in results}
    return Variant(
        what=results[0][0].what,
        seeds=tuple(sorted(trial.seed for trial, _ in results)),
        unfinished=tuple(sorted(trial.seed for trial, values in results if not values)),
        metrics=_compute_statistics(values_by_seed, headlines),
        costs=_compute_statistics(values_by_seed, costs) if costs else {},
    )


def _compare_answers(
    candidate: Mapping[int, Outcomes], reference: Mapping[int, Outcomes], headlines: Sequence[str], comparisons: int
) -> Metrics:
    """Return the differences between two variants with intervals over the questions, for shares of correct answers.

    The answers of a variant to a question are averaged over the seeds that both variants have.
    """
    seeds = sorted(candidate.keys() & reference.keys())
    if not seeds:
        return {}
    level = 1 - (1 - CONFIDENCE) / comparisons
    differences = {}
    for name in headlines:
        try:
            candidate_scores = evidence.average([candidate[seed] for seed in seeds], name)
            reference_scores = evidence.average([reference[seed] for seed in seeds], name)
            gain = paired_bootstrap(candidate_scores, reference_scores, level=level)
        except (InputError, ValueError):  # not a share of correct answers, such as a perplexity, or of other questions
            continue
        differences[name] = Statistic(gain.questions, gain.gain, interval=(gain.lower, gain.upper))
    return differences


# ---------------------------------------------------------------- suites and evaluations


def summarise(config: SuiteConfig, results: Mapping[str, Scores]) -> Summary:
    """Summarise a suite.

    Args:
        config: the suite.
        results: trial name -> scores, for all finished trials.
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
    """Summarise an evaluation: a suite in which every model has one trial on each task that it can be measured on.

    Args:
        title: title of the page.
        models: name -> description; the first is the model under test.
        tasks: the tasks with their settings.
        scores: model -> task -> scores.
    """
    summaries = {}
    for task, settings in tasks:
        task_scores = {model: by_task[task.name] for model, by_task in scores.items() if task.name in by_task}
        if not task_scores:
            continue
        results = {}
        for model, model_scores in task_scores.items():
            scores_by_seed = {1: model_scores}
            grid_point = _summarise_grid_point({}, scores_by_seed)
            results[model] = _summarise_model(task, task.name, settings, scores_by_seed, grid_point, [grid_point])
        summaries[task.name] = _summarise_task(task, results, list(task_scores.values()))
    return _join_tasks(title, models, summaries, unfinished=())


def _join_tasks(
    title: str, models: Mapping[str, str], tasks: Mapping[str, TaskSummary], unfinished: tuple[str, ...]
) -> Summary:
    """Return the summary of several tasks. Its headlines are the main metrics of each task."""
    headlines: dict[str, None] = {}  # an ordered set
    metrics: dict[str, dict[str, Statistic]] = {model: {} for model in models}
    for name, task in tasks.items():
        task_headlines = [f"{name}/{metric}" for metric in (*_TASK_HEADLINES, task.main, "transfer_gap")]
        for model, result in task.models.items():
            metrics[model] |= result.metrics
            headlines |= {headline: None for headline in task_headlines if headline in result.metrics}
    missing = Statistic(0, None)
    variants = {}
    for model, location in models.items():
        model_headlines = {headline: metrics[model].get(headline, missing) for headline in headlines}
        variants[model] = Variant(what=location, seeds=(), unfinished=(), metrics=model_headlines)
    model_under_test = next(iter(models))
    return Summary(title, model_under_test, dict(models), tuple(headlines), variants, unfinished, tasks)


def _summarise_suite_task(
    name: str, suite_task: SuiteTaskConfig, planned_trials: Sequence[Trial], scores: Mapping[str, Scores]
) -> TaskSummary:
    """Summarise one task of a suite from its planned trials and the scores of the finished ones."""
    task = task_of(suite_task.settings)
    notes = []
    results = {}
    for model in dict.fromkeys(trial.model for trial in planned_trials):
        grid_by_description: dict[str, Mapping[str, Any]] = {}
        scores_by_description: dict[str, dict[int, Scores]] = {}  # description of a grid point -> seed -> scores
        for trial in planned_trials:
            if trial.model == model:
                description = trials.describe_grid_point(trial.grid)
                grid_by_description[description] = trial.grid
                scores_by_seed = scores_by_description.setdefault(description, {})
                if trial.name in scores:
                    scores_by_seed[trial.seed] = scores[trial.name]
        grid_points = []
        for description, grid in grid_by_description.items():
            grid_points.append(_summarise_grid_point(grid, scores_by_description[description]))
        chosen, problem = _choose_grid_point(grid_points)
        if problem:
            notes.append(f"{model}: {problem}")
        if chosen:
            chosen_scores = scores_by_description[trials.describe_grid_point(chosen.grid)]
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


def _summarise_task(
    task: Task[Any], results: Mapping[str, ModelResult], finished_scores: Sequence[Scores]
) -> TaskSummary:
    """Summarise the results of all models on one task, without the protocol, which only a suite has."""
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
    counts = {code: scores.counts[code] for scores in finished_scores for code in scores.languages}
    codes = languages.sort(counts, task.order)
    metrics = task.metrics[:1]
    if finished_scores:
        metrics = tuple(dict.fromkeys((*task.metrics, *finished_scores[0].mean)))
    return TaskSummary(
        kind=task.name,
        description=(task.__doc__ or "").splitlines()[0],
        main=task.metrics[0],
        metrics=metrics,
        languages=tuple(codes),
        counts={code: counts[code] for code in codes},
        notes=tuple(notes),
        models=results,
    )


def _summarise_grid_point(grid: Mapping[str, Any], scores_by_seed: Mapping[int, Scores]) -> GridPoint:
    """Average the development scores of a grid point over seeds. They are None if no seed has development sets."""
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

    Under the rule `source` it is the score of the source language alone. With any other score, the test would not be
    zero-shot.
    """
    dev = scores.dev or {}
    score: float = dev["mean"]
    if scores.selection and scores.selection["rule"] == "source" and scores.trained_on:
        source_language = scores.trained_on[0]
        score = dev["languages"].get(source_language, score)
    return score


def _choose_grid_point(grid_points: Sequence[GridPoint]) -> tuple[GridPoint | None, str]:
    """Choose the grid point with the best development score, the first one of equals. Test scores are never used.

    Only points with the most finished seeds compete, so that one lucky seed does not beat a mean of five.

    Returns:
        The chosen point, or None if no seed is finished, or if finished points of a grid have no development scores.
        A sentence about the points that could not be chosen, or "".
    """
    measured = [grid_point for grid_point in grid_points if grid_point.seeds]
    if not measured:
        return None, ""
    if len(grid_points) == 1:
        return measured[0], ""
    without_dev = [grid_point for grid_point in measured if grid_point.by is None]
    if without_dev:
        points = _describe_grid_points(without_dev)
        return None, f"no grid point is chosen, because {points} have no development scores. Add development sets."
    seed_count = max(len(grid_point.seeds) for grid_point in measured)
    complete = [grid_point for grid_point in measured if len(grid_point.seeds) == seed_count]
    incomplete = [grid_point for grid_point in measured if len(grid_point.seeds) < seed_count]
    problem = ""
    if incomplete:
        points = _describe_grid_points(incomplete)
        problem = f"{points} cannot be chosen, because fewer than {seed_count} seeds are finished."
    return max(complete, key=lambda grid_point: grid_point.by or 0.0), problem


def _describe_grid_points(grid_points: Iterable[GridPoint]) -> str:
    return ", ".join(trials.describe_grid_point(grid_point.grid) for grid_point in grid_points)


def _summarise_model(
    task: Task[Any],
    task_name: str,
    settings: Any,
    scores_by_seed: Mapping[int, Scores],
    chosen: GridPoint,
    grid_points: Sequence[GridPoint],
) -> ModelResult:
    """Summarise one model on one task over the seeds of its chosen grid point."""
    first_scores = next(iter(scores_by_seed.values()))
    grid_dev_languages = first_scores.dev["languages"] if first_scores.dev and len(grid_points) > 1 else ()
    scores_of_language = {}
    for code in languages.sort(first_scores.languages, task.order):
        scores_of_language[code] = {seed: scores.languages[code] for seed, scores in scores_by_seed.items()}
    # Scores of mixed pairs also have a table of all language pairs, which has no statistic.
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
        languages={code: _compute_statistics(by_seed) for code, by_seed in scores_of_language.items()},
        mean=_compute_statistics({seed: scores.mean for seed, scores in scores_by_seed.items()}),
        transfer_gap=_compute_statistics(gaps) or None,
        within=mixed.get("within"),
        across=mixed.get("across"),
        details=first_scores.details,
        metrics=_compute_statistics(metrics),
    )


def _compute_statistics(
    values_by_seed: Mapping[int, Mapping[str, Any]], names: Iterable[str] = ()
) -> dict[str, Statistic]:
    """Return the statistic over seeds of each named metric, by default of all metrics. Seeds may lack a metric."""
    metrics = tuple(names) or dict.fromkeys(name for values in values_by_seed.values() for name in values)
    statistics = {}
    for metric in metrics:
        metric_by_seed = {seed: values[metric] for seed, values in values_by_seed.items() if metric in values}
        statistics[metric] = summarise_seeds(metric_by_seed)
    return statistics
