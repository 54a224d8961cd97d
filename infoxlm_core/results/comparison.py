"""Trials of several variants and seeds -> one comparison: a table with error bars, a figure, Markdown, HTML, JSON.

A trial is a mapping {"variant", "seed", "what", "metrics"}; one that did not finish has no metrics. Statistics are over
the seeds of a variant: mean, sample standard deviation, and the 95 % interval of the mean by Student's t.
"""

import base64
import itertools
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import jinja2
import matplotlib
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from infoxlm_core import manifests
from infoxlm_core.errors import InputError
from infoxlm_core.results import figures, published

T_QUANTILES = (math.nan, math.nan, 12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
"""0.975 quantiles of Student's t with n - 1 degrees of freedom, at place n; above 10 the last, a little too wide."""

_SHARES = ("retrieval/", "classification/", "xnli/", "mlqa/", "xlco/accuracy")
_LOWER = ("perplexity/", "loss/", "transfer_gap")


def summarise(values: Mapping[int, float]) -> dict[str, Any]:
    """Mean, sample standard deviation and 95 % interval of values by seed; a value that is not finite does not count.

    `deviation` and `interval` are None for a single seed, `mean` too for none.
    """
    finite = [value for value in values.values() if math.isfinite(value)]
    n, mean = len(finite), fmean(finite) if finite else None
    by_seed = {seed: value if math.isfinite(value) else None for seed, value in values.items()}
    summary: dict[str, Any] = {"n": n, "mean": mean, "deviation": None, "interval": None, "values": by_seed}
    if mean is not None and n > 1:
        half = T_QUANTILES[min(n, len(T_QUANTILES) - 1)] * stdev(finite) / math.sqrt(n)
        summary |= {"deviation": stdev(finite), "interval": (mean - half, mean + half)}
    return summary


def compare(trials: Iterable[Mapping[str, Any]], metrics: Sequence[str], title: str) -> dict[str, Any]:
    """Compare variants over their seeds.

    Args:
        trials: in the order in which the variants shall stand.
        metrics: names; one that no trial has is left out.
        title: of the whole.

    Returns:
        {"title", "metrics", "variants": {name: {"what", "seeds", "unfinished", "metrics": {name: summary}}}, "said"}.
    """
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for trial in trials:
        groups.setdefault(trial["variant"], []).append(trial)
    known = [name for name in metrics if any(name in trial["metrics"] for group in groups.values() for trial in group)]
    variants = {
        variant: {
            "what": group[0].get("what", ""),
            "seeds": sorted(trial["seed"] for trial in group),
            "unfinished": sorted(trial["seed"] for trial in group if not trial["metrics"]),
            "metrics": {
                name: summarise({t["seed"]: t["metrics"][name] for t in group if name in t["metrics"]})
                for name in known
            },
        }
        for variant, group in groups.items()
    }
    comparison = {"title": title, "metrics": known, "variants": variants}
    return comparison | {"said": {name: describe(name, variants) for name in known}}


def choose(headlines: Sequence[str]) -> list[str]:
    """The metrics that are compared if nobody names others: the headlines, the contrast layer, the paper's tasks."""
    return [*headlines, "retrieval/contrast", *published.METRICS]


def check_metrics(trials: Iterable[Mapping[str, Any]], metrics: Sequence[str]) -> None:
    """Refuse a metric that no trial has."""
    known = {name for trial in trials for name in trial["metrics"]}
    for name in metrics:
        if name not in known:
            raise InputError(f"no trial has a metric {name!r}; known are {', '.join(sorted(known)) or 'none'}")


def describe(metric: str, variants: Mapping[str, Any]) -> str:
    """Say the order of the variants, and of which neighbours the intervals overlap."""
    found = {name: row["metrics"][metric] for name, row in variants.items() if row["metrics"][metric]["n"]}
    order = sorted(found, key=lambda name: found[name]["mean"], reverse=not is_lower_better(metric))
    text = "Best first: " + ", ".join(f"{name} {show(metric, found[name]['mean'])}" for name in order) + "."
    apart: list[str] = []
    together: list[str] = []
    for first, second in itertools.pairwise(name for name in order if found[name]["interval"]):
        (low, high), (low_2, high_2) = found[first]["interval"], found[second]["interval"]
        (together if low <= high_2 and low_2 <= high else apart).append(f"{first} and {second}")
    if together:
        text += f" The intervals of these neighbours overlap: {', '.join(together)}."
    if apart:
        text += f" The intervals of these neighbours do not overlap: {', '.join(apart)}."
    if alone := [name for name in order if not found[name]["interval"]]:
        text += f" Without an interval, since one seed cannot tell: {', '.join(alone)}."
    return text


def is_lower_better(metric: str) -> bool:
    """Whether less is better."""
    return any(part in metric for part in _LOWER)


def is_share(metric: str) -> bool:
    """Whether a metric is a share from 0 to 1, shown in percent."""
    return metric.startswith(_SHARES) and not metric.endswith("/best_layer")


def show(metric: str, value: float | None, like: float | None = None) -> str:
    """A value as people read it: percent with two decimals, else four digits, or as many decimals as `like` gets."""
    if value is None:
        return "–"
    if is_share(metric):
        return f"{100 * value:.2f}"
    whole = len(str(int(abs(value if like is None else like))))
    return f"{value:,.{max(0, 4 - whole)}f}"


def show_spread(metric: str, summary: Mapping[str, Any]) -> str:
    """`mean ± deviation`; a single seed has no deviation."""
    mean, deviation = summary["mean"], summary["deviation"]
    return show(metric, mean) + (f" ± {show(metric, deviation, mean)}" if deviation is not None else "")


def heading(metric: str) -> str:
    """A column's name with its unit and which way is better."""
    parts = [metric] + ["%"] * is_share(metric) + ["↓" if is_lower_better(metric) else "↑"]
    return "\N{NO-BREAK SPACE}".join(parts)


def tabulate(comparison: Mapping[str, Any]) -> list[list[str]]:
    """The table as rows of text, the heading first; published numbers stand beside ours where the task is the same."""
    columns = comparison["metrics"]
    head, rows = ["variant", "seeds"], []
    for name in columns:
        head += [heading(name)] + (["paper"] if name in published.METRICS else [])
    for variant, row in comparison["variants"].items():
        done = len(row["seeds"]) - len(row["unfinished"])
        cells = [variant, str(done) if not row["unfinished"] else f"{done} of {len(row['seeds'])}"]
        for name in columns:
            summary = row["metrics"][name]
            fewer = f" (n={summary['n']})" if 0 < summary["n"] < done else ""
            cells.append(show_spread(name, summary) + fewer)
            if name in published.METRICS:
                cells.append(show(name, published.ABLATIONS.get(variant, {}).get(name)))
        rows.append(cells)
    return [head, *rows]


def tabulate_published(comparison: Mapping[str, Any]) -> list[list[str]]:
    """What the paper reports for the same variants on tasks that these trials do not have; perhaps nothing."""
    others = [name for name in published.METRICS if name not in comparison["metrics"]]
    rows = [
        [variant, *(show(name, published.ABLATIONS[variant].get(name)) for name in others)]
        for variant in comparison["variants"]
        if variant in published.ABLATIONS and others
    ]
    return [["variant", *(f"{published.METRICS[name]} %" for name in others)], *rows] if rows else []


def align(rows: Sequence[Sequence[str]]) -> str:
    """Rows of text as a Markdown table whose columns also stand under each other on a console."""
    rows = [[cell.replace("|", r"\|") for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["| " + " | ".join(f"{c:<{w}}" for c, w in zip(row, widths, strict=True)) + " |" for row in rows]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(lines)


def list_unfinished(comparison: Mapping[str, Any]) -> list[str]:
    """The trials that are missing, each named."""
    return [f"{name} seed {seed}" for name, row in comparison["variants"].items() for seed in row["unfinished"]]


def draw(comparison: Mapping[str, Any], kind: str) -> bytes:
    """Draw a panel a metric: a point for every seed, the mean with its interval; `kind` is png or svg."""
    metrics, variants = comparison["metrics"], comparison["variants"]
    columns = min(3, len(metrics)) or 1
    lines = -(-len(metrics) // columns) or 1
    with matplotlib.rc_context(figures.STYLE):
        figure = Figure(figsize=(1.6 + 3.2 * columns, lines * (1.0 + 0.32 * len(variants))), layout="constrained")
        panels = figure.subplots(lines, columns, sharey=True, squeeze=False).flat
        for panel, metric in itertools.zip_longest(panels, metrics):
            if metric is None:
                panel.set_visible(False)
                continue
            panel.set_title(heading(metric))
            for place, row in enumerate(variants.values()):
                scale, found = 100 if is_share(metric) else 1, row["metrics"][metric]
                values = [scale * value for value in found["values"].values() if value is not None]
                panel.plot(values, [place] * len(values), "o", color=figures.MODEL, alpha=0.35, markersize=5)
                if found["interval"]:
                    panel.plot([scale * bound for bound in found["interval"]], [place] * 2, "-", color=figures.MODEL)
                if found["n"]:
                    panel.plot([scale * found["mean"]], [place], "|", color=figures.MODEL, markersize=13, mew=2.2)
            panel.set(yticks=range(len(variants)), ylim=(len(variants) - 0.5, -0.5))
            panel.set_yticklabels(list(variants), parse_math=False)
            panel.xaxis.set_major_locator(MaxNLocator(4))
        return figures.save(figure, kind)


def render(comparison: Mapping[str, Any], kind: str) -> str:
    """The comparison as Markdown (`md`) or as a self-contained page (`html`)."""
    pages = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=jinja2.select_autoescape(["html.j2"], default_for_string=False),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    pages.globals |= {"show": show, "align": align}
    image = base64.b64encode(draw(comparison, "svg")).decode() if kind == "html" else ""
    facts = {
        "rows": tabulate(comparison),
        "unfinished": list_unfinished(comparison),
        "published": tabulate_published(comparison),
        "source": published.SOURCE,
        "image": f"data:image/svg+xml;base64,{image}",
    }
    return pages.get_template(f"comparison.{kind}.j2").render(comparison, **facts).strip() + "\n"


def write(output: Path, comparison: Mapping[str, Any]) -> None:
    """Write comparison.json, comparison.md, comparison.html and comparison.png into a directory."""
    output.mkdir(parents=True, exist_ok=True)
    files = {kind: render(comparison, kind) for kind in ("md", "html")} | {"png": draw(comparison, "png")}
    files["json"] = json.dumps(comparison, indent=1, ensure_ascii=False) + "\n"
    for kind, content in files.items():
        manifests.write_atomically(output / f"comparison.{kind}", content)


def flatten(comparison: Mapping[str, Any]) -> dict[str, float]:
    """The comparison as metrics of a tracking server: `full/retrieval/best`, and `.../deviation`, `.../n`."""
    flat: dict[str, float | None] = {}
    for variant, row in comparison["variants"].items():
        for name, summary in row["metrics"].items():
            flat[f"{variant}/{name}"] = summary["mean"]
            flat |= {f"{variant}/{name}/{part}": summary[part] for part in ("deviation", "n")}
    return {name: value for name, value in flat.items() if value is not None}
