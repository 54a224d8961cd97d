"""Build the tables of a sweep: our rows, and below them published rows of the same task and training set."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from statistics import fmean
from types import MappingProxyType
from typing import Any, NamedTuple

from infoxlm_core import languages
from infoxlm_core.results import published, statistics, trials
from infoxlm_core.results.statistics import Statistic, is_share
from infoxlm_core.results.summary import ModelResult, Summary, TaskSummary
from infoxlm_core.results.tables import (
    Cell,
    Column,
    Line,
    PageTable,
    format_count,
    format_figure,
    format_hours,
    format_percent,
)

BEST = "best on this set"
_BEST_NOTE = f"“{BEST}”: the layer was chosen on these same pairs, so its scores are slightly too high"
_TATOEBA_GROUPS = {
    "14": "14 languages with parallel training text",
    "22": "22 languages without parallel training text",
    "other": "other languages",
}
_TITLES = {
    "f1": "F1",
    "mean": "accuracy, both directions",
    "to_pivot": "accuracy, from the other languages",
    "from_pivot": "accuracy, from the pivot language",
    "no_overlap": "accuracy, pairs that share no token",
}
_COST_COLUMNS = {
    "steps": Column("optimizer steps", format_count),
    "tokens_seen": Column("tokens seen", format_count),
    "cost/cpu_hours/pretrain": Column("process hours on CPUs", format_hours),
    "cost/gpu_hours/pretrain": Column("GPU hours", format_hours),
}
_POOLINGS = {"mean": "mean of tokens", "mean_no_special": "mean without special tokens", "cls": "[CLS]"}
_format_precise_percent = partial(format_percent, decimals=2)


def get_title(metric: str) -> str:
    """Return the name of a metric as titles show it."""
    return _TITLES.get(metric, metric.replace("_", " "))


def describe_vector(vector: Mapping[str, Any], layers: int | None = None) -> str:
    """Describe how a sentence vector is computed, such as `mean of tokens, layer 8`.

    Args:
        vector: the fields of a `VectorSpec`; here `pooling` and `layer`.
        layers: number of layers of the encoder. If it is given, the last layer is called `last layer`.
    """
    pooling = _POOLINGS.get(vector["pooling"], vector["pooling"])
    layer = "last layer" if vector["layer"] == layers else f"layer {vector['layer']}"
    return f"{pooling}, {layer}"


# ---------------------------------------------------------------- all models or variants


def tabulate_headlines(summary: Summary) -> PageTable:
    """Tabulate the headline metrics, with a row for every model or variant."""
    has_several_seeds = any(len(variant.seeds) > 1 for variant in summary.variants.values())
    columns = [_make_headline_column(summary, metric) for metric in summary.metrics]
    if has_several_seeds:
        columns = [Column("seeds", role="text"), *columns]
    lines = []
    for model, variant in summary.variants.items():
        finished_seeds = len(variant.seeds) - len(variant.unfinished)
        cells: list[Cell] = [variant.metrics[metric] for metric in summary.metrics]
        if has_several_seeds:
            seeds = f"{finished_seeds} of {len(variant.seeds)}" if variant.unfinished else str(finished_seeds)
            cells = [seeds, *cells]
        lines.append(Line(model, tuple(cells), what=variant.what, seeds=finished_seeds))
    if summary.tasks:
        return PageTable("headlines", "", tuple(columns), tuple(lines), highlighted=summary.model)
    return PageTable("headlines", "", tuple(columns), tuple(lines), head="variant")


def _make_headline_column(summary: Summary, metric: str, has_intervals: bool = False) -> Column:
    """Return the column of a headline: a share in percent, any other figure with four digits."""
    is_percentage = summary.is_share(metric)
    format_number = _format_precise_percent if is_percentage else None
    return Column(statistics.name_column(metric, is_percentage), format_number, has_intervals=has_intervals)


def tabulate_differences(summary: Summary) -> PageTable | None:
    """Tabulate the differences of an ablation's variants to the first one. Return None if no seed is in both."""
    differences = {name: variant.differences for name, variant in summary.variants.items() if variant.differences}
    if not any(difference.n for by_metric in differences.values() for difference in by_metric.values()):
        return None
    columns = {metric: _make_headline_column(summary, metric, has_intervals=True) for metric in summary.metrics}
    planned_seeds = {name: len(variant.seeds) for name, variant in summary.variants.items()}
    return _tabulate_variants(summary, "differences", columns, differences, planned_seeds)


