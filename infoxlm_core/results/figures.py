"""The figures of all our pages: results -> PNG files, and SVG for inside a page."""

import io
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogFormatter, MaxNLocator, PercentFormatter, StrMethodFormatter

from infoxlm_core.results.ablation import Comparison
from infoxlm_core.results.statistics import Statistic, exact, is_share, name_column
from infoxlm_core.results.suite_tables import choose_transferred
from infoxlm_core.results.summary import Summary, TaskSummary
from infoxlm_core.results.tables import title_of
from infoxlm_core.tasks.scores import Scores

MODEL, REFERENCE = "#1d5b8f", "#b3413a"
_COLOURS = (MODEL, "#d08a3c", "#8a8f98", "#7a9e6b", "#6b4f8a", "#b3413a", "#444444")
_STYLE: dict[Any, Any] = {
    "font.family": "DejaVu Sans",  # comes with matplotlib; figures name languages by their codes
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#8a8f98",
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e6e4df",
    "axes.titlesize": 11,
    "axes.titlelocation": "left",
    "legend.frameon": False,
    "legend.fontsize": 9,
    "text.parse_math": False,  # names of languages and models come from outside: a dollar sign is one
    "svg.hashsalt": "infoxlm",  # equal scores give equal files
}
_LINES = {"mean": "-o", "cls": "--s"}
_POOLINGS = {"cls": "[CLS]"}

Curve = tuple[str, str, Sequence[float]]  # model, pooling, the share at each layer


def render(drawn: Mapping[str, Callable[[], Figure | None]]) -> dict[str, dict[str, bytes]]:
    """Draw every figure that there is something for; return each by name, as `png` and `svg`.

    The same figure gives the same bytes.
    """
    with matplotlib.rc_context(_STYLE):
        figures = {name: draw() for name, draw in drawn.items()}
        return {name: {kind: _save(fig, kind) for kind in ("png", "svg")} for name, fig in figures.items() if fig}


def _save(figure: Figure, kind: str) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format=kind, dpi=160, metadata={"Date": None} if kind == "svg" else {"Software": None})
    return buffer.getvalue()


def colour(models: Iterable[str]) -> dict[str, str]:
    """A colour for each model; the first, which is under test, always has the same."""
    return dict(zip(models, itertools.cycle(_COLOURS), strict=False))


def of_suite(summary: Summary) -> dict[str, Callable[[], Figure | None]]:
    """A figure a task, by its name, and one of the transfer gaps."""
    colours = colour(summary.models)
    drawn: dict[str, Callable[[], Figure | None]] = {
        task: lambda task=task, found=found: _draw_task(task, found, colours)  # type: ignore[misc]
        for task, found in summary.tasks.items()
    }
    return drawn | {"transfer-gap": lambda: _draw_gaps(summary, colours)}


def _draw_task(task: str, found: TaskSummary, colours: Mapping[str, str]) -> Figure | None:
    """Retrieval by layer in both directions (Figure 1 of the paper), or the main metric by language."""
    if not found.models:
        return None
    deep = {model: row.details["by_layer"] for model, row in found.models.items() if row.details.get("by_layer")}
    if deep:
        pivot = found.settings.get("pivot", "en")
        panels = {}
        for direction, name in (("to_pivot", f"xx → {pivot}"), ("from_pivot", f"{pivot} → xx")):
            panels[f"{task}: {name}, {len(found.languages)} languages"] = [
                (model, pooling, shares[direction])
                for model, by_layer in deep.items()
                for pooling, shares in by_layer.items()
            ]
        return draw_layers(panels, colours)
    if "vectors" in next(iter(found.models.values())).details:
        return None
    heights = {
        model: [row.mean[found.main], *(row.languages.get(code, {}).get(found.main) for code in found.languages)]
        for model, row in found.models.items()
    }
    title = f"{task}: {title_of(found.main)} by language"
    return draw_bars({title: heights}, ["mean", *found.languages], colours, parted=True)


def _draw_gaps(summary: Summary, colours: Mapping[str, str]) -> Figure | None:
    """The transfer gap of every task: a bar a model."""
    tasks = choose_transferred(summary)
    gaps = {
        model: [row.transfer_gap[found.main] if row and row.transfer_gap else None for found, row in rows]
        for model in summary.models
        if (rows := [(found, found.models.get(model)) for found in tasks.values()])
    }
    gaps = {model: cells for model, cells in gaps.items() if any(cells)}
    return draw_bars({"Transfer gap (lower is better)": gaps}, list(tasks), colours) if gaps else None


def draw_layers(panels: Mapping[str, Sequence[Curve]], colours: Mapping[str, str]) -> Figure:
    """Shares by layer: a line a model and pooling, a panel a direction."""
    figure, axes = _start(5.6 if len(panels) == 1 else 9.0, 3.7, list(panels))
    for panel, curves in zip(axes, panels.values(), strict=True):
        for model, pooling, shares in curves:
            label = f"{model}, {_POOLINGS.get(pooling, pooling)}"
            panel.plot(shares, _LINES.get(pooling, ":"), color=colours[model], markersize=4, label=label)
        panel.set_xlabel("layer (0: embeddings)")
        panel.xaxis.set_major_locator(MaxNLocator(integer=True))
    return _finish(figure, axes)


