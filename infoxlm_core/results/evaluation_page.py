"""The page and the model card of an evaluation: one model and its floors, on held-out text."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from infoxlm_core.results import figures, pages
from infoxlm_core.results.evaluation import Evaluation
from infoxlm_core.results.pages import Page, Section, Tile
from infoxlm_core.results.tables import POOLING_TITLES, Column, Line, Table, count, percent, short
from infoxlm_core.tasks.scores import Scores
from infoxlm_core.tasks.task import Fact

Show = Callable[[Any], str]


def write(output: Path, evaluation: Evaluation) -> None:
    """Write scores.json, report.html, model_card.md and figures/ into a directory."""
    corpus, images = tabulate_corpus(evaluation.corpus), pages.draw(output, draw(evaluation))
    files = {
        "report.html": pages.render("page.html", page=lay_out(evaluation, corpus), figures=images),
        "model_card.md": pages.render("model_card.md", scores=evaluation, corpus=corpus),
        "scores.json": pages.dump(evaluation.to_dict()),
    }
    pages.write(output, files)


def draw(evaluation: Evaluation) -> dict[str, Any]:
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


def lay_out(evaluation: Evaluation, corpus: Mapping[str, Any] | None) -> Page:
    """The parts of the page; what was not measured has none."""
    model, pivot, encoder = evaluation.model, evaluation.pivot, evaluation.models[evaluation.model].encoder
    retrieval, perplexity, labelled = map(evaluation.of, ("retrieval", "perplexity", "classification"))
    tiles, sections = _tile_retrieval(evaluation), [_show_retrieval(evaluation)]
    if perplexity:
        tiles.append(_make_tile(model, "Perplexity", perplexity, "perplexity", short))
        sections.append(_show_perplexity(perplexity))
    if labelled:
        gaps = {name: percent((one.transfer_gap or {}).get("accuracy")) for name, one in labelled.items()}
        tiles.append(_make_tile(model, "Classification", labelled, "accuracy"))
        tiles.append(Tile("Transfer gap", gaps.pop(model, "–"), [f"{name} {gap}" for name, gap in gaps.items()]))
        sections.append(_show_classification(labelled, pivot))
    if any(name.startswith("loss/") for name in evaluation.models[model].curves):
        said = "Mean losses, and how often the translation is found among the queue's negatives, over the steps."
        sections.append(Section("Training", figures={"training": said}))
    if corpus:
        sections.append(_show_corpus(corpus))
    sections.append(Section("Settings", facts=[Fact(name, str(value)) for name, value in evaluation.settings.items()]))
    size = f"{encoder['layers']} layers × {encoder['hidden']}, {encoder['vocabulary']:,} tokens"
    languages = f"{pivot} ↔ {' '.join(retrieval[model].languages)}"
    return Page(
        title=f"{model} · evaluation",
        heading=f"{model}: how well it carries meaning across languages",
        soft=[f"{encoder['type']}, {size}, {encoder['parameters']:,} parameters · {languages}"],
        lead=_sum_up(model, retrieval[model], *tiles[:2]) + _warn(evaluation),
        sections=sections,
        tiles=tiles,
        end="All numbers, those of every layer too, are in scores.json; how to load the model is in model_card.md.",
    )


def _warn(evaluation: Evaluation) -> str:
    """One sentence on models that may have been trained on what they are asked; else nothing."""
    names = [name for name, one in evaluation.models.items() if one.not_reserved]
    if not names:
        return ""
    return f" These sentences were not taken out of the training text of {', '.join(names)}: compare with care."


def _in_percent(share: float | None) -> str:
    return f"{percent(share)} %"


def _make_tile(model: str, title: str, scores: Mapping[str, Scores], metric: str, show: Show = _in_percent) -> Tile:
    """The mean of the model under test, below it those of its floors."""
    shown = {name: show(one.mean[metric]) for name, one in scores.items()}
    return Tile(title, shown.pop(model, "–"), [f"{name} {value}" for name, value in shown.items()])


def _tile_retrieval(evaluation: Evaluation) -> list[Tile]:
    model, retrieval = evaluation.model, evaluation.of("retrieval")
    own = evaluation.models[model]
    best, contrast = (own.tasks["retrieval"].details[name] for name in ("best", "contrast"))
    fixed = f" · contrast layer {contrast['layer']}: {percent(contrast['mean'])} %" if contrast else ""
    return [
        _make_tile(model, "Retrieval", retrieval, "mean"),
        _make_tile(model, "No shared token", retrieval, "no_overlap"),
        Tile("Best layer", f"{best['layer']} of {own.encoder['layers']}", [best["pooling"] + fixed]),
    ]


def _sum_up(model: str, found: Scores, whole: Tile, unshared: Tile) -> str:
    best, guessing = found.details["best"], f"guessing {100 * found.details['chance']:.2f} %"
    vector = "[CLS] vector" if best["pooling"] == "cls" else "mean of tokens"
    lead = (
        f"Given a held-out sentence, {model} finds its translation as the nearest vector in {whole.value} of the cases:"
        f" mean of both directions and {len(found.languages)} languages, layer {best['layer']}, {vector}"
        f" ({', '.join([*whole.below, guessing])})."
    )
    if found.mean["no_overlap"] is not None:
        floors = f" ({', '.join(unshared.below)})" if unshared.below else ""
        lead += f" On pairs that share no token, where nothing can be copied, it finds {unshared.value}{floors}."
    return lead


def _show_retrieval(evaluation: Evaluation) -> Section:
    retrieval, pivot = evaluation.of("retrieval"), evaluation.pivot
    kinds = {"all pairs": "drawn", "that share no token": "no_overlap"}
    pairs = {said: {code: row[kind] for code, row in evaluation.pairs.items()} for said, kind in kinds.items()}
    directions = {"both directions": "mean", f"xx → {pivot}": "to_pivot", f"{pivot} → xx": "from_pivot"}
    return Section(
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
            tabulate_layers(retrieval),
            tabulate_scores("By language", retrieval, directions | {"no shared token": "no_overlap"}),
            tabulate_counts("pairs", list(retrieval[evaluation.model].languages), pairs),
        ],
    )


def _show_perplexity(scores: Mapping[str, Scores]) -> Section:
    return Section(
        "Perplexity",
        "How many tokens a model wavers between when it fills a gap in a held-out sentence. Compare only models"
        " that share a tokenizer: they fill the same gaps.",
        figures={"perplexity": ""},
        tables=[tabulate_scores("By language", scores, {"": "perplexity"}, short)],
    )


def _show_classification(scores: Mapping[str, Scores], pivot: str) -> Section:
    details = next(iter(scores.values())).details
    return Section(
        "Classification",
        f"Fine-tuned on some languages, tested on all ({details['rows']:,} test rows,"
        f" {len(details['labels'])} labels); accuracy in percent. The transfer gap is the score of {pivot}"
        " minus the mean of the others, in points.",
        figures={"classification": "The dotted line always gives the most frequent label."},
        tables=[tabulate_scores("By language", scores, {"": "accuracy"})],
    )


def _show_corpus(corpus: Mapping[str, Any]) -> Section:
    kinds, rows = list(corpus["by_kind"]), ["read", "kept", *corpus["reasons"]]
    lines = {name.replace("_", " "): {kind: corpus["by_kind"][kind][name] for kind in kinds} for name in rows}
    detail = {f"{name} ({kind})": counts for (name, kind), counts in corpus["by_corpus"].items()}
    return Section(
        "Text",
        "What cleaning made of the corpus: every line that was read is kept, or dropped under one reason.",
        tables=[tabulate_counts("lines", kinds, lines), tabulate_counts("kept", kinds, corpus["kept"])],
        folded={"By corpus": tabulate_counts("corpus", rows, detail)},
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


def tabulate_scores(
    title: str,
    scores: Mapping[str, Scores],
    metrics: Mapping[str, str],
    show: Callable[[float, float], str] = percent,
) -> Table:
    """Models, the one under test first, by language; `metrics` are words -> metric."""
    first = next(iter(scores))
    codes = list(scores[first].languages)
    lines = tuple(
        Line(
            model,
            (one.mean[metric], *(one.languages.get(code, {}).get(metric) for code in codes)),
            detail,
            own=model == first,
        )
        for detail, metric in metrics.items()
        for model, one in scores.items()
    )
    return Table("", title, (Column("mean", show, "sum"), *(Column(code, show) for code in codes)), lines)


def tabulate_layers(scores: Mapping[str, Scores]) -> Table:
    """Retrieval by layer: a row for every model and pooling, the best of each model in colour."""
    depth = max(len(shares) for one in scores.values() for shares in one.details["by_layer"].values())
    lines = []
    for model, one in scores.items():
        best = one.details["best"]
        for pooling, shares in one.details["by_layer"].items():
            cells = (*shares, *[""] * (depth - len(shares)))
            marked = best["layer"] if best["pooling"] == pooling else None
            lines.append(Line(model, cells, POOLING_TITLES.get(pooling, pooling), marked=marked))
    return Table("layers", "By layer", tuple(Column(str(layer)) for layer in range(depth)), tuple(lines))


def tabulate_counts(head: str, columns: Sequence[str], rows: Mapping[str, Mapping[str, float]]) -> Table:
    """Numbers of lines."""
    shown = tuple(Column(name.replace("_", " "), count) for name in columns)
    lines = tuple(Line(name, tuple(row[column] for column in columns)) for name, row in rows.items())
    return Table(head, "", shown, lines, head=head)
