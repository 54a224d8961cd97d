"""Links and commands in the documents are valid, and the README stays short."""

import ast
import functools
import re
from pathlib import Path

import pytest
import typer

from pipelines.cli import app

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub writes them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_links_of_a_page_are_valid(page: Path):
    links = re.findall(r"\]\((?!https?:)([^)#]*)(?:#([^)]*))?\)", page.read_text(encoding="utf-8"))
    targets = [(page.parent / file if file else page, anchor) for file, anchor in links]

    assert [file for file, _ in targets if not file.exists()] == []
    assert [anchor for file, anchor in targets if anchor and anchor not in anchors(file)] == []


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) < 200


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_commands_of_a_page_exist_with_their_options(page: Path):
    commands = typer.main.get_command(app).commands
    text = page.read_text(encoding="utf-8")
    blocks = re.findall(r"```bash\n(.*?)```", text, re.DOTALL)
    in_sentences = re.findall(r"`(infoxlm [a-z][^`]*)`", text) if page.name != "CHANGELOG.md" else []
    lines = "\n".join([*blocks, *in_sentences]).replace("\\\n", " ").splitlines()
    parts = [part for line in lines for part in re.split(r"[;&|]+| do ", re.sub(r"(^|\s)#.*", "", line))]
    matches = [re.match(r"\s*(?:\w+=\S* )*(?:\S*/)?infoxlm ([\w-]+)(.*)", part) for part in parts]

    for match in matches:
        if match:
            name, arguments = match.groups()
            assert name in commands
            options = {option for p in commands[name].params for option in (*p.opts, *p.secondary_opts)}
            assert set(re.findall(r"(?<= )--[a-z-]+", arguments)) <= options, name


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_configs_that_a_page_names_exist(page: Path):
    named = set(re.findall(r"configs/[\w-]+\.yaml", page.read_text(encoding="utf-8")))

    assert page.name == "CHANGELOG.md" or {name for name in named if not (ROOT / name).is_file()} == set()


def test_the_commands_of_the_runbook_have_no_placeholders():
    """A function of the first block reads names that only the cluster knows."""
    pages = sorted(ROOT.glob("docs/runbook/*.md"))
    text = "\n".join(page.read_text(encoding="utf-8") for page in pages)
    commands = "\n".join(re.findall(r"```bash\n(.*?)```", text, re.DOTALL))

    assert re.findall(r"\b[A-Z]+_OF_[A-Z_]+\b", commands) == []
    assert [line for line in commands.splitlines() if " … " in line] == []


@functools.cache
def messages_of_the_code() -> str:
    """Return all strings of the product, one per line, with `…` for each value that is filled in."""
    strings = []
    for package in ("infoxlm_core", "components", "pipelines"):
        for path in (ROOT / package).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.JoinedStr):
                    parts = [part.value if isinstance(part, ast.Constant) else "…" for part in node.values]
                    strings.append("".join(map(str, parts)))
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    strings.append(re.sub(r"%[\w.]+", "…", node.value))
    return "\n".join(text.replace("\n", " ") for text in strings)


LISTED_MESSAGES = re.findall(r"^\| `([^`]+)` \|", (ROOT / "docs/errors.md").read_text(encoding="utf-8"), re.MULTILINE)


def test_the_page_of_errors_lists_the_most_frequent_messages():
    assert len(LISTED_MESSAGES) == len(set(LISTED_MESSAGES)) >= 40


@pytest.mark.parametrize("message", LISTED_MESSAGES)
def test_a_listed_error_message_is_in_the_code(message):
    pattern = ".*".join(re.escape(part) for part in message.split("…"))

    assert re.search(pattern, messages_of_the_code()), "docs/errors.md lists a message that no longer exists"
