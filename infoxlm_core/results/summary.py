"""Scores of a suite's trials -> one summary: the best place of each grid, mean and deviation over the seeds."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

from infoxlm_core.results import trials
from infoxlm_core.results.protocol import compare_protocol, describe_rule, find_differences, name_setting
from infoxlm_core.results.statistics import Statistic, over_seeds, over_seeds_each
from infoxlm_core.results.suite_config import SuiteConfig, SuiteTaskConfig
from infoxlm_core.results.trials import Trial
from infoxlm_core.tasks import TASKS, task_of
from infoxlm_core.tasks.scores import Scores, finite
from infoxlm_core.tasks.task import Fact


@dataclass(frozen=True)
class GridPoint:
    """One place of a model's grid."""

    grid: Mapping[str, Any]
    dev: float | None  # development score over all languages, the mean over finished seeds
    by: float | None  # the development score that chooses among places
    seeds: tuple[int, ...]  # those that are finished


@dataclass(frozen=True)
class Row:
    """One model on one task, at the chosen place of its grid."""

    chosen: GridPoint
    grid: tuple[GridPoint, ...]
    rule: str
    tuned: Mapping[int, str | None]  # where in the store the model of a seed is
    steps: Mapping[int, Mapping[str, int]]
    languages: Mapping[str, Mapping[str, Statistic]]
    mean: Mapping[str, Statistic]
    transfer_gap: Mapping[str, Statistic] | None
    within: Statistic | None
    across: Statistic | None
    details: Mapping[str, Any]  # what a task alone has, of the first seed: the vectors of retrieval


@dataclass(frozen=True)
class TaskSummary:
    """All models on one task; one of which nothing is finished has no row."""

    kind: str
    main: str
    metrics: tuple[str, ...]
    table: str
    setting: str
    languages: tuple[str, ...]
    counts: Mapping[str, int]
    protocol: tuple[Fact, ...]
    notes: tuple[str, ...]
    settings: Mapping[str, Any]
    models: Mapping[str, Row]

    @property
    def warning(self) -> str:
        """One sentence if these numbers must not be compared with the published ones; else nothing."""
        differences = find_differences(self.protocol)
        if self.table == "none" or not self.models or not differences:
            return ""
        return (
            f"Not the paper's protocol ({', '.join(differences)}): compare our rows with each other, "
            "and with the published ones at most their order."
        )


@dataclass(frozen=True)
class Summary:
    """What a suite has measured."""

    model: str
    models: Mapping[str, str]
    unfinished: tuple[str, ...]
    tasks: Mapping[str, TaskSummary]

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as suite.json holds them."""
        plain = asdict(self)
        for task in plain["tasks"].values():
            task["protocol"] = [fact._asdict() for fact in task["protocol"]]
            for row in task["models"].values():
                row |= row.pop("details")
        return plain

    def flatten(self) -> dict[str, float]:
        """As metrics: `xnli/mean`, `xnli/en`, `mlqa/f1/en`, `tatoeba/xx_en`; other models by name in front."""
        flat: dict[str, float] = {}
        for name, found in self.tasks.items():
            task, settings = TASKS[found.kind], trials.read_settings(found.settings)
            for model, row in found.models.items():
                prefix = name if model == self.model else f"{trials.slug(model)}/{name}"
                flat |= task.name_metrics(_average(found, row), settings, prefix)
                flat |= finite({f"{prefix}/deviation": row.mean[found.main].deviation})
                flat[f"{prefix}/seeds"] = len(row.chosen.seeds)
        return flat


def _average(found: TaskSummary, row: Row) -> Scores:
    """The means of a row, as if they were the scores of one trial."""

    def means(cells: Mapping[str, Statistic] | None) -> dict[str, Any]:
        return {metric: cell.mean for metric, cell in (cells or {}).items()}

    return Scores(
        found.kind,
        {code: means(cells) for code, cells in row.languages.items()},
        means(row.mean),
        found.counts,
        "",
        transfer_gap=means(row.transfer_gap),
        dev={"mean": row.chosen.dev},
        mixed={"within": row.within and row.within.mean, "across": row.across and row.across.mean},
        details=row.details,
    )


def summarise(config: SuiteConfig, results: Mapping[str, Scores]) -> Summary:
    """Sum up what has been measured: the scores of the trials that are finished, by name."""
    planned = [item.trial for item in trials.plan(config)]
    tasks = {
        task: _summarise_task(measure, [one for one in planned if one.task == task], list(config.models), results)
        for task, measure in config.tasks.items()
    }
    unfinished = tuple(one.name for one in planned if one.name not in results)
    return Summary(next(iter(config.models)), dict(config.models), unfinished, tasks)


def _summarise_task(
    measure: SuiteTaskConfig, planned: Sequence[Trial], models: Sequence[str], results: Mapping[str, Scores]
) -> TaskSummary:
    task = task_of(measure.settings)
    finished = [results[one.name] for one in planned if one.name in results]
    notes: list[str] = []
    rows: dict[str, Row] = {}
    for model in models:
        places = _group([one for one in planned if one.model == model], results)
        if (best := _choose(list(places), model, notes)) is not None:
            rows[model] = _summarise_row(best, places)
    for model in rows:
        if missing := rows[model].details.get("not_reserved"):
            notes.append(
                f"{model} may have been trained on this test: {len(missing)} of its files were not taken out of the "
                f"training text ({missing[0]}, …), see preparation.evaluation_sets."
            )
    if len({scores.test_set for scores in finished}) > 1:
        notes.append("Not all points were asked the same questions: their test sets differ. Do not compare them.")
    counts = {code: scores.counts[code] for scores in finished for code in scores.languages}
    ordered = task.sort(counts)
    return TaskSummary(
        kind=task.name,
        main=task.metrics[0],
        metrics=tuple(finished[0].mean) if finished else task.metrics[:1],
        table=measure.table,
        setting=name_setting(measure, finished),
        languages=tuple(ordered),
        counts={code: counts[code] for code in ordered},
        protocol=tuple(compare_protocol(measure, counts, finished)),
        notes=tuple(notes),
        settings=trials.dump(measure.settings),
        models=rows,
    )


def _group(planned: Sequence[Trial], results: Mapping[str, Scores]) -> list[tuple[GridPoint, dict[int, Scores]]]:
    """The places of one model's grid, each with the scores of its finished seeds."""
    groups: dict[str, tuple[Mapping[str, Any], dict[int, Scores]]] = {}
    for trial in planned:
        _, scores = groups.setdefault(trials.describe(trial.grid), (trial.grid, {}))
        if trial.name in results:
            scores[trial.seed] = results[trial.name]
    places = []
    for grid, scores in groups.values():
        developed = [one for one in scores.values() if one.dev]
        dev = fmean(one.dev["mean"] for one in developed if one.dev) if developed else None
        by = fmean(map(_rank_by, developed)) if developed else None
        places.append((GridPoint(grid, dev, by, tuple(scores)), scores))
    return places


