"""Files of sentence vectors: NumPy arrays (N, d), whose row i is the vector of sentence i."""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
import torch.nn.functional as F

from infoxlm_core import manifests
from infoxlm_core.corpora import lines
from infoxlm_core.errors import InputError
from infoxlm_core.progress import show_progress
from infoxlm_core.tasks import embedding
from infoxlm_core.tasks.embedding import Embedder

CHUNK_CHARACTERS = 16 << 20  # a chunk of sentences ends at this length, or at `embedding.CHUNK` sentences


def embed_file(embedder: Embedder, file: Path, output: Path) -> int:
    """Write the vectors of all lines of a file as float32, and return the number of lines.

    Raises:
        EncodingError: a line is not UTF-8. The file is checked before the first line is embedded.
        InputError: the file is empty, or a line is too long.
    """
    num_lines = sum(1 for _ in lines.read_valid_texts(file))
    if not num_lines:
        raise InputError(f"{file} is empty. Give one sentence a line.")
    write(output, embedder, lines.read_valid_texts(file), num_lines)
    return num_lines


def write(path: Path, embedder: Embedder, sentences: Iterable[str], count: int, normalise: bool = False) -> None:
    """Embed sentences and write their vectors. Memory holds only one chunk of sentences and its vectors.

    The file gets its name when it is complete. It is not written as a memory map, because writing to a memory map on a
    full disk kills the process.

    Args:
        path: the file to write.
        embedder: computes the vectors.
        sentences: the sentences, of which only a chunk needs to be in memory.
        count: number of sentences, which the header of the file contains.
        normalise: scale vectors to length 1 and round them to float16, as mining needs them, instead of float32.
    """
    dtype = np.dtype(np.float16 if normalise else np.float32)
    shape = (count, embedder.encoder.model.config.hidden_size)
    header = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
    with manifests.open_atomically(path) as file, show_progress("embedding", count, "sentences") as advance:
        np.lib.format.write_array_header_1_0(file, header)
        for chunk in _split_into_chunks(sentences):
            vectors = embedder(chunk, advance)  # (sentences, d)
            if normalise:
                vectors = F.normalize(vectors, dim=1).half()
            file.write(vectors.numpy().data)


def embed_cached(embedder: Embedder, model_digest: str, sentences: Sequence[str], cache: Path) -> np.ndarray:
    """Return the vectors of N sentences, scaled to length 1, as a memory-mapped array (N, d) of float16.

    They are computed only once: the cache has a file for each combination of model, options and sentences.

    Args:
        embedder: computes the vectors.
        model_digest: identifies the files of the embedder's model.
        sentences: N sentences.
        cache: folder of the files.
    """
    key = {
        "model": model_digest,
        "vector": embedder.spec,
        "prefix": embedder.encoder.prefix,
        "max_tokens": embedder.encoder.max_tokens,
        "sentences": manifests.digest(sentences),
    }
    path = cache / f"{manifests.digest(key).removeprefix('sha256:')}.npy"
    if not path.is_file():
        cache.mkdir(parents=True, exist_ok=True)
        write(path, embedder, sentences, len(sentences), normalise=True)
    return np.load(path, mmap_mode="r")


def _split_into_chunks(sentences: Iterable[str]) -> Iterator[list[str]]:
    """Yield the sentences in chunks that fit into memory."""
    chunk: list[str] = []
    num_characters = 0
    for sentence in sentences:
        chunk.append(sentence)
        num_characters += len(sentence)
        if len(chunk) == embedding.CHUNK or num_characters >= CHUNK_CHARACTERS:
            yield chunk
            chunk = []
            num_characters = 0
    if chunk:
        yield chunk
