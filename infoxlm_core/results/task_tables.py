"""Build the tables of a sweep: our rows, followed by published rows for the same task and training set."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from statistics import fmean
from typing import Any, NamedTuple

from infoxlm_core import languages
from infoxlm_core.results import published, statistics, trials
from infoxlm_core.results.statistics import Statistic, is_share
from infoxlm_core.results.summaries.suite import ModelResult, Summary, TaskSummary
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
_BEST_NOTE = f"“{BEST}”: the layer was chosen on these same pairs, so the scores are slightly too high"
_TATOEBA_GROUPS = {
    "14": "14 languages with parallel training text",
    "22": "22 languages without parallel training text",
    "other": "other languages",
}
_MEASURES = {
    "mean": "accuracy, mean of both directions",
    "to_pivot": "accuracy from the other languages to the pivot",
    "from_pivot": "accuracy from the pivot to the other languages",
    "no_overlap": "accuracy on pairs that share no token",
}
_ACRONYMS = ("xnli", "mlqa", "bucc")
"""Names of tasks that titles write in capitals."""
_COST_COLUMNS = {
    "steps": Column("optimizer steps", format_count),
    "tokens_seen": Column("tokens seen", format_count),
    "cost/cpu_hours/pretrain": Column("process hours on CPUs", format_hours),
    "cost/gpu_hours/pretrain": Column("GPU hours", format_hours),
}
_POOLINGS = {"mean": "mean of tokens", "mean_no_special": "mean without special tokens", "cls": "[CLS]"}
_format_precise_percent = partial(format_percent, decimals=2)


def get_title(metric: str) -> str:
    """Return the title of a table or panel that shows a metric by language, without initial capital."""
    return _MEASURES.get(metric, f"{name_measure(metric)} by language")


def name_measure(metric: str) -> str:
    """Return the measure of a metric that a task declares, such as `exact match`."""
    return _MEASURES.get(metric, metric.replace("_", " ").replace("f1", "F1"))


def get_task_title(name: str) -> str:
    """Return the title of a task, such as `Retrieval` or `XNLI`."""
    for acronym in _ACRONYMS:
        name = name.replace(acronym, acronym.upper())
    return _capitalise(name.replace("_", " "))


def _capitalise(text: str) -> str:
    """Change the first letter to a capital. `str.capitalize` would also change all other letters."""
    return text[:1].upper() + text[1:]


def describe_vector(vector: Mapping[str, Any], layers: int | None = None) -> str:
    """Describe how a sentence vector is computed, such as `mean of tokens, layer 8`.

    Args:
        vector: mapping with the fields `pooling` and `layer` of a `VectorSpec`.
        layers: number of encoder layers. If it is given, the last layer is called `last layer`.
    """
    pooling = _POOLINGS.get(vector["pooling"], vector["pooling"])
    layer = "last layer" if vector["layer"] == layers else f"layer {vector['layer']}"
    return f"{pooling}, {layer}"


# ---------------------------------------------------------------- all models or variants


def tabulate_headlines(summary: Summary) -> PageTable:
    """Tabulate the headline metrics, one row per model or variant."""
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
    table = PageTable("headlines", "", tuple(columns), tuple(lines))
    return replace(table, highlighted=summary.model) if summary.tasks else replace(table, head="variant")  # ablation


def _make_headline_column(summary: Summary, metric: str, has_intervals: bool = False) -> Column:
    """Make the column of a headline metric. Shares are shown in percent, other metrics with four digits."""
    is_percentage = summary.is_share(metric)
    format_number = _format_precise_percent if is_percentage else None
    return Column(statistics.name_column(metric, is_percentage), format_number, has_intervals=has_intervals)


def tabulate_differences(summary: Summary) -> PageTable | None:
    """Tabulate the differences of an ablation's variants from the first. Return None if they share no seed."""
    differences = {name: variant.differences for name, variant in summary.variants.items() if variant.differences}
    if not any(difference.n for by_metric in differences.values() for difference in by_metric.values()):
        return None
    columns = {metric: _make_headline_column(summary, metric, has_intervals=True) for metric in summary.metrics}
    return _tabulate_variants(summary, "differences", columns, differences, are_over_seeds=True)


