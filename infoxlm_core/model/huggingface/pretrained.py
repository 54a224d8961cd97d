"""Hugging Face in and out: our parameters under the names of `XLMRobertaForMaskedLM`, RoBERTa's and BERT's alike."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, NotRequired

import torch
from pydantic import Field
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PretrainedConfig, XLMRobertaConfig
from typing_extensions import TypedDict

from infoxlm_core import manifests, outside
from infoxlm_core.data.vocabulary import BOS, EOS, PAD
from infoxlm_core.errors import InputError, one_line
from infoxlm_core.model.encoder import Encoder, EncoderSize
from infoxlm_core.model.heads import InfoXLM
from infoxlm_core.model.huggingface import stored_weights, tokenizers

WEIGHTS, PROJECTION = "model.safetensors", "projection.safetensors"
KINDS = ("xlm-roberta", "roberta", "bert")  # model types whose encoder is ours, whatever its parameters are called

Names = Sequence[tuple[str, str]]
_Rows = Annotated[int, Field(gt=0, lt=2**31)]
_Width = Annotated[int, Field(gt=0, le=2**17)]
_Layers = Annotated[int, Field(ge=0, le=1000)]
_Epsilon = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]


class _Space(TypedDict):
    """What our own models say of contrast."""

    layer: _Layers
    pooling: str
    normalise: NotRequired[bool]


@outside.allow_extra_keys
class Described(TypedDict):
    """What any config.json may say, as far as it is read for models of every kind."""

    model_type: NotRequired[str | None]
    architectures: NotRequired[list[str] | None]
    infoxlm: NotRequired[_Space | None]
    num_hidden_layers: NotRequired[_Layers]
    layer_norm_eps: NotRequired[_Epsilon | None]
    max_position_embeddings: NotRequired[int | None]
    pad_token_id: NotRequired[int | None]


@outside.allow_extra_keys
class Sizes(TypedDict):
    """What config.json of a model of ours must say."""

    vocab_size: _Rows
    num_hidden_layers: _Layers
    hidden_size: _Width
    intermediate_size: Annotated[int, Field(gt=0, le=2**20)]
    num_attention_heads: _Width
    max_position_embeddings: _Rows
    layer_norm_eps: NotRequired[_Epsilon]
    type_vocab_size: NotRequired[Annotated[int, Field(ge=0, lt=2**20)]]
    pad_token_id: NotRequired[Annotated[int, Field(ge=0, lt=2**20)] | None]


_RENAMED = [  # ours -> Hugging Face, the first that fits
    (r"^encoder\.token_embedding\.", "roberta.embeddings.word_embeddings."),
    (r"^encoder\.position_embedding\.", "roberta.embeddings.position_embeddings."),
    (r"^encoder\.type_embedding\.", "roberta.embeddings.token_type_embeddings."),
    (r"^encoder\.embedding_norm\.", "roberta.embeddings.LayerNorm."),
    (r"^encoder\.layers\.(\d+)\.(query|key|value)\.", r"roberta.encoder.layer.\1.attention.self.\2."),
    (r"^encoder\.layers\.(\d+)\.attention_output\.", r"roberta.encoder.layer.\1.attention.output.dense."),
    (r"^encoder\.layers\.(\d+)\.attention_norm\.", r"roberta.encoder.layer.\1.attention.output.LayerNorm."),
    (r"^encoder\.layers\.(\d+)\.up\.", r"roberta.encoder.layer.\1.intermediate.dense."),
    (r"^encoder\.layers\.(\d+)\.down\.", r"roberta.encoder.layer.\1.output.dense."),
    (r"^encoder\.layers\.(\d+)\.output_norm\.", r"roberta.encoder.layer.\1.output.LayerNorm."),
    (r"^head\.dense\.", "lm_head.dense."),
    (r"^head\.norm\.", "lm_head.layer_norm."),
    (r"^head\.bias$", "lm_head.bias"),
]
_HEADS = ("lm_head.", "cls.", "classifier.", "qa_outputs.")  # what is no part of the encoder in Hugging Face's classes

TYPE_ROW = "roberta.embeddings.token_type_embeddings.weight"
_FAILED = "its training has failed, take another model"


def hugging_face_name(name: str, first: Names = ()) -> str:
    """`encoder.layers.0.up.bias` -> `roberta.encoder.layer.0.intermediate.dense.bias`; the rules `first` go before."""
    return rename(name, (*first, *_RENAMED))


def rename(name: str, rules: Names) -> str:
    """The first of the rules (pattern, replacement) that fits; KeyError if none does."""
    for ours, theirs in rules:
        renamed, count = re.subn(ours, theirs, name)
        if count:
            return renamed
    raise KeyError(name)


def hugging_face_config(
    size: EncoderSize, kind: Callable[..., PretrainedConfig] = XLMRobertaConfig, **more: Any
) -> PretrainedConfig:
    """The config of XLM-R, or of another `kind` that calls its sizes by the same names."""
    return kind(
        vocab_size=size.vocabulary,
        hidden_size=size.hidden,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        intermediate_size=size.ffn,
        max_position_embeddings=size.positions,
        type_vocab_size=max(1, size.types),
        layer_norm_eps=size.epsilon,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        pad_token_id=PAD,
        bos_token_id=BOS,
        eos_token_id=EOS,
        **more,
    )


def write_model(weights: Mapping[str, Tensor], config: PretrainedConfig, directory: Path) -> None:
    """Write weights, under Hugging Face's names, and config."""
    directory.mkdir(parents=True, exist_ok=True)
    weights = {name: value.detach().float().cpu().contiguous() for name, value in weights.items()}
    save_file(weights, directory / WEIGHTS, metadata={"format": "pt"})
    config.save_pretrained(directory)


