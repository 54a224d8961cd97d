"""Write the page of a sweep as self-contained HTML and as Markdown, with its figures and tables as files.

The pages of a suite, an ablation and an evaluation have the same parts: the headlines of all models, a section for each
task, and the sections that a caller adds.
"""

import base64
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

import jinja2

from infoxlm_core import manifests
from infoxlm_core.model.huggingface.origin import describe_origin
from infoxlm_core.results import figures, published, statistics, tables, task_tables
from infoxlm_core.results.summary import Summary, TaskSummary
from infoxlm_core.results.tables import PageTable
from infoxlm_core.tasks.task import Fact

_COST_TEXT = (
    "Each value is the mean over seeds. The tokens are those of all objectives, in the query encoder and in the key "
    "encoder. Process hours include the time in which a training process waits for a core. They do not include killed "
    "attempts, or trainings that an earlier run of the pipeline finished."
)
_QUESTIONS_TEXT = (
    "The table shows the same differences with intervals over the held-out questions. The intervals are from a paired "
    "bootstrap of the answers with Bonferroni's correction. The answers are averaged over the seeds that both variants "
    "have. An interval without 0 shows that the difference is not due to the choice of questions. It does not show "
    "what other seeds would give."
)
MAX_NAMES = 12
"""Unfinished trials that a page lists by name."""


@dataclass(frozen=True)
class Section:
    """One part of a page. Empty fields are left out."""

    title: str
    text: str = ""
    problems: Sequence[str] = ()
    tables: Sequence[PageTable] = ()
    drawings: Mapping[str, figures.Draw] = field(default_factory=dict)  # name -> function that draws a figure
    caption: str = ""  # of each figure
    facts: Sequence[Fact] = ()
    folded: Mapping[str, PageTable | str] = field(default_factory=dict)
    """Heading -> content that the reader unfolds; not in Markdown."""


def write(output: Path, name: str, summary: Summary) -> None:
    """Write the files of a suite or an ablation into a directory: NAME.html, .md and .json, figures/, tables/.

    A suite also gets model_card.md, the evaluation section of its first model's card.
    """
    files = {f"{name}.json": to_json(summary.to_dict())}
    if summary.tasks:
        files["model_card.md"] = _render_suite_card(summary)
    write_page(output, name, summary, lay_out(summary))
    write_files(output, files)


def _render_suite_card(summary: Summary) -> str:
    """Return the evaluation section of the model under test, without published numbers."""
    tables_of_tasks = {}
    for name, task in summary.tasks.items():
        if summary.model in task.models:
            tables_of_tasks[name] = task_tables.tabulate_task(name, task, summary.model)
    gaps = task_tables.tabulate_gaps(summary)
    return render("suite_card.md", summary=summary, tables=tables_of_tasks, gaps=gaps)


def write_page(output: Path, name: str, summary: Summary, sections: Sequence[Section], lead: str = "") -> None:
    """Write NAME.html, NAME.md, figures/ and tables/ into a directory.

    Args:
        output: the directory.
        name: the page's file name without suffix.
        summary: the results of the sweep.
        sections: the sections of the page, usually those of `lay_out` and others.
        lead: the first paragraph.
    """
    drawings: dict[str, figures.Draw] = {}
    for section in sections:
        drawings |= section.drawings
    rendered = figures.render(drawings)
    context = {"summary": summary, "name": name, "lead": lead, "sections": sections}
    data_uris = {figure: _to_data_uri(images["svg"]) for figure, images in rendered.items()}
    files: dict[str, str | bytes] = {
        f"{name}.html": render("page.html", **context, figures=data_uris),
        f"{name}.md": render("page.md", **context),
    }
    for figure, images_by_format in rendered.items():
        for suffix, image in images_by_format.items():
            files[f"figures/{figure}.{suffix}"] = image
    for section in sections:
        for table in section.tables:
            files[f"tables/{table.name}.csv"] = tables.to_csv(table)
    write_files(output, files)


def to_markdown(summary: Summary) -> str:
    """Return the page of a sweep as Markdown, for a console."""
    return render("page.md", summary=summary, lead="", sections=lay_out(summary))


# ---------------------------------------------------------------- sections of a sweep


def lay_out(summary: Summary) -> list[Section]:
    """Return the sections of a sweep, the headlines first."""
    colours = figures.assign_colours(summary.models)
    sections = [_show_headlines(summary), *_show_ablation(summary)]
    sections += [_show_task(name, task, summary.model, colours) for name, task in summary.tasks.items()]
    gaps = task_tables.tabulate_gaps(summary)
    if gaps:
        text = (
            "The transfer gap is the score of the source language minus the mean of the other languages. Lower is "
            "better, but a model that is weak in every language also has a small gap."
        )
        drawings = {"transfer-gap": partial(figures.draw_gaps, gaps, colours)}
        sections.append(Section("Transfer gap", text, tables=[gaps], drawings=drawings))
    mixed = task_tables.tabulate_mixed(summary)
    if mixed:
        text = (
            "Within means that both texts are in the same language. Across means that they are in two languages. The "
            "score `across` of a language is the mean over all language pairs that contain it."
        )
        sections.append(Section("Examples in two languages", text, tables=mixed))
    settings = {}
    for name, task in summary.tasks.items():
        if task.settings:
            settings[name] = json.dumps(task.settings, indent=1, ensure_ascii=False)
    if settings:
        sections.append(Section("Settings of the tasks", folded=settings))
    return sections


