"""Checkpoints of fairseq in: XLM-R's `model.pt`, a training checkpoint of InfoXLM's release; also pickles of the hub.

Pickled weights can run code, so they are read here once, by torch's restricted reader, and become a Hugging Face
directory of safetensors and JSON. Nothing else in the project opens a pickle.
"""

import argparse
import mmap
import re
import tempfile
import zipfile
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves

from infoxlm_core import outside
from infoxlm_core.data.vocabulary import FIRST_POSITION
from infoxlm_core.errors import InputError, one_line
from infoxlm_core.model.encoder import Encoder, EncoderSize
from infoxlm_core.model.heads import MaskedLMHead
from infoxlm_core.model.huggingface import pretrained, tokenizers

HEAD_SIZE = 64  # of all of XLM-R's sizes; weights do not tell how many heads share them

_PREFIXES = ("model_fast.decoder.", "model_fast.encoder.", "decoder.", "encoder.", "")  # the longest that fits
_PROJECTION = "proj_matrix_fast"  # (1, d, d), z = h @ it
_RENAMED = [  # ours -> fairseq, the first that fits
    (r"^encoder\.token_embedding\.", "sentence_encoder.embed_tokens."),
    (r"^encoder\.position_embedding\.", "sentence_encoder.embed_positions."),
    (r"^encoder\.embedding_norm\.", "sentence_encoder.emb_layer_norm."),
    (r"^encoder\.layers\.(\d+)\.(q)uery\.", r"sentence_encoder.layers.\1.self_attn.\2_proj."),
    (r"^encoder\.layers\.(\d+)\.(k)ey\.", r"sentence_encoder.layers.\1.self_attn.\2_proj."),
    (r"^encoder\.layers\.(\d+)\.(v)alue\.", r"sentence_encoder.layers.\1.self_attn.\2_proj."),
    (r"^encoder\.layers\.(\d+)\.attention_output\.", r"sentence_encoder.layers.\1.self_attn.out_proj."),
    (r"^encoder\.layers\.(\d+)\.attention_norm\.", r"sentence_encoder.layers.\1.self_attn_layer_norm."),
    (r"^encoder\.layers\.(\d+)\.up\.", r"sentence_encoder.layers.\1.fc1."),
    (r"^encoder\.layers\.(\d+)\.down\.", r"sentence_encoder.layers.\1.fc2."),
    (r"^encoder\.layers\.(\d+)\.output_norm\.", r"sentence_encoder.layers.\1.final_layer_norm."),
    (r"^head\.dense\.", "lm_head.dense."),
    (r"^head\.norm\.", "lm_head.layer_norm."),
    (r"^head\.bias$", "lm_head.bias"),
]


@dataclass(frozen=True)
class Imported:
    """What came of an import; names are those of the checkpoint."""

    size: EncoderSize
    projection: bool  # whether the contrast projection was in it
    missing: tuple[str, ...]  # of the masked-LM head; an encoder that is not complete is refused
    unused: tuple[str, ...]

    @property
    def unused_parts(self) -> dict[str, int]:
        """How many names were not used, by their first part: `model_slow` 199."""
        return dict(Counter(name.partition(".")[0] for name in self.unused))


def fairseq_name(name: str) -> str:
    """`encoder.layers.0.up.bias` -> `sentence_encoder.layers.0.fc1.bias`."""
    return pretrained.rename(name, _RENAMED)


