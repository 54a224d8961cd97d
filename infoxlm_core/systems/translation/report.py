"""Evaluate translators and write their page: BLEU beside XLM's results, intervals, curves and examples."""

from collections.abc import Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.figure import Figure
from sacrebleu.significance import PairedTest

from infoxlm_core import manifests
from infoxlm_core.results import evidence, figures, page, published
from infoxlm_core.results.page import Section
from infoxlm_core.results.summaries.ablation import summarise_metrics
from infoxlm_core.results.summaries.suite import Summary
from infoxlm_core.results.tables import SENTENCE, Cell, Column, Line, PageTable, format_figure
from infoxlm_core.results.trials import Trial
from infoxlm_core.systems.translation import evaluation
from infoxlm_core.systems.translation.decoding import TextTranslator, create_bleu
from infoxlm_core.systems.translation.evaluation import METRIC, HeldOutPairs
from infoxlm_core.training import tracker

RESAMPLES = 1_000  # bootstrap samples; sacreBLEU's default
MAX_EXAMPLES = 8  # example sentences per direction

Scores = Mapping[str, Any]
"""The content of a translator's scores.json."""


def evaluate(translator: Path, corpus: Path, validation_pairs: int, name: str, output: Path) -> dict[str, float]:
    """Evaluate a translator. Write scores.json, items.parquet and the page `report`, and return the metrics.

    Args:
        translator: directory of the translator.
        corpus: a prepared corpus with held-out pairs of the two languages.
        validation_pairs: number of leading held-out pairs to skip, because validation used them to choose the weights.
        name: display name of the translator.
        output: directory for the files.
    """
    text_translator = TextTranslator.load(translator)
    pairs = HeldOutPairs.read(corpus, text_translator.pair).skip(validation_pairs)
    results = pairs.translate(text_translator)
    tables = [evaluation.score_sentences(direction, result) for direction, result in results.items()]
    outcomes = pd.concat(tables)
    evidence.write(output / evidence.FILE, {"translator": outcomes})
    scores = {
        "model": "translator",
        "pivot": text_translator.pair[0],
        "test_set": manifests.digest(pairs.texts),
        "chrf": outcomes["right"].mean(),  # for translations, this column has each sentence's chrF
        "curve": evaluation.read_bleu_curves(translator / tracker.METRICS),
        "directions": {direction: asdict(result) for direction, result in results.items()},
    }
    metrics = evaluation.name_metrics(scores)
    page.write_files(output, {"scores.json": page.to_json(scores)})
    summary = summarise_metrics(name, [(Trial(name, name, 1), metrics)])
    write_page(output, "report", summary, {name: scores})
    return metrics


def write_page(output: Path, name: str, summary: Summary, scores_by_variant: Mapping[str, Scores]) -> None:
    """Write a page about one or more translators: NAME.html, NAME.md, NAME.json, figures/ and tables/.

    Args:
        output: the directory.
        name: file name of the page.
        summary: BLEU of every variant over its seeds.
        scores_by_variant: first-seed scores of each finished variant. The first variant is the baseline for p-values.
    """
    sections = [*page.build_sections(summary), _compare_with_paper(summary)]
    directions = [direction for scores in scores_by_variant.values() for direction in scores["directions"]]
    for direction in dict.fromkeys(directions):  # once, although several variants have the same direction
        curves = {variant: scores["curve"].get(direction, []) for variant, scores in scores_by_variant.items()}
        drawings = {f"bleu-{direction}": partial(_draw_curves, direction, curves)}
        results = {variant: scores["directions"][direction] for variant, scores in scores_by_variant.items()}
        tables = [_tabulate_intervals(direction, results), _tabulate_examples(direction, results)]
        sections.append(Section(direction, _DIRECTION_TEXT, tables=tables, drawings=drawings))
    page.write_page(output, name, summary, sections)
    page.write_files(output, {f"{name}.json": page.to_json(summary.to_dict())})


_DIRECTION_TEXT = (
    f"First seed. BLEU with the 95 % interval of sacreBLEU's paired bootstrap over sentences ({RESAMPLES:,} samples), "
    "and the probability that a difference to the first row is due to the choice of sentences. The curve is BLEU on "
    "the validation pairs by optimizer step."
)


