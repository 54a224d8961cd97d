"""Draw the figures of a page: PNG files, and SVG inside the page."""

import io
import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogFormatter, MaxNLocator, PercentFormatter, StrMethodFormatter

from infoxlm_core.results import statistics, task_tables
from infoxlm_core.results.statistics import Statistic
from infoxlm_core.results.summary import Summary, TaskSummary
from infoxlm_core.results.tables import Cell, PageTable, to_statistic

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
    "text.parse_math": False,  # names come from users: a dollar sign in them does not start a formula
    "svg.hashsalt": "infoxlm",  # equal scores give equal files
}
_LINE_FORMATS = {"mean": "-o", "cls": "--s"}  # pooling -> line and marker, as matplotlib writes them
_POOLINGS = {"cls": "[CLS]"}
_REFERENCES = {"chance": "chance", "majority": "most frequent label"}
"""Field of a task's details -> label of its dotted line."""

Draw = Callable[[], Figure | None]
SentenceMap = Mapping[str, Sequence[Sequence[float]]]
"""Language -> the x and the y coordinates of its sentences. Row i of the second language translates row i of the first
one."""
Bars = Mapping[str, Sequence[Cell]]
"""Model -> the heights of its bars, one for each name on the axis."""


def render(drawings: Mapping[str, Draw]) -> dict[str, dict[str, bytes]]:
    """Draw every figure that has data. Return name -> `png` and `svg` -> bytes, which are equal for equal figures."""
    images = {}
    with matplotlib.rc_context(_STYLE):
        for name, draw in drawings.items():
            figure = draw()
            if figure:
                images[name] = {"png": _save(figure, "png"), "svg": _save(figure, "svg")}
    return images


def _save(figure: Figure, kind: str) -> bytes:
    """Return the content of a file of this kind, `png` or `svg`."""
    buffer = io.BytesIO()
    # Without these fields, which matplotlib would fill, equal figures are equal files.
    metadata = {"Date": None} if kind == "svg" else {"Software": None}
    figure.savefig(buffer, format=kind, dpi=160, metadata=metadata)
    return buffer.getvalue()


def assign_colours(models: Iterable[str]) -> dict[str, str]:
    """Return a colour for each model. The first one, the model under test, always has the same colour."""
    return dict(zip(models, itertools.cycle(_COLOURS), strict=False))


def draw_headlines(summary: Summary) -> Figure | None:
    """Draw a panel for each headline: a point for every seed, and the mean with its interval."""
    metrics = summary.metrics
    variants = summary.variants
    if all(statistic.n < 2 for variant in variants.values() for statistic in variant.metrics.values()):
        return None
    columns = min(3, len(metrics))
    rows = math.ceil(len(metrics) / columns)
    figure = Figure(figsize=(1.6 + 3.2 * columns, rows * (1.0 + 0.32 * len(variants))), layout="constrained")
    panels = list(figure.subplots(rows, columns, sharey=True, squeeze=False).flat)
    for unused_panel in panels[len(metrics) :]:
        unused_panel.set_visible(False)
    for panel, metric in zip(panels, metrics, strict=False):
        is_share = summary.is_share(metric)
        panel.set_title(statistics.name_column(metric, is_share))
        for row, variant in enumerate(variants.values()):
            _draw_seeds(panel, row, variant.metrics[metric], scale=100 if is_share else 1)
        panel.set(yticks=range(len(variants)), ylim=(len(variants) - 0.5, -0.5))
        panel.set_yticklabels(list(variants), parse_math=False)
        panel.xaxis.set_major_locator(MaxNLocator(4))
    return figure


def _draw_seeds(panel: Axes, row: int, statistic: Statistic, scale: float) -> None:
    """Draw a row of a panel: a point for every seed, the interval as a line, and the mean as a bar."""
    values = [scale * value for value in statistic.values.values() if value is not None]
    panel.plot(values, [row] * len(values), "o", color=MODEL, alpha=0.35, markersize=5)
    if statistic.interval:
        panel.plot([scale * bound for bound in statistic.interval], [row, row], "-", color=MODEL)
    if statistic.mean is not None:
        panel.plot([scale * statistic.mean], [row], "|", color=MODEL, markersize=13, mew=2.2)


