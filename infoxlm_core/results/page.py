"""Write the page of a sweep as self-contained HTML and as Markdown, with its figures and tables as files.

The pages of a suite, an ablation and an evaluation have the same structure: a summary of all models, a section for each
task, and sections added by the caller.
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
from infoxlm_core.results.summaries.suite import Summary, TaskSummary
from infoxlm_core.results.tables import PageTable
from infoxlm_core.tasks.task import Fact

_COST_TEXT = (
    "Each value is the mean over seeds. Token counts include all objectives and both the query and the key encoder. "
    "Process hours include the time that a training process waits for a core. They exclude killed attempts, and "
    "training that an earlier pipeline run finished."
)
_QUESTIONS_TEXT = (
    "The table shows the same differences with intervals over the held-out questions. The intervals come from a paired "
    "bootstrap of the answers with Bonferroni's correction. Answers are averaged over the seeds that both variants "
    "have. An interval without 0 shows that the difference is not due to the choice of questions. It says nothing "
    "about other seeds."
)
_GAP_TEXT = (
    "The transfer gap is the score of the source language minus the mean of the other languages. Lower is better, but "
    "a model that is weak in every language also has a small gap."
)
_MIXED_TEXT = (
    "Within: both texts are in the same language. Across: the texts are in two languages. A language's score `across` "
    "is the mean over all language pairs that contain the language."
)
_SUMMARY_CAPTION = (
    f"Each point is one seed, the bar is the mean over seeds, and the line is the {statistics.INTERVAL} of the mean "
    "(Student's t). Overlapping intervals do not show that two models are equal."
)
_METRIC_MEANINGS = {
    "served": "accuracy with the vectors that users get",
    "best": "accuracy with the best layer and pooling on these pairs; slightly too high, because both were chosen here",
    "centred": "accuracy with the vectors that users get, after each language's mean vector is subtracted",
    "no_overlap": "score on the pairs that share no token, with the vectors that users get",
    "transfer_gap": "score of the source language minus the mean of the other languages",
}
"""Last part of a metric's name -> its meaning, except for the main scores of tasks."""
MAX_NAMES = 12
"""Largest number of unfinished trials that a page lists by name."""


@dataclass(frozen=True)
class Section:
    """One section of a page. Empty fields are not shown."""

    title: str
    text: str = ""
    problems: Sequence[str] = ()
    tables: Sequence[PageTable] = ()
    drawings: Mapping[str, figures.Draw] = field(default_factory=dict)
    """Name of a figure -> function that draws the figure. Markdown shows no figures."""
    caption: str = ""  # shown below every figure
    facts: Sequence[Fact] = ()
    folded: Mapping[str, PageTable | str] = field(default_factory=dict)
    """Heading -> content that is hidden until the reader clicks on the heading. Markdown shows none of it."""


def write_sweep_report(output: Path, name: str, summary: Summary) -> None:
    """Write the report of a suite or an ablation as HTML, Markdown and JSON, with its figures and tables.

    For a suite, also write model_card.md: the evaluation section of the first model's card.

    Args:
        output: output directory.
        name: file name of the report, without suffix.
        summary: results of the sweep.
    """
    files = {f"{name}.json": to_json(summary.to_dict())}
    if summary.tasks:  # an ablation has none
        files["model_card.md"] = _render_suite_card(summary)
    write_page(output, name, summary, build_sections(summary))
    write_files(output, files)


def _render_suite_card(summary: Summary) -> str:
    """Render the evaluation section of the tested model's card, without published scores."""
    tables_by_task = {}
    for name, task in summary.tasks.items():
        if summary.model in task.models:
            tables_by_task[name] = task_tables.tabulate_task(name, task, summary.model)
    gaps = task_tables.tabulate_gaps(summary)
    return render("suite_card.md", summary=summary, tables=tables_by_task, gaps=gaps)


