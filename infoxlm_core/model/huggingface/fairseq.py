"""Converts pickled checkpoints from fairseq and Hugging Face to Hugging Face directories.

Examples are XLM-R's `model.pt`, the checkpoints of InfoXLM's release, and `pytorch_model.bin`. Because pickles can run
code, only this module reads pickles, with torch's restricted reader, and writes safetensors and JSON. The weights of a
Hugging Face model keep their names, and its other files are copied, because they describe pooling, prompts and length.
"""

import argparse
import mmap
import re
import shutil
import tempfile
import zipfile
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves

from infoxlm_core import user_files
from infoxlm_core.errors import InputError, one_line
from infoxlm_core.model.encoder import Encoder, EncoderSize
from infoxlm_core.model.heads import MaskedLMHead
from infoxlm_core.model.huggingface import pretrained, tokenizers
from infoxlm_core.model.huggingface.directories import POOLING

_REMEDY = "give model.pt as it was downloaded"
HEAD_SIZE = 64  # head size of every XLM-R; the shapes of the weights do not determine it

# Possible prefixes of the query encoder's tensors, in order of preference. InfoXLM's release calls this encoder "fast".
_PREFIXES = ("model_fast.decoder.", "model_fast.encoder.", "decoder.", "encoder.")
_PROJECTION = "proj_matrix_fast"  # (1, d, d): z = h @ projection
_OUTPUT_LAYER = "lm_head.weight"  # a copy of the word embeddings, so it does not count as unused
_HUGGING_FACE_EMBEDDINGS = "embeddings.word_embeddings.weight"
"""End of the name of the word embeddings in Hugging Face's XLM-R, BERT and DistilBERT. fairseq has no such name."""
_MODEL_FILES = ("*.json", "*.model", "*.txt", "README.md", f"{POOLING}/config.json")
"""Patterns of the files to copy from the directory of a Hugging Face model."""
NAME_RULES = [  # our name -> fairseq's name
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
    """A summary of an imported checkpoint. Tensors have their names from the checkpoint."""

    size: EncoderSize
    projection: bool  # whether the checkpoint has a contrast projection
    missing: tuple[str, ...]  # masked-LM head tensors that the checkpoint lacks
    unused: tuple[str, ...]  # checkpoint tensors that were not imported

    @property
    def unused_parts(self) -> dict[str, int]:
        """The number of unused tensors by first part of their names, such as {"model_slow": 199}."""
        return dict(Counter(name.partition(".")[0] for name in self.unused))


@dataclass(frozen=True)
class _QueryEncoder:
    """A checkpoint's tensors for the query encoder and its head."""

    checkpoint: Path
    tensors: dict[str, Tensor]  # by their names in the checkpoint, without the query encoder's prefix
    other_names: list[str]  # names of the checkpoint's other tensors

    def stored_name(self, name: str) -> str:
        """Convert one of our parameter names to its name in `tensors`."""
        return pretrained.rename(name, NAME_RULES)

    def find_tensor(self, name: str) -> Tensor:
        """Return the tensor for one of our parameter names. Raise InputError if the checkpoint lacks the tensor."""
        tensor = self.tensors.get(self.stored_name(name))
        if tensor is None:
            raise InputError(
                f"{self.checkpoint} has no {self.stored_name(name)}: give a complete checkpoint of XLM-R or InfoXLM"
            )
        return tensor


def convert(checkpoint: Path, directory: Path, tokenizer: Path | None = None, heads: int | None = None) -> Imported:
    """Convert a checkpoint to a new Hugging Face directory.

    The directory contains all weights of a Hugging Face checkpoint, or the query encoder, head and projection of a
    fairseq checkpoint.

    Args:
        checkpoint: pickle from fairseq, or `pytorch_model.bin` in the directory of a Hugging Face model.
        directory: directory to create.
        tokenizer: directory with sentencepiece.bpe.model or tokenizer.json; None: the checkpoint's directory.
        heads: number of attention heads of a fairseq checkpoint; None: hidden size / 64.

    Raises:
        InputError: the checkpoint cannot be read without running code, a tensor is missing, or a shape is wrong.
    """
    if directory.exists():
        raise InputError(f"{directory} exists: give a new directory")
    if tokenizer and not (tokenizer / tokenizers.MODEL).is_file() and not (tokenizer / tokenizers.FAST).is_file():
        raise InputError(
            f"{tokenizer} holds neither {tokenizers.MODEL} nor {tokenizers.FAST}: give another --tokenizer"
        )
    state, contrast_layer = _read_checkpoint(checkpoint)
    directory.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".import-", dir=directory.parent) as temporary:
        unfinished = Path(temporary) / "model"  # renamed at the end, so that a failed import leaves no partial model
        if any(name.endswith(_HUGGING_FACE_EMBEDDINGS) for name in state):
            imported = _write_hugging_face_model(state, checkpoint, unfinished, tokenizer, heads)
        else:
            imported = _write_fairseq_model(state, contrast_layer, checkpoint, unfinished, tokenizer, heads)
        sentencepiece_model = unfinished / tokenizers.MODEL
        if sentencepiece_model.is_file() and not (unfinished / tokenizers.FAST).is_file():
            tokenizers.write_fast(sentencepiece_model.read_bytes(), unfinished, imported.size.max_tokens)
        unfinished.replace(directory)
    return imported