def convert(checkpoint: Path, directory: Path, tokenizer: Path | None = None, heads: int | None = None) -> Imported:
    """Write a checkpoint as a new Hugging Face directory: the query encoder, its head, its projection.

    `checkpoint` is a pickle of fairseq's layout, or a `pytorch_model.bin` in Hugging Face's; `tokenizer` the directory
    of `sentencepiece.bpe.model` or tokenizer.json, or the checkpoint's own; attention `heads` are hidden size / 64 if
    not given. Raises InputError if it cannot be read without running code, or its tensors are missing, misshapen or
    unfit.
    """
    if directory.exists():
        raise InputError(f"{directory} exists: give a new directory")
    state, layer = _read(checkpoint)
    named, naming, unused = _strip(state)
    size = _size(named, naming, heads, checkpoint)
    holder, missing = _fill(named, naming, size, checkpoint)
    projection = state.get(_PROJECTION)
    if projection is not None and projection.shape != (1, size.hidden, size.hidden):
        raise InputError(
            f"{checkpoint}: {_PROJECTION} is {tuple(projection.shape)}, not {(1, size.hidden, size.hidden)}"
        )
    more: dict[str, Any] = {}
    if projection is not None and layer:
        more["infoxlm"] = {"layer": layer, "pooling": "cls", "normalise": False}
    architectures = ["XLMRobertaModel" if missing else "XLMRobertaForMaskedLM"]
    config = pretrained.hugging_face_config(size, architectures=architectures, **more)
    directory.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".import-", dir=directory.parent) as folder:
        partial = Path(folder) / "it"
        if tokenizer and not any((tokenizer / name).is_file() for name in (tokenizers.MODEL, "tokenizer.json")):
            raise InputError(
                f"{tokenizer} holds neither {tokenizers.MODEL} nor tokenizer.json: give another --tokenizer"
            )
        pretrained.write(holder, config, tokenizer or checkpoint.parent, partial)
        if projection is not None:
            save_file({"projection": projection[0].float().contiguous()}, partial / pretrained.PROJECTION)
        model = partial / tokenizers.MODEL
        if model.is_file() and not (partial / "tokenizer.json").is_file():
            tokenizers.write_fast(model.read_bytes(), partial, size.positions - FIRST_POSITION)
        partial.replace(directory)
    used = {naming(name) for name, _ in holder.named_parameters()} | _TIED
    return Imported(size, projection is not None, missing, tuple(sorted([*unused, *(named.keys() - used)])))


_TIED = {"lm_head.weight", "lm_head.decoder.weight", "lm_head.decoder.bias", pretrained.TYPE_ROW}


def _read(checkpoint: Path) -> tuple[dict[str, Tensor], int | None]:
    """Return the tensors of a checkpoint by name, and the contrast layer if the checkpoint's arguments name it."""
    try:
        with torch.serialization.safe_globals([argparse.Namespace]):
            _check_claimed_sizes(checkpoint)
            loaded = torch.load(checkpoint, map_location="cpu", weights_only=True, mmap=False)
    except InputError:
        raise
    except Exception as error:  # what is no pickle raises almost any exception
        raise InputError(
            f"{checkpoint} is no checkpoint that can be read without running code ({one_line(error)}): "
            "give model.pt as it was downloaded"
        ) from None
    if not isinstance(loaded, dict):
        raise InputError(f"{checkpoint} holds a {type(loaded).__name__}, not the tensors of a model: give a checkpoint")
    state = loaded.get("model", loaded)
    layer = getattr(loaded.get("args"), "xlco_layer", None)
    return {name: value for name, value in state.items() if isinstance(value, Tensor)}, layer


def _check_claimed_sizes(checkpoint: Path) -> None:
    """Raise InputError if the tensors of a checkpoint claim more bytes than its file can hold.

    Fake tensors have sizes and no memory, so the checkpoint is read with them first.
    """
    file_size = outside.check_readable(checkpoint).stat().st_size
    remedy = "give model.pt as it was downloaded"
    if zipfile.is_zipfile(checkpoint):
        with zipfile.ZipFile(checkpoint) as archive:
            if sum(entry.file_size for entry in archive.infolist()) > file_size:
                raise InputError(f"{checkpoint} unpacks to more than its {file_size:,} bytes: {remedy}")
    with checkpoint.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        if content.find(b"bytearray") >= 0:  # the one builtin of torch's restricted reader that allocates any size
            raise InputError(f"{checkpoint} holds a bytearray, which no checkpoint needs: {remedy}")
    with FakeTensorMode():
        loaded = torch.load(checkpoint, map_location="cpu", weights_only=True)
    tensors = [value for value in tree_leaves(loaded) if isinstance(value, Tensor)]
    claimed = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    largest_storage = max((tensor.untyped_storage().nbytes() for tensor in tensors), default=0)
    # Tied weights are stored once: the embeddings may count twice, and a checkpoint may hold two such models.
    if claimed > 2 * file_size or largest_storage > file_size:
        raise InputError(
            f"{checkpoint} has {file_size:,} bytes, its tensors claim {max(claimed, largest_storage):,}: {remedy}"
        )


