"""Converts pickled checkpoints of fairseq and of the hub to Hugging Face directories.

Examples are `model.pt` of XLM-R, the checkpoints of InfoXLM's release, and `pytorch_model.bin`. Pickles can run code.
They are read only here, by torch's restricted reader, and converted to safetensors and JSON.
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

from infoxlm_core import user_files
from infoxlm_core.data.vocabulary import FIRST_POSITION
from infoxlm_core.errors import InputError, one_line
from infoxlm_core.model.encoder import Encoder, EncoderSize
from infoxlm_core.model.heads import MaskedLMHead
from infoxlm_core.model.huggingface import pretrained, tokenizers

HEAD_SIZE = 64  # dimensions of a head in every XLM-R, because the weights do not show the number of heads

# Prefixes of the query encoder's tensors, which InfoXLM's release calls "fast". The first one that occurs is used.
_PREFIXES = ("model_fast.decoder.", "model_fast.encoder.", "decoder.", "encoder.", "")
_PROJECTION = "proj_matrix_fast"  # (1, d, d): z = h @ projection
_NAME_RULES = [  # our name -> fairseq's name
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
    """A description of an imported checkpoint, with the names that its tensors have there."""

    size: EncoderSize
    projection: bool  # whether the checkpoint has the contrast projection
    missing: tuple[str, ...]  # tensors of the masked-LM head that the checkpoint lacks
    unused: tuple[str, ...]  # tensors of the checkpoint that were not imported

    @property
    def unused_parts(self) -> dict[str, int]:
        """Return the number of unused tensors by the first part of their names, such as {"model_slow": 199}."""
        return dict(Counter(name.partition(".")[0] for name in self.unused))


def fairseq_name(name: str) -> str:
    """Return the name of a parameter in fairseq: `encoder.layers.0.up.bias` -> `sentence_encoder.layers.0.fc1.bias`."""
    return pretrained.rename(name, _NAME_RULES)


def convert(checkpoint: Path, directory: Path, tokenizer: Path | None = None, heads: int | None = None) -> Imported:
    """Convert the query encoder of a checkpoint, with head and projection, to a new Hugging Face directory.

    Args:
        checkpoint: a pickle of fairseq, or a `pytorch_model.bin` of Hugging Face.
        directory: the directory to create.
        tokenizer: directory with sentencepiece.bpe.model or tokenizer.json; None: that of the checkpoint.
        heads: number of attention heads; None: hidden size / 64.

    Raises:
        InputError: the checkpoint cannot be read without running code, or a tensor is missing or has a wrong shape.
    """
    if directory.exists():
        raise InputError(f"{directory} exists: give a new directory")
    if tokenizer and not any((tokenizer / name).is_file() for name in (tokenizers.MODEL, "tokenizer.json")):
        raise InputError(f"{tokenizer} holds neither {tokenizers.MODEL} nor tokenizer.json: give another --tokenizer")
    state, contrast_layer = _read(checkpoint)
    tensors, to_stored_name, unused = _select_query_encoder(state)
    size = _infer_size(tensors, to_stored_name, heads, checkpoint)
    model, missing = _build_model(tensors, to_stored_name, size, checkpoint)
    projection = _read_projection(state, size, checkpoint)
    contrast: dict[str, Any] = {}
    if projection is not None and contrast_layer:
        contrast["infoxlm"] = {"layer": contrast_layer, "pooling": "cls", "normalise": False}
    architectures = ["XLMRobertaModel" if missing else "XLMRobertaForMaskedLM"]
    config = pretrained.make_hugging_face_config(size, architectures=architectures, **contrast)
    directory.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".import-", dir=directory.parent) as folder:
        unfinished = Path(folder) / "model"  # renamed when it is complete
        pretrained.write(model, config, tokenizer or checkpoint.parent, unfinished)
        if projection is not None:
            save_file({"projection": projection}, unfinished / pretrained.PROJECTION)
        sentencepiece_model = unfinished / tokenizers.MODEL
        if sentencepiece_model.is_file() and not (unfinished / "tokenizer.json").is_file():
            tokenizers.write_fast(sentencepiece_model.read_bytes(), unfinished, size.positions - FIRST_POSITION)
        unfinished.replace(directory)
    used = {to_stored_name(name) for name, _ in model.named_parameters()} | _REDUNDANT
    unused += tensors.keys() - used
    return Imported(size, projection is not None, missing, tuple(sorted(unused)))


# Tensors that are not reported as unused: copies of the word embeddings and of the head's bias, and the type row, which
# is added to the positions.
_REDUNDANT = {"lm_head.weight", "lm_head.decoder.weight", "lm_head.decoder.bias", pretrained.TYPE_ROW}


def _read_projection(state: Mapping[str, Tensor], size: EncoderSize, checkpoint: Path) -> Tensor | None:
    """Return the contrast projection (d, d) of a checkpoint in fp32, or None if there is none."""
    projection = state.get(_PROJECTION)
    if projection is None:
        return None
    expected_shape = (1, size.hidden, size.hidden)
    if projection.shape != expected_shape:
        raise InputError(f"{checkpoint}: {_PROJECTION} is {tuple(projection.shape)}, not {expected_shape}")
    return projection[0].float().contiguous()


def _read(checkpoint: Path) -> tuple[dict[str, Tensor], int | None]:
    """Return the tensors of a checkpoint by name, and the contrast layer if the checkpoint records it."""
    try:
        with torch.serialization.safe_globals([argparse.Namespace]):
            _check_claimed_sizes(checkpoint)
            loaded = torch.load(checkpoint, map_location="cpu", weights_only=True, mmap=False)
    except InputError:
        raise
    except Exception as error:  # a damaged file can raise almost any exception
        raise InputError(
            f"{checkpoint} cannot be read as a checkpoint without running code ({one_line(error)}): "
            "give model.pt as it was downloaded"
        ) from None
    if not isinstance(loaded, dict):
        raise InputError(f"{checkpoint} holds a {type(loaded).__name__}, not the tensors of a model: give a checkpoint")
    state = loaded.get("model", loaded)
    layer = getattr(loaded.get("args"), "xlco_layer", None)
    return {name: value for name, value in state.items() if isinstance(value, Tensor)}, layer


def _check_claimed_sizes(checkpoint: Path) -> None:
    """Raise InputError if a checkpoint describes larger tensors than its file can contain.

    The checkpoint is read with fake tensors, which have sizes but no memory.
    """
    file_size = user_files.check_readable(checkpoint).stat().st_size
    remedy = "give model.pt as it was downloaded"
    if zipfile.is_zipfile(checkpoint):
        with zipfile.ZipFile(checkpoint) as archive:
            unpacked_size = sum(member.file_size for member in archive.infolist())
            if unpacked_size > file_size:
                raise InputError(f"{checkpoint} unpacks to more than its {file_size:,} bytes: {remedy}")
    with checkpoint.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        if content.find(b"bytearray") >= 0:  # torch's restricted reader would allocate any size
            raise InputError(f"{checkpoint} holds a bytearray, which no checkpoint needs: {remedy}")
    with FakeTensorMode():
        loaded = torch.load(checkpoint, map_location="cpu", weights_only=True)
    tensors = [value for value in tree_leaves(loaded) if isinstance(value, Tensor)]
    claimed_size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    largest_storage = max((tensor.untyped_storage().nbytes() for tensor in tensors), default=0)
    # The file contains tied weights once, but `claimed_size` counts them for each of their names.
    if claimed_size > 2 * file_size or largest_storage > file_size:
        largest_claim = max(claimed_size, largest_storage)
        raise InputError(f"{checkpoint} has {file_size:,} bytes, but its tensors claim {largest_claim:,}: {remedy}")


def _select_query_encoder(state: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], Callable[[str], str], list[str]]:
    """Select the tensors of the query encoder and its head from a checkpoint of fairseq or Hugging Face.

    Returns:
        The tensors by their names without prefix, the function that converts our names to these names, and the names
        of all other tensors.
    """
    if any(name.startswith("roberta.") for name in state):
        return dict(state), pretrained.to_hugging_face_name, []
    used_prefixes = [prefix for prefix in _PREFIXES if f"{prefix}sentence_encoder.embed_tokens.weight" in state]
    prefix = used_prefixes[0] if used_prefixes else ""
    tensors: dict[str, Tensor] = {}
    unused = []
    for name, value in state.items():
        if name == _PROJECTION:
            continue
        if not name.startswith(prefix):
            unused.append(name)
        elif ".self_attn.in_proj_" in name:  # older files join the rows of query, key and value
            for letter, rows in zip("qkv", value.chunk(3), strict=True):
                new_name = name.removeprefix(prefix).replace("in_proj_", f"{letter}_proj.")
                tensors[new_name] = rows
        else:
            tensors[name.removeprefix(prefix)] = value
    return tensors, fairseq_name, unused


def _infer_size(
    tensors: Mapping[str, Tensor], to_stored_name: Callable[[str], str], heads: int | None, checkpoint: Path
) -> EncoderSize:
    """Infer the sizes of an encoder from the shapes of its tensors."""

    def count_rows(name: str) -> int:
        tensor = tensors.get(to_stored_name(name))
        if tensor is None:
            raise InputError(f"{checkpoint} has no {to_stored_name(name)}: give a checkpoint of XLM-R or InfoXLM")
        return tensor.shape[0]

    hidden = count_rows("encoder.embedding_norm.weight")
    heads = heads or max(1, hidden // HEAD_SIZE)
    if hidden % heads:
        raise InputError(
            f"{checkpoint}: hidden size {hidden} is not a multiple of {heads} heads: give the number with --heads"
        )
    layer_numbers = []
    for name in tensors:
        match = re.search(r"\.layers?\.(\d+)\.", name)
        if match:
            layer_numbers.append(int(match[1]))
    return EncoderSize(
        vocabulary=count_rows("encoder.token_embedding.weight"),
        layers=max(layer_numbers, default=-1) + 1,
        hidden=hidden,
        ffn=count_rows("encoder.layers.0.up.weight"),
        heads=heads,
        positions=count_rows("encoder.position_embedding.weight"),
    )


def _build_model(
    tensors: Mapping[str, Tensor], to_stored_name: Callable[[str], str], size: EncoderSize, checkpoint: Path
) -> tuple[nn.Module, tuple[str, ...]]:
    """Return a module with the encoder and the masked-LM head of a checkpoint, and the names of missing head tensors.

    If a tensor of the head is missing, the module has no head.
    """
    embedding = tensors[to_stored_name("encoder.token_embedding.weight")]
    for name in ("lm_head.weight", "lm_head.decoder.weight"):
        if name in tensors and not torch.equal(tensors[name], embedding):
            raise InputError(f"{checkpoint}: {name} differs from the word embeddings: give a model with a tied head")
    model = nn.Module()
    with torch.device("meta"):
        model.encoder = Encoder(size)
        model.head = MaskedLMHead(size)
    head_names = [to_stored_name(f"head.{name}") for name in model.head.state_dict()]
    missing = tuple(name for name in head_names if name not in tensors)
    if missing:
        del model.head
    weights = {}
    for name, parameter in model.named_parameters():
        tensor = tensors.get(to_stored_name(name))
        if tensor is None:
            raise InputError(f"{checkpoint} has no {to_stored_name(name)}: give a complete checkpoint")
        if tensor.shape != parameter.shape:
            raise InputError(
                f"{checkpoint}: {to_stored_name(name)} is {tuple(tensor.shape)}, not {tuple(parameter.shape)}: "
                "give a complete checkpoint"
            )
        weights[name] = tensor
    types = tensors.get(pretrained.TYPE_ROW)
    if types is not None:  # every token has the same type, so its row can be added to the positions
        weights["encoder.position_embedding.weight"] = weights["encoder.position_embedding.weight"] + types[0]
    model.load_state_dict(weights, assign=True)
    return model, missing