def write(module: nn.Module, config: PretrainedConfig, tokenizer: Path, directory: Path, names: Names = ()) -> None:
    """Write a module, without projection, and the tokenizer; `names` are rules for what stands on the encoder."""
    weights: dict[str, Tensor] = {
        hugging_face_name(name, names): value for name, value in module.named_parameters() if name != "projection"
    }
    if TYPE_ROW not in weights:
        weights[TYPE_ROW] = torch.zeros(1, config.hidden_size)
    if config.model_type == "bert":
        weights = {re.sub(r"^roberta\.", "bert.", name): value for name, value in weights.items()}
    write_model(weights, config, directory)
    tokenizers.copy(tokenizer, directory, longest_of(config.to_dict()))


def export(model: InfoXLM, tokenizer: Path, directory: Path) -> None:
    """Write a directory that `AutoModel` and `AutoTokenizer` load.

    The contrast projection stands beside it: `projection.safetensors`, tensor `projection` (d, d), z = h @ projection.
    `config.json` says under `infoxlm` at which layer and with which pooling contrast was taken.
    """
    about = {"layer": model.contrast_layer, "pooling": model.pooling, "normalise": model.normalise}
    config = hugging_face_config(model.encoder.size, architectures=["XLMRobertaForMaskedLM"], infoxlm=about)
    write(model, config, tokenizer, directory)
    save_file({"projection": model.projection.detach().float().cpu().contiguous()}, directory / PROJECTION)


def read_config(directory: Path) -> dict[str, Any]:
    """Return a Hugging Face config.json; InputError if there is none, or a size in it is impossible."""
    path = directory / "config.json"
    config = outside.read_json(path, Described, "give a Hugging Face model directory")
    stored_weights.check_counts(config, path)
    return {"model_type": None} | config


def is_ours(config: Mapping[str, Any]) -> bool:
    """Whether our encoder computes what this config describes."""
    plain = config.get("hidden_act", "gelu") == "gelu" and not config.get("is_decoder", False)
    absolute = config.get("position_embedding_type", "absolute") == "absolute"
    return plain and absolute and config["model_type"] in KINDS


def first_position(config: Mapping[str, Any]) -> int:
    """Position of a sequence's first token: RoBERTa's kind counts from the one after padding's."""
    pad = config.get("pad_token_id")
    return 0 if config["model_type"] == "bert" else (PAD if pad is None else pad) + 1


def longest_of(config: Mapping[str, Any]) -> int:
    """Tokens of the longest sequence that a model can read."""
    positions = config.get("max_position_embeddings") or 0
    if config["model_type"] in KINDS:
        return positions - first_position(config)
    # of other kinds some count like RoBERTa: to leave two positions unused harms none
    return positions - 2 if positions > 2 else 512


def size_of(directory: Path, kinds: Sequence[str] = ("xlm-roberta",)) -> EncoderSize:
    """Return the sizes in a Hugging Face config.json, compared with the shapes of the weights that lie beside it.

    Raises:
        InputError: there is no config.json, it describes another architecture, or the weights have other shapes.
    """
    path, config = directory / "config.json", read_config(directory)
    if config["model_type"] not in kinds:
        known = " or ".join(map(repr, kinds))
        raise InputError(f"{path}: model_type is {config['model_type']!r}, not {known}: give such a model")
    bert = config["model_type"] == "bert"
    outside.validate(config, Sizes, path, "give a complete model")
    if config["hidden_size"] % config["num_attention_heads"]:
        raise InputError(f"{path}: num_attention_heads must divide hidden_size: give a complete model")
    types = config.get("type_vocab_size", 2 if bert else 1)
    size = EncoderSize(
        vocabulary=config["vocab_size"],
        layers=config["num_hidden_layers"],
        hidden=config["hidden_size"],
        ffn=config["intermediate_size"],
        heads=config["num_attention_heads"],
        positions=config["max_position_embeddings"],
        epsilon=config.get("layer_norm_eps", 1e-12 if bert else 1e-5),
        types=types if types > 1 else 0,
        first=first_position(config),
    )
    if any(directory.glob("*.safetensors")):  # a plan needs no weights
        _check_size(size, directory)
    return size


