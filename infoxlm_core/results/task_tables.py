"""Build the tables of a sweep: our rows, and below them published rows of the same task and training set."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from statistics import fmean
from typing import Any

from infoxlm_core import languages
from infoxlm_core.results import published, statistics, trials
from infoxlm_core.results.statistics import Statistic, exact, is_share
from infoxlm_core.results.summary import ModelResult, Summary, TaskSummary
from infoxlm_core.results.tables import Cell, Column, Line, PageTable, percent, short

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
_POOLINGS = {"mean": "mean of tokens", "mean_no_special": "mean without special tokens", "cls": "[CLS]"}


def title_of(metric: str) -> str:
    """Return the name of a metric in titles."""
    return _TITLES.get(metric, metric.replace("_", " "))


def name_pooling(pooling: str) -> str:
    """Return the name of a pooling in texts."""
    return _POOLINGS.get(pooling, pooling)


def describe_vector(vector: Mapping[str, Any]) -> str:
    """Return pooling and layer of a vector in words; `vector` has the fields of a `VectorSpec`."""
    return f"{name_pooling(vector['pooling'])}, layer {vector['layer']}"


def tabulate(summary: Summary) -> dict[str, list[PageTable]]:
    """Return the tables of each task by its name; tables of several tasks are under `transfer` and `mixed`."""
    tables = {name: _tabulate_task(name, task, summary.model) for name, task in summary.tasks.items() if task.models}
    tables |= {"transfer": _tabulate_gaps(summary), "mixed": _tabulate_mixed(summary)}
    return {name: group for name, group in tables.items() if group}


def tabulate_headlines(summary: Summary) -> PageTable:
    """Tabulate the headline metrics of every model."""
    several_seeds = any(len(variant.seeds) > 1 for variant in summary.variants.values())
    columns = [Column("seeds", role="text")] if several_seeds else []
    columns += [_headline_column(summary, metric) for metric in summary.metrics]
    lines = []
    for model, variant in summary.variants.items():
        planned, finished = len(variant.seeds), len(variant.seeds) - len(variant.unfinished)
        cells: list[Cell] = [variant.metrics[metric] for metric in summary.metrics]
        if several_seeds:
            cells.insert(0, str(finished) if finished == planned else f"{finished} of {planned}")
        under_test = model == summary.model and bool(summary.tasks)
        lines.append(Line(model, tuple(cells), what=variant.what, seeds=finished, under_test=under_test))
    head = "model" if summary.tasks else "variant"
    return PageTable("headlines", "", tuple(columns), tuple(lines), head=head)


def _headline_column(summary: Summary, metric: str, intervals: bool = False) -> Column:
    share = summary.is_share(metric)
    return Column(statistics.name_column(metric, share), partial(statistics.show, share=share), intervals=intervals)


def tabulate_differences(summary: Summary) -> PageTable | None:
    """Tabulate the differences of an ablation's variants to the first one; None if no seed is in both."""
    compared = {model: variant.differences for model, variant in summary.variants.items() if variant.differences}
    if not any(difference.n for differences in compared.values() for difference in differences.values()):
        return None
    columns = tuple(_headline_column(summary, metric, intervals=True) for metric in summary.metrics)
    lines = []
    for model, differences in compared.items():
        cells = tuple(differences[metric] for metric in summary.metrics)
        lines.append(Line(model, cells, seeds=len(summary.variants[model].seeds)))
    return PageTable("differences", "", columns, tuple(lines), head="variant")


def tabulate_published_ablations(summary: Summary) -> PageTable | None:
    """Tabulate the paper's results for the same variants; return None if it has none of them."""
    columns = tuple(Column(title, partial(statistics.show, share=True)) for title in published.METRICS.values())
    lines = tuple(
        Line(name, tuple(published.ablations()[name].get(metric) for metric in published.METRICS))
        for name in summary.variants
        if name in published.ablations()
    )
    return PageTable("published-ablations", "", columns, lines, head="variant") if lines else None