def _compare_with_paper(summary: Summary) -> Section:
    """Build the section with our rows of BLEU, followed by the rows of XLM's paper. Missing results are empty cells."""
    paper = published.translation()
    prefix = f"{METRIC}/"
    our_directions = [metric.removeprefix(prefix) for metric in summary.metrics if metric.startswith(prefix)]
    directions = list(dict.fromkeys([*our_directions, *paper.columns]))  # the paper's table may share our directions
    our_lines = []
    for variant, result in summary.variants.items():
        cells = tuple(result.metrics.get(prefix + direction, "") for direction in directions)
        our_lines.append(Line(variant, cells, seeds=len(result.seeds)))
    paper_lines = []
    for row in paper.rows:
        scores: list[Cell] = [row.cells.get(direction, "") for direction in directions]
        paper_lines.append(Line(row.model, tuple(scores), source=row.source))
    columns = tuple(Column(direction, format_figure) for direction in directions)
    table = PageTable("initialisations", "", columns, tuple(our_lines), tuple(paper_lines), head="initialisation")
    text = (
        "BLEU by the initial weights of the encoder and the decoder. XLM's rows are unsupervised, trained on millions "
        "of sentences with models of 6 layers × 1024: compare only the ranking."
    )
    return Section("XLM's table", text, tables=[table])


def _tabulate_intervals(direction: str, results: Mapping[str, Mapping[str, Any]]) -> PageTable:
    """Tabulate each variant's BLEU, bootstrap interval, and p-value against the first variant."""
    baseline = next(iter(results.values()))
    lines = []
    if len(results) == 1:  # the paired test needs two variants
        for variant, result in results.items():
            lines.append(Line(variant, (result["bleu"], "", "")))
    else:
        for variant, score in zip(results, _compare_with_baseline(direction, results), strict=True):
            interval = f"{score.mean - score.ci:.1f} … {score.mean + score.ci:.1f}"
            p_value = "" if score.p_value is None else f"{score.p_value:.3f}"
            lines.append(Line(variant, (score.score, interval, p_value)))
    columns = (Column("BLEU", format_figure), Column("95 % interval"), Column("p"))
    notes = (f"{len(baseline['references'])} sentences, {baseline['signature']}",)
    return PageTable(f"bleu-{direction}", "", columns, tuple(lines), notes=notes, head="initialisation")


def _compare_with_baseline(direction: str, results: Mapping[str, Mapping[str, Any]]) -> list[Any]:
    """Run sacreBLEU's paired bootstrap, with the first variant as the baseline. Return one result per variant."""
    _, target_language = direction.split("-")
    references = next(iter(results.values()))["references"]
    translations = [(variant, result["translations"]) for variant, result in results.items()]
    metrics = {"BLEU": create_bleu(target_language)}
    test = PairedTest(translations, metrics, [references], test_type="bs", n_samples=RESAMPLES)
    _, scores_by_metric = test()
    return scores_by_metric["BLEU"]


def _tabulate_examples(direction: str, results: Mapping[str, Mapping[str, Any]]) -> PageTable:
    """Tabulate evenly spaced test sentences with their references and every variant's translation."""
    baseline = next(iter(results.values()))  # all variants translate the same sentences
    sentence_count = len(baseline["sources"])
    spacing = max(1, sentence_count // MAX_EXAMPLES)
    lines = []
    for row in range(0, sentence_count, spacing)[:MAX_EXAMPLES]:
        translations = [result["translations"][row] for result in results.values()]
        lines.append(Line(str(row + 1), (baseline["sources"][row], baseline["references"][row], *translations)))
    columns = tuple(Column(name, role=SENTENCE) for name in ("source", "reference", *results))
    return PageTable(f"examples-{direction}", "", columns, tuple(lines), head="sentence")


def _draw_curves(direction: str, curves: Mapping[str, list[tuple[int, float]]]) -> Figure | None:
    """Plot every variant's validation BLEU by optimizer step. Return None without validations."""
    if not any(curves.values()):
        return None
    figure = Figure(figsize=(5.6, 3.4), layout="constrained")
    axes = figure.subplots()
    for variant, colour in figures.assign_colours(curves).items():
        steps = [step for step, _ in curves[variant]]
        scores = [score for _, score in curves[variant]]
        axes.plot(steps, scores, color=colour, label=variant)
    axes.set(xlabel="optimizer step", ylabel=f"BLEU {direction}")
    axes.legend()
    return figure
