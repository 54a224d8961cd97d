"""What the documents point to exists, and the page that everybody reads first stays short."""

import re
from pathlib import Path

import pytest
import typer

from pipelines.cli import app

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])


def anchors(page: Path) -> set[str]:
    """The headings of a page as GitHub names them in links."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_what_a_page_points_to_exists(page: Path):
    links = re.findall(r"\]\((?!https?:)([^)#]*)(?:#([^)]*))?\)", page.read_text(encoding="utf-8"))
    targets = [(page.parent / file if file else page, anchor) for file, anchor in links]

    assert [file for file, _ in targets if not file.exists()] == []
    assert [anchor for file, anchor in targets if anchor and anchor not in anchors(file)] == []


def test_the_readme_is_read_in_ten_minutes():
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) < 200


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_what_a_page_types_the_commands_know(page: Path):
    """Subcommand and options of every `infoxlm …` of a block; a line that ends in a backslash goes on in the next."""
    commands = typer.main.get_command(app).commands
    blocks = re.findall(r"```bash\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    parts = [part for line in lines for part in re.split(r"[;&|]+| do ", re.sub(r"(^|\s)#.*", "", line))]
    typed = [
        found.groups() for part in parts if (found := re.match(r"\s*(?:\w+=\S* )*(?:\S*/)?infoxlm ([\w-]+)(.*)", part))
    ]

    known = {
        name: {o for p in command.params for o in (*p.opts, *p.secondary_opts)} for name, command in commands.items()
    }
    assert [name for name, _ in typed if name not in known] == []
    options = [(name, option) for name, rest in typed for option in re.findall(r"(?<= )--[a-z-]+", rest)]
    assert [(name, option) for name, option in options if option not in known[name]] == []


def test_the_runbook_says_exactly_what_to_type():
    """Names that only the cluster knows are asked of it by a function of the first block."""
    text = (ROOT / "docs/runbook.md").read_text(encoding="utf-8")
    commands = "\n".join(re.findall(r"```bash\n(.*?)```", text, re.DOTALL))

    assert re.findall(r"\b[A-Z]+_OF_[A-Z_]+\b", commands) == []
    assert [line for line in commands.splitlines() if " … " in line] == []
