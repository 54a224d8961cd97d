"""Row i of a file of vectors is the vector of line i, and the file is complete or absent."""

import gzip

import numpy as np
import pytest

from infoxlm_core.errors import EncodingError, InputError
from infoxlm_core.tasks import embedding, vector_files
from infoxlm_core.tasks.embedding import load_embedder
from tests.toys.models import TEXTS


@pytest.mark.parametrize("name", ["lines.txt", "lines.txt.gz"])
def test_row_i_is_the_vector_of_line_i_in_every_chunk(tiny_encoders, tmp_path, monkeypatch, name):
    embedder = load_embedder(tiny_encoders["first"], layer=1)
    sentences = [*"abcdefg", "", "h i", *TEXTS]
    content = ("\ufeff" + "\r\n".join(sentences)).encode()  # as Windows writes it, without an end of the last line
    (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    monkeypatch.setattr(embedding, "CHUNK", 3)
    monkeypatch.setattr(vector_files, "CHUNK_CHARACTERS", 8)

    num_lines = vector_files.embed_file(embedder, tmp_path / name, tmp_path / "vectors.npy")

    vectors = np.load(tmp_path / "vectors.npy", mmap_mode="r")
    assert num_lines == len(sentences)
    assert vectors.dtype == np.float32
    assert vectors.shape == (len(sentences), 32)
    for vector, sentence in zip(vectors, sentences, strict=True):
        np.testing.assert_allclose(vector, embedder([sentence])[0].numpy(), atol=1e-5)


def test_a_chunk_ends_at_its_number_of_sentences_or_characters(monkeypatch):
    monkeypatch.setattr(embedding, "CHUNK", 3)
    monkeypatch.setattr(vector_files, "CHUNK_CHARACTERS", 8)

    chunks = list(vector_files._split_into_chunks(["a", "b", "c", "d", "eight letters", "e"]))

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

    def yield_three_and_interrupt():
        yield from "abc"
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        vector_files.write(tmp_path / "out.npy", embedder, yield_three_and_interrupt(), 4, normalise=True)

    assert [path.name for path in tmp_path.iterdir()] == ["out.npy"]
    assert (tmp_path / "out.npy").read_bytes() == b"former"