def _show_ablation(summary: Summary) -> list[Section]:
    """Return the sections that only an ablation has: differences between variants, costs, and the paper's results."""
    sections = []
    differences = task_tables.tabulate_differences(summary)
    if differences:
        sections.append(_show_differences(summary, differences))
    question_differences = task_tables.tabulate_question_differences(summary)
    if question_differences:
        sections.append(Section("Differences over the questions", _QUESTIONS_TEXT, tables=[question_differences]))
    costs = task_tables.tabulate_costs(summary)
    if costs:
        sections.append(Section("Cost of the pre-training", _COST_TEXT, tables=[costs]))
    ablations = task_tables.tabulate_published_ablations(summary)
    if ablations:
        text = f"Means of five runs on other data than ours, so compare only the ranking. {published.SOURCE}."
        sections.append(Section("What the paper reports", text, tables=[ablations]))
    return sections


def _show_headlines(summary: Summary) -> Section:
    """Return the section with the headlines of all models, and explain what their deviations and intervals mean."""
    text = "↑ higher is better, ↓ lower is better."
    if any(statistic.n > 1 for variant in summary.variants.values() for statistic in variant.metrics.values()):
        text += " Mean ± sample standard deviation over seeds."
        if summary.tasks:
            text += (
                " All seeds fine-tune the same pre-trained model, so the deviation does not include the variation "
                "between pre-trainings."
            )
    if not summary.tasks:
        text += (
            " All variants are trained on the same text with the same vocabulary, and measured on the same held-out "
            "text. A dash means that the objectives of the variant do not define the metric, or that no trial has "
            "finished."
        )
    caption = (
        f"Each point is one seed, the bar is their mean, and the line is the {statistics.INTERVAL} of the mean "
        "(Student's t). Overlapping intervals do not show that two models are equal."
    )
    return Section(
        "Headlines",
        text,
        problems=() if summary.metrics else ["No trial has finished."],
        tables=[task_tables.tabulate_headlines(summary)] if summary.metrics else [],
        drawings={"headlines": partial(figures.draw_headlines, summary)},
        caption=caption,
    )


def _show_differences(summary: Summary, table: PageTable) -> Section:
    """Return the section that compares the variants of an ablation with the first one."""
    comparisons = len(summary.variants) - 1
    correction = f" with Bonferroni's correction for {comparisons} comparisons" if comparisons > 1 else ""
    text = (
        f"Each difference is the metric of a variant minus the metric of {summary.model} with the same seed. The table "
        f"shows the mean ± sample standard deviation, and the {statistics.INTERVAL} of the mean (Student's "
        f"t{correction}). Differences of percentages are in percentage points. An interval without 0 shows a "
        "difference. An interval with 0 does not show that the variants are equal."
    )
    return Section("Differences between variants", text, tables=[table])


def _show_task(name: str, task: TaskSummary, model_under_test: str, colours: Mapping[str, str]) -> Section:
    """Return the section of one task: its protocol, its tables and figures, and the scores of its grid."""
    text = task.description
    if statistics.is_share(f"{task.kind}/{task.main}"):
        text += " In percent."
    if task.table != "none":
        text += " Compare published rows with ours only as far as the protocols agree."
    problems = list(task.notes)
    drawings: dict[str, figures.Draw] = {}
    if task.models:
        drawings[f"{name}_by_layer"] = partial(figures.draw_layers, name, task, colours)
        drawings[name] = partial(figures.draw_languages, name, task, colours)
    else:
        problems.append("No trial has finished.")
    layers = task_tables.tabulate_layers(name, task)
    metric_tables = task_tables.tabulate_task(name, task, model_under_test)
    grid = task_tables.tabulate_grid(task)
    return Section(
        name,
        text,
        problems=problems,
        tables=[layers, *metric_tables] if layers else metric_tables,
        drawings=drawings,
        facts=task.protocol,
        folded={"Development scores by grid point": grid} if grid else {},
    )


# ---------------------------------------------------------------- files


def write_files(output: Path, files: Mapping[str, str | bytes]) -> None:
    """Write files into a directory. `files` maps a relative path to the content."""
    for name, content in files.items():
        (output / name).parent.mkdir(parents=True, exist_ok=True)
        manifests.write_atomically(output / name, content)


def to_json(content: Mapping[str, Any]) -> str:
    """Return the content of a file as JSON that a person can read."""
    return json.dumps(content, indent=1, ensure_ascii=False) + "\n"


def _to_data_uri(svg: bytes) -> str:
    """Return an image as a URI that contains it, so that the page needs no other file."""
    return "data:image/svg+xml;base64," + base64.b64encode(svg).decode()


@cache
def _load_templates() -> jinja2.Environment:
    """Return the environment of the page templates, with the filters and functions that they call."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=jinja2.select_autoescape(["html.j2"], default_for_string=False),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"percent": tables.percent, "count": tables.count, "short": tables.short}
    functions = (
        tables.show,
        tables.show_interval,
        tables.list_sources,
        tables.to_markdown,
        list_first,
        describe_origin,
        isinstance,
    )
    environment.globals |= {function.__name__: function for function in functions}
    environment.globals["str"] = str
    return environment


def render(template: str, **context: Any) -> str:
    """Fill a template."""
    return _load_templates().get_template(f"{template}.j2").render(**context).strip() + "\n"


def list_first(names: Sequence[str]) -> str:
    """Return the first `MAX_NAMES` names as text that ends with the number of all others."""
    text = ", ".join(names[:MAX_NAMES])
    if len(names) > MAX_NAMES:
        text += f" and {len(names) - MAX_NAMES} more"
    return text
