"""The figures of an evaluation: scores, as plain dictionaries -> PNG files, and SVG for inside the report."""

import io
from collections.abc import Callable
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

Scores = dict[str, Any]

MODEL, FLOORS, CHANCE = "#1d5b8f", ("#d08a3c", "#8a8f98", "#7a9e6b"), "#b3413a"
STYLE: dict[Any, Any] = {
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
    "svg.hashsalt": "infoxlm",  # equal scores give equal files
}


def render(scores: Scores) -> dict[str, dict[str, bytes]]:
    """Draw every figure that the scores have something for; return each by name, as `png` and `svg`."""
    with matplotlib.rc_context(STYLE):
        drawn = {name: draw(scores) for name, draw in FIGURES.items()}
        return {name: {kind: save(figure, kind) for kind in ("png", "svg")} for name, figure in drawn.items() if figure}


def draw_layers(scores: Scores) -> Figure | None:
    """Retrieval by layer: a line a pooling and model (Figure 1 of the paper)."""
    figure, axes = _start(5.6, 3.6, "Retrieval by layer")
    for name, colour, model in _models(scores, "retrieval"):
        for pooling, line in (("mean", "-o"), ("cls", "--s")):
            values = model["by_layer"][pooling]
            axes.plot(
                values, line, color=colour, markersize=4, label=f"{name}, {'[CLS]' if pooling == 'cls' else 'mean'}"
            )
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set_xlabel("layer (0: embeddings)")
    return _finish_shares(figure, axes)


def draw_languages(scores: Scores) -> Figure | None:
    """Retrieval by language at each model's best layer: all pairs, and those that share no token."""
    languages = scores["models"][scores["model"]]["retrieval"]["best"]["languages"]
    figure, axes = _start(
        max(9.0, 1.5 + 0.7 * len(languages)), 3.6, "All pairs", "Pairs that share no token", share_y=True
    )
    chance = scores["models"][scores["model"]]["retrieval"]["chance"]
    for panel, part in zip(axes, ("mean", "no_overlap"), strict=True):
        found = {
            name: [m["best"]["languages"].get(code, {}).get(part) or 0.0 for code in languages]
            for name, _, m in _models(scores, "retrieval")
        }
        _bars(panel, list(languages), found, scores)
        panel.axhline(chance, color=CHANCE, linestyle=":", linewidth=1.2, label="chance")
    return _finish_shares(figure, *axes)


def draw_perplexity(scores: Scores) -> Figure | None:
    """Perplexity by language: points, since a bar on a logarithmic axis has no foot."""
    found = _models(scores, "perplexity")
    if not found:
        return None
    figure, axes = _start(5.6, 3.6, "Perplexity (lower is better)")
    for name, colour, model in found:
        axes.plot(list(model["languages"]), list(model["languages"].values()), "o", color=colour, label=name)
    axes.set_yscale("log")
    figure.legend(loc="outside lower center", ncols=len(found))
    return figure


def draw_classification(scores: Scores) -> Figure | None:
    """Accuracy of the fine-tuned classifiers by language."""
    found = {name: model for name, _, model in _models(scores, "classification")}
    if not found:
        return None
    first = next(iter(found.values()))
    languages = list(first["languages"])
    figure, axes = _start(5.6, 3.4, "Classification accuracy by language")
    values = {name: [model["languages"].get(code, 0.0) for code in languages] for name, model in found.items()}
    _bars(axes, languages, values, scores)
    axes.axhline(first["majority"], color=CHANCE, linestyle=":", linewidth=1.2, label="most frequent label")
    return _finish_shares(figure, axes)


def draw_training(scores: Scores) -> Figure | None:
    """Losses, and the accuracy of contrast and of the probe, over the optimizer steps."""
    curves = scores["models"][scores["model"]].get("curves") or {}
    losses = {name: points for name, points in curves.items() if name.startswith("loss/")}
    named = (("XLCO accuracy", "xlco/accuracy"), ("held-out retrieval", "probe/retrieval"))
    shares = {name: curves[curve] for name, curve in named if curves.get(curve)}
    if not losses:
        return None
    titles = ["Training losses"] + (["In training: " + " and ".join(shares)] if shares else [])
    figure, axes = _start(9.0 if shares else 5.6, 3.4, *titles)
    panels = list(axes) if shares else [axes]
    colours = (MODEL, *FLOORS, "#6b4f8a", "#444444")
    for (name, points), colour in zip(sorted(losses.items()), colours, strict=False):
        panels[0].plot(
            *zip(*points, strict=True), color=colour, linewidth=1.4, label=name.removeprefix("loss/").upper()
        )
    panels[0].legend()
    for (name, points), colour in zip(shares.items(), colours, strict=False):
        panels[1].plot(*zip(*points, strict=True), color=colour, linewidth=1.4, label=name)
        panels[1].set_ylim(0, 1)
        panels[1].yaxis.set_major_formatter(PercentFormatter(1))
    if len(shares) > 1:
        panels[1].legend()
    for panel in panels:
        panel.set_xlabel("optimizer step")
    return figure


FIGURES: dict[str, Callable[[Scores], Figure | None]] = {
    "retrieval_by_layer": draw_layers,
    "retrieval_by_language": draw_languages,
    "perplexity": draw_perplexity,
    "classification": draw_classification,
    "training": draw_training,
}


def _start(width: float, height: float, *titles: str, share_y: bool = False) -> tuple[Figure, Any]:
    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.subplots(1, len(titles), sharey=share_y)
    for panel, title in zip(axes if len(titles) > 1 else [axes], titles, strict=True):
        panel.set_title(title)
    return figure, axes


def _models(scores: Scores, part: str) -> list[tuple[str, str, Scores]]:
    """Name, colour and one part of every model that has it; the model under test comes first."""
    floors = (name for name in scores["models"] if name != scores["model"])
    colours = {scores["model"]: MODEL} | {name: FLOORS[i % len(FLOORS)] for i, name in enumerate(floors)}
    return [(name, colours[name], model[part]) for name, model in scores["models"].items() if model.get(part)]


def _bars(axes: Axes, languages: list[str], values: dict[str, list[float]], scores: Scores) -> None:
    """A group of bars a language, a bar a model."""
    colours = {
        name: colour
        for part in ("retrieval", "perplexity", "classification")
        for name, colour, _ in _models(scores, part)
    }
    width = 0.8 / len(values)
    for place, (name, heights) in enumerate(values.items()):
        left = [i - 0.4 + (place + 0.5) * width for i in range(len(languages))]
        axes.bar(left, heights, width * 0.92, color=colours[name], label=name)
    axes.set_xticks(range(len(languages)), languages)
    axes.grid(axis="x", visible=False)


def _finish_shares(figure: Figure, *panels: Axes) -> Figure:
    """A percent axis from 0, and one legend under the panels."""
    for panel in panels:
        panel.set_ylim(bottom=0)
        panel.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=2 if len(labels) == 4 else 3)
    return figure


def save(figure: Figure, kind: str) -> bytes:
    """A figure as the bytes of a `png` or `svg`, the same for the same figure."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format=kind, dpi=160, metadata={"Date": None} if kind == "svg" else {"Software": None})
    return buffer.getvalue()
