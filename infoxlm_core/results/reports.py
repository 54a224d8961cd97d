"""Scores, as plain dictionaries -> scores.json, figures, an HTML report and a model card.

The report is one file that needs no network: style and figures are inside.
"""

import base64
import json
from pathlib import Path

import jinja2
import pandas as pd

from infoxlm_core import manifests
from infoxlm_core.results import figures
from infoxlm_core.results.figures import Scores


def write(output: Path, scores: Scores) -> None:
    """Write scores.json, figures/*.png, report.html and model_card.md into a directory."""
    output.mkdir(parents=True, exist_ok=True)
    (output / "figures").mkdir(exist_ok=True)
    images = {}
    for name, rendered in figures.render(scores).items():
        manifests.write_atomically(output / "figures" / f"{name}.png", rendered["png"])
        images[name] = "data:image/svg+xml;base64," + base64.b64encode(rendered["svg"]).decode()
    parts = ("encoder", "retrieval", "perplexity", "classification", "curves")
    scores = scores | {"models": {name: dict.fromkeys(parts) | found for name, found in scores["models"].items()}}
    facts = {"scores": scores, "model": scores["models"][scores["model"]], "corpus": tabulate_corpus(scores["corpus"])}
    pages = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=jinja2.select_autoescape(["html.j2"], default_for_string=False),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    pages.filters |= {"percent": _percent, "count": "{:,}".format, "short": _short}
    pages.globals |= {"percent": _percent, "short": _short}
    page = pages.get_template("report.html.j2").render(facts, figures=images)
    card = pages.get_template("model_card.md.j2").render(facts)
    manifests.write_atomically(output / "report.html", page)
    manifests.write_atomically(output / "model_card.md", card + "\n")
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
