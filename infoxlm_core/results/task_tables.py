"""Build the tables of a sweep: our rows, and below them published rows of the same task and training set."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from statistics import fmean
from typing import Any, NamedTuple

from infoxlm_core import languages
from infoxlm_core.results import published, statistics, trials
from infoxlm_core.results.statistics import Statistic, as_statistic, is_share
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


def get_title(metric: str) -> str:
    """Return the name of a metric in titles."""
    return _TITLES.get(metric, metric.replace("_", " "))


def name_pooling(pooling: str) -> str:
    """Return the name of a pooling in texts."""
    return _POOLINGS.get(pooling, pooling)


def describe_vector(vector: Mapping[str, Any]) -> str:
    """Return pooling and layer of a vector in words. `vector` has the fields of a `VectorSpec`."""
    return f"{name_pooling(vector['pooling'])}, layer {vector['layer']}"


def tabulate(summary: Summary) -> dict[str, list[PageTable]]:
    """Return the tables of each task by its name. Tables of several tasks are under `transfer` and `mixed`."""
    tables = {}
    for name, task in summary.tasks.items():
        if task.models:
            tables[name] = _tabulate_task(name, task, summary.model)
    tables["transfer"] = _tabulate_gaps(summary)
    tables["mixed"] = _tabulate_mixed(summary)
    return {name: task_tables for name, task_tables in tables.items() if task_tables}


def tabulate_headlines(summary: Summary) -> PageTable:
    """Tabulate the headline metrics of every model."""
    several_seeds = any(len(variant.seeds) > 1 for variant in summary.variants.values())
    columns = [Column("seeds", role="text")] if several_seeds else []
    columns += [_make_headline_column(summary, metric) for metric in summary.metrics]
    lines = []
    for model, variant in summary.variants.items():
        planned = len(variant.seeds)
        finished = planned - len(variant.unfinished)
        cells: list[Cell] = [variant.metrics[metric] for metric in summary.metrics]
        if several_seeds:
            cells.insert(0, str(finished) if finished == planned else f"{finished} of {planned}")
        under_test = model == summary.model and bool(summary.tasks)
        lines.append(Line(model, tuple(cells), what=variant.what, seeds=finished, under_test=under_test))
    head = "model" if summary.tasks else "variant"
    return PageTable("headlines", "", tuple(columns), tuple(lines), head=head)


def _make_headline_column(summary: Summary, metric: str, intervals: bool = False) -> Column:
    share = summary.is_share(metric)
    return Column(statistics.name_column(metric, share), partial(statistics.show, share=share), intervals=intervals)


def tabulate_differences(summary: Summary) -> PageTable | None:
    """Tabulate the differences of an ablation's variants to the first one. Return None if no seed is in both."""
    compared = {model: variant.differences for model, variant in summary.variants.items() if variant.differences}
    if not any(difference.n for differences in compared.values() for difference in differences.values()):
        return None
    columns = tuple(_make_headline_column(summary, metric, intervals=True) for metric in summary.metrics)
    lines = []
    for model, differences in compared.items():
        cells = tuple(differences[metric] for metric in summary.metrics)
        lines.append(Line(model, cells, seeds=len(summary.variants[model].seeds)))
    return PageTable("differences", "", columns, tuple(lines), head="variant")


def tabulate_question_differences(summary: Summary) -> PageTable | None:
    """Tabulate the differences of an ablation's variants to the first one over the questions. None without answers."""
    compared = {model: variant.question_differences for model, variant in summary.variants.items()}
    measured = {metric for differences in compared.values() for metric in differences}
    metrics = [metric for metric in summary.metrics if metric in measured]
    lines = []
    for model, differences in compared.items():
        if differences:
            lines.append(Line(model, tuple(differences.get(metric) for metric in metrics)))
    columns = tuple(_make_headline_column(summary, metric, intervals=True) for metric in metrics)
    return PageTable("question-differences", "", columns, tuple(lines), head="variant") if lines else None


def tabulate_costs(summary: Summary) -> PageTable | None:
    """Tabulate what the pre-training of an ablation's variants cost, the mean of their seeds; None if it is unknown."""
    lines = []
    columns: tuple[Column, ...] = ()
    for model, variant in summary.variants.items():
        if variant.costs:
            columns = tuple(_COST_COLUMNS[name] for name in variant.costs)  # the same for all variants
            lines.append(Line(model, tuple(cost.mean for cost in variant.costs.values())))
    return PageTable("costs", "", columns, tuple(lines), head="variant") if lines else None


