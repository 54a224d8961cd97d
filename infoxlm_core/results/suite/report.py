"""A summary -> suite.html (one page that needs no network), suite.md, suite.json, model_card.md, tables/, figures/."""

import base64
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jinja2

from infoxlm_core import manifests
from infoxlm_core.results.comparison import align
from infoxlm_core.results.suite import figures, tables, text
from infoxlm_core.results.suite.tables import Table

TEMPLATES = Path(__file__).parents[1] / "templates"


def write(output: Path, summary: Mapping[str, Any]) -> None:
    """Write everything into a directory."""
    built = tables.build(summary)
    images = {}
    for folder in ("tables", "figures"):
        (output / folder).mkdir(parents=True, exist_ok=True)
    for table in (table for found in built.values() for table in found):
        manifests.write_atomically(output / "tables" / f"{table.name}.csv", text.write_csv(table))
    for name, rendered in figures.render(summary).items():
        for kind, content in rendered.items():
            manifests.write_atomically(output / "figures" / f"{name}.{kind}", content)
        images[name] = "data:image/svg+xml;base64," + base64.b64encode(rendered["svg"]).decode()
    for name in ("suite.html", "suite.md", "suite_card.md"):
        page = render(name, summary, built, images)
        manifests.write_atomically(output / name.replace("suite_card", "model_card"), page)
    manifests.write_atomically(output / "suite.json", json.dumps(summary, indent=1, ensure_ascii=False) + "\n")


def render(name: str, summary: Mapping[str, Any], built: Mapping[str, list[Table]], images: Mapping[str, str]) -> str:
    """Fill one template."""
    pages = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=jinja2.select_autoescape(["html.j2"], default_for_string=False),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    pages.globals |= {
        "warn": tables.warn,
        "list_sources": text.list_sources,
        "list_unfinished": text.list_unfinished,
        "tabulate_grid": text.tabulate_grid,
        "lay_out": text.lay_out,
        "align": align,
    }
    facts = {"tables": built, "figures": images, "order": [*summary["tasks"], "transfer", "mixed"]}
    return pages.get_template(f"{name}.j2").render(summary, **facts).strip() + "\n"
