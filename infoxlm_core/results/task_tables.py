"""Build the tables of a sweep: our rows, and below them published rows of the same task and training set."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from statistics import fmean
from typing import Any, NamedTuple

from infoxlm_core import languages
from infoxlm_core.results import published, statistics, trials
from infoxlm_core.results.statistics import Statistic, is_share
from infoxlm_core.results.summary import ModelResult, Summary, TaskSummary
from infoxlm_core.results.tables import Cell, Column, Line, PageTable, count, hours, percent, short

BEST = "best on this set"
_BEST_NOTE = f"“{BEST}”: the layer was chosen on these same pairs, so its scores are slightly too high"
_GROUPS = {
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
    "steps": Column("optimizer steps", count),
    "tokens_seen": Column("tokens seen", count),
    "cost/cpu_hours/pretrain": Column("process hours on CPUs", hours),
    "cost/gpu_hours/pretrain": Column("GPU hours", hours),
}
_POOLINGS = {"mean": "mean of tokens", "mean_no_special": "mean without special tokens", "cls": "[CLS]"}
_precise_percent = partial(percent, decimals=2)


def get_title(metric: str) -> str:
    """Return the name of a metric in titles."""
    return _TITLES.get(metric, metric.replace("_", " "))


def describe_vector(vector: Mapping[str, Any], layers: int | None = None) -> str:
    """Return pooling and layer of a vector in words, such as `mean of tokens, layer 8`.

    Args:
        vector: has the fields of a `VectorSpec`.
        layers: number of layers of the encoder, if the text should tell which layer is the last one.
    """
    pooling = _POOLINGS.get(vector["pooling"], vector["pooling"])
    layer = "last layer" if vector["layer"] == layers else f"layer {vector['layer']}"
    return f"{pooling}, {layer}"


# ---------------------------------------------------------------- all models or variants


def tabulate_headlines(summary: Summary) -> PageTable:
    """Tabulate the headline metrics of every model."""
    has_seeds = any(len(variant.seeds) > 1 for variant in summary.variants.values())
    columns = [Column("seeds", role="text")] if has_seeds else []
    columns += [_make_headline_column(summary, metric) for metric in summary.metrics]
    lines = []
    for model, variant in summary.variants.items():
        planned_count = len(variant.seeds)
        finished_count = planned_count - len(variant.unfinished)
        cells: list[Cell] = [variant.metrics[metric] for metric in summary.metrics]
        if has_seeds:
            is_complete = finished_count == planned_count
            cells.insert(0, str(finished_count) if is_complete else f"{finished_count} of {planned_count}")
        lines.append(Line(model, tuple(cells), what=variant.what, seeds=finished_count))
    head = "model" if summary.tasks else "variant"
    highlighted = summary.model if summary.tasks else ""
    return PageTable("headlines", "", tuple(columns), tuple(lines), head=head, highlighted=highlighted)


def _make_headline_column(summary: Summary, metric: str, intervals: bool = False) -> Column:
    """Return the column of a headline: a share in percent, any other figure with four digits."""
    share = summary.is_share(metric)
    return Column(statistics.name_column(metric, share), _precise_percent if share else None, intervals=intervals)


def tabulate_differences(summary: Summary) -> PageTable | None:
    """Tabulate the differences of an ablation's variants to the first one. Return None if no seed is in both."""
    differences = {name: variant.differences for name, variant in summary.variants.items() if variant.differences}
    if not any(difference.n for by_metric in differences.values() for difference in by_metric.values()):
        return None
    columns = {metric: _make_headline_column(summary, metric, intervals=True) for metric in summary.metrics}
    return _tabulate_variants(summary, "differences", columns, differences, over_seeds=True)


def tabulate_question_differences(summary: Summary) -> PageTable | None:
    """Tabulate the differences to the first variant with intervals over the questions. Return None without answers."""
    differences = {name: variant.question_differences for name, variant in summary.variants.items()}
    measured = {metric for by_metric in differences.values() for metric in by_metric}
    columns = {}
    for metric in summary.metrics:
        if metric in measured:
            columns[metric] = _make_headline_column(summary, metric, intervals=True)
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
    columns = {metric: Column(title, _precise_percent) for metric, title in published.METRICS.items()}
    return _tabulate_variants(summary, "published-ablations", columns, published.ablations())


def _tabulate_variants(
    summary: Summary,
    name: str,
    columns: Mapping[str, Column],
    cells: Mapping[str, Mapping[str, Cell]],
    over_seeds: bool = False,
) -> PageTable | None:
    """Tabulate figures of an ablation's variants.

    Args:
        summary: the ablation.
        name: name of the table.
        columns: metric -> its column.
        cells: variant -> metric -> figure.
        over_seeds: whether each figure is a statistic over seeds, so that missing seeds are shown.

    Returns:
        The table of the variants that have figures, in the order of the ablation, or None if there are none.
    """
    lines = []
    for variant, result in summary.variants.items():
        if cells.get(variant):
            row = tuple(cells[variant].get(metric) for metric in columns)
            lines.append(Line(variant, row, seeds=len(result.seeds) if over_seeds else 0))
    return PageTable(name, "", tuple(columns.values()), tuple(lines), head="variant") if lines else None