def _write_hugging_face_model(
    state: Mapping[str, Tensor], checkpoint: Path, directory: Path, tokenizer: Path | None, heads: int | None
) -> Imported:
    """Write the weights of a Hugging Face checkpoint as safetensors, and copy the model's other files.

    The arguments are those of `convert`, and `state` has the checkpoint's tensors by name.
    """
    source = checkpoint.parent
    unsupported_setting = pretrained.find_unsupported_setting(pretrained.read_config(source))
    if unsupported_setting:
        raise InputError(f"{source}/config.json: {unsupported_setting}: give a model that can be a start of a training")
    size = pretrained.read_encoder_size(source)
    if heads not in (None, size.heads):
        raise InputError(f"--heads is {heads}, but {source}/config.json says {size.heads}: leave it out")
    pretrained.check_size(size, state, checkpoint)
    directory.mkdir()
    for pattern in _MODEL_FILES:
        for path in source.glob(pattern):
            if path.name.endswith(".index.json"):  # an index of weight files that are not copied
                continue
            copy = directory / path.relative_to(source)
            copy.parent.mkdir(exist_ok=True)
            shutil.copyfile(user_files.check_readable(path), copy)
    weights: dict[str, Tensor] = {}
    written_views = set()
    embeddings_first = sorted(state.items(), key=lambda item: "embeddings" not in item[0])
    for name, tensor in embeddings_first:
        view = (tensor.data_ptr(), tensor.shape, tensor.stride())
        if view in written_views:  # a tied weight: the output layer is the same tensor as the word embeddings
            continue
        written_views.add(view)
        weights[name] = tensor.contiguous()
    save_file(weights, directory / pretrained.WEIGHTS, metadata={"format": "pt"})
    if tokenizer:
        tokenizers.copy(tokenizer, directory, size.max_tokens)
    return Imported(size, projection=False, missing=(), unused=())


