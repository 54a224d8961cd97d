"""Retrieval among a few held-out pairs during training, which shows whether the model learns to align languages."""

import itertools
from collections.abc import Iterator, Sequence
from statistics import fmean

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from infoxlm_core.data.layouts import Sequences, gather, lay_out, positions
from infoxlm_core.data.shards import Pairs, Shards, Table
from infoxlm_core.model import devices
from infoxlm_core.model.encoder import Encoder, evaluating, pool
from infoxlm_core.tasks.retrieval.nearest import find_nearest
from infoxlm_core.training.learner import autocast

SEQUENCES = 64  # of one forward pass


class Probe:
    """The first `count` held-out pairs of each language pair that share no side; at most `longest` tokens of a side."""

    def __init__(self, shards: Shards, count: int, longest: int) -> None:
        self.pairs = {}
        for name, tables in shards.held_out.items():
            if any(map(len, tables)):
                self.pairs[name] = _first_pairs(tables, count, longest)

    @torch.no_grad()
    def score(
        self, encoder: Encoder, layer: int, pooling: str, device: torch.device, precision: str = "auto"
    ) -> dict[str, float]:
        """Return the share of sentences whose nearest neighbour by cosine is their translation, in both directions."""
        scores = {}
        for name, (source_side, target_side) in self.pairs.items():
            with evaluating(encoder):
                source = _encode(encoder, source_side, layer, pooling, device, precision)
                target = _encode(encoder, target_side, layer, pooling, device, precision)
            scores[f"probe/retrieval/{name}"] = fmean([_accuracy(source, target), _accuracy(target, source)])
        return {"probe/retrieval": fmean(scores.values()), **scores}


def _accuracy(queries: Tensor, candidates: Tensor) -> float:
    right = torch.arange(len(queries), device=queries.device)
    return (find_nearest(queries, candidates) == right).double().mean().item()


def _first_pairs(tables: Sequence[Pairs], count: int, longest: int) -> tuple[Sequences, Sequences]:
    chosen = list(itertools.islice(_find_distinct_pairs(tables, longest), count))
    table_numbers, rows = np.array(chosen).T
    source = gather([table.source for table in tables], table_numbers, rows, longest)
    target = gather([table.target for table in tables], table_numbers, rows, longest)
    return lay_out(source), lay_out(target)


def _find_distinct_pairs(tables: Sequence[Pairs], longest: int) -> Iterator[tuple[int, int]]:
    """Yield the table and row of each pair that shares no side with an earlier one, so that one answer is right."""
    seen: set[tuple[str, bytes]] = set()
    for number, table in enumerate(tables):
        for row in range(len(table)):
            sides = {
                ("source", _read_bytes(table.source, row, longest)),
                ("target", _read_bytes(table.target, row, longest)),
            }
            if sides.isdisjoint(seen):
                seen |= sides
                yield number, row


def _read_bytes(table: Table, row: int, longest: int) -> bytes:
    start, end = table.offsets.item(row), table.offsets.item(row + 1)
    return table.tokens[start : min(end, start + longest)].tobytes()


def _encode(
    encoder: Encoder, side: Sequences, layer: int, pooling: str, device: torch.device, precision: str
) -> Tensor:
    """Return unit vectors (N, d) of sentences, in the precision of training since other workers wait."""
    vectors = []
    for start in range(0, len(side.lengths), SEQUENCES):
        part = side[start : start + SEQUENCES]
        lengths = part.lengths.tolist()
        ids = devices.send(torch.from_numpy(part.flat), device)
        rows = devices.send(torch.from_numpy(positions(part.lengths)), device)
        with autocast(device, precision):
            hidden = encoder(ids, rows, lengths, last=layer)
        vectors.append(pool(hidden, lengths, pooling).float())
    return F.normalize(torch.cat(vectors), dim=1)
