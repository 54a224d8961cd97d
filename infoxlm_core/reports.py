"""Scores, as plain dictionaries -> scores.json, figures, an HTML report and a model card.

The report is one file that needs no network: style and figures are inside.
"""

import base64
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jinja2
import matplotlib
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from infoxlm_core import manifests

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


def write(output: Path, scores: Scores) -> None:
    """Write scores.json, figures/*.png, report.html and model_card.md into a directory."""
    output.mkdir(parents=True, exist_ok=True)
    (output / "figures").mkdir(exist_ok=True)
    figures = {}
    with matplotlib.rc_context(STYLE):
        for name, draw in FIGURES.items():
            if (figure := draw(scores)) is not None:
                manifests.write_atomically(output / "figures" / f"{name}.png", _render(figure, "png"))
                figures[name] = "data:image/svg+xml;base64," + base64.b64encode(_render(figure, "svg")).decode()
    parts = ("encoder", "retrieval", "perplexity", "classification", "curves")
    scores = scores | {"models": {name: dict.fromkeys(parts) | found for name, found in scores["models"].items()}}
    facts = {"scores": scores, "model": scores["models"][scores["model"]], "corpus": tabulate_corpus(scores["corpus"])}
    pages = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=jinja2.select_autoescape(["html.j2"], default_for_string=False),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    pages.filters |= {"percent": _percent, "count": "{:,}".format, "short": _short}
    pages.globals |= {"percent": _percent, "short": _short}
    template = pages.get_template("report.html.j2")
    manifests.write_atomically(output / "report.html", template.render(facts, figures=figures))
    manifests.write_atomically(output / "model_card.md", pages.from_string(MODEL_CARD).render(facts) + "\n")
    manifests.write_atomically(output / "scores.json", json.dumps(scores, indent=1, ensure_ascii=False) + "\n")


def tabulate_corpus(report: Scores | None) -> Scores | None:
    """Sum the cleaning report's lines by corpus and kind, its drops by reason."""
    if not report or not report.get("files"):
        return None
    files = pd.DataFrame(report["files"])
    dropped = pd.DataFrame([entry["dropped"] for entry in report["files"]]).fillna(0).astype(int)
    reasons = list(dropped.sum().sort_values(ascending=False).index)
    counts = pd.concat([files, dropped[reasons]], axis=1)
    columns = ["read", "kept", *reasons]
    return {
        "reasons": reasons,
        "by_kind": counts.groupby("kind")[columns].sum().to_dict("index"),
        "by_corpus": counts.groupby(["corpus", "kind"])[columns].sum().to_dict("index"),
        "kept": counts.groupby(["language", "kind"])["kept"].sum().unstack(fill_value=0).to_dict("index"),
    }


def _percent(share: float | None) -> str:
    return "–" if share is None else f"{100 * share:.1f}"


def _short(number: float) -> str:
    return f"{number:,.1f}" if number < 1000 else f"{number:,.0f}"


# ---------------------------------------------------------------- figures


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
    """Losses, and the accuracy of contrast, over the optimizer steps."""
    curves = scores["models"][scores["model"]].get("curves") or {}
    losses = {name: points for name, points in curves.items() if name.startswith("loss/")}
    accuracy = curves.get("xlco/accuracy")
    if not losses:
        return None
    titles = ["Training losses"] + (["XLCO accuracy in training"] if accuracy else [])
    figure, axes = _start(9.0 if accuracy else 5.6, 3.4, *titles)
    panels = list(axes) if accuracy else [axes]
    for (name, points), colour in zip(sorted(losses.items()), (MODEL, *FLOORS, "#6b4f8a", "#444444"), strict=False):
        panels[0].plot(
            *zip(*points, strict=True), color=colour, linewidth=1.4, label=name.removeprefix("loss/").upper()
        )
    panels[0].legend()
    if accuracy:
        panels[1].plot(*zip(*accuracy, strict=True), color=MODEL, linewidth=1.4)
        panels[1].set_ylim(0, 1)
        panels[1].yaxis.set_major_formatter(PercentFormatter(1))
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


def _render(figure: Figure, kind: str) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format=kind, dpi=160, metadata={"Date": None} if kind == "svg" else {"Software": None})
    return buffer.getvalue()


# ---------------------------------------------------------------- model card