def tabulate_question_differences(summary: Summary) -> PageTable | None:
    """Tabulate the differences from the first variant with intervals over questions. Return None without answers."""
    differences = {name: variant.question_differences for name, variant in summary.variants.items()}
    measured_metrics = {metric for by_metric in differences.values() for metric in by_metric}
    columns = {}
    for metric in summary.metrics:
        if metric in measured_metrics:
            columns[metric] = _make_headline_column(summary, metric, has_intervals=True)
    return _tabulate_variants(summary, "question-differences", columns, differences)


def tabulate_costs(summary: Summary) -> PageTable | None:
    """Tabulate the mean pre-training cost of an ablation's variants. Return None if no cost is known."""
    means = {}
    columns: dict[str, Column] = {}
    for name, variant in summary.variants.items():
        means[name] = {cost: statistic.mean for cost, statistic in variant.costs.items()}
        columns |= {cost: _COST_COLUMNS[cost] for cost in variant.costs}
    return _tabulate_variants(summary, "costs", columns, means)


def tabulate_published_ablations(summary: Summary) -> PageTable | None:
    """Tabulate the paper's results for the same variants. Return None if the paper has none of the variants."""
    columns = {metric: Column(title, _format_precise_percent) for metric, title in published.METRICS.items()}
    return _tabulate_variants(summary, "published-ablations", columns, published.ablations())


def _tabulate_variants(
    summary: Summary,
    name: str,
    columns: Mapping[str, Column],
    cells_by_variant: Mapping[str, Mapping[str, Cell]],
    are_over_seeds: bool = False,
) -> PageTable | None:
    """Tabulate figures of an ablation, one row per variant. Return None if no variant has figures.

    Args:
        summary: the ablation.
        name: name of the table.
        columns: mapping from metric to column.
        cells_by_variant: mapping from variant to figures by metric.
        are_over_seeds: whether figures are statistics over seeds. A figure from fewer seeds than planned shows its
            number of seeds.
    """
    lines = []
    for variant_name, variant in summary.variants.items():
        cells = cells_by_variant.get(variant_name)
        if cells:
            row = tuple(cells.get(metric) for metric in columns)
            lines.append(Line(variant_name, row, seeds=len(variant.seeds) if are_over_seeds else 0))
    if not lines:
        return None
    return PageTable(name, "", tuple(columns.values()), tuple(lines), head="variant")


# ---------------------------------------------------------------- one task


def tabulate_task(name: str, task: TaskSummary, model_under_test: str) -> list[PageTable]:
    """Tabulate a task's scores: by vector for retrieval in a suite, by metric for other tasks."""
    if not task.models:
        return []
    if any("vectors" in result.details for result in task.models.values()):
        tables = _tabulate_vectors(name, task)
    else:
        tables = [_tabulate_metric(name, task, metric) for metric in task.metrics]
    return [replace(table, highlighted=model_under_test) for table in tables]


def tabulate_layers(name: str, task: TaskSummary) -> PageTable | None:
    """Tabulate accuracy by layer, one row per model and pooling. Each model's best layer is highlighted."""
    shares_by_model = {}
    for model, result in task.models.items():
        if result.details.get("by_layer"):
            shares_by_model[model] = _average_directions(result.details["by_layer"])
    if not shares_by_model:
        return None
    layer_count = max(len(shares) for by_pooling in shares_by_model.values() for shares in by_pooling.values())
    lines = []
    for model, shares_by_pooling in shares_by_model.items():
        best_share = max(max(shares) for shares in shares_by_pooling.values())
        for pooling, shares in shares_by_pooling.items():
            padding = [""] * (layer_count - len(shares))  # another model may have more layers
            # The best layer may belong to another pooling.
            best_layer = shares.index(best_share) if best_share in shares else None
            lines.append(Line(model, (*shares, *padding), _POOLINGS.get(pooling, pooling), marked=best_layer))
    columns = tuple(Column(str(layer)) for layer in range(layer_count))
    return PageTable(f"{name}-by-layer", "Accuracy by layer, mean of both directions", columns, tuple(lines))


def _average_directions(by_layer: Mapping[str, Any]) -> dict[str, Sequence[float]]:
    """Return the mean of both directions by layer, for each pooling."""
    means = {}
    for pooling, shares in by_layer.items():
        has_directions = isinstance(shares, Mapping)  # a suite also stores each direction
        means[pooling] = shares["mean"] if has_directions else shares
    return means


def _make_language_columns(
    codes: Sequence[str], format_number: Callable[[float], str] = format_percent
) -> tuple[Column, ...]:
    """Make a column for the mean and a column for each language."""
    mean_column = Column("mean", format_number, role="sum")
    return (mean_column, *(Column(code, format_number) for code in codes))