def _rank_by(scores: Scores) -> float:
    """What a place of the grid is chosen by: under rule `source` that language alone, or it would not be zero-shot."""
    dev, source = scores.dev or {}, next(iter(scores.trained_on), "")
    chosen_by_source = (scores.selection or {}).get("rule") == "source"
    value: float = dev["languages"].get(source, dev["mean"]) if chosen_by_source else dev["mean"]
    return value


def _choose(
    places: Sequence[tuple[GridPoint, dict[int, Scores]]], model: str, notes: list[str]
) -> tuple[GridPoint, dict[int, Scores]] | None:
    """The place with the best development score, the first of equals; never chosen by test scores.

    Only among those with the most finished seeds: one lucky seed must not win over the mean of five.
    """
    done = [place for place in places if place[1]]
    if len(places) == 1 or not done:
        return done[0] if done else None
    if undecidable := [place for place, _ in done if place.dev is None]:
        names = ", ".join(trials.describe(place.grid) for place in undecidable)
        notes.append(f"{model}: no development scores ({names}), so nothing is chosen: give development sets.")
        return None
    most = max(len(scores) for _, scores in done)
    if fewer := [trials.describe(place.grid) for place, scores in done if len(scores) < most]:
        notes.append(f"{model}: {', '.join(fewer)} not in the choice: fewer than {most} seeds are finished.")
    return max((one for one in done if len(one[1]) == most), key=lambda one: one[0].by or 0.0)


def _summarise_row(
    best: tuple[GridPoint, dict[int, Scores]], places: Sequence[tuple[GridPoint, dict[int, Scores]]]
) -> Row:
    chosen, by_seed = best
    first = next(iter(by_seed.values()))
    judged = first.dev["languages"] if first.dev and len(places) > 1 else ()
    task, mixed = TASKS[first.task], {}
    if first.mixed:
        mixed = {
            part: over_seeds({seed: (scores.mixed or {})[part] for seed, scores in by_seed.items()})
            for part in ("within", "across")
        }
    gaps = {seed: scores.transfer_gap for seed, scores in by_seed.items() if scores.transfer_gap}
    return Row(
        chosen=chosen,
        grid=tuple(place for place, _ in places),
        rule=describe_rule(first.selection, judged),
        tuned={seed: scores.training.get("tuned") for seed, scores in by_seed.items()},
        steps={seed: (scores.selection or {}).get("chosen", {}) for seed, scores in by_seed.items()},
        languages={
            code: over_seeds_each({seed: scores.languages[code] for seed, scores in by_seed.items()})
            for code in task.sort(first.languages)
        },
        mean=over_seeds_each({seed: scores.mean for seed, scores in by_seed.items()}),
        transfer_gap=over_seeds_each(gaps) if gaps else None,
        within=mixed.get("within"),
        across=mixed.get("across"),
        details=first.details,
    )
