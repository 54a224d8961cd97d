"""Retrieval among a few held-out pairs while a training goes on: the one curve that says whether it works."""

from collections.abc import Sequence
from statistics import fmean

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from infoxlm_core.data.layouts import Sequences, gather, lay_out, positions
from infoxlm_core.data.shards import Pairs, Shards
from infoxlm_core.model import devices
from infoxlm_core.model.encoder import Encoder, evaluating, pool
from infoxlm_core.tasks.retrieval.nearest import find_nearest
from infoxlm_core.training.learner import autocast

SEQUENCES = 64  # of one forward pass


class Probe:
    """The first `count` held-out pairs, if any, of each language pair: sides of at most `longest` tokens as `<s> a
    </s>`."""

    def __init__(self, shards: Shards, count: int, longest: int) -> None:
        self.pairs = {
            name: _first(tables, count, longest) for name, tables in shards.held_out.items() if any(map(len, tables))
        }

    @torch.no_grad()
    def score(
        self, encoder: Encoder, layer: int, pooling: str, device: torch.device, precision: str = "auto"
    ) -> dict[str, float]:
        """Share of sentences whose translation is their nearest neighbour by cosine, both directions, and its mean;
        encoded in `model.precision`."""
        found = {}
        for name, sides in self.pairs.items():
            with evaluating(encoder):
                source, target = (_encode(encoder, side, layer, pooling, device, precision) for side in sides)
            right = torch.arange(len(source), device=device)
            hits = [
                (find_nearest(a, b) == right).double().mean().item() for a, b in ((source, target), (target, source))
            ]
            found[f"probe/retrieval/{name}"] = fmean(hits)
        return {"probe/retrieval": fmean(found.values()), **found}


def _first(tables: Sequence[Pairs], count: int, longest: int) -> tuple[Sequences, Sequences]:
    which = np.repeat(np.arange(len(tables)), [len(table) for table in tables])[:count]
    rows = np.concatenate([np.arange(len(table)) for table in tables])[:count]
    source, target = ([getattr(table, side) for table in tables] for side in ("source", "target"))
    first, second = (lay_out(gather(side, which, rows, longest)) for side in (source, target))
    return first, second


def _encode(
    encoder: Encoder, side: Sequences, layer: int, pooling: str, device: torch.device, precision: str
) -> Tensor:
    vectors = []
    for start in range(0, len(side.lengths), SEQUENCES):
        part = side[start : start + SEQUENCES]
        lengths = part.lengths.tolist()
        ids, places = (
            devices.send(torch.from_numpy(values), device) for values in (part.flat, positions(part.lengths))
        )
        with autocast(device, precision):  # as in training: other workers wait for this one
            hidden = encoder(ids, places, lengths, last=layer)
        vectors.append(pool(hidden, lengths, pooling).float())
    return F.normalize(torch.cat(vectors), dim=1)