def draw_bars(
    panels: Mapping[str, Mapping[str, Sequence[Statistic | None]]],
    names: Sequence[str],
    colours: Mapping[str, str],
    parted: bool = False,
    reference: tuple[str, float] | None = None,
) -> Figure:
    """Groups of bars, a bar a model with its sample deviation over seeds.

    Panels are title -> model -> one cell for each name; the first group may stand parted from the others. The reference
    is a dotted line: what it is, and where.
    """
    figure, axes = _start(max(6.0, 1.4 + 0.5 * len(names) * len(panels)), 3.5, list(panels))
    for panel, heights in zip(axes, panels.values(), strict=True):
        width = 0.8 / len(heights)
        for rank, (model, cells) in enumerate(heights.items()):
            left = [i - 0.4 + (rank + 0.5) * width for i in range(len(names))]
            means = [(cell and cell.mean) or 0.0 for cell in cells]
            spread = [(cell and cell.deviation) or 0.0 for cell in cells]
            panel.bar(left, means, width * 0.92, color=colours[model], label=model)
            if any(spread):
                panel.errorbar(left, means, spread, fmt="none", ecolor="#1f2328", elinewidth=0.9, capsize=1.5)
        if parted:
            panel.axvline(0.5, color="#8a8f98", linewidth=0.8)
        if reference:
            panel.axhline(reference[1], color=REFERENCE, linestyle=":", linewidth=1.2, label=reference[0])
        panel.set_xticks(range(len(names)), names)
        panel.set_xlim(-0.5, len(names) - 0.5)
        panel.grid(axis="x", visible=False)
    return _finish(figure, axes)


def draw_points(title: str, scores: Mapping[str, Scores], metric: str, colours: Mapping[str, str]) -> Figure:
    """A metric by language on a logarithmic axis, where a bar would have no foot."""
    figure, (axes,) = _start(5.6, 3.6, [title])
    for model, one in scores.items():
        values = [cell[metric] for cell in one.languages.values()]
        axes.plot(list(one.languages), values, "o", color=colours[model], label=model)
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,g}"))  # the default is mathematics, which `_STYLE` turns off
    axes.yaxis.set_minor_formatter(LogFormatter())  # labels only where less than a power of ten is shown
    figure.legend(loc="outside lower center", ncols=len(scores))
    return figure


def draw_training(curves: Mapping[str, Sequence[Sequence[float]]]) -> Figure | None:
    """Losses, and the accuracy of contrast and of the probe, over the optimizer steps."""
    losses = {name.removeprefix("loss/").upper(): curves[name] for name in sorted(curves) if name.startswith("loss/")}
    named = (("XLCO accuracy", "xlco/accuracy"), ("held-out retrieval", "probe/retrieval"))
    shares = {name: curves[curve] for name, curve in named if curves.get(curve)}
    if not losses:
        return None
    panels = {"Training losses": losses} | ({"In training: " + " and ".join(shares): shares} if shares else {})
    figure, axes = _start(9.0 if shares else 5.6, 3.4, list(panels), share_y=False)
    for panel, found in zip(axes, panels.values(), strict=True):
        for (name, points), shade in zip(found.items(), itertools.cycle(_COLOURS), strict=False):
            panel.plot(*zip(*points, strict=True), color=shade, linewidth=1.4, label=name)
        if found is shares:
            panel.set_ylim(0, 1)
            panel.yaxis.set_major_formatter(PercentFormatter(1))
        if found is losses or len(found) > 1:
            panel.legend()
        panel.set_xlabel("optimizer step")
    return figure


def draw_comparison(comparison: Comparison) -> Figure:
    """A panel a metric: a point for every seed, the mean with its interval."""
    metrics, variants = comparison.metrics, comparison.variants
    columns = min(3, len(metrics)) or 1
    lines = -(-len(metrics) // columns) or 1
    figure = Figure(figsize=(1.6 + 3.2 * columns, lines * (1.0 + 0.32 * len(variants))), layout="constrained")
    panels = figure.subplots(lines, columns, sharey=True, squeeze=False).flat
    for panel, metric in itertools.zip_longest(panels, metrics):
        if metric is None:
            panel.set_visible(False)
            continue
        panel.set_title(name_column(metric))
        for rank, row in enumerate(variants.values()):
            scale, found = 100 if is_share(metric) else 1, row.metrics[metric]
            values = [scale * value for value in found.values.values() if value is not None]
            panel.plot(values, [rank] * len(values), "o", color=MODEL, alpha=0.35, markersize=5)
            if found.interval:
                panel.plot([scale * bound for bound in found.interval], [rank] * 2, "-", color=MODEL)
            if found.mean is not None:
                panel.plot([scale * found.mean], [rank], "|", color=MODEL, markersize=13, mew=2.2)
        panel.set(yticks=range(len(variants)), ylim=(len(variants) - 0.5, -0.5))
        panel.set_yticklabels(list(variants), parse_math=False)
        panel.xaxis.set_major_locator(MaxNLocator(4))
    return figure


def cells(scores: Mapping[str, Scores], metric: str, codes: Sequence[str]) -> dict[str, list[Statistic | None]]:
    """One metric of every model by language, for `draw_bars`."""
    return {m: [exact(one.languages.get(code, {}).get(metric)) for code in codes] for m, one in scores.items()}


def _start(width: float, height: float, titles: Sequence[str], share_y: bool = True) -> tuple[Figure, list[Axes]]:
    figure = Figure(figsize=(width, height), layout="constrained")
    axes = list(figure.subplots(1, len(titles), sharey=share_y, squeeze=False).flat)
    for panel, title in zip(axes, titles, strict=True):
        panel.set_title(title)
    return figure, axes


def _finish(figure: Figure, axes: Sequence[Axes]) -> Figure:
    """A percent axis from 0, or below where a gap is, and one legend under the panels."""
    for panel in axes:
        panel.set_ylim(bottom=min(0.0, panel.get_ylim()[0]))
        panel.yaxis.set_major_formatter(PercentFormatter(1))
    handles, labels = axes[0].get_legend_handles_labels()
    columns = max(2, int(figure.get_size_inches()[0] // 2.2))
    figure.legend(handles, labels, loc="outside lower center", ncols=min(len(labels), columns))
    return figure
