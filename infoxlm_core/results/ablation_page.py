"""The page of an ablation: variants over their seeds."""

from collections.abc import Callable
from pathlib import Path

from infoxlm_core.results import figures, pages, published, statistics
from infoxlm_core.results.ablation import Comparison
from infoxlm_core.results.pages import Page, Section
from infoxlm_core.results.tables import Cell, Column, Line, Table
from infoxlm_core.tasks.task import Fact


def write(output: Path, comparison: Comparison) -> None:
    """Write comparison.json, comparison.md, comparison.html and comparison.png into a directory."""
    drawn = figures.render({"comparison": lambda: figures.draw_comparison(comparison)})["comparison"]
    images = {"comparison": pages.inline(drawn["svg"])} if comparison.metrics else {}
    files: dict[str, str | bytes] = {
        "comparison.html": pages.render("page.html", page=lay_out(comparison), figures=images),
        "comparison.md": to_markdown(comparison),
        "comparison.json": pages.dump(comparison.to_dict()),
        "comparison.png": drawn["png"],
    }
    pages.write(output, files)


def to_markdown(comparison: Comparison) -> str:
    """The table of an ablation, for a console too."""
    return pages.render("page.md", page=lay_out(comparison))


def lay_out(comparison: Comparison) -> Page:
    """Variants over their seeds."""
    sections = [
        Section(
            "Scores",
            problems=() if comparison.metrics else ("Nothing is finished.",),
            tables=[tabulate(comparison)],
            figures={
                "comparison": (
                    "A point is a seed, the bar its mean, the line the 95 % interval of the mean; shares in percent."
                )
            },
        ),
        Section(
            "What the seeds can tell",
            "95 % intervals of the mean (Student's t). Intervals that do not overlap show a difference; overlapping"
            " ones do not show that there is none.",
            facts=[Fact(name, sentence) for name, sentence in comparison.said.items()],
        ),
    ]
    if theirs := tabulate_published(comparison):
        text = f"Not to be compared with the numbers above, only with their order. {published.SOURCE}."
        sections.append(Section("What the paper reports, on other tasks and other data", text, tables=theirs))
    lead = (
        "Mean ± sample standard deviation over seeds, below it the 95 % interval of the mean; ↑ more is better, ↓ less"
        " is better."
    )
    return Page(
        title=f"{comparison.title} · comparison",
        heading=f"{comparison.title}: variants compared",
        soft=(),
        lead=lead,
        sections=sections,
        unfinished=comparison.unfinished,
        end="All numbers, seed by seed, are in comparison.json.",
        brief=lead.replace(", below it the 95 % interval of the mean", ""),
    )


def tabulate(comparison: Comparison) -> Table:
    """Variants and their metrics; published numbers stand beside ours where the task is the same."""
    columns = [Column("seeds", role="text")]
    for name in comparison.metrics:
        columns.append(Column(statistics.name_column(name), _as(name), intervals=True))
        columns += [Column("paper", _as(name), "soft")] if name in published.METRICS else []
    lines = []
    for variant, row in comparison.variants.items():
        done = len(row.seeds) - len(row.unfinished)
        cells: list[Cell] = [str(done) if not row.unfinished else f"{done} of {len(row.seeds)}"]
        for name in comparison.metrics:
            cells.append(row.metrics[name])
            if name in published.METRICS:
                cells.append(published.ablations().get(variant, {}).get(name))
        lines.append(Line(variant, tuple(cells), what=row.what, seeds=done))
    return Table("comparison", "", tuple(columns), tuple(lines), head="variant")


def tabulate_published(comparison: Comparison) -> list[Table]:
    """What the paper reports for the same variants on tasks that these trials do not have; perhaps nothing."""
    others = [name for name in published.METRICS if name not in comparison.metrics]
    lines = tuple(
        Line(variant, tuple(published.ablations()[variant].get(name) for name in others))
        for variant in comparison.variants
        if variant in published.ablations() and others
    )
    columns = tuple(Column(f"{published.METRICS[name]} %", _as(name)) for name in others)
    return [Table("published", "", columns, lines, head="variant")] if lines else []


def _as(metric: str) -> Callable[[float, float], str]:
    return lambda value, like: statistics.show(metric, value, like)
