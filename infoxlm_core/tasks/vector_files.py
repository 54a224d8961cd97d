"""Write sentence vectors to files: NumPy arrays (N, d), with the vector of sentence i in row i."""

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

CHUNK_CHARACTERS = 16 << 20  # length at which a chunk of sentences ends, unless it has `embedding.CHUNK` sentences


def embed_file(embedder: Embedder, file: Path, output: Path) -> int:
    """Embed every line of a file, write the vectors as float32, and return the number of lines.

    Raises:
        EncodingError: a line is not UTF-8. All lines are checked before the first line is embedded.
        InputError: the file is empty, or a line is too long.
    """
    # Read the file twice, because the output begins with the number of vectors.
    num_lines = sum(1 for _ in lines.read_valid_texts(file))
    if not num_lines:
        raise InputError(f"{file} is empty. Give one sentence per line.")
    write(output, embedder, lines.read_valid_texts(file), num_lines)
    return num_lines


def write(path: Path, embedder: Embedder, sentences: Iterable[str], num_rows: int, normalise: bool = False) -> None:
    """Embed sentences in chunks, and write the vectors. Only one chunk is in memory at a time.

    The file gets its final name when it is complete. The vectors are not written through a memory map, because a full
    disk would then kill the process instead of raising an error.

    Args:
        path: output file.
        embedder: embedder for the sentences.
        sentences: sentences to embed, which are read only once.
        num_rows: number of sentences, and of rows in the file.
        normalise: whether to write vectors of length 1 in float16, for mining, instead of float32.
    """
    dtype = np.dtype(np.float16 if normalise else np.float32)
    shape = (num_rows, embedder.encoder.model.config.hidden_size)
    header = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
    with manifests.open_atomically(path) as file, show_progress("embedding", num_rows, "sentences") as advance:
        # After the header of a .npy file, the rows can be appended chunk by chunk.
        np.lib.format.write_array_header_1_0(file, header)
        for chunk in _split_into_chunks(sentences):
            vectors = embedder(chunk, advance)  # (sentences, d)
            if normalise:
                vectors = F.normalize(vectors, dim=1).half()
            file.write(vectors.numpy().data)


def embed_cached(embedder: Embedder, model_digest: str, sentences: Sequence[str], cache: Path) -> np.ndarray:
    """Return the normalised vectors of N sentences as a memory-mapped array (N, d), float16.

    Compute the vectors only if the cache has no file for this combination of model, options and sentences.

    Args:
        embedder: embedder for the sentences.
        model_digest: digest of the embedder's model files.
        sentences: N sentences.
        cache: directory for cached vectors.
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