def _write_fairseq_model(
    state: Mapping[str, Tensor],
    contrast_layer: int | None,
    checkpoint: Path,
    directory: Path,
    tokenizer: Path | None,
    heads: int | None,
) -> Imported:
    """Write the query encoder, head and projection of a fairseq checkpoint in Hugging Face's format.

    The arguments are those of `convert`. `state` has the checkpoint's tensors by name, and `contrast_layer` is the
    layer of the contrastive loss if the checkpoint records it.
    """
    query_encoder = _select_query_encoder(state, checkpoint)
    size = _infer_size(query_encoder, heads)
    missing_head_names = _find_missing_head_tensors(query_encoder, size)
    model = _build_model(query_encoder, size, has_head=not missing_head_names)
    projection = _read_projection(state, size, checkpoint)
    config = pretrained.make_hugging_face_config(size)
    config.architectures = ["XLMRobertaModel" if missing_head_names else "XLMRobertaForMaskedLM"]
    if projection is not None and contrast_layer:  # pooling and normalise are those of the released code
        config.infoxlm = {"layer": contrast_layer, "pooling": "cls", "normalise": False}
    pretrained.write(model, config, tokenizer or checkpoint.parent, directory)
    if projection is not None:
        save_file({"projection": projection}, directory / pretrained.PROJECTION)
    imported_names = {query_encoder.stored_name(name) for name, _ in model.named_parameters()}
    unused_names = query_encoder.tensors.keys() - imported_names - {_OUTPUT_LAYER}
    unused = tuple(sorted([*query_encoder.other_names, *unused_names]))
    return Imported(size, projection is not None, missing_head_names, unused)


def _read_projection(state: Mapping[str, Tensor], size: EncoderSize, checkpoint: Path) -> Tensor | None:
    """Return a checkpoint's (d, d) contrast projection in fp32, or None if the checkpoint has no projection."""
    projection = state.get(_PROJECTION)
    if projection is None:
        return None
    expected_shape = (1, size.hidden, size.hidden)
    if projection.shape != expected_shape:
        raise InputError(f"{checkpoint}: {_PROJECTION} is {tuple(projection.shape)}, not {expected_shape}: {_REMEDY}")
    return projection[0].float().contiguous()


def _read_checkpoint(checkpoint: Path) -> tuple[dict[str, Tensor], int | None]:
    """Return a checkpoint's tensors by name, and its contrast layer, or None if the checkpoint does not record it."""
    try:
        with torch.serialization.safe_globals([argparse.Namespace]):  # the type of fairseq's options
            _check_tensor_sizes(checkpoint)
            loaded = torch.load(checkpoint, map_location="cpu", weights_only=True)
    except InputError:  # from `_check_tensor_sizes`, with a better message
        raise
    except Exception as error:  # a damaged file can raise almost any exception
        raise InputError(
            f"{checkpoint} cannot be read as a checkpoint without running code ({one_line(error)}): {_REMEDY}"
        ) from None
    state = loaded.get("model", loaded) if isinstance(loaded, dict) else loaded  # fairseq stores them as "model"
    if not isinstance(state, dict):
        raise InputError(f"{checkpoint} holds a {type(state).__name__}, not the tensors of a model: give a checkpoint")
    tensors = {str(name): value for name, value in state.items() if isinstance(value, Tensor)}
    contrast_layer = getattr(loaded.get("args"), "xlco_layer", None)
    return tensors, contrast_layer


def _check_tensor_sizes(checkpoint: Path) -> None:
    """Raise InputError if a checkpoint describes tensors that are too large for its file.

    Otherwise a small file could fill the machine's memory.
    """
    file_size = user_files.check_readable(checkpoint).stat().st_size
    if zipfile.is_zipfile(checkpoint):
        with zipfile.ZipFile(checkpoint) as archive:
            unpacked_size = sum(member.file_size for member in archive.infolist())
        if unpacked_size > file_size:
            raise InputError(f"{checkpoint} unpacks to more than its {file_size:,} bytes: {_REMEDY}")
    with checkpoint.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        if content.find(b"bytearray") >= 0:  # torch's restricted reader would allocate a bytearray of any size
            raise InputError(f"{checkpoint} holds a bytearray, which no checkpoint needs: {_REMEDY}")
    with FakeTensorMode():  # fake tensors have sizes, but no memory
        loaded = torch.load(checkpoint, map_location="cpu", weights_only=True)
    tensors = [value for value in tree_leaves(loaded) if isinstance(value, Tensor)]
    total_size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    largest_storage = max((tensor.untyped_storage().nbytes() for tensor in tensors), default=0)
    # The file stores tied weights once, but `total_size` counts tied weights once per name.
    if total_size > 2 * file_size or largest_storage > file_size:
        claimed_size = max(total_size, largest_storage)
        raise InputError(f"{checkpoint} has {file_size:,} bytes, but its tensors claim {claimed_size:,}: {_REMEDY}")