def tabulate_layers(name: str, task: TaskSummary) -> PageTable | None:
    """Tabulate a metric by layer: a row for every model and pooling, the best layer of each model highlighted."""
    by_layer = {}
    for model, result in task.models.items():
        if result.details.get("by_layer"):
            by_layer[model] = mean_by_layer(result)
    if not by_layer:
        return None
    depth = max(len(shares) for poolings in by_layer.values() for shares in poolings.values())
    lines = []
    for model, poolings in by_layer.items():
        best = max(max(shares) for shares in poolings.values())
        for pooling, shares in poolings.items():
            cells: tuple[Cell, ...] = (*shares, *[""] * (depth - len(shares)))
            marked = shares.index(best) if best in shares else None
            lines.append(Line(model, cells, name_pooling(pooling), marked=marked))
    columns = tuple(Column(str(layer)) for layer in range(depth))
    return PageTable(f"{name}-by-layer", f"{name}: by layer, both directions", columns, tuple(lines))


def mean_by_layer(result: ModelResult) -> dict[str, Sequence[float]]:
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


def _columns(codes: Iterable[str], show: Callable[[float, float], str] = percent) -> tuple[Column, ...]:
    return (Column("mean", show, role="sum"), *(Column(code, show) for code in codes))


def _tabulate_metric(name: str, task: TaskSummary, metric: str, model_under_test: str) -> PageTable:
    """Tabulate one metric by language, beside published rows of the same training set."""
    lines = []
    for model, result in task.models.items():
        scores = [result.languages.get(code, {}).get(metric) for code in task.languages]
        line = Line(
            model,
            (result.mean[metric], *scores),
            detail=describe_vector(result.details["served"]) if "served" in result.details else "",
            rule=result.rule.strip("–"),  # a task that trains nothing has no rule
            under_test=model == model_under_test,
        )
        lines.append(line)
    key = next((key for key in (task.table, f"{task.table}/{metric}") if key in published.tables()), "")
    rows, notes = _lay_beside(key, task.languages, lambda row: row.kind == task.setting)
    file = name if len(task.metrics) == 1 else f"{name}-{metric.replace('_', '-')}"
    show = percent if is_share(f"{task.kind}/{metric}") else short
    return PageTable(file, f"{name}: {title_of(metric)}", _columns(task.languages, show), tuple(lines), rows, notes)


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
            key = f"{task.table}/{group}/{label}" if task.table == "tatoeba" else ""
            lines = tuple(_list_vectors(task.models, codes, direction, model_under_test))
            rows, notes = _lay_beside(key, codes, lambda _: True, detailed=True)
            if any(BEST in line.detail for line in lines):
                notes = (_BEST_NOTE, *notes)
            title = label.replace("_", " → ")
            file = label.replace("_", "-")
            if len(groups) > 1:
                title = f"{_GROUPS[group]}, {title}"
                file = f"{group}-{file}"
            yield PageTable(f"{name}-{file}", f"{name}: {title}", _columns(codes), lines, rows, notes)


def _find_group(code: str) -> str:
    """Return the paper's group of a language."""
    two_letters = languages.two_letters(code)
    return next((group for group in ("14", "22") if two_letters in languages.GROUPS[group]), "other")


def _list_vectors(
    models: Mapping[str, ModelResult], codes: Sequence[str], direction: str, model_under_test: str
) -> Iterable[Line]:
    """Yield a row for each model, vector by vector, in the order of the paper's tables."""
    for rank in range(len(next(iter(models.values())).details["vectors"])):
        for model, result in models.items():
            name, vector = list(result.details["vectors"].items())[rank]
            shares = [vector["languages"].get(code, {}).get(direction) for code in codes]
            measured = [share for share in shares if share is not None]
            detail = _describe_vector(vector, result.details["encoder"]["layers"])
            if name.endswith("@best"):
                detail += f", {BEST}"
            cells = (exact(fmean(measured)) if measured else None, *map(exact, shares))
            yield Line(model, cells, detail, under_test=model == model_under_test)


def _describe_vector(vector: Mapping[str, Any], layers: int) -> str:
    """Return a vector as text, such as `mean of tokens, layer 8`."""
    layer = "last layer" if vector["layer"] == layers else f"layer {vector['layer']}"
    return f"{name_pooling(vector['pooling'])}, {layer}"