# ---------------------------------------------------------------- one task


def tabulate_task(name: str, task: TaskSummary, model_under_test: str) -> list[PageTable]:
    """Tabulate the scores of a task: retrieval by vector, any other task by metric."""
    if not task.models:
        return []
    if any("vectors" in result.details for result in task.models.values()):
        tables = list(_tabulate_vectors(name, task))
    else:
        tables = [_tabulate_metric(name, task, metric) for metric in task.metrics]
    return [replace(table, highlighted=model_under_test) for table in tables]


def tabulate_layers(name: str, task: TaskSummary) -> PageTable | None:
    """Tabulate a metric by layer: a row for every model and pooling, the best layer of each model highlighted."""
    shares_of_model = {}
    for model, result in task.models.items():
        if result.details.get("by_layer"):
            shares_of_model[model] = _average_directions(result.details["by_layer"])
    if not shares_of_model:
        return None
    layer_count = max(len(shares) for poolings in shares_of_model.values() for shares in poolings.values())
    lines = []
    for model, poolings in shares_of_model.items():
        best_share = max(max(shares) for shares in poolings.values())
        for pooling, shares in poolings.items():
            padding = [""] * (layer_count - len(shares))
            best_layer = shares.index(best_share) if best_share in shares else None
            lines.append(Line(model, (*shares, *padding), _POOLINGS.get(pooling, pooling), marked=best_layer))
    columns = tuple(Column(str(layer)) for layer in range(layer_count))
    return PageTable(f"{name}-by-layer", f"{name}: by layer, both directions", columns, tuple(lines))


def _average_directions(by_layer: Mapping[str, Any]) -> dict[str, Sequence[float]]:
    """Return pooling -> shares by layer, the mean of both directions."""
    means = {}
    for pooling, shares in by_layer.items():
        has_directions = isinstance(shares, Mapping)  # a suite stores each direction and their mean
        means[pooling] = shares["mean"] if has_directions else shares
    return means


def _make_language_columns(codes: Iterable[str], show: Callable[[float], str] = percent) -> tuple[Column, ...]:
    """Return a column for the mean and one for each language."""
    return (Column("mean", show, role="sum"), *(Column(code, show) for code in codes))


def _tabulate_metric(name: str, task: TaskSummary, metric: str) -> PageTable:
    """Tabulate one metric by language, beside published rows of the same training set."""
    lines = []
    for model, result in task.models.items():
        scores = [result.languages.get(code, {}).get(metric) for code in task.languages]
        detail = ""
        if "served" in result.details:  # the vectors that users of the model get
            detail = describe_vector(result.details["served"])
        rule = result.rule.strip("–")  # a task that trains nothing has no rule
        lines.append(Line(model, (result.mean[metric], *scores), detail, rule))
    published_name = task.table if task.table in published.tables() else f"{task.table}/{metric}"
    paper = _arrange_published(published_name, task.languages, lambda row: row.kind == task.setting)
    show = percent if is_share(f"{task.kind}/{metric}") else short
    return PageTable(
        name if len(task.metrics) == 1 else f"{name}-{metric.replace('_', '-')}",
        f"{name}: {get_title(metric)}",
        _make_language_columns(task.languages, show),
        tuple(lines),
        paper.lines,
        paper.notes,
    )


def _tabulate_vectors(name: str, task: TaskSummary) -> Iterable[PageTable]:
    """Yield tables of retrieval by group of languages and direction, with a row for every model and vector."""
    pivot = task.settings.get("pivot", "en")
    groups = {"other": list(task.languages)}
    if task.table == "tatoeba":
        groups = {group: [] for group in _GROUPS}
        for code in task.languages:
            groups[_find_group(code)].append(code)
    for group, codes in groups.items():
        if not codes:
            continue
        for direction, label in (("to_pivot", f"xx_{pivot}"), ("from_pivot", f"{pivot}_xx")):
            published_name = f"{task.table}/{group}/{label}" if task.table == "tatoeba" else ""
            lines = tuple(_make_vector_lines(task.models, codes, direction))
            paper = _arrange_published(published_name, codes, lambda _: True, detailed=True)
            notes = paper.notes
            if any(BEST in line.detail for line in lines):
                notes = (_BEST_NOTE, *notes)
            title = label.replace("_", " → ")
            file_suffix = label.replace("_", "-")
            if len(groups) > 1:
                title = f"{_GROUPS[group]}, {title}"
                file_suffix = f"{group}-{file_suffix}"
            yield PageTable(
                f"{name}-{file_suffix}", f"{name}: {title}", _make_language_columns(codes), lines, paper.lines, notes
            )


def _find_group(code: str) -> str:
    """Return the paper's group of a language."""
    two_letters = languages.two_letters(code)
    for group in ("14", "22"):
        if two_letters in languages.GROUPS[group]:
            return group
    return "other"


