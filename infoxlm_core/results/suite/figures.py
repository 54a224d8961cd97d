"""The figures of a suite: retrieval by layer (Figure 1 of the paper), scores by language, transfer gaps."""

from collections.abc import Mapping
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from infoxlm_core.results.figures import FLOORS, MODEL, STYLE, save
from infoxlm_core.results.suite.tables import TITLES, choose_transferred

_COLOURS = (MODEL, *FLOORS, "#6b4f8a", "#b3413a", "#444444")
_LINES = {"mean": "-o", "cls": "--s"}
_POOLINGS = {"mean": "mean", "cls": "[CLS]"}

Summary = Mapping[str, Any]


def render(summary: Summary) -> dict[str, dict[str, bytes]]:
    """Draw what the summary has something for; each figure by name (`xnli`, `tatoeba`, `transfer-gap`), png and svg."""
    colours = {model: _COLOURS[place % len(_COLOURS)] for place, model in enumerate(summary["models"])}
    with matplotlib.rc_context(STYLE):
        drawn = {}
        for task, found in summary["tasks"].items():
            draw = draw_layers if found["kind"] == "retrieval" else draw_languages
            drawn[task] = draw(task, found, colours)
        drawn["transfer-gap"] = draw_gaps(summary, colours)
        return {name: {kind: save(figure, kind) for kind in ("png", "svg")} for name, figure in drawn.items() if figure}


def draw_layers(task: str, found: Summary, colours: Mapping[str, str]) -> Figure | None:
    """Retrieval by layer in both directions: a line a model and pooling."""
    models = {model: row for model, row in found["models"].items() if row["by_layer"]}
    if not models:
        return None
    pivot = found["settings"].get("pivot", "en")
    figure = Figure(figsize=(9.0, 3.7), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    for panel, direction, title in zip(
        panels, ("to_pivot", "from_pivot"), (f"xx → {pivot}", f"{pivot} → xx"), strict=True
    ):
        panel.set_title(f"{task}: {title}, {len(found['languages'])} languages")
        for model, row in models.items():
            for pooling, shares in row["by_layer"].items():
                label = f"{model}, {_POOLINGS.get(pooling, pooling)}"
                panel.plot(shares[direction], _LINES.get(pooling, ":"), color=colours[model], markersize=4, label=label)
        panel.set_xlabel("layer (0: embeddings)")
        panel.xaxis.get_major_locator().set_params(integer=True)
    return _finish(figure, *panels)


def draw_languages(task: str, found: Summary, colours: Mapping[str, str]) -> Figure | None:
    """The main metric by language: a bar a model, its sample deviation over seeds; on the left the mean."""
    if not found["models"]:
        return None
    codes, main = list(found["languages"]), found["main"]
    figure = Figure(figsize=(max(6.0, 1.4 + 0.5 * (1 + len(codes))), 3.4), layout="constrained")
    axes = figure.subplots()
    axes.set_title(f"{task}: {TITLES[main]} by language")
    heights = {
        model: [row["mean"][main], *(row["languages"].get(code, {}).get(main) for code in codes)]
        for model, row in found["models"].items()
    }
    _bars(axes, ["mean", *codes], heights, colours)
    axes.axvline(0.5, color="#8a8f98", linewidth=0.8)
    return _finish(figure, axes)


def draw_gaps(summary: Summary, colours: Mapping[str, str]) -> Figure | None:
    """The transfer gap of every task: a bar a model."""
    tasks = choose_transferred(summary)
    if not tasks:
        return None
    figure = Figure(figsize=(max(4.2, 1.8 + 1.5 * len(tasks)), 3.2), layout="constrained")
    axes = figure.subplots()
    axes.set_title("Transfer gap (lower is better)")
    heights = {
        model: [_gap(found, model) for found in tasks.values()]
        for model in summary["models"]
        if any(_gap(found, model) for found in tasks.values())
    }
    _bars(axes, list(tasks), heights, colours)
    return _finish(figure, axes)


def _gap(found: Summary, model: str) -> Mapping[str, Any] | None:
    row = found["models"].get(model)
    return row["transfer_gap"][found["main"]] if row and row["transfer_gap"] else None


def _bars(
    axes: Axes, names: list[str], heights: Mapping[str, list[Mapping[str, Any] | None]], colours: Mapping[str, str]
) -> None:
    width = 0.8 / len(heights)
    for place, (model, cells) in enumerate(heights.items()):
        left = [i - 0.4 + (place + 0.5) * width for i in range(len(names))]
        means = [cell["mean"] if cell else 0.0 for cell in cells]
        spread = [(cell and cell["deviation"]) or 0.0 for cell in cells]
        axes.bar(left, means, width * 0.92, color=colours[model], label=model)
        if any(spread):
            axes.errorbar(left, means, spread, fmt="none", ecolor="#1f2328", elinewidth=0.9, capsize=1.5)
    axes.set_xticks(range(len(names)), names)
    axes.set_xlim(-0.5, len(names) - 0.5)
    axes.grid(axis="x", visible=False)


def _finish(figure: Figure, *panels: Axes) -> Figure:
    for panel in panels:
        panel.set_ylim(bottom=min(0.0, panel.get_ylim()[0]))  # a gap may be below 0
        panel.yaxis.set_major_formatter(PercentFormatter(1))
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=min(len(labels), 4))
    return figure
