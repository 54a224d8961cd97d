"""Find the translation: for each sentence the most similar candidate (Tatoeba's task).

Similar is the cosine, or the ratio margin: the cosine divided by the mean of the cosines to the nearest neighbours of
both sentences, so that a sentence that is near to everything wins less often (Artetxe and Schwenk 2019, equation 3).

Pure functions of vectors. Two sides are aligned: row i of one translates row i of the other.
"""

from collections.abc import Collection, Sequence
from statistics import fmean
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK = 1024  # queries compared at a time; only memory depends on it
WHOLE = 4096  # sentences whose cosines with as many others are held at once, to be read in both directions
ROUNDING = 1e-12  # two equal candidates may differ by this much after a matrix product in fp64
NEIGHBOURS = 4  # of the ratio margin


def find_nearest(queries: Tensor, candidates: Tensor, margin: bool = False) -> Tensor:
    """Index of the candidate (M, d) most similar to each query (N, d): (N,); ties go to the lowest index.

    In fp64: vectors of untrained or [CLS]-only encoders are almost parallel, and their cosines differ late.

    Args:
        queries: (N, d).
        candidates: (M, d).
        margin: compare by ratio margin; its neighbours are found among all queries and all candidates.
    """
    crowds = _crowd(candidates, queries) if margin else None
    return _search(queries, _unit(candidates), crowds)


def find_both(sources: Tensor, targets: Tensor, margin: bool = False) -> tuple[Tensor, Tensor]:
    """`find_nearest` in both directions: for each source (N, d) its target (M, d), for each target its source."""
    if max(len(sources), len(targets)) > WHOLE:
        return find_nearest(sources, targets, margin), find_nearest(targets, sources, margin)
    similar = _unit(sources) @ _unit(targets).T  # (N, M)
    if margin:
        similar = similar / (_mean_of_highest(similar).unsqueeze(1) + _mean_of_highest(similar.T)) * 2
    return _first_of_best(similar), _first_of_best(similar.T)


def _unit(vectors: Tensor) -> Tensor:
    return F.normalize(vectors.double(), dim=1)


def _first_of_best(similar: Tensor) -> Tensor:
    """(N, M) -> (N,) the lowest index of the highest value of each row."""
    best = similar.amax(dim=1, keepdim=True) - ROUNDING
    return (similar >= best).to(torch.uint8).argmax(dim=1)  # argmax returns the first of equals


def _mean_of_highest(similar: Tensor) -> Tensor:
    """(N, M) cosines -> (N,) mean of the NEIGHBOURS highest of each row."""
    return similar.topk(min(NEIGHBOURS, similar.shape[1]), dim=1).values.mean(dim=1)


def _crowd(vectors: Tensor, others: Tensor) -> Tensor:
    """How near the nearest of the others (M, d) are to each vector (N, d): (N,) mean cosines."""
    others = _unit(others)
    return torch.cat([_mean_of_highest(_unit(chunk) @ others.T) for chunk in vectors.split(CHUNK)])


def _search(queries: Tensor, candidates: Tensor, crowds: Tensor | None) -> Tensor:
    """Exhaustive search among candidates (M, d) of length 1; `crowds` (M,) are theirs, for the ratio margin."""
    found = []
    for chunk in queries.split(CHUNK):
        similar = _unit(chunk) @ candidates.T  # (chunk, M)
        if crowds is not None:
            similar = similar / (_mean_of_highest(similar).unsqueeze(1) + crowds) * 2
        found.append(_first_of_best(similar))
    return torch.cat(found)


def shares_no_token(sources: Sequence[Collection[int]], targets: Sequence[Collection[int]]) -> Tensor:
    """Whether a sentence and its translation have no token id in common: (N,) bool. Ids without special tokens.

    Such pairs cannot be found by copied names, numbers or placeholders.
    """
    return torch.tensor([set(a).isdisjoint(b) for a, b in zip(sources, targets, strict=True)], dtype=torch.bool)


def find_hits(sources: Sequence[Tensor], targets: Sequence[Tensor]) -> dict[str, Tensor]:
    """Retrieve in both directions, layer by layer.

    Args:
        sources: (N, d) of each layer, in the pivot language.
        targets: (N, d) of each layer, their translations in the same order.

    Returns:
        {"from_pivot" | "to_pivot": (layers, N) bool, whether the nearest sentence is the translation}.
    """
    hits: dict[str, list[Tensor]] = {"from_pivot": [], "to_pivot": []}
    for source, target in zip(sources, targets, strict=True):
        for direction, found in zip(hits, find_both(source, target), strict=True):
            hits[direction].append((found == torch.arange(len(found), device=found.device)).cpu())
    return {direction: torch.stack(layers) for direction, layers in hits.items()}


def score_layers(hits: dict[str, Tensor], subset: Tensor) -> dict[str, dict[str, list[float | None]]]:
    """Shares of hits.

    Args:
        hits: of `find_hits`.
        subset: (N,) bool, queries that are scored once more on their own; candidates were always all N.

    Returns:
        {"from_pivot" | "to_pivot": {"all" | "subset": accuracy of each layer}}; None where the subset is empty.
    """
    return {
        direction: {
            "all": [layer.double().mean().item() for layer in found],
            "subset": [layer[subset].double().mean().item() if subset.any() else None for layer in found],
        }
        for direction, found in hits.items()
    }


def summarise(cells: dict[str, Any], layer: int) -> dict[str, Any]:
    """Means over directions and languages at one layer; every language weighs the same."""
    languages = {}
    for language, directions in cells.items():
        row = {direction: part["all"][layer] for direction, part in directions.items()}
        subset = [part["subset"][layer] for part in directions.values()]
        languages[language] = row | {
            "mean": fmean(row.values()),
            "no_overlap": None if None in subset else fmean(subset),
        }
    found = {
        name: [row[name] for row in languages.values() if row[name] is not None]
        for name in ("mean", "to_pivot", "from_pivot", "no_overlap")
    }
    return {name: fmean(values) if values else None for name, values in found.items()} | {"languages": languages}