def _check_size(size: EncoderSize, directory: Path) -> None:
    """Raise InputError if an encoder of this size is not what the weight files hold."""
    stored = stored_weights.read_headers(directory)
    shapes = {canonical: stored[name].shape for name, canonical in canonical_names(stored).items()}
    with torch.device("meta"):
        encoder = Encoder(size)
    described = {
        hugging_face_name(name): tuple(value.shape) for name, value in encoder.named_parameters(prefix="encoder")
    }
    stored_weights.compare_shapes(described, shapes, directory)


def weight_files(directory: Path) -> list[Path]:
    """The weight files of a Hugging Face model, one or the parts of a large one; InputError if none is in
    safetensors."""
    paths = [directory / WEIGHTS] if (directory / WEIGHTS).is_file() else sorted(directory.glob("model-*.safetensors"))
    if not paths:
        path = directory / WEIGHTS
        raise InputError(f"{path} is missing: convert the model to safetensors (pickled weights are not read)")
    return paths


def read_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file; InputError if there is none, or it is damaged."""
    try:
        return load_file(outside.check_readable(path))
    except (SafetensorError, OSError) as error:
        raise InputError(f"{path} is damaged ({one_line(error)}): copy it again") from None


def read_projection(path: Path) -> Tensor:
    """The contrast projection of a file; InputError if it holds none, or what is no number."""
    found = read_tensors(path).get("projection")
    if found is None:
        raise InputError(f"{path} holds no tensor projection: copy it again")
    if not found.isfinite().all():
        raise InputError(f"{path} holds what is no number: copy it again, or take another model")
    return found


def digest_of(directory: Path) -> str:
    """Digest of the weights in a Hugging Face directory."""
    digests = [manifests.file_sha256(path) for path in weight_files(directory)]
    return f"sha256:{digests[0]}" if len(digests) == 1 else manifests.digest(digests)


def read_weights(directory: Path) -> dict[str, Tensor]:
    """Weights by the names of `XLMRobertaFor…`, from the directory of a model of any of KINDS, or its bare encoder;
    InputError if they are not there or damaged."""
    found: dict[str, Tensor] = {}
    for path in weight_files(directory):
        found |= read_tensors(path)
    return {canonical: found[name] for name, canonical in canonical_names(found).items()}


def canonical_names(names: Iterable[str]) -> dict[str, str]:
    """Map the names of stored weights to the names of `XLMRobertaFor…`."""
    names = list(names)
    is_bare_encoder = not any(name.startswith(("roberta.", "bert.")) for name in names)

    def canonical(name: str) -> str:
        name = re.sub(r"LayerNorm\.(gamma|beta)$", lambda m: f"LayerNorm.{_OLD[m[1]]}", name)
        name = re.sub(r"^bert\.", "roberta.", name)
        return f"roberta.{name}" if is_bare_encoder and not name.startswith(_HEADS) else name

    return {name: canonical(name) for name in names}


_OLD = {"gamma": "weight", "beta": "bias"}  # so Google's BERT calls them


def load_into(
    module: nn.Module, directory: Path, optional: tuple[str, ...] = ("projection",), names: Names = ()
) -> None:
    """Fill a model of ours from a Hugging Face directory, safetensors only.

    A single token-type row, zeros in every published XLM-R, is added to the positions: equal by construction.
    Parameters whose names begin like an `optional` one may be missing there and then keep their values; `names` are
    rules as in `hugging_face_name`. Raises InputError if a weight is missing, has another shape, or is no number.
    """
    stored_weights.check_dtypes(directory)
    found = read_weights(directory)
    if (directory / PROJECTION).is_file():
        found["projection"] = read_projection(directory / PROJECTION)
    types = found.get(TYPE_ROW)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            theirs = name if name == "projection" else hugging_face_name(name, names)
            path = directory / (PROJECTION if name == "projection" else WEIGHTS)
            if theirs not in found:
                if name.startswith(optional):
                    continue
                raise InputError(f"{path} has no {theirs}: give a complete model")
            value: Tensor = found[theirs]
            if value.shape != parameter.shape:
                raise InputError(f"{path}: {theirs} is {tuple(value.shape)}, not {tuple(parameter.shape)}")
            if not value.isfinite().all():  # looked at here: an optional one that is missing may hold anything yet
                raise InputError(f"{path}: {theirs} holds what is no number: {_FAILED}")
            parameter.copy_(value)
            if name == "encoder.position_embedding.weight" and types is not None and len(types) == 1:
                parameter.add_(types[0])


def check_numbers(model: nn.Module, directory: Path) -> None:
    """Refuse weights of a directory that are no numbers: InputError names the first."""
    wrong = [name for name, value in model.named_parameters() if not value.isfinite().all()]
    if wrong:
        raise InputError(f"{directory}: {wrong[0]} holds what is no number: {_FAILED}")