MODEL_CARD = """\
---
language:
{% for code in [scores.pivot] + scores.pairs | list %}
- "{{ code }}"
{% endfor %}
library_name: transformers
pipeline_tag: {{ "fill-mask" if model.perplexity else "feature-extraction" }}
tags:
- cross-lingual
- infoxlm
- {{ model.encoder.type }}
- sentence-similarity
---
{% set best = model.retrieval.best %}
{% set place = model.retrieval.contrast or best %}

# {{ scores.model }}

{% if model.encoder.contrast %}
Made by the InfoXLM pipeline: masked and translation language modelling with cross-lingual contrast
([InfoXLM](https://arxiv.org/abs/2007.07834)). Sentences that mean the same lie close together, whatever their language.

{% endif %}
An encoder of type {{ model.encoder.type }}: {{ model.encoder.layers }} layers of {{ model.encoder.hidden }} dimensions,
{{ model.encoder.parameters | count }} parameters, {{ model.encoder.vocabulary | count }} tokens.

## How to use it

```python
import torch
from transformers import AutoModel, AutoTokenizer

directory = "path/to/this/model"
tokenizer = AutoTokenizer.from_pretrained(directory)
model = AutoModel.from_pretrained(directory).eval()

batch = tokenizer(["Save the file", "Datei speichern"], padding=True, truncation=True, return_tensors="pt")
with torch.inference_mode():
    hidden = model(**batch, output_hidden_states=True).hidden_states[{{ place.layer }}]  # the layer to compare on
{% if place.pooling == "mean" %}
mask = batch["attention_mask"].unsqueeze(-1)
vectors = (hidden * mask).sum(dim=1) / mask.sum(dim=1)  # the mean of all tokens
{% else %}
vectors = hidden[:, 0]  # [CLS]
{% endif %}
print(torch.cosine_similarity(vectors[:1], vectors[1:]))
```

{% if model.perplexity %}
With its masked-LM head it loads as `AutoModelForMaskedLM`; to fine-tune it, use any `AutoModelFor...` class.
{% endif %}
Do not use `pooler_output`: pre-training does not train a pooler.

## Scores

Retrieval: how often (%) the translation is the nearest of all held-out candidates by cosine. The first row of a model
is its best layer and pooling, chosen on these same pairs; a second row is the layer fixed before training.
Guessing gives {{ "%.2f" | format(100 * model.retrieval.chance) }} %.

| model | layer | pooling | mean | xx→{{ scores.pivot }} | {{ scores.pivot }}→xx | no shared token
{%- for code in scores.pairs %} | {{ code }}{% endfor %} |
|---|---|---|---|---|---|---{{ "|---" * scores.pairs | length }}|
{% for name, found in scores.models.items() if found.retrieval %}
{% set fixed = found.retrieval.contrast %}
{% for row in [found.retrieval.best] + ([fixed] if fixed and fixed != found.retrieval.best else []) %}
| {{ name }} | {{ row.layer }} | {{ row.pooling }}
{%- for share in [row.mean, row.to_pivot, row.from_pivot, row.no_overlap] %} | {{ share | percent }}{% endfor %}
{%- for language in row.languages.values() %} | {{ language.mean | percent }}{% endfor %} |
{% endfor %}
{% endfor %}
{% if model.perplexity %}

Masked-LM perplexity, mean over languages: {{ model.perplexity.mean | short }} (compare only with the same tokenizer).
{% endif %}
{% if model.classification %}

Classification after fine-tuning: mean accuracy {{ model.classification.mean | percent }} %,
transfer gap {{ model.classification.transfer_gap | percent }} points.
{% endif %}

## Training data

{% if corpus and model.encoder.contrast %}
{% set kinds = corpus.by_kind | reject("equalto", "held_out") | list %}
Lines kept after cleaning:

| language |{% for kind in kinds %} {{ kind }} |{% endfor +%}
|---|{{ "---|" * kinds | length }}
{% for code, kept in corpus.kept.items() %}
| {{ code }} |{% for kind in kinds %} {{ kept[kind] | count }} |{% endfor +%}
{% endfor %}
{% else %}
Not recorded with this evaluation.
{% endif %}

## Limits

- Scores are on held-out text of the kind named above; other domains and languages may differ much.
- Names, numbers and placeholders help retrieval; the column "no shared token" is without that help.
- Differences of a point or less mean little.
- The model repeats what its training text contains, biases included; it does not generate text and knows no facts.
"""
