"""Find the nearest neighbours of each vector of two large sets in the other set.

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
from infoxlm_core.progress import progress
from infoxlm_core.tasks.retrieval.nearest import NEIGHBOURS

if TYPE_CHECKING:
    import faiss

VectorArrays = Sequence[np.ndarray]  # arrays (N_i, d) whose rows are numbered as if they were one array
MAX_EXACT = 300_000  # vectors of a set that are compared without an index; with 384 numbers, 20 minutes on one core
MAX_NEIGHBOURS = NEIGHBOURS + 1  # one more than the margin needs, because an equal text or a translation is removed
BLOCK = 2048  # vectors of each set that are compared at a time; changes memory and speed, not the result
TRAINING_VECTORS = 50  # per cell of an index
PROBED_CELLS = 128  # cells of an index that are searched for each query


class Neighbours(NamedTuple):
    """The nearest vectors of the other set for each of N vectors, the nearest first."""

    cosines: np.ndarray  # (N, k) float32
    rows: np.ndarray  # (N, k) int64


def find_neighbours(sources: VectorArrays, targets: VectorArrays) -> tuple[Neighbours, Neighbours]:
    """Return the nearest targets of each source, and the nearest sources of each target.

    The search is exact up to `MAX_EXACT` vectors a set, and approximate above.
    """
    if max(_count(sources), _count(targets)) <= MAX_EXACT:
        return _search_exactly(sources, targets)
    return _search_index(sources, targets), _search_index(targets, sources)


def check_size(*num_vectors: int) -> None:
    """Raise InputError if sets of these sizes need an index and the library for it is not installed."""
    if max(num_vectors) > MAX_EXACT and not importlib.util.find_spec("faiss"):
        raise InputError(
            f"{max(num_vectors):,} sentences are more than the {MAX_EXACT:,} that are compared without an index: "
            "install infoxlm-pipeline[mining] (faiss-cpu), or split the file"
        )


def _count(vectors: VectorArrays) -> int:
    """Return the number of vectors in all arrays together."""
    return sum(len(array) for array in vectors)


def _read_blocks(vectors: VectorArrays) -> Iterator[tuple[int, Tensor]]:
    """Yield the row of the first vector of each block, and the block of up to `BLOCK` vectors, (n, d) float32."""
    first_row = 0
    for array in vectors:
        for start in range(0, len(array), BLOCK):
            block = array[start : start + BLOCK].astype(np.float32)
            yield first_row + start, torch.from_numpy(block)
        first_row += len(array)


def _search_exactly(sources: VectorArrays, targets: VectorArrays) -> tuple[Neighbours, Neighbours]:
    """Compare all sources with all targets; one product of two blocks serves both directions."""
    source_neighbours = _Nearest(_count(sources), min(MAX_NEIGHBOURS, _count(targets)))
    target_neighbours = _Nearest(_count(targets), min(MAX_NEIGHBOURS, _count(sources)))
    with progress("comparing", _count(sources), "sentences") as advance:
        for first_source, source_block in _read_blocks(sources):
            for first_target, target_block in _read_blocks(targets):
                cosines = source_block @ target_block.T  # (sources, targets)
                source_neighbours.add(first_source, cosines, first_target)
                target_neighbours.add(first_target, cosines.T.contiguous(), first_source)
            advance(len(source_block))
    return source_neighbours.get(), target_neighbours.get()


class _Nearest:
    """Collects the k highest cosines of each of N vectors from blocks of cosines."""

    def __init__(self, num_vectors: int, k: int):
        self.cosines = torch.full((num_vectors, k), -math.inf)
        self.rows = torch.zeros((num_vectors, k), dtype=torch.long)

    def add(self, first_row: int, cosines: Tensor, first_candidate: int) -> None:
        """Add the cosines (n, m) of n vectors, from row `first_row` on, to m candidates."""
        block = slice(first_row, first_row + len(cosines))
        num_candidates = min(self.cosines.shape[1], cosines.shape[1])
        block_cosines, block_rows = cosines.topk(num_candidates, dim=1)
        all_cosines = torch.cat([self.cosines[block], block_cosines], dim=1)
        all_rows = torch.cat([self.rows[block], block_rows + first_candidate], dim=1)
        nearest_cosines, positions = all_cosines.topk(self.cosines.shape[1], dim=1)
        self.cosines[block] = nearest_cosines
        self.rows[block] = all_rows.gather(1, positions)

    def get(self) -> Neighbours:
        return Neighbours(self.cosines.numpy(), self.rows.numpy())


def _search_index(queries: VectorArrays, candidates: VectorArrays) -> Neighbours:
    """Return the approximately nearest candidates of each query."""
    num_neighbours = min(MAX_NEIGHBOURS, _count(candidates))
    index = _build_index(candidates)
    cosines = []
    rows = []
    with progress("searching", _count(queries), "sentences") as advance:
        for _, block in _read_blocks(queries):
            vectors = block.numpy()
            index.nprobe = PROBED_CELLS
            block_cosines, block_rows = index.search(vectors, num_neighbours)
            is_incomplete = (block_rows < 0).any(axis=1)  # the probed cells have fewer vectors than neighbours
            if is_incomplete.any():
                index.nprobe = index.nlist  # all cells
                complete = index.search(vectors[is_incomplete], num_neighbours)
                block_cosines[is_incomplete], block_rows[is_incomplete] = complete
            cosines.append(block_cosines)
            rows.append(block_rows)
            advance(len(vectors))
    return Neighbours(np.concatenate(cosines), np.concatenate(rows))


def _build_index(vectors: VectorArrays) -> "faiss.IndexIVF":
    """Return an index that stores vectors in clusters (cells), with 8 bits for each number."""
    import faiss  # an optional dependency, for large files only

    num_vectors = _count(vectors)
    best_num_cells = round(16 * math.sqrt(num_vectors))  # FAISS recommends 4 to 16 times the square root
    num_cells = max(1, min(best_num_cells, num_vectors // TRAINING_VECTORS))
    size = vectors[0].shape[1]
    index = faiss.IndexIVFScalarQuantizer(
        faiss.IndexFlatIP(size), size, num_cells, faiss.ScalarQuantizer.QT_8bit, faiss.METRIC_INNER_PRODUCT
    )
    index.train(_draw_rows(vectors, num_cells * TRAINING_VECTORS))
    for _, block in _read_blocks(vectors):
        index.add(block.numpy())
    return index


def _draw_rows(vectors: VectorArrays, count: int) -> np.ndarray:
    """Return about `count` vectors at regular intervals, (n, d) float32."""
    step = max(1, _count(vectors) // count)
    return np.concatenate([array[::step].astype(np.float32) for array in vectors])
