"""Find the translation: for each sentence the most similar candidate (Tatoeba's task).

Similar is the cosine, or the ratio margin: the cosine divided by the mean of the cosines to the nearest neighbours of
both sentences, so that a sentence that is near to everything wins less often (Artetxe and Schwenk 2019, equation 3).

Two sides are aligned: row i of one translates row i of the other.
"""

import logging
from collections.abc import Collection, Iterable, Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from infoxlm_core.tasks.embedding import Place

logger = logging.getLogger(__name__)
Vectors = Mapping[Place, Tensor]  # of the sentences of one side, at every place: (N, d)
Found = dict[str, dict[Place, dict[str, Tensor]]]  # language -> place -> direction -> (N,) the row found for each row

CHUNK = 1024  # queries compared at a time; only memory depends on it
WHOLE = 4096  # sentences whose cosines with as many others are held at once, to be read in both directions
ROUNDING = 1e-12  # two equal candidates may differ by this much after a matrix product in fp64
NEIGHBOURS = 4  # of the ratio margin


def find_nearest(queries: Tensor, candidates: Tensor, margin: bool = False) -> Tensor:
    """Index of the candidate (M, d) most similar to each query (N, d): (N,); ties go to the lowest index.

    In fp64: vectors of untrained or [CLS]-only encoders are almost parallel, and their cosines differ late. By ratio
    margin neighbours are found among all queries and all candidates.
    """
    crowds = _crowd(candidates, queries) if margin else None  # (M,)
    candidates, found = _unit(candidates), []
    for chunk in queries.split(CHUNK):
        similar = _unit(chunk) @ candidates.T  # (chunk, M)
        if crowds is not None:
            similar = similar / (_mean_of_highest(similar).unsqueeze(1) + crowds) * 2
        found.append(_first_of_best(similar))
    return torch.cat(found)


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


def search(sides: Iterable[tuple[str, Vectors, Vectors]], margin: bool = False) -> Found:
    """`find_both` for every language and place.

    Sides are a language, vectors of the pivot's sentences, and of their translations in the same order; computed as
    they are asked for, since those of all languages may not fit into memory together.
    """
    found: Found = {}
    for code, pivot, translations in sides:
        found[code] = {}
        for place, own in pivot.items():
            rows = find_both(own, translations[place], margin)
            found[code][place] = {"from_pivot": rows[0].cpu(), "to_pivot": rows[1].cpu()}
        logger.info("retrieved %d pairs of %s", len(next(iter(pivot.values()))), code)
    return found


def shares_no_token(sources: Sequence[Collection[int]], targets: Sequence[Collection[int]]) -> Tensor:
    """Whether a sentence and its translation have no token id in common: (N,) bool. Ids without special tokens.

    Such pairs cannot be found by copied names, numbers or placeholders.
    """
    return torch.tensor([set(a).isdisjoint(b) for a, b in zip(sources, targets, strict=True)], dtype=torch.bool)