def tabulate_question_differences(summary: Summary) -> PageTable | None:
    """Tabulate the differences to the first variant with intervals over the questions. Return None without answers."""
    differences = {name: variant.question_differences for name, variant in summary.variants.items()}
    measured_metrics = {metric for by_metric in differences.values() for metric in by_metric}
    columns = {}
    for metric in summary.metrics:
        if metric in measured_metrics:
            columns[metric] = _make_headline_column(summary, metric, has_intervals=True)
    return _tabulate_variants(summary, "question-differences", columns, differences)


def tabulate_costs(summary: Summary) -> PageTable | None:
    """Tabulate the mean costs of pre-training an ablation's variants. Return None if they are unknown."""
    means = {}
    columns: dict[str, Column] = {}
    for name, variant in summary.variants.items():
        means[name] = {cost: statistic.mean for cost, statistic in variant.costs.items()}
        columns |= {cost: _COST_COLUMNS[cost] for cost in variant.costs}
    return _tabulate_variants(summary, "costs", columns, means)


def tabulate_published_ablations(summary: Summary) -> PageTable | None:
    """Tabulate the paper's results for the same variants. Return None if it has none of them."""
    columns = {metric: Column(title, _format_precise_percent) for metric, title in published.METRICS.items()}
    return _tabulate_variants(summary, "published-ablations", columns, published.ablations())


def _tabulate_variants(
    summary: Summary,
    name: str,
    columns: Mapping[str, Column],
    cells_by_variant: Mapping[str, Mapping[str, Cell]],
    planned_seeds: Mapping[str, int] = MappingProxyType({}),
) -> PageTable | None:
    """Tabulate figures of an ablation's variants in the order of the ablation. Return None if no variant has any.

    Args:
        summary: the ablation.
        name: name of the table.
        columns: metric -> its column.
        cells_by_variant: variant -> metric -> figure.
        planned_seeds: variant -> number of its seeds. A figure with fewer seeds shows how many it has.
    """
    lines = []
    for variant in summary.variants:
        cells = cells_by_variant.get(variant)
        if cells:
            row = tuple(cells.get(metric) for metric in columns)
            lines.append(Line(variant, row, seeds=planned_seeds.get(variant, 0)))
    if not lines:
        return None
    return PageTable(name, "", tuple(columns.values()), tuple(lines), head="variant")


# ---------------------------------------------------------------- one task


def tabulate_task(name: str, task: TaskSummary, model_under_test: str) -> list[PageTable]:
    """Tabulate the scores of a task: retrieval by vector, any other task by metric."""
    if not task.models:
        return []
    if any("vectors" in result.details for result in task.models.values()):
        tables = _tabulate_vectors(name, task)
    else:
        tables = [_tabulate_metric(name, task, metric) for metric in task.metrics]
    return [replace(table, highlighted=model_under_test) for table in tables]


def tabulate_layers(name: str, task: TaskSummary) -> PageTable | None:
    """Tabulate a metric by layer, with a row for every model and pooling. The best layer of a model is highlighted."""
    shares_by_model = {}
    for model, result in task.models.items():
        if result.details.get("by_layer"):
            shares_by_model[model] = _average_directions(result.details["by_layer"])
    if not shares_by_model:
        return None
    layer_count = 0
    for shares_by_pooling in shares_by_model.values():
        layer_count = max(layer_count, *(len(shares) for shares in shares_by_pooling.values()))
    lines = []
    for model, shares_by_pooling in shares_by_model.items():
        best_share = max(max(shares) for shares in shares_by_pooling.values())
        for pooling, shares in shares_by_pooling.items():
            padding = [""] * (layer_count - len(shares))  # other models may have more layers
            best_layer = shares.index(best_share) if best_share in shares else None
            lines.append(Line(model, (*shares, *padding), _POOLINGS.get(pooling, pooling), marked=best_layer))
    columns = tuple(Column(str(layer)) for layer in range(layer_count))
    return PageTable(f"{name}-by-layer", f"{name}: by layer, both directions", columns, tuple(lines))


def _average_directions(by_layer: Mapping[str, Any]) -> dict[str, Sequence[float]]:
    """Return pooling -> shares by layer, each the mean of both directions."""
    means = {}
    for pooling, shares in by_layer.items():
        has_directions = isinstance(shares, Mapping)  # a suite stores each direction and their mean
        means[pooling] = shares["mean"] if has_directions else shares
    return means


def _make_language_columns(
    codes: Sequence[str], format_number: Callable[[float], str] = format_percent
) -> tuple[Column, ...]:
    """Return a column for the mean and one for each language."""
    mean_column = Column("mean", format_number, role="sum")
    return (mean_column, *(Column(code, format_number) for code in codes))


