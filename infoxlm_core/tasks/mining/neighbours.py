"""Find the nearest neighbours between two large sets of vectors, in both directions.

Vectors have length 1, so that their product is the cosine. They are read in blocks, because they may be on disk.
"""

import importlib.util
import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from infoxlm_core.errors import InputError
from infoxlm_core.progress import show_progress
from infoxlm_core.tasks.retrieval.nearest import NEIGHBOURS

if TYPE_CHECKING:
    import faiss

VectorArrays = Sequence[np.ndarray]  # arrays (N_i, d) with consecutive row numbers
MAX_EXACT = 300_000  # largest number of vectors per set for the exact search: 20 minutes on one core with d = 384
MAX_NEIGHBOURS = NEIGHBOURS + 1  # the margin needs one fewer, but an equal text or a translation may be removed
BLOCK = 2048  # vectors of each set to compare at a time; affects memory and speed, not the result
TRAINING_VECTORS_PER_CELL = 50
PROBED_CELLS = 128  # index cells to search per query


class Neighbours(NamedTuple):
    """The k nearest vectors of the other set for each of N vectors, the nearest first."""

    cosines: np.ndarray  # (N, k) float32
    rows: np.ndarray  # (N, k) int64


def find_neighbours(sources: VectorArrays, targets: VectorArrays) -> tuple[Neighbours, Neighbours]:
    """Find the nearest targets of each source, and the nearest sources of each target.

    The search is exact for up to `MAX_EXACT` vectors per set, and approximate for more.
    """
    if max(_count(sources), _count(targets)) <= MAX_EXACT:
        return _search_exactly(sources, targets)
    return _search_index(sources, targets), _search_index(targets, sources)


def check_faiss_if_large(*num_vectors: int) -> None:
    """Raise InputError if sets of these sizes need faiss and it is not installed."""
    if max(num_vectors) > MAX_EXACT and not importlib.util.find_spec("faiss"):
        raise InputError(
            f"{max(num_vectors):,} sentences are more than the {MAX_EXACT:,} that are compared without an index: "
            "install infoxlm-pipeline[mining] (faiss-cpu), or split the file"
        )


def _count(vectors: VectorArrays) -> int:
    """Return the total number of vectors in all arrays."""
    return sum(len(array) for array in vectors)


def _read_blocks(vectors: VectorArrays) -> Iterator[tuple[int, Tensor]]:
    """Yield each block's first row number and up to `BLOCK` vectors (n, d), float32."""
    first_row = 0
    for array in vectors:
        for start in range(0, len(array), BLOCK):
            block = array[start : start + BLOCK].astype(np.float32)
            yield first_row + start, torch.from_numpy(block)
        first_row += len(array)


def _search_exactly(sources: VectorArrays, targets: VectorArrays) -> tuple[Neighbours, Neighbours]:
    """Compare all sources with all targets. Each cosine is computed once and used in both directions."""
    source_neighbours = _NearestNeighbours(_count(sources), min(MAX_NEIGHBOURS, _count(targets)))
    target_neighbours = _NearestNeighbours(_count(targets), min(MAX_NEIGHBOURS, _count(sources)))
    with show_progress("comparing", _count(sources), "sentences") as advance:
        for first_source, source_block in _read_blocks(sources):
            for first_target, target_block in _read_blocks(targets):
                cosines = source_block @ target_block.T  # (sources, targets)
                source_neighbours.add(first_source, cosines, first_target)
                # `topk` is several times as fast on contiguous rows, so the copy saves time.
                target_neighbours.add(first_target, cosines.T.contiguous(), first_source)
            advance(len(source_block))
    return source_neighbours.to_arrays(), target_neighbours.to_arrays()


class _NearestNeighbours:
    """The k nearest candidates of each of N vectors, collected from blocks of cosines."""

    def __init__(self, num_vectors: int, k: int):
        self.cosines = torch.full((num_vectors, k), -math.inf)
        self.rows = torch.zeros((num_vectors, k), dtype=torch.long)

    def add(self, first_row: int, cosines: Tensor, first_candidate: int) -> None:
        """Update the neighbours of n consecutive vectors with their cosines (n, m) to m consecutive candidates."""
        block = slice(first_row, first_row + len(cosines))
        k = self.cosines.shape[1]
        new_cosines, new_rows = cosines.topk(min(k, cosines.shape[1]), dim=1)
        all_cosines = torch.cat([self.cosines[block], new_cosines], dim=1)
        all_rows = torch.cat([self.rows[block], new_rows + first_candidate], dim=1)
        self.cosines[block], columns = all_cosines.topk(k, dim=1)
        self.rows[block] = all_rows.gather(1, columns)

    def to_arrays(self) -> Neighbours:
        """Return the neighbours as arrays. All blocks must have been added."""
        return Neighbours(self.cosines.numpy(), self.rows.numpy())


def _search_index(queries: VectorArrays, candidates: VectorArrays) -> Neighbours:
    """Find the approximate nearest candidates of each query."""
    num_neighbours = min(MAX_NEIGHBOURS, _count(candidates))
    index = _build_index(candidates)
    cosines = []
    rows = []
    with show_progress("searching", _count(queries), "sentences") as advance:
        for _, block in _read_blocks(queries):
            neighbours = _search_block(index, block.numpy(), num_neighbours)
            cosines.append(neighbours.cosines)
            rows.append(neighbours.rows)
            advance(len(block))
    return Neighbours(np.concatenate(cosines), np.concatenate(rows))


def _search_block(index: "faiss.IndexIVF", queries: np.ndarray, num_neighbours: int) -> Neighbours:
    """Search `PROBED_CELLS` index cells for each query (n, d), or all cells if these have too few neighbours."""
    index.nprobe = PROBED_CELLS
    cosines, rows = index.search(queries, num_neighbours)
    is_incomplete = (rows < 0).any(axis=1)  # (n,)
    if is_incomplete.any():
        index.nprobe = index.nlist  # all cells
        cosines[is_incomplete], rows[is_incomplete] = index.search(queries[is_incomplete], num_neighbours)
    return Neighbours(cosines, rows)


def _build_index(vectors: VectorArrays) -> "faiss.IndexIVF":
    """Build an index that stores vectors in clusters (cells), with 8 bits per number."""
    import faiss  # an optional dependency, for large files only

    num_vectors = _count(vectors)
    recommended_cells = round(16 * math.sqrt(num_vectors))  # FAISS recommends 4 to 16 times the square root
    num_cells = max(1, min(recommended_cells, num_vectors // TRAINING_VECTORS_PER_CELL))
    dimension = vectors[0].shape[1]
    index = faiss.IndexIVFScalarQuantizer(
        faiss.IndexFlatIP(dimension), dimension, num_cells, faiss.ScalarQuantizer.QT_8bit, faiss.METRIC_INNER_PRODUCT
    )
    index.train(_draw_rows(vectors, num_cells * TRAINING_VECTORS_PER_CELL))
    for _, block in _read_blocks(vectors):
        index.add(block.numpy())
    return index


def _draw_rows(vectors: VectorArrays, count: int) -> np.ndarray:
    """Return about `count` vectors (n, d) at regular intervals, float32."""
    step = max(1, _count(vectors) // count)
    return np.concatenate([array[::step].astype(np.float32) for array in vectors])