def _tabulate_metric(name: str, task: TaskSummary, metric: str) -> PageTable:
    """Tabulate one metric by language, with published rows for the same setting."""
    lines = []
    for model, result in task.models.items():
        scores = [result.languages.get(code, {}).get(metric) for code in task.languages]
        detail = ""
        if "served" in result.details:  # the vector that users get
            detail = describe_vector(result.details["served"])
        rule = result.rule.strip("–")  # "–" stands for no rule: the task trains nothing
        lines.append(Line(model, (result.mean[metric], *scores), detail, rule))
    # Published results with several metrics are stored as one table per metric.
    published_name = task.table if task.table in published.tables() else f"{task.table}/{metric}"
    published_rows = _select_published_rows(published_name, task.languages, task.setting)
    file_name = name if len(task.metrics) == 1 else f"{name}-{metric.replace('_', '-')}"
    format_number = format_percent if is_share(f"{task.kind}/{metric}") else format_figure
    return PageTable(
        file_name,
        _capitalise(get_title(metric)),
        _make_language_columns(task.languages, format_number),
        tuple(lines),
        published_rows.lines,
        published_rows.notes,
    )


def _tabulate_vectors(name: str, task: TaskSummary) -> list[PageTable]:
    """Tabulate retrieval by language group and direction."""
    tables = []
    for group, codes in _group_languages(task).items():
        for direction in ("to_pivot", "from_pivot"):
            tables.append(_tabulate_direction(name, task, direction, group, codes))
    return tables


def _group_languages(task: TaskSummary) -> dict[str, list[str]]:
    """Group the languages of Tatoeba as the paper does. Any other test is one group without name."""
    groups: dict[str, list[str]] = {"": list(task.languages)}
    if task.table == "tatoeba":
        groups = {group: [] for group in _TATOEBA_GROUPS}
        for code in task.languages:
            groups[_find_tatoeba_group(code)].append(code)
    return {group: codes for group, codes in groups.items() if codes}


def _find_tatoeba_group(code: str) -> str:
    """Return the group of Tatoeba in which the paper has a language."""
    two_letters = languages.two_letters(code)
    for group in ("14", "22"):
        if two_letters in languages.GROUPS[group]:
            return group
    return "other"


def _tabulate_direction(name: str, task: TaskSummary, direction: str, group: str, codes: Sequence[str]) -> PageTable:
    """Tabulate retrieval in one direction, one row per model and vector.

    Args:
        name: name of the task.
        task: results of the task.
        direction: `to_pivot` or `from_pivot`.
        group: language group of Tatoeba, or "" for a test without groups.
        codes: languages of the group.
    """
    pivot = task.settings.get("pivot", "en")  # a summary's settings lack default values
    source, target = ("xx", pivot) if direction == "to_pivot" else (pivot, "xx")
    title = f"Accuracy, {source} → {target}"
    file_suffix = f"{source}-{target}"
    published_rows = _PublishedRows()
    if group:
        title = f"Accuracy on {_TATOEBA_GROUPS[group]}, {source} → {target}"
        file_suffix = f"{group}-{file_suffix}"
        published_rows = _select_published_rows(f"tatoeba/{group}/{source}_{target}", codes)
    lines = _make_vector_lines(task.models, codes, direction)
    notes = published_rows.notes
    if any(BEST in line.detail for line in lines):
        notes = (_BEST_NOTE, *notes)
    columns = _make_language_columns(codes)
    return PageTable(f"{name}-{file_suffix}", title, columns, tuple(lines), published_rows.lines, notes)


def _make_vector_lines(models: Mapping[str, ModelResult], codes: Sequence[str], direction: str) -> list[Line]:
    """Make a row for each model and vector, ordered by vector as in the paper's tables."""
    first_result = next(iter(models.values()))
    lines = []
    for vector_name in first_result.details["vectors"]:  # set by the task, so all models have the same vectors
        for model, result in models.items():
            vector = result.details["vectors"][vector_name]
            shares = [vector["languages"].get(code, {}).get(direction) for code in codes]
            known_shares = [share for share in shares if share is not None]
            mean = fmean(known_shares) if known_shares else None
            detail = describe_vector(vector, result.details["encoder"]["layers"])
            if vector_name.endswith("@best"):
                detail += f", {BEST}"
            lines.append(Line(model, (mean, *shares), detail))
    return lines