def _tabulate_metric(name: str, task: TaskSummary, metric: str) -> PageTable:
    """Tabulate one metric by language, beside published rows of the same training setting."""
    lines = []
    for model, result in task.models.items():
        scores = [result.languages.get(code, {}).get(metric) for code in task.languages]
        detail = ""
        if "served" in result.details:  # the vector that users of the model get
            detail = describe_vector(result.details["served"])
        rule = result.rule.strip("–")  # a task that trains nothing has no rule
        lines.append(Line(model, (result.mean[metric], *scores), detail, rule))
    # A published table with several metrics is stored as one table for each metric.
    published_name = task.table if task.table in published.tables() else f"{task.table}/{metric}"
    published_rows = _select_published_rows(published_name, task.languages, task.setting)
    file_name = name if len(task.metrics) == 1 else f"{name}-{metric.replace('_', '-')}"
    format_number = format_percent if is_share(f"{task.kind}/{metric}") else format_figure
    return PageTable(
        file_name,
        f"{name}: {get_title(metric)}",
        _make_language_columns(task.languages, format_number),
        tuple(lines),
        published_rows.lines,
        published_rows.notes,
    )


def _tabulate_vectors(name: str, task: TaskSummary) -> list[PageTable]:
    """Tabulate retrieval by group of languages and by direction."""
    tables = []
    for group, codes in _group_languages(task).items():
        for direction in ("to_pivot", "from_pivot"):
            tables.append(_tabulate_direction(name, task, direction, group, codes))
    return tables


def _group_languages(task: TaskSummary) -> dict[str, list[str]]:
    """Return the paper's groups of Tatoeba: group -> languages. Any other test is one group with an empty name."""
    groups: dict[str, list[str]] = {"": list(task.languages)}
    if task.table == "tatoeba":
        groups = {group: [] for group in _TATOEBA_GROUPS}
        for code in task.languages:
            groups[_find_tatoeba_group(code)].append(code)
    return {group: codes for group, codes in groups.items() if codes}


def _find_tatoeba_group(code: str) -> str:
    """Return the paper's group of a language."""
    two_letters = languages.two_letters(code)
    for group in ("14", "22"):
        if two_letters in languages.GROUPS[group]:
            return group
    return "other"


def _tabulate_direction(name: str, task: TaskSummary, direction: str, group: str, codes: Sequence[str]) -> PageTable:
    """Tabulate retrieval in one direction, with a row for every model and vector.

    Args:
        name: name of the task.
        task: the results of the task.
        direction: `to_pivot` or `from_pivot`.
        group: a group of Tatoeba's languages, or "" for a test without groups.
        codes: the languages of the group.
    """
    pivot = task.settings.get("pivot", "en")
    source, target = ("xx", pivot) if direction == "to_pivot" else (pivot, "xx")
    title = f"{source} → {target}"
    file_suffix = f"{source}-{target}"
    published_rows = _PublishedRows()
    if group:
        title = f"{_TATOEBA_GROUPS[group]}, {title}"
        file_suffix = f"{group}-{file_suffix}"
        published_rows = _select_published_rows(f"tatoeba/{group}/{source}_{target}", codes)
    lines = _make_vector_lines(task.models, codes, direction)
    notes = published_rows.notes
    if any(BEST in line.detail for line in lines):
        notes = (_BEST_NOTE, *notes)
    columns = _make_language_columns(codes)
    return PageTable(f"{name}-{file_suffix}", f"{name}: {title}", columns, tuple(lines), published_rows.lines, notes)


def _make_vector_lines(models: Mapping[str, ModelResult], codes: Sequence[str], direction: str) -> list[Line]:
    """Return a row for each vector of each model: first the first vector of all models, as in the paper's tables."""
    first_result = next(iter(models.values()))
    lines = []
    for vector_index in range(len(first_result.details["vectors"])):
        for model, result in models.items():
            vector_name, vector = list(result.details["vectors"].items())[vector_index]
            shares = [vector["languages"].get(code, {}).get(direction) for code in codes]
            known_shares = [share for share in shares if share is not None]
            mean = fmean(known_shares) if known_shares else None
            detail = describe_vector(vector, result.details["encoder"]["layers"])
            if vector_name.endswith("@best"):
                detail += f", {BEST}"
            lines.append(Line(model, (mean, *shares), detail))
    return lines


class _PublishedRows(NamedTuple):
    """Rows of a published table in the columns of our table, and notes on how to read them."""

    lines: tuple[Line, ...] = ()
    notes: tuple[str, ...] = ()


