"""Results -> files that people read: a page that needs no network, Markdown, a model card, tables, figures, JSON.

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
import pandas as pd

from infoxlm_core import manifests
from infoxlm_core.results import figures, published, tables, trials
from infoxlm_core.results.evaluation import Evaluation
from infoxlm_core.results.summary import Comparison, Summary
from infoxlm_core.results.tables import Table, percent, short, title_of
from infoxlm_core.tasks import TASKS
from infoxlm_core.tasks.task import Fact, Scores

SHOWN = 12
"""Unfinished trials that are named on a page."""


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
    caution: str = ""
    """What forbids a comparison, in a box."""

    problems: Sequence[str] = ()
    tables: Sequence[Table] = ()
    figures: Mapping[str, str] = field(default_factory=dict)
    """Name -> what it shows."""

    facts: Sequence[Fact] = ()
    facts_title: str = ""
    """Where they are folded away."""

    folded: Mapping[str, Table | str] = field(default_factory=dict)
    """What only some will read: heading -> table or text. Not in Markdown."""


@dataclass(frozen=True)
class Page:
    """One page."""

    title: str
    heading: str
    soft: Sequence[str]
    """Below the heading, in grey."""

    lead: str
    sections: Sequence[Section]
    tiles: Sequence[Tile] = ()
    unfinished: Sequence[str] = ()
    end: str = ""
    brief: str = ""
    """What Markdown says in place of `lead`."""


def write_evaluation(output: Path, evaluation: Evaluation) -> None:
    """Write scores.json, report.html, model_card.md and figures/ into a directory."""
    corpus, images = tabulate_corpus(evaluation.corpus), _draw(output, figures_of_evaluation(evaluation))
    files = {
        "report.html": _render("page.html", page=of_evaluation(evaluation, corpus), figures=images),
        "model_card.md": _render("model_card.md", scores=evaluation, corpus=corpus),
        "scores.json": _dump(evaluation.to_dict()),
    }
    _write(output, files)


def write_suite(output: Path, summary: Summary) -> None:
    """Write suite.html, suite.md, suite.json, model_card.md, tables/ and figures/ into a directory."""
    built = tables.of_suite(summary)
    page, images = of_suite(summary, built), _draw(output, figures.of_suite(summary))
    files = {
        "suite.html": _render("page.html", page=page, figures=images),
        "suite.md": _render("page.md", page=page),
        "model_card.md": _render("suite_card.md", summary=summary, tables=built),
        "suite.json": _dump(summary.to_dict()),
    }
    files |= {f"tables/{table.name}.csv": tables.to_csv(table) for found in built.values() for table in found}
    _write(output, files)


def write_comparison(output: Path, comparison: Comparison) -> None:
    """Write comparison.json, comparison.md, comparison.html and comparison.png into a directory."""
    drawn = figures.render({"comparison": lambda: figures.draw_comparison(comparison)})["comparison"]
    images = {"comparison": _inline(drawn["svg"])} if comparison.metrics else {}
    files: dict[str, str | bytes] = {
        "comparison.html": _render("page.html", page=of_comparison(comparison), figures=images),
        "comparison.md": comparison_as_markdown(comparison),
        "comparison.json": _dump(comparison.to_dict()),
        "comparison.png": drawn["png"],
    }
    _write(output, files)


def comparison_as_markdown(comparison: Comparison) -> str:
    """The table of an ablation, for a console too."""
    return _render("page.md", page=of_comparison(comparison))


def _draw(output: Path, drawn: Mapping[str, Any]) -> dict[str, str]:
    """Write figures/; return each as what an <img> takes."""
    rendered = figures.render(drawn)
    _write(output, {f"figures/{n}.{kind}": data for n, kinds in rendered.items() for kind, data in kinds.items()})
    return {name: _inline(kinds["svg"]) for name, kinds in rendered.items()}


def _inline(svg: bytes) -> str:
    return "data:image/svg+xml;base64," + base64.b64encode(svg).decode()


def _write(output: Path, files: Mapping[str, str | bytes]) -> None:
    for name, content in files.items():
        (output / name).parent.mkdir(parents=True, exist_ok=True)
        manifests.write_atomically(output / name, content)


def _dump(plain: Mapping[str, Any]) -> str:
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


def _render(name: str, **facts: Any) -> str:
    return _templates().get_template(f"{name}.j2").render(**facts).strip() + "\n"


def name_some(names: Sequence[str]) -> str:
    """The first of them; all are in the JSON beside the page."""
    return ", ".join(names[:SHOWN]) + f" and {len(names) - SHOWN} more" * (len(names) > SHOWN)


# A suite


def of_suite(summary: Summary, built: Mapping[str, list[Table]]) -> Page:
    """Encoders x tasks beside the published numbers."""
    peers = [name for name in summary.models if name != summary.model]
    tiles, sections = [], []
    for name, found in summary.tasks.items():
        row, task = found.models.get(summary.model), TASKS[found.kind]
        gap = row.transfer_gap[found.main].mean if row and row.transfer_gap else None
        below = [title_of(found.main) + (f", gap {percent(gap)}" if gap is not None else "")]
        means = {model: f"{percent(one.mean[found.main].mean)} %" for model, one in found.models.items()}
        below += [f"{peer} {means[peer]}" for peer in peers if peer in means]
        tiles.append(Tile(name, means.get(summary.model, "–"), below))
        languages = ", ".join(found.settings.get("train_languages", ()))
        trained = f" Trained on {languages}." if languages else ""
        grid = tables.of_grid(found, trials.describe)
        section = Section(
            name,
            (task.__doc__ or "").splitlines()[0] + " In percent." + trained,
            caution=found.warning,
            problems=[*found.notes, *([] if found.models else ["Nothing is finished."])],
            tables=built.get(name, ()),
            figures={name: ""},
            facts=found.protocol,
            facts_title="How it was measured",
            folded={"What the grid was chosen by": grid} if grid else {},
        )
        sections.append(section)
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
        tiles=tiles,
        unfinished=summary.unfinished,
        end="All numbers of this page, seed by seed, are in suite.json, its tables as CSV in tables/.",
        brief=(
            "Percent; mean ± sample deviation over seeds. #M: checkpoints for all languages (N: one for each), and what"
            " chose them."
        ),
    )


# An ablation


def of_comparison(comparison: Comparison) -> Page:
    """Variants over their seeds."""
    sections = [
        Section(
            "Scores",
            problems=() if comparison.metrics else ("Nothing is finished.",),
            tables=[tables.of_comparison(comparison)],
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
    if theirs := tables.of_published_ablations(comparison):
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


# An evaluation


def figures_of_evaluation(evaluation: Evaluation) -> dict[str, Any]:
    """What is drawn of an evaluation, by name."""
    colours = figures.colour(evaluation.models)
    retrieval, perplexity, labelled = map(evaluation.of, ("retrieval", "perplexity", "classification"))

    def by_layer() -> Any:
        depths = {model: one.details["by_layer"].items() for model, one in retrieval.items()}
        curves = [(model, pooling, shares) for model, found in depths.items() for pooling, shares in found]
        return figures.draw_layers({"Retrieval by layer": curves}, colours)

    def by_language(scores: Mapping[str, Scores], parts: Mapping[str, str], line: str, detail: str) -> Any:
        first = next(iter(scores.values()))
        codes = list(first.languages)
        panels = {title: figures.cells(scores, metric, codes) for title, metric in parts.items()}
        return figures.draw_bars(panels, codes, colours, reference=(line, first.details[detail]))

    pairs = {"All pairs": "mean", "Pairs that share no token": "no_overlap"}
    accuracy = {"Classification accuracy by language": "accuracy"}
    drawn = {
        "retrieval_by_layer": by_layer,
        "retrieval_by_language": lambda: by_language(retrieval, pairs, "chance", "chance"),
        "training": lambda: figures.draw_training(evaluation.models[evaluation.model].curves),
    }
    if perplexity:
        title = "Perplexity (lower is better)"
        drawn["perplexity"] = lambda: figures.draw_points(title, perplexity, "perplexity", colours)
    if labelled:
        drawn["classification"] = lambda: by_language(labelled, accuracy, "most frequent label", "majority")
    return drawn


def of_evaluation(evaluation: Evaluation, corpus: Mapping[str, Any] | None) -> Page:
    """One model and its floors, on held-out text."""
    model, pivot, encoder = evaluation.model, evaluation.pivot, evaluation.models[evaluation.model].encoder
    retrieval, perplexity, labelled = map(evaluation.of, ("retrieval", "perplexity", "classification"))
    found = retrieval[model]
    best, contrast = found.details["best"], found.details["contrast"]

    def tile(title: str, scores: Mapping[str, Scores], metric: str, show: Any = lambda v: f"{percent(v)} %") -> Tile:
        shown = {name: show(one.mean[metric]) for name, one in scores.items()}
        return Tile(title, shown.pop(model, "–"), [f"{name} {value}" for name, value in shown.items()])

    whole, unshared = tile("Retrieval", retrieval, "mean"), tile("No shared token", retrieval, "no_overlap")
    fixed = f" · contrast layer {contrast['layer']}: {percent(contrast['mean'])} %" if contrast else ""
    tiles = [whole, unshared, Tile("Best layer", f"{best['layer']} of {encoder['layers']}", [best["pooling"] + fixed])]
    guessing = f"guessing {100 * found.details['chance']:.2f} %"
    vector = "[CLS] vector" if best["pooling"] == "cls" else "mean of tokens"
    lead = (
        f"Given a held-out sentence, {model} finds its translation as the nearest vector in {whole.value} of the cases:"
        f" mean of both directions and {len(found.languages)} languages, layer {best['layer']}, {vector}"
        f" ({', '.join([*whole.below, guessing])})."
    )
    if found.mean["no_overlap"] is not None:
        floors = f" ({', '.join(unshared.below)})" if unshared.below else ""
        lead += f" On pairs that share no token, where nothing can be copied, it finds {unshared.value}{floors}."
    directions = {"both directions": "mean", f"xx → {pivot}": "to_pivot", f"{pivot} → xx": "from_pivot"}
    sections = [
        Section(
            "Retrieval",
            "Each query's answer is the candidate with the highest cosine, out of all drawn pairs of the language."
            " Every model is shown at its own best layer and pooling, chosen on these same pairs by the mean over"
            " languages and directions; the contrast layer was fixed before training. In percent.",
            figures={
                "retrieval_by_layer": "Top-1 accuracy by layer and pooling, mean over languages and directions.",
                "retrieval_by_language": "Top-1 accuracy, mean of both directions, at each model's best layer. On the"
                " right only some queries are asked, but the candidates are still all drawn pairs.",
            },
            tables=[
                tables.of_layers(retrieval),
                tables.of_scores("By language", retrieval, directions | {"no shared token": "no_overlap"}),
                tables.of_counts("pairs", list(found.languages), evaluation.count_pairs()),
            ],
        )
    ]
    if perplexity:
        tiles.append(tile("Perplexity", perplexity, "perplexity", short))
        sections.append(
            Section(
                "Perplexity",
                "How many tokens a model wavers between when it fills a gap in a held-out sentence. Compare only models"
                " that share a tokenizer: they fill the same gaps.",
                figures={"perplexity": ""},
                tables=[tables.of_scores("By language", perplexity, {"": "perplexity"}, short)],
            )
        )
    if labelled:
        gaps = {name: percent((one.transfer_gap or {}).get("accuracy")) for name, one in labelled.items()}
        tiles.append(tile("Classification", labelled, "accuracy"))
        tiles.append(Tile("Transfer gap", gaps.pop(model, "–"), [f"{name} {gap}" for name, gap in gaps.items()]))
        details = next(iter(labelled.values())).details
        sections.append(
            Section(
                "Classification",
                f"Fine-tuned on some languages, tested on all ({details['rows']:,} test rows,"
                f" {len(details['labels'])} labels); accuracy in percent. The transfer gap is the score of {pivot}"
                " minus the mean of the others, in points.",
                figures={"classification": "The dotted line always gives the most frequent label."},
                tables=[tables.of_scores("By language", labelled, {"": "accuracy"})],
            )
        )
    if any(name.startswith("loss/") for name in evaluation.models[model].curves):
        said = "Mean losses, and how often the translation is found among the queue's negatives, over the steps."
        sections.append(Section("Training", figures={"training": said}))
    if corpus:
        kinds, rows = list(corpus["by_kind"]), ["read", "kept", *corpus["reasons"]]
        lines = {name.replace("_", " "): {kind: corpus["by_kind"][kind][name] for kind in kinds} for name in rows}
        detail = {f"{name} ({kind})": counts for (name, kind), counts in corpus["by_corpus"].items()}
        sections.append(
            Section(
                "Text",
                "What cleaning made of the corpus: every line that was read is kept, or dropped under one reason.",
                tables=[tables.of_counts("lines", kinds, lines), tables.of_counts("kept", kinds, corpus["kept"])],
                folded={"By corpus": tables.of_counts("corpus", rows, detail)},
            )
        )
    sections.append(Section("Settings", facts=[Fact(name, str(value)) for name, value in evaluation.settings.items()]))
    size = f"{encoder['layers']} layers × {encoder['hidden']}, {encoder['vocabulary']:,} tokens"
    languages = f"{pivot} ↔ {' '.join(found.languages)}"
    return Page(
        title=f"{model} · evaluation",
        heading=f"{model}: how well it carries meaning across languages",
        soft=[f"{encoder['type']}, {size}, {encoder['parameters']:,} parameters · {languages}"],
        lead=lead,
        sections=sections,
        tiles=tiles,
        end="All numbers, those of every layer too, are in scores.json; how to load the model is in model_card.md.",
    )


def tabulate_corpus(report: Mapping[str, Any] | None) -> dict[str, Any] | None:
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
