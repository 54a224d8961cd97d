"""The page of a suite: encoders x tasks beside the published numbers."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from infoxlm_core.results import figures, pages, suite_tables, tables, trials
from infoxlm_core.results.pages import Page, Section, Tile
from infoxlm_core.results.summary import Summary, TaskSummary
from infoxlm_core.results.tables import Table, percent, title_of
from infoxlm_core.tasks import TASKS


def write(output: Path, summary: Summary) -> None:
    """Write suite.html, suite.md, suite.json, model_card.md, tables/ and figures/ into a directory."""
    built = suite_tables.of_suite(summary)
    page, images = lay_out(summary, built), pages.draw(output, figures.of_suite(summary))
    files = {
        "suite.html": pages.render("page.html", page=page, figures=images),
        "suite.md": pages.render("page.md", page=page),
        "model_card.md": pages.render("suite_card.md", summary=summary, tables=built),
        "suite.json": pages.dump(summary.to_dict()),
    }
    files |= {f"tables/{table.name}.csv": tables.to_csv(table) for found in built.values() for table in found}
    pages.write(output, files)


def lay_out(summary: Summary, built: Mapping[str, list[Table]]) -> Page:
    """The parts of the page, from the tables that were built."""
    peers = [name for name in summary.models if name != summary.model]
    sections = [_show_task(name, found, built.get(name, ())) for name, found in summary.tasks.items()]
    if "transfer" in built:
        text = (
            "Score of the source language minus the mean of the others: what is lost on the way. Lower is better, but"
            " not alone: a model that is poor everywhere has none."
        )
        sections.append(Section("Transfer gap", text, tables=built["transfer"], figures={"transfer-gap": ""}))
    if "mixed" in built:
        text = (
            "Within: both texts in one language. Across: the mean of all cells in which one of them is in another,"
            " language by language."
        )
        sections.append(Section("Two languages in one example", text, tables=built["mixed"]))
    settings = {name: json.dumps(found.settings, indent=1, ensure_ascii=False) for name, found in summary.tasks.items()}
    sections.append(Section("Settings", folded=settings))
    return Page(
        title=f"{summary.model} · suite",
        heading=summary.model + (f" beside {', '.join(peers)}" if peers else ""),
        soft=[" · ".join(f"{name}: {source}" for name, source in summary.models.items())],
        lead=(
            "Mean over seeds, with the sample deviation behind ±; means of languages weigh every language alike. In"
            " blue the model under test. On grey, published numbers: each with its source, and with #M, how many"
            " checkpoints serve all languages (1, or N: one for each), where that is said."
        ),
        sections=sections,
        tiles=[_make_tile(name, found, summary.model, peers) for name, found in summary.tasks.items()],
        unfinished=summary.unfinished,
        end="All numbers of this page, seed by seed, are in suite.json, its tables as CSV in tables/.",
        brief=(
            "Percent; mean ± sample deviation over seeds. #M: checkpoints for all languages (N: one for each), and what"
            " chose them."
        ),
    )


def _make_tile(name: str, found: TaskSummary, own: str, peers: Sequence[str]) -> Tile:
    row = found.models.get(own)
    gap = row.transfer_gap[found.main].mean if row and row.transfer_gap else None
    means = {model: f"{percent(one.mean[found.main].mean)} %" for model, one in found.models.items()}
    below = [title_of(found.main) + (f", gap {percent(gap)}" if gap is not None else "")]
    return Tile(name, means.get(own, "–"), below + [f"{peer} {means[peer]}" for peer in peers if peer in means])


def _show_task(name: str, found: TaskSummary, built: Sequence[Table]) -> Section:
    languages = ", ".join(found.settings.get("train_languages", ()))
    trained = f" Trained on {languages}." if languages else ""
    grid = suite_tables.of_grid(found, trials.describe)
    return Section(
        name,
        (TASKS[found.kind].__doc__ or "").splitlines()[0] + " In percent." + trained,
        caution=found.warning,
        problems=[*found.notes, *([] if found.models else ["Nothing is finished."])],
        tables=built,
        figures={name: ""},
        facts=found.protocol,
        facts_title="How it was measured",
        folded={"What the grid was chosen by": grid} if grid else {},
    )