def write_page(output: Path, name: str, summary: Summary, sections: Sequence[Section], lead: str = "") -> None:
    """Write a page as HTML and Markdown, every figure as PNG and SVG, and every table as CSV.

    Args:
        output: output directory.
        name: file name of the page, without suffix.
        summary: results of the sweep; the page shows its title and its unfinished trials.
        sections: sections of the page.
        lead: first paragraph.
    """
    drawings: dict[str, figures.Draw] = {}
    for section in sections:
        drawings |= section.drawings
    rendered_figures = figures.render(drawings)
    context = {"summary": summary, "name": name, "lead": lead, "sections": sections}
    data_uris = {}  # of images inside the page, so that it needs no other file
    for figure, images in rendered_figures.items():
        data_uris[figure] = f"data:image/svg+xml;base64,{base64.b64encode(images['svg']).decode()}"
    files: dict[str, str | bytes] = {
        f"{name}.html": render("page.html", **context, figures=data_uris),
        f"{name}.md": render("page.md", **context),
    }
    for figure, images_by_format in rendered_figures.items():
        for suffix, image in images_by_format.items():
            files[f"figures/{figure}.{suffix}"] = image
    for section in sections:
        for table in section.tables:
            files[f"tables/{table.name}.csv"] = tables.to_csv(table)
    write_files(output, files)


def to_markdown(summary: Summary) -> str:
    """Render the page of a sweep as Markdown, to be printed on a console."""
    return render("page.md", summary=summary, lead="", sections=build_sections(summary))


# ---------------------------------------------------------------- sections of a sweep


def build_sections(summary: Summary) -> list[Section]:
    """Return the sections of a sweep's page, the summary first."""
    colours = figures.assign_colours(summary.models)
    sections = [_build_summary_section(summary), *_build_ablation_sections(summary)]
    for name, task in summary.tasks.items():
        sections.append(_build_task_section(name, task, summary.model, colours))
    gaps = task_tables.tabulate_gaps(summary)
    if gaps:
        drawings = {"transfer-gap": partial(figures.draw_gaps, gaps, colours)}
        sections.append(Section("Transfer gap", _GAP_TEXT, tables=[gaps], drawings=drawings))
    mixed_tables = task_tables.tabulate_mixed(summary)
    if mixed_tables:
        sections.append(Section("Examples in two languages", _MIXED_TEXT, tables=mixed_tables))
    settings_by_task = {}
    for name, task in summary.tasks.items():
        if task.settings:
            settings_by_task[name] = json.dumps(task.settings, indent=1, ensure_ascii=False)
    if settings_by_task:
        sections.append(Section("Settings of the tasks", folded=settings_by_task))
    return sections


def _build_summary_section(summary: Summary) -> Section:
    """Compare the headline metrics of all models or variants, and explain the metrics."""
    if not summary.metrics:
        return Section("Summary", _explain_summary(summary), problems=["No trial has finished."])
    return Section(
        "Summary",
        _explain_summary(summary),
        tables=[task_tables.tabulate_headlines(summary)],
        drawings={"headlines": partial(figures.draw_headlines, summary)},
        caption=_SUMMARY_CAPTION,
        facts=_explain_metrics(summary),
    )


def _explain_metrics(summary: Summary) -> list[Fact]:
    """Explain the headline metrics. Metrics of the machine-translation system explain themselves."""
    explanations = []
    for metric in summary.metrics:
        task_name, _, name = metric.rpartition("/")
        task = summary.tasks.get(task_name)  # None in an ablation, which knows only the names of its metrics
        if name == "mean" or (task and name == task.main):
            main_score = task_tables.name_measure(task.main) if task else "the task's main score"
            meaning = f"{main_score}, averaged over languages"
        elif name in _METRIC_MEANINGS:
            meaning = _METRIC_MEANINGS[name]
        else:
            continue
        if statistics.is_lower_better(metric):
            meaning += "; lower is better"
        explanations.append(Fact(metric, meaning))
    return explanations


def _explain_summary(summary: Summary) -> str:
    """Explain the arrows, deviations and empty cells of the summary table."""
    text = "↑ higher is better, ↓ lower is better."
    is_suite = bool(summary.tasks)
    variants = summary.variants.values()
    has_several_seeds = any(statistic.n > 1 for variant in variants for statistic in variant.metrics.values())
    if has_several_seeds:
        text += " Mean ± sample standard deviation over seeds."
    if has_several_seeds and is_suite:
        text += (
            " All seeds fine-tune the same pre-trained model, so the deviation does not include the variation between "
            "pre-trainings."
        )
    if not is_suite:
        text += (
            " All variants are trained on the same text with the same vocabulary, and measured on the same held-out "
            "text. A dash means that the variant's objectives do not define the metric, or that no trial has finished."
        )
    return text