def draw_layers(name: str, task: TaskSummary, colours: Mapping[str, str]) -> Figure | None:
    """Draw retrieval by layer, in both directions where they are known (Figure 1 of the paper)."""
    pivot = task.settings.get("pivot", "en")
    directions = {"to_pivot": f"xx → {pivot}", "from_pivot": f"{pivot} → xx"}
    curves: dict[str, dict[tuple[str, str], Sequence[float]]] = defaultdict(dict)  # title -> (model, pooling) -> shares
    for model, result in task.models.items():
        for pooling, shares in result.details.get("by_layer", {}).items():
            if not isinstance(shares, Mapping):  # an evaluation stores only the mean of both directions
                curves[f"{name} by layer"][model, pooling] = shares
                continue
            for direction, label in directions.items():
                curves[f"{name}: {label}, {len(task.languages)} languages"][model, pooling] = shares[direction]
    if not curves:
        return None
    figure, axes = _make_figure(5.6 if len(curves) == 1 else 9.0, 3.7, list(curves))
    for panel, curves_of_panel in zip(axes, curves.values(), strict=True):
        for (model, pooling), shares in curves_of_panel.items():
            label = f"{model}, {_POOLINGS.get(pooling, pooling)}"
            panel.plot(shares, _LINE_FORMATS.get(pooling, ":"), color=colours[model], markersize=4, label=label)
        panel.set_xlabel("layer (0: embeddings)")
        panel.xaxis.set_major_locator(MaxNLocator(integer=True))
    return _add_percent_axes_and_legend(figure, axes)


def draw_languages(name: str, task: TaskSummary, colours: Mapping[str, str]) -> Figure | None:
    """Draw the main metric by language, and for held-out retrieval the pairs that share no token."""
    first_result = next(iter(task.models.values()))
    if "vectors" in first_result.details:  # many languages, each with several vectors: only tables are readable
        return None
    if not statistics.is_share(f"{task.kind}/{task.main}"):
        return _draw_points(f"{name} (lower is better)", task, colours)
    titles = {task.main: f"{name}: {task_tables.get_title(task.main)}", "no_overlap": "no shared token"}
    panels = {}
    for metric, title in titles.items():
        if metric in first_result.mean:
            bars: dict[str, list[Cell]] = {}
            for model, result in task.models.items():
                scores = [result.languages.get(code, {}).get(metric) for code in task.languages]
                bars[model] = [result.mean[metric], *scores]
            panels[title] = bars
    references = {}
    for key, label in _REFERENCES.items():
        if key in first_result.details:
            references[label] = first_result.details[key]
    return _draw_bars(panels, ["mean", *task.languages], colours, separate_mean=True, references=references)


def draw_gaps(table: PageTable, colours: Mapping[str, str]) -> Figure:
    """Draw the table of the transfer gaps: a group of bars for each task."""
    bars = {line.name: line.cells for line in table.ours}
    return _draw_bars({"Transfer gap (lower is better)": bars}, [column.name for column in table.columns], colours)


def _draw_bars(
    panels: Mapping[str, Bars],
    names: Sequence[str],
    colours: Mapping[str, str],
    separate_mean: bool = False,
    references: Mapping[str, float] = MappingProxyType({}),
) -> Figure:
    """Draw groups of bars: one bar for each model, with its sample deviation over seeds.

    Args:
        panels: title -> bars.
        names: of the groups.
        colours: by model.
        separate_mean: draw a line between the first group, the mean, and the others.
        references: label -> height of a dotted line.
    """
    figure, axes = _make_figure(max(6.0, 1.4 + 0.5 * len(names) * len(panels)), 3.5, list(panels))
    for panel, bars in zip(axes, panels.values(), strict=True):
        width = 0.8 / len(bars)  # groups are 1 apart, so that a gap of 0.2 separates them
        for rank, (model, cells) in enumerate(bars.items()):
            positions = [group - 0.4 + (rank + 0.5) * width for group in range(len(cells))]
            bar_statistics = [to_statistic(cell) for cell in cells]
            heights = [statistic.mean or 0.0 for statistic in bar_statistics]
            deviations = [statistic.deviation or 0.0 for statistic in bar_statistics]
            panel.bar(positions, heights, width * 0.92, color=colours[model], label=model)
            if any(deviations):
                panel.errorbar(
                    positions, heights, deviations, fmt="none", ecolor="#1f2328", elinewidth=0.9, capsize=1.5
                )
        if separate_mean:
            panel.axvline(0.5, color="#8a8f98", linewidth=0.8)
        for label, height in references.items():
            panel.axhline(height, color=REFERENCE, linestyle=":", linewidth=1.2, label=label)
        panel.set_xticks(range(len(names)), names)
        panel.set_xlim(-0.5, len(names) - 0.5)
        panel.grid(axis="x", visible=False)
    return _add_percent_axes_and_legend(figure, axes)


def _draw_points(title: str, task: TaskSummary, colours: Mapping[str, str]) -> Figure:
    """Draw a metric by language on a logarithmic axis."""
    figure, (axes,) = _make_figure(5.6, 3.6, [title])
    for model, result in task.models.items():
        values = [metrics[task.main].mean or math.nan for metrics in result.languages.values()]
        axes.plot(list(result.languages), values, "o", color=colours[model], label=model)
    axes.set_yscale("log")
    # The default formatter writes formulas, which `_STYLE` turns off.
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,g}"))
    axes.yaxis.set_minor_formatter(LogFormatter())  # labels them only if the axis spans less than a power of ten
    figure.legend(loc="outside lower center", ncols=len(task.models))
    return figure


