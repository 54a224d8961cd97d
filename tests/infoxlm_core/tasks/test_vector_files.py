"""Row i of a file of vectors is the vector of line i, and the file is complete or absent."""

import gzip

import numpy as np
import pytest

from infoxlm_core.errors import EncodingError, InputError
from infoxlm_core.tasks import embedding, vector_files
from infoxlm_core.tasks.embedding import load_embedder
from tests.toys.models import TEXTS


def test_row_i_is_line_i_in_every_chunk_of_a_plain_or_compressed_file(tiny_encoders, tmp_path, monkeypatch):
    embedder = load_embedder(tiny_encoders["first"], layer=1)
    sentences = [*"abcdefg", "", "h i", *TEXTS]
    content = "\ufeff" + "\r\n".join(sentences)  # as Windows writes it, without an end of the last line
    (tmp_path / "plain.txt").write_bytes(content.encode())
    (tmp_path / "packed.txt.gz").write_bytes(gzip.compress(content.encode()))
    monkeypatch.setattr(embedding, "CHUNK", 3)
    monkeypatch.setattr(vector_files, "CHUNK_CHARACTERS", 8)

    for name in ("plain.txt", "packed.txt.gz"):
        assert vector_files.embed_file(embedder, tmp_path / name, tmp_path / f"{name}.npy") == len(sentences)

        vectors = np.load(tmp_path / f"{name}.npy", mmap_mode="r")
        assert (vectors.dtype, vectors.shape) == (np.float32, (len(sentences), 32))
        for row, sentence in enumerate(sentences):
            np.testing.assert_allclose(vectors[row], embedder([sentence])[0].numpy(), atol=1e-5)


def test_a_chunk_ends_at_its_number_of_sentences_or_characters(monkeypatch):
    monkeypatch.setattr(embedding, "CHUNK", 3)
    monkeypatch.setattr(vector_files, "CHUNK_CHARACTERS", 8)

    chunks = list(vector_files._split(["a", "b", "c", "d", "eight letters", "e"]))

    assert chunks == [["a", "b", "c"], ["d", "eight letters"], ["e"]]


@pytest.mark.parametrize(
    ("content", "error", "reason"),
    [
        (b"", InputError, "lines.txt is empty"),
        (b"a\nsch\xe9n\n", EncodingError, "lines.txt:2:4: not UTF-8 from this byte on"),
        (b"a\n" + b"x" * (1 << 20), InputError, "lines.txt:2 is too long"),
    ],
)
def test_a_file_that_cannot_be_embedded_leaves_no_output(tiny_encoders, tmp_path, content, error, reason):
    (tmp_path / "lines.txt").write_bytes(content)

    with pytest.raises(error, match=reason):
        vector_files.embed_file(load_embedder(tiny_encoders["first"]), tmp_path / "lines.txt", tmp_path / "out.npy")

    assert [path.name for path in tmp_path.iterdir()] == ["lines.txt"]


def test_an_interrupted_embedding_leaves_the_former_file(tiny_encoders, tmp_path, monkeypatch):
    monkeypatch.setattr(embedding, "CHUNK", 2)
    (tmp_path / "out.npy").write_bytes(b"former")
    embedder = load_embedder(tiny_encoders["first"])

    def sentences():
        yield from "abc"
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        vector_files.write(tmp_path / "out.npy", embedder, sentences(), 4, as_units=True)

    assert [path.name for path in tmp_path.iterdir()] == ["out.npy"]
    assert (tmp_path / "out.npy").read_bytes() == b"former"