def tabulate_published_ablations(summary: Summary) -> PageTable | None:
    """Tabulate the paper's results for the same variants. Return None if it has none of them."""
    lines = []
    for variant in summary.variants:
        if variant in published.ablations():
            metrics = published.ablations()[variant]
            lines.append(Line(variant, tuple(metrics.get(metric) for metric in published.METRICS)))
    if not lines:
        return None
    show = partial(statistics.show, share=True)
    columns = tuple(Column(title, show) for title in published.METRICS.values())
    return PageTable("published-ablations", "", columns, tuple(lines), head="variant")


def tabulate_layers(name: str, task: TaskSummary) -> PageTable | None:
    """Tabulate a metric by layer: a row for every model and pooling, the best layer of each model highlighted."""
    by_layer = {}
    for model, result in task.models.items():
        if result.details.get("by_layer"):
            by_layer[model] = average_by_layer(result)
    if not by_layer:
        return None
    layer_count = max(len(shares) for poolings in by_layer.values() for shares in poolings.values())
    lines = []
    for model, poolings in by_layer.items():
        best_share = max(max(shares) for shares in poolings.values())
        for pooling, shares in poolings.items():
            padding = [""] * (layer_count - len(shares))
            cells: tuple[Cell, ...] = (*shares, *padding)
            marked = shares.index(best_share) if best_share in shares else None
            lines.append(Line(model, cells, name_pooling(pooling), marked=marked))
    columns = tuple(Column(str(layer)) for layer in range(layer_count))
    return PageTable(f"{name}-by-layer", f"{name}: by layer, both directions", columns, tuple(lines))


def average_by_layer(result: ModelResult) -> dict[str, Sequence[float]]:
    """Return pooling -> shares by layer, the mean of both directions."""
    means = {}
    for pooling, shares in result.details["by_layer"].items():
        has_directions = isinstance(shares, Mapping)  # a suite stores each direction and their mean
        means[pooling] = shares["mean"] if has_directions else shares
    return means


def _tabulate_task(name: str, task: TaskSummary, model_under_test: str) -> list[PageTable]:
    """Tabulate a task: retrieval by vector, any other task by metric."""
    if any("vectors" in result.details for result in task.models.values()):
        return list(_tabulate_vectors(name, task, model_under_test))
    return [_tabulate_metric(name, task, metric, model_under_test) for metric in task.metrics]


def _list_columns(codes: Iterable[str], show: Callable[[float, float], str] = percent) -> tuple[Column, ...]:
    language_columns = [Column(code, show) for code in codes]
    return (Column("mean", show, role="sum"), *language_columns)


def _tabulate_metric(name: str, task: TaskSummary, metric: str, model_under_test: str) -> PageTable:
    """Tabulate one metric by language, beside published rows of the same training set."""
    lines = []
    for model, result in task.models.items():
        scores = [result.languages.get(code, {}).get(metric) for code in task.languages]
        detail = ""
        if "served" in result.details:  # the vectors that users of the model get
            detail = describe_vector(result.details["served"])
        rule = result.rule.strip("–")  # a task that trains nothing has no rule
        is_under_test = model == model_under_test
        lines.append(Line(model, (result.mean[metric], *scores), detail, rule, under_test=is_under_test))
    published_name = task.table if task.table in published.tables() else f"{task.table}/{metric}"
    paper = _arrange_published(published_name, task.languages, lambda row: row.kind == task.setting)
    file = name if len(task.metrics) == 1 else f"{name}-{metric.replace('_', '-')}"
    show = percent if is_share(f"{task.kind}/{metric}") else short
    return PageTable(
        file,
        f"{name}: {get_title(metric)}",
        _list_columns(task.languages, show),
        tuple(lines),
        paper.lines,
        paper.notes,
    )


def _tabulate_vectors(name: str, task: TaskSummary, model_under_test: str) -> Iterable[PageTable]:
    """Tabulate retrieval by group of languages and direction, with a row for every model and vector."""
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
            lines = tuple(_list_vectors(task.models, codes, direction, model_under_test))
            paper = _arrange_published(published_name, codes, lambda _: True, detailed=True)
            notes = paper.notes
            if any(BEST in line.detail for line in lines):
                notes = (_BEST_NOTE, *notes)
            title = label.replace("_", " → ")
            file = label.replace("_", "-")
            if len(groups) > 1:
                title = f"{_GROUPS[group]}, {title}"
                file = f"{group}-{file}"
            yield PageTable(f"{name}-{file}", f"{name}: {title}", _list_columns(codes), lines, paper.lines, notes)


def _find_group(code: str) -> str:
    """Return the paper's group of a language."""
    two_letters = languages.two_letters(code)
    for group in ("14", "22"):
        if two_letters in languages.GROUPS[group]:
            return group
    return "other"