class _PublishedRows(NamedTuple):
    """Published rows, arranged in the columns of our table, and notes about them."""

    lines: tuple[Line, ...] = ()
    notes: tuple[str, ...] = ()


def _select_published_rows(table_name: str, codes: Sequence[str], kind: str = "") -> _PublishedRows:
    """Select the rows of a published table that are comparable with ours. Without such a table, select none.

    Args:
        table_name: name of the table, such as `xnli`.
        codes: languages of our columns.
        kind: kind of the rows to select, such as `zero-shot`. By default, select all rows and show their kinds.
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
            cells=(row.mean if has_same_languages else _average_if_complete(shares), *shares),
            detail="" if kind else row.kind,
            rule=f"{row.rule} ({row.runs} runs)".strip() if row.runs > 1 else row.rule,  # many rows have no rule
            source=row.source,
        )
        lines.append(line)
        if row.note:
            notes.append(row.note)
    if lines and not has_same_languages:
        notes.append("the paper's table has other languages, so published averages cover only the languages shown here")
    distinct_notes = dict.fromkeys(notes)  # several rows may have the same note
    return _PublishedRows(tuple(lines), tuple(distinct_notes))


def _average_if_complete(shares: Sequence[float | None]) -> float | None:
    """Return the mean of shares, or None if a share is unknown: the mean of a part would mislead."""
    known_shares = [share for share in shares if share is not None]
    return fmean(known_shares) if len(known_shares) == len(shares) else None


def tabulate_grid(task: TaskSummary) -> PageTable | None:
    """Tabulate the development scores by grid point. Return None if there is only one grid point."""
    first_result = next(iter(task.models.values()), None)
    if first_result is None or len(first_result.grid) == 1:
        return None
    lines = []
    for model, result in task.models.items():
        # As statistics, so that a score from fewer seeds than the chosen point's shows its number of seeds.
        cells = tuple(Statistic(len(grid_point.seeds), grid_point.by) for grid_point in result.grid)
        chosen_index = result.grid.index(result.chosen)
        lines.append(Line(model, cells, seeds=len(result.chosen.seeds), marked=chosen_index))
    columns = []
    for grid_point in first_result.grid:
        columns.append(Column(trials.describe_grid_point(grid_point.grid), _format_precise_percent))
    return PageTable("grid", "", tuple(columns), tuple(lines))


# ---------------------------------------------------------------- several tasks


def tabulate_gaps(summary: Summary) -> PageTable | None:
    """Tabulate the transfer gaps by model and task. Return None if no task has a transfer gap."""
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
        "transfer-gap", "Gap by task, in points", columns, tuple(lines), published_lines, highlighted=summary.model
    )


def _get_transfer_gap(task: TaskSummary, model: str) -> Statistic | None:
    """Return a model's transfer gap in a task's main metric, or None if it has none."""
    result = task.models.get(model)
    return result.transfer_gap[task.main] if result and result.transfer_gap else None


def _list_published_gaps(tasks: Sequence[TaskSummary]) -> list[Line]:
    """Return the published transfer gaps of every model that has one in at least one of the tasks."""
    # The paper reports gaps only for zero-shot transfer, so published rows are empty in all other columns.
    published_columns = [task.table if task.setting == "zero-shot" else "" for task in tasks]
    lines = []
    for row in published.tables()["transfer_gap"].rows:
        cells = tuple(row.cells.get(column) for column in published_columns)
        if not row.cells.keys().isdisjoint(published_columns):
            lines.append(Line(row.model, cells, source=row.source))
    return lines


def tabulate_mixed(summary: Summary) -> list[PageTable]:
    """Tabulate the scores of text pairs in one language and in two languages."""
    tables = []
    for name, task in summary.tasks.items():
        lines = []
        for model, result in task.models.items():
            if result.within:
                lines.append(Line(model, (result.within, result.across), rule=result.rule))
        if not lines:
            continue
        has_published_rows = task.table == "xnli" and task.setting == "zero-shot"  # the only published scores
        published_rows = published.tables()["mixed"].rows if has_published_rows else ()
        table = PageTable(
            f"{name}-mixed",
            f"{get_task_title(name)}: pairs in one language and in two languages",
            (Column("within"), Column("across")),
            tuple(lines),
            tuple(Line(row.model, tuple(row.cells.values()), source=row.source) for row in published_rows),
            tuple(row.note for row in published_rows if row.note),
            highlighted=summary.model,
        )
        tables.append(table)
    return tables
