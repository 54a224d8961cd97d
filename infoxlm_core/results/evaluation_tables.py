"""The tables of an evaluation: the model under test and its floors."""

from collections.abc import Callable, Mapping, Sequence

from infoxlm_core.results.tables import POOLING_TITLES, Column, Line, Table, count, percent
from infoxlm_core.tasks.task import Scores


def of_scores(
    title: str,
    scores: Mapping[str, Scores],
    metrics: Mapping[str, str],
    show: Callable[[float, float], str] = percent,
) -> Table:
    """Models by language.

    Args:
        title: above it.
        scores: by model, the one under test first.
        metrics: what is shown of each model: words -> metric.
        show: how a figure is shown.
    """
    first = next(iter(scores))
    codes = list(scores[first].languages)
    lines = tuple(
        Line(
            model,
            (one.mean[metric], *(one.languages.get(code, {}).get(metric) for code in codes)),
            detail,
            own=model == first,
        )
        for detail, metric in metrics.items()
        for model, one in scores.items()
    )
    return Table("", title, (Column("mean", show, "sum"), *(Column(code, show) for code in codes)), lines)


def of_layers(scores: Mapping[str, Scores]) -> Table:
    """Retrieval by layer: a row for every model and pooling, the best of each model in colour."""
    depth = max(len(shares) for one in scores.values() for shares in one.details["by_layer"].values())
    lines = []
    for model, one in scores.items():
        best = one.details["best"]
        for pooling, shares in one.details["by_layer"].items():
            cells = (*shares, *[""] * (depth - len(shares)))
            marked = best["layer"] if best["pooling"] == pooling else None
            lines.append(Line(model, cells, POOLING_TITLES.get(pooling, pooling), marked=marked))
    return Table("layers", "By layer", tuple(Column(str(layer)) for layer in range(depth)), tuple(lines))


def of_counts(head: str, columns: Sequence[str], rows: Mapping[str, Mapping[str, float]]) -> Table:
    """Numbers of lines."""
    shown = tuple(Column(name.replace("_", " "), count) for name in columns)
    lines = tuple(Line(name, tuple(row[column] for column in columns)) for name, row in rows.items())
    return Table(head, "", shown, lines, head=head)