def _build_ablation_sections(summary: Summary) -> list[Section]:
    """Return the sections that only an ablation has: differences, costs, and the paper's results."""
    sections = []
    differences = task_tables.tabulate_differences(summary)
    if differences:
        sections.append(Section("Differences between variants", _explain_differences(summary), tables=[differences]))
    question_differences = task_tables.tabulate_question_differences(summary)
    if question_differences:
        sections.append(Section("Differences over the questions", _QUESTIONS_TEXT, tables=[question_differences]))
    costs = task_tables.tabulate_costs(summary)
    if costs:
        sections.append(Section("Cost of the pre-training", _COST_TEXT, tables=[costs]))
    published_ablations = task_tables.tabulate_published_ablations(summary)
    if published_ablations:
        text = f"Means of five runs on other data than ours, so compare only the ranking. {published.SOURCE}."
        sections.append(Section("What the paper reports", text, tables=[published_ablations]))
    return sections


def _explain_differences(summary: Summary) -> str:
    """Explain the table of differences from the first variant."""
    comparisons = len(summary.variants) - 1
    correction = f" with Bonferroni's correction for {comparisons} comparisons" if comparisons > 1 else ""
    return (
        f"Each difference is a variant's metric minus that of {summary.model} with the same seed. The table "
        f"shows the mean ± sample standard deviation, and the {statistics.INTERVAL} of the mean (Student's "
        f"t{correction}). Differences of percentages are in percentage points. An interval without 0 shows a "
        "difference. An interval with 0 does not show that the variants are equal."
    )


def _build_task_section(name: str, task: TaskSummary, model_under_test: str, colours: Mapping[str, str]) -> Section:
    """Build a task's section: its scores, its figures and its protocol."""
    title = task_tables.get_task_title(name)
    text = task.description
    if statistics.is_share(f"{task.kind}/{task.main}"):
        text += " In percent."
    if task.table != "none":
        text += " Compare published rows with ours only as far as the protocols agree."
    if not task.models:
        return Section(title, text, problems=[*task.notes, "No trial has finished."], facts=task.protocol)
    score_tables = task_tables.tabulate_task(name, task, model_under_test)
    layer_table = task_tables.tabulate_layers(name, task)
    if layer_table:
        score_tables.insert(0, layer_table)
    grid_table = task_tables.tabulate_grid(task)
    return Section(
        title,
        text,
        problems=task.notes,
        tables=score_tables,
        drawings={
            f"{name}_by_layer": partial(figures.draw_layers, name, task, colours),
            name: partial(figures.draw_languages, name, task, colours),
        },
        facts=task.protocol,
        folded={"Development scores by grid point": grid_table} if grid_table else {},
    )


# ---------------------------------------------------------------- files


def write_files(output: Path, files: Mapping[str, str | bytes]) -> None:
    """Write files into a directory. `files` maps relative paths to contents."""
    for relative_path, content in files.items():
        path = output / relative_path
        path.parent.mkdir(parents=True, exist_ok=True)
        manifests.write_atomically(path, content)


def to_json(content: Mapping[str, Any]) -> str:
    """Format the content of a file as indented JSON."""
    return json.dumps(content, indent=1, ensure_ascii=False) + "\n"


@cache
def _load_templates() -> jinja2.Environment:
    """Load the page templates, with the filters and functions that they use."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent / "templates"),
        # Escape only HTML: `tables.to_markdown` escapes Markdown.
        autoescape=jinja2.select_autoescape(["html.j2"], default_for_string=False),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "percent": tables.format_percent,
        "count": tables.format_count,
        "short": tables.format_figure,
    }
    environment.globals |= {
        "format_cell": tables.format_cell,
        "format_interval": tables.format_interval,
        "list_sources": tables.list_sources,
        "to_markdown": tables.to_markdown,
        "list_first": list_first,
        "describe_origin": describe_origin,
        "isinstance": isinstance,  # distinguishes folded text from folded tables
        "str": str,
    }
    return environment


def render(template: str, **context: Any) -> str:
    """Fill a template with the values of `context`."""
    return _load_templates().get_template(f"{template}.j2").render(**context).strip() + "\n"


def list_first(names: Sequence[str]) -> str:
    """List up to `MAX_NAMES` names, and count the remaining names: `a, b and 3 more`."""
    text = ", ".join(names[:MAX_NAMES])
    if len(names) > MAX_NAMES:
        text += f" and {len(names) - MAX_NAMES} more"
    return text