def _strip(state: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], Callable[[str], str], list[str]]:
    """Tensors of the query encoder without prefix, how they are named, and the names of all the others."""
    if any(name.startswith("roberta.") for name in state):
        return dict(state), pretrained.hugging_face_name, []
    prefix = next(p for p in _PREFIXES if not p or f"{p}sentence_encoder.embed_tokens.weight" in state)
    named = {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}
    named.pop(_PROJECTION, None)
    unused = [name for name in state if not name.startswith(prefix) and name != _PROJECTION]
    for name in [name for name in named if ".self_attn.in_proj_" in name]:  # older files: rows of q, k, v together
        for part, rows in zip("qkv", named.pop(name).chunk(3), strict=True):
            named[name.replace("in_proj_", f"{part}_proj.")] = rows
    return named, fairseq_name, unused


def _size(
    named: Mapping[str, Tensor], naming: Callable[[str], str], heads: int | None, checkpoint: Path
) -> EncoderSize:
    def rows(name: str) -> int:
        value = named.get(naming(name))
        if value is None:
            raise InputError(f"{checkpoint} has no {naming(name)}: give a checkpoint of XLM-R or InfoXLM")
        return value.shape[0]

    hidden = rows("encoder.embedding_norm.weight")
    numbers = [int(number) for name in named for number in re.findall(r"\.layers?\.(\d+)\.", name)[:1]]
    layers = 1 + max(numbers, default=-1)
    heads = heads or max(1, hidden // HEAD_SIZE)
    if hidden % heads:
        raise InputError(f"{checkpoint}: hidden size {hidden} is no multiple of {heads} heads: give --heads")
    return EncoderSize(
        vocabulary=rows("encoder.token_embedding.weight"),
        layers=layers,
        hidden=hidden,
        ffn=rows("encoder.layers.0.up.weight"),
        heads=heads,
        positions=rows("encoder.position_embedding.weight"),
    )


def _fill(
    named: Mapping[str, Tensor], naming: Callable[[str], str], size: EncoderSize, checkpoint: Path
) -> tuple[nn.Module, tuple[str, ...]]:
    """Encoder and head that hold the tensors, and what the head lacks; a head that is not whole is left out."""
    embedding = named[naming("encoder.token_embedding.weight")]
    for name in ("lm_head.weight", "lm_head.decoder.weight"):
        if name in named and not torch.equal(named[name], embedding):
            raise InputError(f"{checkpoint}: {name} is not the word embeddings: an untied head cannot be used")
    holder = nn.Module()
    with torch.device("meta"):
        holder.encoder, holder.head = Encoder(size), MaskedLMHead(size)
    head_names = [naming(f"head.{name}") for name in holder.head.state_dict()]
    missing = tuple(name for name in head_names if name not in named)
    if missing:
        del holder.head
    tensors = {}
    for name, parameter in holder.named_parameters():
        value = named.get(naming(name))
        if value is None:
            raise InputError(f"{checkpoint} has no {naming(name)}: give a complete checkpoint")
        if value.shape != parameter.shape:
            raise InputError(f"{checkpoint}: {naming(name)} is {tuple(value.shape)}, not {tuple(parameter.shape)}")
        tensors[name] = value
    types = named.get(pretrained.TYPE_ROW)
    if types is not None:  # one row, added everywhere
        tensors["encoder.position_embedding.weight"] = tensors["encoder.position_embedding.weight"] + types[0]
    holder.load_state_dict(tensors, assign=True)
    return holder, missing