def draw_training(curves: Mapping[str, Sequence[Sequence[float]]]) -> Figure | None:
    """Draw losses, contrast accuracy and held-out retrieval by optimizer step. Return None without losses.

    Args:
        curves: metric -> points (step, value).
    """
    losses = {}
    for name in sorted(curves):
        if name.startswith("loss/"):
            losses[name.removeprefix("loss/").upper()] = curves[name]
    if not losses:
        return None
    titles = {"xlco/accuracy": "XLCO accuracy", "probe/retrieval": "held-out retrieval"}
    accuracies = {title: curves[name] for name, title in titles.items() if curves.get(name)}
    panels = {"Training losses": losses}
    if accuracies:
        panels[f"During training: {' and '.join(accuracies)}"] = accuracies
    figure, axes = _make_figure(9.0 if accuracies else 5.6, 3.4, list(panels), share_y=False)
    for panel, lines in zip(axes, panels.values(), strict=True):
        for (name, curve), colour in zip(lines.items(), itertools.cycle(_COLOURS), strict=False):
            steps, values = zip(*curve, strict=True)
            panel.plot(steps, values, color=colour, linewidth=1.4, label=name)
        panel.legend()
        panel.set_xlabel("optimizer step")
    if accuracies:
        axes[-1].set_ylim(0, 1)
        axes[-1].yaxis.set_major_formatter(PercentFormatter(1))
    return figure


def draw_merge(curve: Sequence[Mapping[str, float]], weight: float) -> Figure:
    """Draw the accuracies of held-out pairs and guard by weight of a merge. A line marks the chosen weight."""
    figure, (axes,) = _make_figure(5.6, 3.4, ["Accuracy by weight of the merge"])
    weights = [scores["weight"] for scores in curve]
    for name, label, colour in (("held_out", "held-out pairs", MODEL), ("guard", "guard", REFERENCE)):
        axes.plot(weights, [scores[name] for scores in curve], "-o", color=colour, markersize=4, label=label)
    axes.axvline(weight, color=_COLOURS[2], linestyle=":", label="chosen")
    axes.set_xlabel("weight (0: start, 1: trained encoder)")
    axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=1))
    figure.legend(loc="outside lower center", ncols=3)
    return figure


def draw_map(maps: Mapping[str, SentenceMap]) -> Figure:
    """Draw the sentences of each model as dots in the colours of their languages; lines join translations."""
    figure, axes = _make_figure(4.5 * len(maps), 4.6, list(maps), share_y=False)
    tab20 = matplotlib.colormaps["tab20"]
    shades = [tab20(number) for number in range(20)]  # each colour is followed by a lighter shade of it
    colours = [*shades[::2], *shades[1::2]]
    for panel, coordinates in zip(axes, maps.values(), strict=True):
        for (language, (x, y)), colour in zip(coordinates.items(), colours, strict=False):
            panel.plot(x, y, "o", color=colour, markersize=3, markeredgewidth=0, alpha=0.7, label=language)
        (source_x, source_y), (target_x, target_y) = itertools.islice(coordinates.values(), 2)
        panel.plot([source_x, target_x], [source_y, target_y], color="#444444", linewidth=0.5, alpha=0.5, zorder=1)
        panel.set_aspect("equal", adjustable="datalim")
        panel.set(xlabel="first component", ylabel="second component")
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=min(len(labels), 10), markerscale=2)
    return figure


def _make_figure(width: float, height: float, titles: Sequence[str], share_y: bool = True) -> tuple[Figure, list[Axes]]:
    """Return a figure and its panels side by side, one for each title. Width and height are in inches."""
    figure = Figure(figsize=(width, height), layout="constrained")
    axes = list(figure.subplots(1, len(titles), sharey=share_y, squeeze=False).flat)
    for panel, title in zip(axes, titles, strict=True):
        panel.set_title(title)
    return figure, axes


def _add_percent_axes_and_legend(figure: Figure, axes: Sequence[Axes]) -> Figure:
    """Label the y axes in percent, from 0 or the lowest negative value, and add one legend below all panels."""
    for panel in axes:
        panel.set_ylim(bottom=min(0.0, panel.get_ylim()[0]))
        panel.yaxis.set_major_formatter(PercentFormatter(1))
    handles, labels = axes[0].get_legend_handles_labels()
    columns = max(2, int(figure.get_size_inches()[0] // 2.2))
    figure.legend(handles, labels, loc="outside lower center", ncols=min(len(labels), columns))
    return figure
