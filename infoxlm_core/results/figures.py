"""Draw the figures of a page with matplotlib, as PNG files and as SVG inside the page."""

import io
import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogFormatter, MaxNLocator, PercentFormatter, StrMethodFormatter

from infoxlm_core.results import statistics, task_tables
from infoxlm_core.results.statistics import Statistic
from infoxlm_core.results.summaries.suite import Summary, TaskSummary
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
    "text.parse_math": False,  # a dollar sign in a user's name must not start a formula
    "svg.hashsalt": "infoxlm",  # equal scores give equal files
}
_LINE_FORMATS = {"mean": "-o", "cls": "--s"}  # pooling -> line and marker in matplotlib's notation
_POOLINGS = {"cls": "[CLS]"}
_REFERENCES = {"chance": "chance", "majority": "most frequent label"}
"""Field in a task's details -> label of the dotted line at its value."""

Draw = Callable[[], Figure | None]
SentenceMap = Mapping[str, Sequence[Sequence[float]]]
"""Language -> x and y coordinates of its sentences. Sentence i of the second language translates sentence i of the
first language."""
Bars = Mapping[str, Sequence[Cell]]
"""Model -> heights of its bars, one per name on the axis."""


def render(drawings: Mapping[str, Draw]) -> dict[str, dict[str, bytes]]:
    """Draw figures and return the contents of their files by name and format (`png`, `svg`).

    Figures without data are left out. Equal figures have equal files, so that a repeated run does not change a report.
    """
    images = {}
    with matplotlib.rc_context(_STYLE):
        for name, draw in drawings.items():
            figure = draw()
            if figure:
                images[name] = {"png": _save(figure, "png"), "svg": _save(figure, "svg")}
    return images


def _save(figure: Figure, kind: str) -> bytes:
    """Encode a figure as `png` or `svg`."""
    # By default, matplotlib writes the date or its version, and equal figures would have different files.
    metadata = {"Date": None} if kind == "svg" else {"Software": None}
    buffer = io.BytesIO()
    figure.savefig(buffer, format=kind, dpi=160, metadata=metadata)
    return buffer.getvalue()


def assign_colours(models: Iterable[str]) -> dict[str, str]:
    """Assign a colour to each model. The model under test comes first and always has the same colour."""
    return dict(zip(models, itertools.cycle(_COLOURS), strict=False))


def draw_headlines(summary: Summary) -> Figure | None:
    """Draw one panel per headline metric, with a point for every seed, and the mean with its interval.

    Return None if no variant has several seeds, because the table already shows single values.
    """
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
        panel.set(yticks=range(len(variants)), ylim=(len(variants) - 0.5, -0.5))  # the first variant is at the top
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


class _LayerCurve(NamedTuple):
    """Retrieval accuracy of a model by layer, with one pooling."""

    model: str
    pooling: str
    shares: Sequence[float]


def draw_layers(name: str, task: TaskSummary, colours: Mapping[str, str]) -> Figure | None:
    """Draw retrieval accuracy by layer, one panel per direction (Figure 1 of the paper)."""
    curves_by_title = _collect_layer_curves(name, task)
    if not curves_by_title:
        return None
    width = 5.6 if len(curves_by_title) == 1 else 9.0
    figure, panels = _make_figure(width, 3.7, list(curves_by_title))
    for panel, curves in zip(panels, curves_by_title.values(), strict=True):
        for model, pooling, shares in curves:
            label = f"{model}, {_POOLINGS.get(pooling, pooling)}"
            panel.plot(shares, _LINE_FORMATS.get(pooling, ":"), color=colours[model], markersize=4, label=label)
        panel.set_xlabel("layer (0: embeddings)")
        panel.xaxis.set_major_locator(MaxNLocator(integer=True))
    return _add_percent_axes_and_legend(figure, panels)


def _collect_layer_curves(name: str, task: TaskSummary) -> dict[str, list[_LayerCurve]]:
    """Collect the curves of each panel by its title. Results without directions share one panel."""
    pivot = task.settings.get("pivot", "en")  # a summary's settings lack default values
    task_title = task_tables.get_task_title(name)
    title_of_mean = f"{task_title} by layer"
    titles_by_direction = {
        "to_pivot": f"{task_title}: xx → {pivot}, {len(task.languages)} languages",
        "from_pivot": f"{task_title}: {pivot} → xx, {len(task.languages)} languages",
    }
    curves_by_title: defaultdict[str, list[_LayerCurve]] = defaultdict(list)
    for model, result in task.models.items():
        for pooling, shares in result.details.get("by_layer", {}).items():
            if not isinstance(shares, Mapping):  # an evaluation stores only the mean of both directions
                curves_by_title[title_of_mean].append(_LayerCurve(model, pooling, shares))
                continue
            for direction, title in titles_by_direction.items():
                curves_by_title[title].append(_LayerCurve(model, pooling, shares[direction]))
    return curves_by_title


