"""Write the report and the model card of an evaluation, and describe its run for the tracker."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd

from infoxlm_core.corpora.datasets import Dataset
from infoxlm_core.results import before_after, figures, page
from infoxlm_core.results.figures import SentenceMap
from infoxlm_core.results.page import Section
from infoxlm_core.results.summaries.suite import Summary
from infoxlm_core.results.tables import PageTable, format_percent, tabulate_counts
from infoxlm_core.results.task_tables import describe_vector
from infoxlm_core.results.trials import HEADLINES, LINK
from infoxlm_core.tasks.retrieval.task import FEWEST_UNSHARED
from infoxlm_core.tasks.task import Fact


def write_evaluation_report(
    output: Path, scores: Mapping[str, Any], summary: Summary, first_sections: Sequence[Section] = ()
) -> None:
    """Write an evaluation's report as HTML and Markdown, the model card, scores.json, figures and tables.

    Args:
        output: output directory.
        scores: content of scores.json.
        summary: statistics of the scores.
        first_sections: sections to insert after the summary.
    """
    model = scores["models"][scores["model"]]
    if "merge" in model:
        first_sections = [*first_sections, before_after.build_merge_section(model["merge"])]
    line_counts = count_lines(scores["corpus"])
    summary_section, *task_sections = page.build_sections(summary)
    sections = [summary_section, *first_sections, *task_sections, _build_map_section(scores["models"])]
    sections.append(Section("Test pairs", tables=[_tabulate_pairs(scores["pairs"])]))
    if any(name.startswith("loss/") for name in model["curves"]):
        drawings = {"training": partial(figures.draw_training, model["curves"])}
        sections.append(Section("Training", "Mean losses and accuracies by optimizer step.", drawings=drawings))
    if line_counts:
        sections.append(_build_cleaning_section(line_counts, scores["corpus"].get("warnings", ())))
    settings = [Fact(name, str(value)) for name, value in scores["settings"].items()]
    sections.append(Section("Settings", facts=settings))
    page.write_page(output, "report", summary, sections, _describe_retrieval(scores))
    # The card is published with the model, so it must not contain test sentences.
    card_tables = []
    for section in first_sections:
        card_tables += [table for table in section.tables if not table.has_sentences]
    card = page.render("model_card.md", scores=scores, corpus=line_counts, changes=card_tables)
    page.write_files(output, {"model_card.md": card, "scores.json": page.to_json(scores)})


def describe_encoder(encoder: Mapping[str, Any]) -> str:
    """Describe the type and the size of an encoder. Return "" if `encoder` is empty."""
    if not encoder:
        return ""
    size = f"{encoder['layers']} layers × {encoder['hidden']}, {encoder['vocabulary']:,} tokens"
    return f"{encoder['type']}, {size}, {encoder['parameters']:,} parameters"


def _describe_retrieval(scores: Mapping[str, Any]) -> str:
    """Write the report's first paragraph: how often the model finds a translation.

    The paragraph also names all models that may have been trained on the test.
    """
    model = scores["model"]
    retrieval = scores["models"][model]["tasks"]["retrieval"]
    served = retrieval["served"]  # the vector that users get
    best = retrieval["best"]
    mean = retrieval["mean"]
    text = (
        f"For {format_percent(mean['mean'])} % of the held-out sentences, {model} finds the translation as the nearest"
        f" vector (chance: {100 * retrieval['chance']:.2f} %). This is the mean of both directions and"
        f" {len(retrieval['languages'])} languages, with the vectors that users get ({describe_vector(served)})."
        f" The best layer and pooling on these pairs ({describe_vector(best)}) reach {format_percent(best['mean'])} %."
    )
    if mean["no_overlap"] is not None:
        share = format_percent(mean["no_overlap"])
        text += f" Among the pairs that share no token, it finds {share} %."
    if "centred" in retrieval:
        share = format_percent(retrieval["centred"]["mean"])
        text += f" After each language's mean vector is subtracted, it finds {share} % of all pairs."
    suspect_models = [name for name, result in scores["models"].items() if result.get("not_reserved")]
    if suspect_models:
        names = ", ".join(suspect_models)
        text += f" These sentences were not removed from the training text of {names}: compare with care."
    return text


def _build_map_section(models: Mapping[str, Any]) -> Section:
    """Build the section with a map of sentence vectors per encoder. The model under test comes last."""
    maps: dict[str, SentenceMap] = {}
    for name, result in reversed(list(models.items())):
        if "retrieval" in result["tasks"]:
            maps[name] = result["tasks"]["retrieval"]["map"]
    first_map = next(iter(maps.values()))
    pivot, language, *_ = first_map  # lines join the first two languages of a map
    text = (
        "Each dot is the vector of a held-out sentence, projected onto the plane in which the model's vectors differ "
        f"most. Lines join sentences in {pivot} and their translations into {language}. If the vectors are good, "
        "the lines are short and no group of dots has a single colour."
    )
    return Section("Map of the sentences", text, drawings={"map": partial(figures.draw_map, maps)})


def _tabulate_pairs(pairs: Mapping[str, Mapping[str, int]]) -> PageTable:
    """Tabulate the number of held-out pairs by language. A note lists the languages with too few pairs for a score."""
    # `drawn`: the held-out pairs that were drawn as questions
    fields = {"held out": "held_out", "drawn": "drawn", "that share no token": "no_overlap"}
    rows = {}
    for label, field in fields.items():
        rows[label] = {language: counts[field] for language, counts in pairs.items()}
    note = "“share no token”: no token with a letter or digit occurs on both sides"
    unscored_languages = [language for language, counts in pairs.items() if counts["no_overlap"] < FEWEST_UNSHARED]
    if unscored_languages:
        names = ", ".join(unscored_languages)
        note += f". No score of such pairs for {names}, because they have fewer than {FEWEST_UNSHARED}"
    return replace(tabulate_counts("pairs", list(pairs), rows), notes=(note,))


def count_lines(cleaning_report: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Sum the read, kept and dropped lines of a cleaning report over its files.

    Returns:
        A mapping with the `reasons` for dropping lines, the most frequent first; the sums `by_kind` and `by_corpus`;
        and the `kept` lines by language and kind. None without a report.
    """
    if not cleaning_report or not cleaning_report.get("files"):
        return None
    files = pd.DataFrame(cleaning_report["files"])
    dropped = pd.DataFrame([file["dropped"] for file in cleaning_report["files"]])  # one column per reason
    dropped = dropped.fillna(0).astype(int)
    reasons = list(dropped.sum().sort_values(ascending=False).index)
    counts = pd.concat([files, dropped[reasons]], axis=1)
    columns = ["read", "kept", *reasons]
    return {
        "reasons": reasons,
        "by_kind": counts.groupby("kind")[columns].sum().to_dict("index"),
        "by_corpus": counts.groupby(["corpus", "kind"])[columns].sum().to_dict("index"),
        "kept": counts.groupby(["language", "kind"])["kept"].sum().unstack(fill_value=0).to_dict("index"),
    }


