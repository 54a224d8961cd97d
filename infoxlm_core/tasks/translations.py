"""One search for translations: every language, vector and direction of a set of aligned sentences."""

import logging
from collections.abc import Iterable, Mapping
from statistics import fmean
from typing import Any

from torch import Tensor

from infoxlm_core.tasks import nearest
from infoxlm_core.tasks.embedding import Place

logger = logging.getLogger(__name__)

Vectors = Mapping[Place, Tensor]  # of the sentences of one side, at every place: (N, d)
Found = dict[str, dict[Place, dict[str, Tensor]]]  # language -> place -> direction -> (N,) the row found for each row


def search(sides: Iterable[tuple[str, Vectors, Vectors]], margin: bool = False) -> Found:
    """Find for each sentence the nearest of the other side, in both directions.

    Args:
        sides: language, vectors of the pivot's sentences, and of their translations in the same order; computed as
            they are asked for, since those of all languages may not fit into memory together.
        margin: compare by ratio margin instead of the cosine.
    """
    found: Found = {}
    for code, pivot, translations in sides:
        found[code] = {}
        for place, own in pivot.items():
            rows = nearest.find_both(own, translations[place], margin)
            found[code][place] = {"from_pivot": rows[0].cpu(), "to_pivot": rows[1].cpu()}
        logger.info("retrieved %d pairs of %s", len(next(iter(pivot.values()))), code)
    return found


def mean_over(languages: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Of each score the unweighted mean over the languages that have it; None where none has."""
    first = next(iter(languages.values()))
    known = {name: [row[name] for row in languages.values() if row[name] is not None] for name in first}
    return {name: fmean(values) if values else None for name, values in known.items()}
