"""What a page of ours is, and how it becomes files: HTML that needs no network, Markdown, figures, JSON.

Every page has the same parts: a heading, tiles with the main figures, and sections of text, tables and figures.
"""

import base64
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import jinja2

from infoxlm_core import manifests
from infoxlm_core.results import figures, tables
from infoxlm_core.results.tables import Table, percent, short
from infoxlm_core.tasks.task import Fact

SHOWN = 12  # unfinished trials that are named on a page


class Tile(NamedTuple):
    """One figure and what stands below it."""

    title: str
    value: str
    below: Sequence[str] = ()


@dataclass(frozen=True)
class Section:
    """One part of a page; what is empty is left out."""

    title: str
    text: str = ""
    caution: str = ""  # what forbids a comparison, in a box
    problems: Sequence[str] = ()
    tables: Sequence[Table] = ()
    figures: Mapping[str, str] = field(default_factory=dict)  # name -> what it shows
    facts: Sequence[Fact] = ()
    facts_title: str = ""  # where they are folded away
    folded: Mapping[str, Table | str] = field(default_factory=dict)  # heading -> what only some read; not in Markdown


@dataclass(frozen=True)
class Page:
    """One page."""

    title: str
    heading: str
    soft: Sequence[str]  # below the heading, in grey
    lead: str
    sections: Sequence[Section]
    tiles: Sequence[Tile] = ()
    unfinished: Sequence[str] = ()
    end: str = ""
    brief: str = ""  # what Markdown says in place of `lead`


def draw(output: Path, drawn: Mapping[str, Any]) -> dict[str, str]:
    """Write figures/; return each as what an <img> takes."""
    rendered = figures.render(drawn)
    write(output, {f"figures/{n}.{kind}": data for n, kinds in rendered.items() for kind, data in kinds.items()})
    return {name: inline(kinds["svg"]) for name, kinds in rendered.items()}


def inline(svg: bytes) -> str:
    return "data:image/svg+xml;base64," + base64.b64encode(svg).decode()


def write(output: Path, files: Mapping[str, str | bytes]) -> None:
    for name, content in files.items():
        (output / name).parent.mkdir(parents=True, exist_ok=True)
        manifests.write_atomically(output / name, content)


def dump(plain: Mapping[str, Any]) -> str:
    return json.dumps(plain, indent=1, ensure_ascii=False) + "\n"


@cache
def _templates() -> jinja2.Environment:
    found = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=jinja2.select_autoescape(["html.j2"], default_for_string=False),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    found.filters |= {"percent": percent, "count": tables.count, "short": short}
    shown = (tables.show, tables.show_interval, tables.list_sources, tables.to_markdown)
    found.globals |= {function.__name__: function for function in (*shown, name_some, isinstance)} | {"str": str}
    return found


def render(name: str, **facts: Any) -> str:
    return _templates().get_template(f"{name}.j2").render(**facts).strip() + "\n"


def name_some(names: Sequence[str]) -> str:
    """The first of them; all are in the JSON beside the page."""
    return ", ".join(names[:SHOWN]) + f" and {len(names) - SHOWN} more" * (len(names) > SHOWN)