def _select_query_encoder(state: Mapping[str, Tensor], checkpoint: Path) -> _QueryEncoder:
    """Select the tensors of the query encoder and its head from a fairseq checkpoint."""
    prefixes = (prefix for prefix in _PREFIXES if f"{prefix}sentence_encoder.embed_tokens.weight" in state)
    prefix = next(prefixes, "")  # "": the names have no prefix
    tensors: dict[str, Tensor] = {}
    other_names = []
    for full_name, tensor in state.items():
        name = full_name.removeprefix(prefix)
        if full_name == _PROJECTION:  # read by `_read_projection`
            continue
        if not full_name.startswith(prefix):
            other_names.append(full_name)
        elif ".self_attn.in_proj_" in name:  # older files concatenate query, key and value
            for letter, part in zip("qkv", tensor.chunk(3), strict=True):
                tensors[name.replace("in_proj_", f"{letter}_proj.")] = part
        else:
            tensors[name] = tensor
    return _QueryEncoder(checkpoint, tensors, other_names)


def _infer_size(query_encoder: _QueryEncoder, heads: int | None) -> EncoderSize:
    """Infer an encoder's sizes from the shapes of its tensors. `heads` defaults to hidden size / 64."""
    hidden = len(query_encoder.find_tensor("encoder.embedding_norm.weight"))
    heads = heads or max(1, hidden // HEAD_SIZE)
    if hidden % heads:
        raise InputError(
            f"{query_encoder.checkpoint}: hidden size {hidden} is not a multiple of {heads} heads: "
            "give the number of heads with --heads"
        )
    matches = [re.search(r"\.layers\.(\d+)\.", name) for name in query_encoder.tensors]
    layer_numbers = [int(match[1]) for match in matches if match]
    return EncoderSize(
        vocabulary=len(query_encoder.find_tensor("encoder.token_embedding.weight")),
        layers=max(layer_numbers, default=-1) + 1,
        hidden=hidden,
        ffn=len(query_encoder.find_tensor("encoder.layers.0.up.weight")),
        heads=heads,
        positions=len(query_encoder.find_tensor("encoder.position_embedding.weight")),
    )


def _find_missing_head_tensors(query_encoder: _QueryEncoder, size: EncoderSize) -> tuple[str, ...]:
    """Return the names of the masked-LM head tensors that a checkpoint lacks."""
    with torch.device("meta"):
        head = MaskedLMHead(size)
    stored_names = [query_encoder.stored_name(f"head.{name}") for name in head.state_dict()]
    return tuple(name for name in stored_names if name not in query_encoder.tensors)


def _build_model(query_encoder: _QueryEncoder, size: EncoderSize, has_head: bool) -> nn.Module:
    """Build a module with a checkpoint's encoder and, if `has_head`, its masked-LM head."""
    embeddings = query_encoder.find_tensor("encoder.token_embedding.weight")
    output_layer = query_encoder.tensors.get(_OUTPUT_LAYER)
    if output_layer is not None and not torch.equal(output_layer, embeddings):
        raise InputError(
            f"{query_encoder.checkpoint}: {_OUTPUT_LAYER} differs from the word embeddings: give a model with a tied "
            "head"
        )
    model = nn.Module()
    with torch.device("meta"):
        model.encoder = Encoder(size)
        if has_head:
            model.head = MaskedLMHead(size)
    weights = {}
    for name, parameter in model.named_parameters():
        tensor = query_encoder.find_tensor(name)
        if tensor.shape != parameter.shape:
            raise InputError(
                f"{query_encoder.checkpoint}: {query_encoder.stored_name(name)} is {tuple(tensor.shape)}, "
                f"not {tuple(parameter.shape)}: give a complete checkpoint"
            )
        weights[name] = tensor
    model.load_state_dict(weights, assign=True)
    return model
