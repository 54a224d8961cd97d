"""What a run is, in Markdown for its tracker's page: model, text, headline figures, where to read on."""

from collections.abc import Iterable, Mapping
from typing import Any

from infoxlm_core.corpora.datasets import Dataset
from infoxlm_core.results.trials import HEADLINES

FILE = "artifact:"
"""Begins the address of a link to a file of the run; the tracker knows where that is."""


def write(scores: Mapping[str, Any], figures: Mapping[str, float], datasets: Iterable[Dataset], folder: str) -> str:
    """Describe an evaluated run.

    Args:
        scores: scores.json of the evaluation.
        figures: its metrics; those of a floor have its name in front.
        datasets: the corpora of its text.
        folder: of the run's files that has the report.
    """
    encoder, corpora = scores["models"][scores["model"]]["encoder"], list(datasets)
    said = [f"**{scores['model']}**"]
    if encoder:
        size = f"{encoder['layers']} layers of {encoder['hidden']}, {encoder['parameters']:,} parameters"
        said[0] += f", {size}, {encoder['vocabulary']:,} pieces of vocabulary."
    for held_out, what in ((False, "Trained on"), (True, "Evaluated on")):
        if named := [one for one in corpora if one.held_out is held_out]:
            languages = sorted({language for one in named for language in one.languages})
            said.append(f"{what} {', '.join(one.name for one in named)}, in {', '.join(languages)}.")
    floors = [name for name in scores["models"] if name != scores["model"]]
    table = [["", scores["model"], *floors], ["---"] * (2 + len(floors))]
    for name in HEADLINES:
        if name in figures:
            of_floors = [figures.get(f"{floor.lower()}/{name}") for floor in floors]
            table.append([name, *("" if value is None else f"{value:.4g}" for value in (figures[name], *of_floors))])
    rows = "\n".join(f"| {' | '.join(row)} |" for row in table)
    links = f"[Report]({FILE}{folder}/report.html) · [model card]({FILE}{folder}/model_card.md)"
    return f"{' '.join(said)}\n\n{links}\n\n{rows}"  # MLflow folds away what stands below a few lines