def _lay_beside(
    key: str, codes: Sequence[str], is_comparable: Callable[[published.PublishedRow], bool], detailed: bool = False
) -> tuple[tuple[Line, ...], tuple[str, ...]]:
    """Return the comparable published rows, arranged in our columns, and their notes."""
    table = published.tables().get(key)
    if not table:
        return (), ()
    columns = [languages.two_letters(code) for code in codes]
    same_languages = set(columns) == set(table.columns)
    lines, notes = [], []
    for row in filter(is_comparable, table.rows):
        shares = [row.cells.get(code) for code in columns]
        mean = row.mean if same_languages else _mean_of_all(shares)
        model = f"{row.model} large" if row.size == "large" else row.model
        rule = f"{row.rule} ({row.runs} runs)".strip() if row.runs > 1 else row.rule
        cells = tuple(exact(share) for share in (mean, *shares))
        lines.append(Line(model, cells, row.kind if detailed else "", rule, row.source))
        if row.note:
            notes.append(row.note)
    if lines and not same_languages:
        notes.append("the languages differ from the paper's table: published means cover only those shown")
    return tuple(lines), tuple(dict.fromkeys(notes))


def _mean_of_all(shares: Sequence[float | None]) -> float | None:
    """Return the mean of shares; None if one is missing."""
    known = [share for share in shares if share is not None]
    return fmean(known) if len(known) == len(shares) else None


def with_transfer_gap(summary: Summary) -> dict[str, TaskSummary]:
    """Return the tasks in which at least one of our models has a transfer gap."""
    tasks = {}
    for name, task in summary.tasks.items():
        if any(result.transfer_gap for result in task.models.values()):
            tasks[name] = task
    return tasks


def transfer_gap_of(task: TaskSummary, model: str) -> Statistic | None:
    """Return the transfer gap of a model on a task, if it has one."""
    result = task.models.get(model)
    return result.transfer_gap[task.main] if result and result.transfer_gap else None


def _tabulate_gaps(summary: Summary) -> list[PageTable]:
    """Tabulate the transfer gap of every fine-tuned task: score of the source language minus the mean of the others."""
    tasks = with_transfer_gap(summary)
    if not tasks:
        return []
    lines = []
    for model in summary.models:
        gaps = tuple(transfer_gap_of(task, model) for task in tasks.values())
        if any(gaps):
            lines.append(Line(model, gaps, under_test=model == summary.model))
    tables = [task.table if task.setting == "zero-shot" else "" for task in tasks.values()]
    rows = tuple(
        Line(row.model, tuple(exact(row.cells.get(table)) for table in tables), source=row.source)
        for row in published.tables()["transfer_gap"].rows
        if any(table in row.cells for table in tables)
    )
    return [PageTable("transfer-gap", "Transfer gap, points", tuple(map(Column, tasks)), tuple(lines), rows)]


def _tabulate_mixed(summary: Summary) -> list[PageTable]:
    """Tabulate scores of text pairs (premise and hypothesis, paragraph and question) in one language and in two."""
    tables = []
    for name, task in summary.tasks.items():
        lines = tuple(
            Line(model, (result.within, result.across), rule=result.rule, under_test=model == summary.model)
            for model, result in task.models.items()
            if result.within
        )
        if not lines:
            continue
        has_published = task.table == "xnli" and task.setting == "zero-shot"
        rows = published.tables()["mixed"].rows if has_published else ()
        published_lines = tuple(
            Line(row.model, tuple(map(exact, row.cells.values())), source=row.source) for row in rows
        )
        notes = tuple(row.note for row in rows if row.note)
        title = f"{name}: pairs of texts in one language and in two"
        columns = (Column("within"), Column("across"))
        tables.append(PageTable(f"{name}-mixed", title, columns, lines, published_lines, notes))
    return tables


def tabulate_grid(task: TaskSummary) -> PageTable | None:
    """Tabulate development scores by grid point; return None if the grid has only one point."""
    first = next(iter(task.models.values()), None)
    if first is None or len(first.grid) == 1:
        return None
    lines = []
    for model, result in task.models.items():
        cells = tuple(Statistic(len(point.seeds), point.by) for point in result.grid)
        marked = result.grid.index(result.chosen)
        lines.append(Line(model, cells, seeds=len(result.chosen.seeds), marked=marked))
    show = partial(statistics.show, share=True)
    columns = tuple(Column(trials.describe(point.grid), show) for point in first.grid)
    return PageTable("grid", "", columns, tuple(lines))