def _select_published_rows(table_name: str, codes: Sequence[str], kind: str = "") -> _PublishedRows:
    """Return the rows of a published table that may be compared with ours, or nothing if there is no such table.

    Args:
        table_name: name of the table, such as `xnli`.
        codes: the languages of our columns.
        kind: return only rows of this kind, such as `zero-shot`. By default, return all rows and name their kinds.
    """
    table = published.tables().get(table_name)
    if not table:
        return _PublishedRows()
    columns = [languages.two_letters(code) for code in codes]
    has_same_languages = set(columns) == set(table.columns)
    lines = []
    notes = []
    for row in table.rows:
        if kind and row.kind != kind:
            continue
        shares = [row.cells.get(column) for column in columns]
        line = Line(
            name=f"{row.model} large" if row.size == "large" else row.model,
            cells=(row.mean if has_same_languages else _average_known(shares), *shares),
            detail="" if kind else row.kind,
            rule=f"{row.rule} ({row.runs} runs)".strip() if row.runs > 1 else row.rule,
            source=row.source,
        )
        lines.append(line)
        if row.note:
            notes.append(row.note)
    if lines and not has_same_languages:
        notes.append("the languages differ from the paper's table: published means cover only those shown")
    distinct_notes = dict.fromkeys(notes)
    return _PublishedRows(tuple(lines), tuple(distinct_notes))


def _average_known(shares: Sequence[float | None]) -> float | None:
    """Return the mean of shares, or None if one of them is unknown, because a mean of the others would mislead."""
    known_shares = [share for share in shares if share is not None]
    if len(known_shares) < len(shares):
        return None
    return fmean(known_shares)


def tabulate_grid(task: TaskSummary) -> PageTable | None:
    """Tabulate the development scores of all grid points. Return None if the grid has only one point."""
    first_result = next(iter(task.models.values()), None)
    if first_result is None or len(first_result.grid) == 1:
        return None
    lines = []
    for model, result in task.models.items():
        cells = tuple(Statistic(len(grid_point.seeds), grid_point.by) for grid_point in result.grid)
        chosen_index = result.grid.index(result.chosen)
        lines.append(Line(model, cells, seeds=len(result.chosen.seeds), marked=chosen_index))
    columns = []
    for grid_point in first_result.grid:
        columns.append(Column(trials.describe_grid_point(grid_point.grid), _format_precise_percent))
    return PageTable("grid", "", tuple(columns), tuple(lines))


# ---------------------------------------------------------------- several tasks


def tabulate_gaps(summary: Summary) -> PageTable | None:
    """Tabulate the transfer gap of every fine-tuned task: score of the source language minus the mean of the others."""
    tasks = {}
    for name, task in summary.tasks.items():
        if any(result.transfer_gap for result in task.models.values()):
            tasks[name] = task
    if not tasks:
        return None
    lines = []
    for model in summary.models:
        gaps = [_get_transfer_gap(task, model) for task in tasks.values()]
        if any(gaps):
            lines.append(Line(model, tuple(gaps)))
    columns = tuple(Column(name) for name in tasks)
    published_lines = tuple(_list_published_gaps(list(tasks.values())))
    return PageTable(
        "transfer-gap", "Transfer gap, points", columns, tuple(lines), published_lines, highlighted=summary.model
    )


def _get_transfer_gap(task: TaskSummary, model: str) -> Statistic | None:
    """Return the transfer gap of a model in the main metric of a task, if it has one."""
    result = task.models.get(model)
    return result.transfer_gap[task.main] if result and result.transfer_gap else None


def _list_published_gaps(tasks: Sequence[TaskSummary]) -> list[Line]:
    """Return the published rows that have a transfer gap for at least one of the tasks."""
    # The paper reports gaps only for zero-shot transfer, so columns of other tasks have no published cells.
    published_columns = [task.table if task.setting == "zero-shot" else "" for task in tasks]
    lines = []
    for row in published.tables()["transfer_gap"].rows:
        cells = tuple(row.cells.get(column) for column in published_columns)
        if not row.cells.keys().isdisjoint(published_columns):
            lines.append(Line(row.model, cells, source=row.source))
    return lines


def tabulate_mixed(summary: Summary) -> list[PageTable]:
    """Tabulate the scores of text pairs, such as premise and hypothesis, whose texts have the same or two languages."""
    tables = []
    for name, task in summary.tasks.items():
        lines = []
        for model, result in task.models.items():
            if result.within:
                lines.append(Line(model, (result.within, result.across), rule=result.rule))
        if not lines:
            continue
        has_published_rows = task.table == "xnli" and task.setting == "zero-shot"
        published_rows = published.tables()["mixed"].rows if has_published_rows else ()
        table = PageTable(
            f"{name}-mixed",
            f"{name}: pairs of texts in one language and in two",
            (Column("within"), Column("across")),
            tuple(lines),
            tuple(Line(row.model, tuple(row.cells.values()), source=row.source) for row in published_rows),
            tuple(row.note for row in published_rows if row.note),
            highlighted=summary.model,
        )
        tables.append(table)
    return tables
