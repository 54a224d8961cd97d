"""The phase of a preparation that measures how similar the two sides of each translation pair are.

It writes similarities/PART: a float32 cosine for each pair of a part that no other filter drops.
"""

import numpy as np
import pyarrow as pa
import torch

from infoxlm_core.config import PreparationConfig
from infoxlm_core.corpora.parallel import CHUNK
from infoxlm_core.corpora.phases import deduplicate
from infoxlm_core.corpora.phases.job import Job, Record
from infoxlm_core.tasks.embedding import Embedder, load_embedder

_embedder_of_process: dict[str, Embedder] = {}  # path or URI of the encoder -> the one that this process has loaded


def measure(job: Job, part_number: int) -> Record:
    """Write the cosine similarity of the two sides of each training pair of a part.

    Chunks, batches and the number of threads are fixed, so the results are equal bit for bit for any number of workers.
    Another kind of processor changes the last bits, which matters only for pairs very close to the minimum.
    """
    part = job.parts[part_number]
    if part.kind != "pairs":
        return {}
    rows = job.read_table(f"staged/{part.name}", (*deduplicate.COMPARED_COLUMNS, "texts"))
    drop_reasons = deduplicate.find_reasons(job, part, rows)
    is_training = drop_reasons == 0
    pairs = rows["texts"].filter(pa.array(is_training)).to_pylist()
    embedder = _load_embedder(job)
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # Ray gives its tasks one thread
    try:
        similarities = [_compare_sides(embedder, pairs[start : start + CHUNK]) for start in range(0, len(pairs), CHUNK)]
    finally:
        torch.set_num_threads(num_threads)
    job.files.put(f"similarities/{part.name}", np.concatenate([np.empty(0, np.float32), *similarities]).tobytes())
    return {}


def _compare_sides(embedder: Embedder, pairs: list[tuple[str, str]]) -> np.ndarray:
    """Return the cosine of the vectors of the two sides of each pair, (N,) float32."""
    source_vectors = embedder([source for source, _ in pairs])
    target_vectors = embedder([target for _, target in pairs])
    return torch.cosine_similarity(source_vectors, target_vectors).numpy()


def _load_embedder(job: Job) -> Embedder:
    """Return the encoder of the config. A process fetches and loads it once."""
    encoder = _get_encoder(job.config)
    if encoder not in _embedder_of_process:
        config = job.config.model_copy(update={"corpora": (), "evaluation_sets": ()})  # fetch nothing but the encoder
        local_config = job.localise(config) if job.localise else config
        _embedder_of_process.clear()
        _embedder_of_process[encoder] = load_embedder(_get_encoder(local_config))
    return _embedder_of_process[encoder]


def _get_encoder(config: PreparationConfig) -> str:
    """Return the path or URI of the encoder that compares pairs."""
    assert config.cleaning.similarity  # noqa: S101 - this phase runs only with the filter
    return config.cleaning.similarity.encoder