def _build_cleaning_section(line_counts: Mapping[str, Any], warnings: Sequence[str]) -> Section:
    """Build the section about cleaning the training text, from the result of `count_lines`."""
    kinds = list(line_counts["by_kind"])
    columns = ["read", "kept", *line_counts["reasons"]]
    rows = {}
    for column in columns:
        rows[column.replace("_", " ")] = {kind: line_counts["by_kind"][kind][column] for kind in kinds}
    rows_by_corpus = {f"{name} ({kind})": counts for (name, kind), counts in line_counts["by_corpus"].items()}
    return Section(
        "Training text",
        "Lines read, kept, and dropped by cleaning. Each dropped line is counted under one reason.",
        problems=warnings,
        tables=[tabulate_counts("lines", kinds, rows), tabulate_counts("kept", kinds, line_counts["kept"])],
        folded={"By corpus": tabulate_counts("corpus", columns, rows_by_corpus)},
    )


def describe_run(
    scores: Mapping[str, Any], metrics: Mapping[str, float], datasets: Iterable[Dataset], directory: str
) -> str:
    """Describe an evaluated run for MLflow: the model, its text, links to the report, and headline metrics.

    Args:
        scores: content of scores.json.
        metrics: metrics of the run, including costs. Metrics of other models start with the model's name.
        datasets: corpora on which the model was trained and evaluated.
        directory: directory of the report among the run's files.
    """
    model = scores["model"]
    encoder = scores["models"][model]["encoder"]
    sentences = [f"**{model}**"]
    if encoder:
        size = f"{encoder['layers']} layers of {encoder['hidden']}, {encoder['parameters']:,} parameters"
        sentences = [f"**{model}**, {size}, {encoder['vocabulary']:,} pieces of vocabulary."]
    corpora = list(datasets)  # read twice
    sentences += _describe_corpora("Trained on", [corpus for corpus in corpora if not corpus.held_out])
    sentences += _describe_corpora("Evaluated on", [corpus for corpus in corpora if corpus.held_out])
    links = f"[Report]({LINK}{directory}/report.html) · [model card]({LINK}{directory}/model_card.md)"
    other_models = [name for name in scores["models"] if name != model]
    table = _tabulate_headlines(model, other_models, metrics)
    # MLflow shows only the first lines of a description, so the links come before the table.
    return f"{' '.join(sentences)}\n\n{links}\n\n{table}"


def _describe_corpora(verb: str, corpora: Sequence[Dataset]) -> list[str]:
    """Name corpora and their languages in a sentence, such as `Trained on mail, in de, en.`; none without corpora."""
    if not corpora:
        return []
    names = ", ".join(corpus.name for corpus in corpora)
    languages = sorted({language for corpus in corpora for language in corpus.languages})
    return [f"{verb} {names}, in {', '.join(languages)}."]


def _tabulate_headlines(model: str, other_models: Sequence[str], metrics: Mapping[str, float]) -> str:
    """Return a Markdown table of headline metrics and costs, one column per model."""
    rows = [["", model, *other_models], ["---"] * (2 + len(other_models))]
    for name in (*HEADLINES, "cost/gpu_hours/all", "cost/cpu_hours/all"):
        if name not in metrics:
            continue
        cells = [name, f"{metrics[name]:.4g}"]
        for other_model in other_models:
            value = metrics.get(f"{other_model.lower()}/{name}")
            cells.append("" if value is None else f"{value:.4g}")
        rows.append(cells)
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def remove_metadata(card: str) -> str:
    """Remove the YAML header of a model card, because only the Hugging Face hub reads it."""
    return re.sub(r"\A---\n.*?\n---\n", "", card, flags=re.DOTALL)


def select_headlines(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the headline metrics under names such as `headline/retrieval_served`.

    MLflow groups metrics by the part before the slash, so the headline metrics form their own group.
    """
    return {f"headline/{name.replace('/', '_')}": metrics[name] for name in HEADLINES if name in metrics}
