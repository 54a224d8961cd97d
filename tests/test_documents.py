"""What the documents point to exists, and the page that everybody reads first stays short."""

import re
from pathlib import Path

import pytest

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