def _make_vector_lines(models: Mapping[str, ModelResult], codes: Sequence[str], direction: str) -> Iterable[Line]:
    """Yield a row for each model, vector by vector, in the order of the paper's tables."""
    first_result = next(iter(models.values()))
    for index in range(len(first_result.details["vectors"])):
        for model, result in models.items():
            vectors = list(result.details["vectors"].items())
            name, vector = vectors[index]
            shares = [vector["languages"].get(code, {}).get(direction) for code in codes]
            known_shares = [share for share in shares if share is not None]
            mean = fmean(known_shares) if known_shares else None
            detail = describe_vector(vector, result.details["encoder"]["layers"])
            if name.endswith("@best"):
                detail += f", {BEST}"
            yield Line(model, (mean, *shares), detail)


class _Published(NamedTuple):
    """Rows of a published table, arranged in our columns."""

    lines: tuple[Line, ...] = ()
    notes: tuple[str, ...] = ()


def _arrange_published(
    name: str, codes: Sequence[str], is_comparable: Callable[[published.PublishedRow], bool], detailed: bool = False
) -> _Published:
    """Return the comparable rows of a published table and their notes."""
    table = published.tables().get(name)
    if not table:
        return _Published()
    columns = [languages.two_letters(code) for code in codes]
    has_same_languages = set(columns) == set(table.columns)
    lines = []
    notes = []
    for row in filter(is_comparable, table.rows):
        shares = [row.cells.get(code) for code in columns]
        known_shares = [share for share in shares if share is not None]
        mean = row.mean
        if not has_same_languages:
            mean = fmean(known_shares) if len(known_shares) == len(shares) else None
        line = Line(
            name=f"{row.model} large" if row.size == "large" else row.model,
            cells=(mean, *shares),
            detail=row.kind if detailed else "",
            rule=f"{row.rule} ({row.runs} runs)".strip() if row.runs > 1 else row.rule,
            source=row.source,
        )
        lines.append(line)
        if row.note:
            notes.append(row.note)
    if lines and not has_same_languages:
        notes.append("the languages differ from the paper's table: published means cover only those shown")
    return _Published(tuple(lines), tuple(dict.fromkeys(notes)))


def tabulate_grid(task: TaskSummary) -> PageTable | None:
    """Tabulate development scores by grid point. Return None if the grid has only one point."""
    first_result = next(iter(task.models.values()), None)
    if first_result is None or len(first_result.grid) == 1:
        return None
    lines = []
    for model, result in task.models.items():
        cells = tuple(Statistic(len(grid_point.seeds), grid_point.by) for grid_point in result.grid)
        chosen_index = result.grid.index(result.chosen)
        lines.append(Line(model, cells, seeds=len(result.chosen.seeds), marked=chosen_index))
    columns = tuple(
        Column(trials.describe_grid_point(grid_point.grid), _precise_percent) for grid_point in first_result.grid
    )
    return PageTable("grid", "", columns, tuple(lines))


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
        gaps = tuple(_find_transfer_gap(task, model) for task in tasks.values())
        if any(gaps):
            lines.append(Line(model, gaps))
    # The paper reports gaps only for zero-shot transfer, so columns of other tasks have no published cells.
    published_columns = [task.table if task.setting == "zero-shot" else "" for task in tasks.values()]
    published_lines = []
    for row in published.tables()["transfer_gap"].rows:
        if not row.cells.keys().isdisjoint(published_columns):
            cells = tuple(row.cells.get(column) for column in published_columns)
            published_lines.append(Line(row.model, cells, source=row.source))
    columns = tuple(Column(name) for name in tasks)
    table = PageTable("transfer-gap", "Transfer gap, points", columns, tuple(lines), tuple(published_lines))
    return replace(table, highlighted=summary.model)


def _find_transfer_gap(task: TaskSummary, model: str) -> Statistic | None:
    result = task.models.get(model)
    return result.transfer_gap[task.main] if result and result.transfer_gap else None


def tabulate_mixed(summary: Summary) -> list[PageTable]:
    """Tabulate scores of text pairs (premise and hypothesis, paragraph and question) in one language and in two."""
    tables = []
    for name, task in summary.tasks.items():
        lines = []
        for model, result in task.models.items():
            if result.within:
                lines.append(Line(model, (result.within, result.across), rule=result.rule))
        if not lines:
            continue
        has_published = task.table == "xnli" and task.setting == "zero-shot"
        rows = published.tables()["mixed"].rows if has_published else ()
        published_lines = tuple(Line(row.model, tuple(row.cells.values()), source=row.source) for row in rows)
        notes = tuple(row.note for row in rows if row.note)
        title = f"{name}: pairs of texts in one language and in two"
        columns = (Column("within"), Column("across"))
        table = PageTable(f"{name}-mixed", title, columns, tuple(lines), published_lines, notes)
        tables.append(replace(table, highlighted=summary.model))
    return tables
