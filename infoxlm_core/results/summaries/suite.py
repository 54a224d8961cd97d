"""The results of a sweep: statistics over seeds for every model, of its headline metrics and of each task.

Suites, ablations and evaluations share this format. This module summarises suites and evaluations, whose trials have
scores by task.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from infoxlm_core import languages
from infoxlm_core.results import trials
from infoxlm_core.results.protocol import compare_protocol, describe_rule, name_setting
from infoxlm_core.results.statistics import Statistic, is_share, summarise_metrics_by_seed
from infoxlm_core.results.suite_config import SuiteConfig, SuiteTaskConfig
from infoxlm_core.results.summaries import grid_points
from infoxlm_core.results.summaries.grid_points import GridPoint
from infoxlm_core.results.trials import Trial
from infoxlm_core.tasks import task_of
from infoxlm_core.tasks.scores import Scores
from infoxlm_core.tasks.task import Fact, Task

Metrics = Mapping[str, Statistic]
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
class ModelResult:
    """The result of one model on one task, at the chosen grid point."""

    chosen: GridPoint
    grid: tuple[GridPoint, ...]
    rule: str
    tuned: Mapping[int, str | None]  # seed -> location of the fine-tuned model in the store
    steps: Mapping[int, Mapping[str, int]]  # seed -> language -> step of the chosen checkpoint; "*": all languages
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
                del result["metrics"]  # the values above, under their names in the tracker
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
        values = self._list_scores() if self.tasks else self._list_variant_metrics()
        return {name: value for name, value in values if value is not None}

    def _list_variant_metrics(self) -> Iterator[tuple[str, float | None]]:
        """Yield the name and the value of every metric of an ablation, with deviations and differences."""
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
            grid_point = grid_points.summarise({}, scores_by_seed)
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
    headline_metrics: dict[str, None] = {}  # an ordered set: models have different metrics, and tasks name some twice
    metrics_by_model: dict[str, dict[str, Statistic]] = {model: {} for model in models}
    for name, task in tasks.items():
        candidates = [f"{name}/{metric}" for metric in (*_TASK_HEADLINES, task.main, "transfer_gap")]
        for model, result in task.models.items():
            metrics_by_model[model] |= result.metrics
            headline_metrics |= dict.fromkeys(metric for metric in candidates if metric in result.metrics)
    missing = Statistic(0, None)  # of a model without a finished trial
    variants = {}
    for model, location in models.items():
        statistics = {metric: metrics_by_model[model].get(metric, missing) for metric in headline_metrics}
        # Tasks may have different seeds, so each task's `GridPoint` names the seeds instead.
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
    for model in dict.fromkeys(trial.model for trial in planned_trials):  # without duplicates, in the suite's order
        trials_of_model = [trial for trial in planned_trials if trial.model == model]
        grid = []
        for values in trials.list_grid_points(suite_task):
            scores_by_seed = grid_points.select_scores(values, trials_of_model, scores)
            grid.append(grid_points.summarise(values, scores_by_seed))
        chosen, problem = grid_points.choose(grid)
        if problem:
            notes.append(f"{model}: {problem}")
        if chosen:
            chosen_scores = grid_points.select_scores(chosen.grid, trials_of_model, scores)
            results[model] = _summarise_model(task, name, suite_task.settings, chosen_scores, chosen, grid)
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
    """Summarise the results of all models on one task. `finished_scores` has the scores of all finished trials."""
    notes = []
    for model, result in results.items():
        files = result.details.get("not_reserved")
        if files:
            notes.append(
                f"{model} may have been trained on this test: {len(files)} of the test's files were not removed from "
                f"the training text ({files[0]}, …). See preparation.evaluation_sets."
            )
    if len({scores.test_set for scores in finished_scores}) > 1:
        notes.append("The trials have different test sets. Do not compare their scores.")
    question_counts = {}
    for scores in finished_scores:
        for code in scores.languages:
            question_counts[code] = scores.counts[code]
    codes = languages.sort_codes(question_counts, task.order)
    metrics = task.metrics[:1]  # without a finished trial, only the main metric
    if finished_scores:
        # Scores may have more metrics than the task declares, such as `no_overlap`.
        metrics = tuple(dict.fromkeys((*task.metrics, *finished_scores[0].mean)))
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


def _summarise_model(
    task: Task[Any],
    task_name: str,
    settings: Any,
    scores_by_seed: Mapping[int, Scores],
    chosen: GridPoint,
    grid: Sequence[GridPoint],
) -> ModelResult:
    """Summarise one model on one task over the seeds of the chosen grid point.

    Args:
        task: the task.
        task_name: name of the task in the suite. The names of its metrics start with it.
        settings: settings of the task.
        scores_by_seed: scores at the chosen grid point by seed.
        chosen: chosen grid point.
        grid: all grid points of the task.
    """
    first_scores = next(iter(scores_by_seed.values()))
    has_grid = len(grid) > 1
    grid_dev_languages = first_scores.dev["languages"] if first_scores.dev and has_grid else ()
    statistics_by_language = {}
    for code in languages.sort_codes(first_scores.languages, task.order):
        language_scores = {seed: scores.languages[code] for seed, scores in scores_by_seed.items()}
        statistics_by_language[code] = summarise_metrics_by_seed(language_scores)
    # Scores of text pairs in one language (`within`) and in two (`across`). A third field, `cells`, is not summarised.
    mixed_scores = {seed: scores.mixed for seed, scores in scores_by_seed.items() if scores.mixed}
    mixed = summarise_metrics_by_seed(mixed_scores, ("within", "across")) if mixed_scores else {}
    selections = {seed: scores.selection or {} for seed, scores in scores_by_seed.items()}
    gaps = {seed: scores.transfer_gap or {} for seed, scores in scores_by_seed.items()}
    metrics = {seed: task.name_metrics(scores, settings, task_name) for seed, scores in scores_by_seed.items()}
    return ModelResult(
        chosen=chosen,
        grid=tuple(grid),
        rule=describe_rule(first_scores.selection, grid_dev_languages),
        tuned={seed: scores.training.get("tuned") for seed, scores in scores_by_seed.items()},
        steps={seed: selection.get("chosen", {}) for seed, selection in selections.items()},
        languages=statistics_by_language,
        mean=summarise_metrics_by_seed({seed: scores.mean for seed, scores in scores_by_seed.items()}),
        transfer_gap=summarise_metrics_by_seed(gaps) or None,
        within=mixed.get("within"),
        across=mixed.get("across"),
        details=first_scores.details,
        metrics=summarise_metrics_by_seed(metrics),
    )