def draw_languages(name: str, task: TaskSummary, colours: Mapping[str, str]) -> Figure | None:
    """Draw a task's main metric by language. Held-out retrieval has a second panel for pairs that share no token.

    Return None for results with several vectors per model, because bars cannot show all of them.
    """
    first_result = next(iter(task.models.values()))
    if "vectors" in first_result.details:
        return None
    task_title = task_tables.get_task_title(name)
    if not statistics.is_share(f"{task.kind}/{task.main}"):
        return _draw_points(f"{task_title} (lower is better)", task, colours)
    titles = {task.main: f"{task_title}: {task_tables.get_title(task.main)}", "no_overlap": "No shared token"}
    panels = {}
    for metric, title in titles.items():
        if metric in first_result.mean:
            bars: dict[str, list[Cell]] = {}
            for model, result in task.models.items():
                scores = [result.languages.get(code, {}).get(metric) for code in task.languages]
                bars[model] = [result.mean[metric], *scores]
            panels[title] = bars
    references = {}
    for field, label in _REFERENCES.items():
        if field in first_result.details:
            references[label] = first_result.details[field]
    return _draw_bars(panels, ["mean", *task.languages], colours, has_mean=True, references=references)


def draw_gaps(table: PageTable, colours: Mapping[str, str]) -> Figure:
    """Draw the table of transfer gaps, one group of bars per task."""
    bars = {line.name: line.cells for line in table.ours}
    tasks = [column.name for column in table.columns]
    return _draw_bars({"Transfer gap (lower is better)": bars}, tasks, colours)


def _draw_bars(
    panels: Mapping[str, Bars],
    groups: Sequence[str],
    colours: Mapping[str, str],
    has_mean: bool = False,
    references: Mapping[str, float] = MappingProxyType({}),
) -> Figure:
    """Draw groups of bars. A group has one bar per model, with its standard deviation over seeds.

    Args:
        panels: bars by panel title.
        groups: labels of the groups on the x axis.
        colours: colours by model.
        has_mean: whether the first group is a mean, which a line separates from the other groups.
        references: heights of dotted lines by label.
    """
    width = max(6.0, 1.4 + 0.5 * len(groups) * len(panels))  # inches
    figure, axes = _make_figure(width, 3.5, list(panels))
    for panel, bars in zip(axes, panels.values(), strict=True):
        bar_width = 0.8 / len(bars)  # groups are 1 apart, so the gap between two groups is 0.2
        for rank, (model, cells) in enumerate(bars.items()):
            offset = (rank + 0.5) * bar_width - 0.4  # distance from the group's middle
            positions = [group + offset for group in range(len(cells))]
            _draw_bars_of_model(panel, positions, cells, bar_width, model, colours[model])
        if has_mean:
            panel.axvline(0.5, color="#8a8f98", linewidth=0.8)
        for label, height in references.items():
            panel.axhline(height, color=REFERENCE, linestyle=":", linewidth=1.2, label=label)
        panel.set_xticks(range(len(groups)), groups)
        panel.set_xlim(-0.5, len(groups) - 0.5)
        panel.grid(axis="x", visible=False)
    return _add_percent_axes_and_legend(figure, axes)


def _draw_bars_of_model(
    panel: Axes, positions: Sequence[float], cells: Sequence[Cell], width: float, model: str, colour: str
) -> None:
    """Draw one model's bars with their standard deviations. A missing figure has a bar of height 0."""
    bar_statistics = [to_statistic(cell) for cell in cells]
    heights = [statistic.mean or 0.0 for statistic in bar_statistics]
    deviations = [statistic.deviation or 0.0 for statistic in bar_statistics]
    panel.bar(positions, heights, width * 0.92, color=colour, label=model)  # leaves a gap of 8 % between bars
    if any(deviations):
        panel.errorbar(positions, heights, deviations, fmt="none", ecolor="#1f2328", elinewidth=0.9, capsize=1.5)


def _draw_points(title: str, task: TaskSummary, colours: Mapping[str, str]) -> Figure:
    """Draw a task's main metric by language as points on a logarithmic axis. This suits perplexities."""
    figure, (axes,) = _make_figure(5.6, 3.6, [title])
    for model, result in task.models.items():
        # matplotlib draws no point for NaN.
        values = [metrics[task.main].mean or math.nan for metrics in result.languages.values()]
        axes.plot(list(result.languages), values, "o", color=colours[model], label=model)
    axes.set_yscale("log")
    # The default formatter writes formulas, but `_STYLE` turns formulas off.
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,g}"))
    axes.yaxis.set_minor_formatter(LogFormatter())  # adds minor labels if the axis spans less than a power of ten
    figure.legend(loc="outside lower center", ncols=len(task.models))
    return figure


