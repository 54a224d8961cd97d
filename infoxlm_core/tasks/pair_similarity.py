"""Preparation phase: measure the similarity between the source and target of each translation pair.

The phase writes similarities/PART: a float32 cosine for each pair of a part that no other filter drops.
"""

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import torch

from infoxlm_core.config import PreparationConfig
from infoxlm_core.corpora.parallel import CHUNK
from infoxlm_core.corpora.phases import deduplicate
from infoxlm_core.corpora.phases.job import Job, Record
from infoxlm_core.corpora.phases.reserve import NO_REASON
from infoxlm_core.tasks.embedding import Embedder, load_embedder

_embedder_of_process: dict[str, Embedder] = {}  # path or URI of an encoder -> embedder; at most one entry


def measure(job: Job, part_number: int) -> Record:
    """Write the cosine between source and target of a part's training pairs, except pairs that other filters drop.

    Chunks, batches and the number of threads are fixed, so that the results do not depend on the number of workers, bit
    for bit. On another type of processor, the last bits may differ. This matters only for pairs whose cosine is very
    close to the configured minimum.
    """
    part = job.parts[part_number]
    if part.kind != "pairs":
        return {}
    rows = job.read_table(f"staged/{part.name}", (*deduplicate.COMPARED_COLUMNS, "texts"))
    drop_reasons = deduplicate.find_reasons(job, part, rows)
    is_kept = drop_reasons == NO_REASON  # embedding is slow, so skip pairs that another filter drops
    pairs = rows["texts"].filter(pa.array(is_kept)).to_pylist()
    similarities = _compute_similarities(_load_embedder(job), pairs)
    job.files.put(f"similarities/{part.name}", similarities.tobytes())
    return {}


def _compute_similarities(embedder: Embedder, pairs: Sequence[tuple[str, str]]) -> np.ndarray:
    """Return the cosine (N,) between the source and target vectors of each pair, float32."""
    similarities = np.empty(len(pairs), np.float32)
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as in Ray tasks, because the number of threads can change the last bits
    try:
        for start in range(0, len(pairs), CHUNK):
            chunk = pairs[start : start + CHUNK]
            source_vectors = embedder([source for source, _ in chunk])
            target_vectors = embedder([target for _, target in chunk])
            cosines = torch.cosine_similarity(source_vectors, target_vectors)
            similarities[start : start + CHUNK] = cosines.numpy()
    finally:
        torch.set_num_threads(num_threads)
    return similarities


def _load_embedder(job: Job) -> Embedder:
    """Return the configured embedder. Each process fetches and loads the embedder only once."""
    encoder = _get_encoder(job.config)
    if encoder not in _embedder_of_process:
        config = job.config.model_copy(update={"corpora": (), "evaluation_sets": ()})  # fetch only the encoder
        local_config = job.localise(config) if job.localise else config
        _embedder_of_process.clear()
        _embedder_of_process[encoder] = load_embedder(_get_encoder(local_config))
    return _embedder_of_process[encoder]


def _get_encoder(config: PreparationConfig) -> str:
    """Return the path or URI of the encoder for the similarity filter."""
    assert config.cleaning.similarity  # noqa: S101 - this phase runs only if the filter is configured
    return config.cleaning.similarity.encoder