def _list_vectors(
    models: Mapping[str, ModelResult], codes: Sequence[str], direction: str, model_under_test: str
) -> Iterable[Line]:
    """Yield a row for each model, vector by vector, in the order of the paper's tables."""
    first_result = next(iter(models.values()))
    for index in range(len(first_result.details["vectors"])):
        for model, result in models.items():
            vectors = list(result.details["vectors"].items())
            name, vector = vectors[index]
            shares = [vector["languages"].get(code, {}).get(direction) for code in codes]
            known_shares = [share for share in shares if share is not None]
            mean = fmean(known_shares) if known_shares else None
            detail = _describe_vector(vector, result.details["encoder"]["layers"])
            if name.endswith("@best"):
                detail += f", {BEST}"
            cells = tuple(as_statistic(share) for share in (mean, *shares))
            yield Line(model, cells, detail, under_test=model == model_under_test)


def _describe_vector(vector: Mapping[str, Any], layers: int) -> str:
    """Return a vector as text, such as `mean of tokens, layer 8`."""
    layer = "last layer" if vector["layer"] == layers else f"layer {vector['layer']}"
    return f"{name_pooling(vector['pooling'])}, {layer}"


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
        mean = row.mean if has_same_languages else _average_if_complete(shares)
        line = Line(
            name=f"{row.model} large" if row.size == "large" else row.model,
            cells=tuple(as_statistic(share) for share in (mean, *shares)),
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


def _average_if_complete(shares: Sequence[float | None]) -> float | None:
    """Return the mean of shares, or None if one is missing."""
    present = [share for share in shares if share is not None]
    return fmean(present) if len(present) == len(shares) else None


def select_tasks_with_gap(summary: Summary) -> dict[str, TaskSummary]:
    """Return the tasks in which at least one of our models has a transfer gap."""
    tasks = {}
    for name, task in summary.tasks.items():
        if any(result.transfer_gap for result in task.models.values()):
            tasks[name] = task
    return tasks


def find_transfer_gap(task: TaskSummary, model: str) -> Statistic | None:
    """Return the transfer gap of a model on a task, if it has one."""
    result = task.models.get(model)
    return result.transfer_gap[task.main] if result and result.transfer_gap else None


def _tabulate_gaps(summary: Summary) -> list[PageTable]:
    """Tabulate the transfer gap of every fine-tuned task: score of the source language minus the mean of the others."""
    tasks = select_tasks_with_gap(summary)
    if not tasks:
        return []
    lines = []
    for model in summary.models:
        gaps = tuple(find_transfer_gap(task, model) for task in tasks.values())
        if any(gaps):
            lines.append(Line(model, gaps, under_test=model == summary.model))
    # The paper reports gaps only for zero-shot transfer, so columns of other tasks have no published cells.
    published_columns = []
    for task in tasks.values():
        published_columns.append(task.table if task.setting == "zero-shot" else "")
    published_lines = []
    for row in published.tables()["transfer_gap"].rows:
        if not row.cells.keys().isdisjoint(published_columns):
            cells = tuple(as_statistic(row.cells.get(column)) for column in published_columns)
            published_lines.append(Line(row.model, cells, source=row.source))
    columns = tuple(Column(name) for name in tasks)
    return [PageTable("transfer-gap", "Transfer gap, points", columns, tuple(lines), tuple(published_lines))]


def _tabulate_mixed(summary: Summary) -> list[PageTable]:
    """Tabulate scores of text pairs (premise and hypothesis, paragraph and question) in one language and in two."""
    tables = []
    for name, task in summary.tasks.items():
        lines = []
        for model, result in task.models.items():
            if result.within:
                cells = (result.within, result.across)
                lines.append(Line(model, cells, rule=result.rule, under_test=model == summary.model))
        if not lines:
            continue
        has_published = task.table == "xnli" and task.setting == "zero-shot"
        rows = published.tables()["mixed"].rows if has_published else ()
        published_lines = []
        for row in rows:
            shares = tuple(as_statistic(share) for share in row.cells.values())
            published_lines.append(Line(row.model, shares, source=row.source))
        notes = tuple(row.note for row in rows if row.note)
        title = f"{name}: pairs of texts in one language and in two"
        columns = (Column("within"), Column("across"))
        tables.append(PageTable(f"{name}-mixed", title, columns, tuple(lines), tuple(published_lines), notes))
    return tables


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
    show = partial(statistics.show, share=True)
    columns = tuple(Column(trials.describe(grid_point.grid), show) for grid_point in first_result.grid)
    return PageTable("grid", "", columns, tuple(lines))