def draw_training(curves: Mapping[str, Sequence[Sequence[float]]]) -> Figure | None:
    """Draw losses, contrast accuracy and held-out retrieval by optimizer step. Return None without losses.

    Args:
        curves: points (step, value) by metric.
    """
    losses = {}
    for name in sorted(curves):
        if name.startswith("loss/"):
            losses[name.removeprefix("loss/").upper()] = curves[name]
    if not losses:
        return None
    titles = {"xlco/accuracy": "XLCO accuracy", "probe/retrieval": "held-out retrieval"}
    accuracies = {title: curves[name] for name, title in titles.items() if curves.get(name)}
    curves_by_panel = {"Training losses": losses}
    if accuracies:
        curves_by_panel[f"During training: {' and '.join(accuracies)}"] = accuracies
    width = 9.0 if accuracies else 5.6
    figure, panels = _make_figure(width, 3.4, list(curves_by_panel), share_y=False)
    for panel, panel_curves in zip(panels, curves_by_panel.values(), strict=True):
        for (label, curve), colour in zip(panel_curves.items(), itertools.cycle(_COLOURS), strict=False):
            steps, values = zip(*curve, strict=True)
            panel.plot(steps, values, color=colour, linewidth=1.4, label=label)
        panel.legend()
        panel.set_xlabel("optimizer step")
    if accuracies:
        panels[-1].set_ylim(0, 1)
        panels[-1].yaxis.set_major_formatter(PercentFormatter(1))
    return figure


def draw_merge(scores_by_weight: Sequence[Mapping[str, float]], chosen_weight: float) -> Figure:
    """Draw a merged encoder's accuracies by the weight of the trained encoder.

    Args:
        scores_by_weight: mappings with the `weight` of a candidate and its accuracies on `held_out` pairs and `guard`.
        chosen_weight: weight to mark with a vertical line.
    """
    figure, (axes,) = _make_figure(5.6, 3.4, ["Accuracy by weight of the merge"])
    weights = [scores["weight"] for scores in scores_by_weight]
    for name, label, colour in (("held_out", "held-out pairs", MODEL), ("guard", "guard", REFERENCE)):
        accuracies = [scores[name] for scores in scores_by_weight]
        axes.plot(weights, accuracies, "-o", color=colour, markersize=4, label=label)
    axes.axvline(chosen_weight, color=_COLOURS[2], linestyle=":", label="chosen")
    axes.set_xlabel("weight (0: start, 1: trained encoder)")
    axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=1))
    figure.legend(loc="outside lower center", ncols=3)
    return figure


def draw_map(maps: Mapping[str, SentenceMap]) -> Figure:
    """Draw sentence vectors in two dimensions, one panel per model and one colour per language.

    Lines join sentences of the first language and their translations into the second language.
    """
    figure, panels = _make_figure(4.5 * len(maps), 4.6, list(maps), share_y=False)
    tab20 = matplotlib.colormaps["tab20"]
    shades = [tab20(number) for number in range(20)]  # a lighter shade follows each colour
    colours = [*shades[::2], *shades[1::2]]
    for panel, coordinates in zip(panels, maps.values(), strict=True):
        # A map has at most as many languages as there are colours.
        for (language, (x, y)), colour in zip(coordinates.items(), colours, strict=False):
            panel.plot(x, y, "o", color=colour, markersize=3, markeredgewidth=0, alpha=0.7, label=language)
        (source_x, source_y), (target_x, target_y) = itertools.islice(coordinates.values(), 2)
        panel.plot([source_x, target_x], [source_y, target_y], color="#444444", linewidth=0.5, alpha=0.5, zorder=1)
        panel.set_aspect("equal", adjustable="datalim")
        panel.set(xlabel="first component", ylabel="second component")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=min(len(labels), 10), markerscale=2)
    return figure


def _make_figure(width: float, height: float, titles: Sequence[str], share_y: bool = True) -> tuple[Figure, list[Axes]]:
    """Make a figure with one panel per title, side by side. Width and height are in inches."""
    figure = Figure(figsize=(width, height), layout="constrained")
    axes = list(figure.subplots(1, len(titles), sharey=share_y, squeeze=False).flat)
    for panel, title in zip(axes, titles, strict=True):
        panel.set_title(title)
    return figure, axes


def _add_percent_axes_and_legend(figure: Figure, axes: Sequence[Axes]) -> Figure:
    """Show the y axes in percent, starting at 0 or at the lowest negative value. Add one legend for all panels."""
    for panel in axes:
        panel.set_ylim(bottom=min(0.0, panel.get_ylim()[0]))
        panel.yaxis.set_major_formatter(PercentFormatter(1))
    handles, labels = axes[0].get_legend_handles_labels()
    columns = max(2, int(figure.get_size_inches()[0] // 2.2))
    figure.legend(handles, labels, loc="outside lower center", ncols=min(len(labels), columns))
    return figure
