"""Find the translation: for each sentence the candidate with the highest cosine (Tatoeba's task).

Pure functions of vectors. Two sides are aligned: row i of one translates row i of the other.
"""

from collections.abc import Collection, Sequence
from importlib.util import find_spec
from statistics import fmean
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK = 1024  # queries compared at a time; only memory depends on it
ROUNDING = 1e-12  # two equal candidates may differ by this much after a matrix product in fp64
LARGE = 200_000  # candidates from which on faiss searches, if it is installed (extra `large`): a chunk needs gigabytes
SHORTLIST = 16  # candidates that faiss, which counts in fp32, passes on to the comparison in fp64


def find_nearest(queries: Tensor, candidates: Tensor) -> Tensor:
    """Index of the candidate (M, d) with the highest cosine to each query (N, d): (N,); ties go to the lowest index.

    In fp64: vectors of untrained or [CLS]-only encoders are almost parallel, and their cosines differ late.
    """
    if len(candidates) > LARGE and find_spec("faiss"):
        return _find_nearest_of_many(queries, candidates)
    candidates = F.normalize(candidates.double(), dim=1)
    found = []
    for chunk in queries.split(CHUNK):
        cosines = F.normalize(chunk.double(), dim=1) @ candidates.T  # (chunk, M)
        best = cosines.amax(dim=1, keepdim=True) - ROUNDING
        found.append((cosines >= best).to(torch.uint8).argmax(dim=1))  # argmax returns the first of equals
    return torch.cat(found)


def _find_nearest_of_many(queries: Tensor, candidates: Tensor) -> Tensor:
    """`find_nearest` through faiss's exhaustive search; the SHORTLIST best of each query are compared in fp64."""
    import faiss

    index = faiss.IndexFlatIP(candidates.shape[1])
    index.add(F.normalize(candidates.float(), dim=1).cpu().numpy())
    found = []
    for chunk in queries.split(CHUNK):
        _, nearest = index.search(F.normalize(chunk.float(), dim=1).cpu().numpy(), SHORTLIST)
        shortlist = torch.from_numpy(nearest).to(queries.device).sort(dim=1).values  # (chunk, S): lowest index first
        vectors = F.normalize(candidates[shortlist].double(), dim=2)  # (chunk, S, d)
        cosines = (vectors * F.normalize(chunk.double(), dim=1).unsqueeze(1)).sum(dim=2)
        best = cosines.amax(dim=1, keepdim=True) - ROUNDING
        first = (cosines >= best).to(torch.uint8).argmax(dim=1, keepdim=True)
        found.append(shortlist.gather(1, first).squeeze(1))
    return torch.cat(found)


def accuracy(queries: Tensor, candidates: Tensor, targets: Tensor) -> float:
    """Share of queries (N, d) whose nearest candidate (M, d) is their target (N,), from 0 to 1."""
    return (find_nearest(queries, candidates) == targets.to(queries.device)).double().mean().item()


def shares_no_token(sources: Sequence[Collection[int]], targets: Sequence[Collection[int]]) -> Tensor:
    """Whether a sentence and its translation have no token id in common: (N,) bool. Ids without special tokens.

    Such pairs cannot be found by copied names, numbers or placeholders.
    """
    return torch.tensor([set(a).isdisjoint(b) for a, b in zip(sources, targets, strict=True)], dtype=torch.bool)


def score_layers(sources: Tensor, targets: Tensor, subset: Tensor) -> dict[str, dict[str, list[float | None]]]:
    """Retrieve in both directions, layer by layer.

    Args:
        sources, targets: (T + 1, N, d), aligned; sources are in the pivot language.
        subset: (N,) bool, queries that are scored once more on their own; candidates are always all N.

    Returns:
        {"from_pivot" | "to_pivot": {"all" | "subset": accuracy of each layer}}; None where the subset is empty.
    """
    subset = subset.to(sources.device)
    own = torch.arange(sources.shape[1], device=sources.device)
    scores: dict[str, dict[str, list[float | None]]] = {}
    for direction, queries, candidates in (("from_pivot", sources, targets), ("to_pivot", targets, sources)):
        scores[direction] = {"all": [], "subset": []}
        for query, candidate in zip(queries, candidates, strict=True):  # (N, d) each
            hits = (find_nearest(query, candidate) == own).double()  # (N,)
            scores[direction]["all"].append(hits.mean().item())
            scores[direction]["subset"].append(hits[subset].mean().item() if subset.any() else None)
    return scores


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
