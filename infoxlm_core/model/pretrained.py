"""Hugging Face in and out: our parameters under the names of `XLMRobertaForMaskedLM`."""

import json
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PretrainedConfig, XLMRobertaConfig

from infoxlm_core import manifests
from infoxlm_core.data.vocabulary import BOS, EOS, FIRST_POSITION, PAD
from infoxlm_core.errors import InputError
from infoxlm_core.model.encoder import Encoder, EncoderSize
from infoxlm_core.model.heads import Classifier, InfoXLM
from infoxlm_core.model.tokenizers import MODEL

WEIGHTS, PROJECTION = "model.safetensors", "projection.safetensors"
_RENAMED = [  # ours -> Hugging Face, the first that fits
    (r"^encoder\.token_embedding\.", "roberta.embeddings.word_embeddings."),
    (r"^encoder\.position_embedding\.", "roberta.embeddings.position_embeddings."),
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
    (r"^dense\.", "classifier.dense."),
    (r"^output\.", "classifier.out_proj."),
]
TYPE_ROW = "roberta.embeddings.token_type_embeddings.weight"


def hugging_face_name(name: str, first: Sequence[tuple[str, str]] = ()) -> str:
    """`encoder.layers.0.up.bias` -> `roberta.encoder.layer.0.intermediate.dense.bias`; the rules `first` go before."""
    for ours, theirs in (*first, *_RENAMED):
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


def write(module: nn.Module, config: PretrainedConfig, tokenizer: Path, directory: Path) -> None:
    """Write a module of XLM-R's names, without projection, and the tokenizer."""
    weights = {hugging_face_name(name): v for name, v in module.named_parameters() if name != "projection"}
    write_model(weights | {TYPE_ROW: torch.zeros(1, config.hidden_size)}, config, directory)
    for name in ("tokenizer.json", MODEL):
        if (tokenizer / name).exists():
            shutil.copy(tokenizer / name, directory / name)
    if (tokenizer / "tokenizer_config.json").exists():
        settings = json.loads((tokenizer / "tokenizer_config.json").read_bytes())
        settings["model_max_length"] = config.max_position_embeddings - FIRST_POSITION
        (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=1) + "\n")


def export(model: InfoXLM, tokenizer: Path, directory: Path) -> None:
    """Write a directory that `AutoModel` and `AutoTokenizer` load.

    The contrast projection stands beside it: `projection.safetensors`, tensor `projection` (d, d), z = h @ projection.
    `config.json` says under `infoxlm` at which layer and with which pooling contrast was taken.
    """
    about = {"layer": model.contrast_layer, "pooling": model.pooling, "normalise": model.normalise}
    config = hugging_face_config(model.encoder.size, architectures=["XLMRobertaForMaskedLM"], infoxlm=about)
    write(model, config, tokenizer, directory)
    save_file({"projection": model.projection.detach().float().cpu().contiguous()}, directory / PROJECTION)


def export_classifier(model: Classifier, labels: list[str], tokenizer: Path, directory: Path) -> None:
    """Write a directory that `AutoModelForSequenceClassification` loads."""
    config = hugging_face_config(
        model.encoder.size,
        architectures=["XLMRobertaForSequenceClassification"],
        id2label=dict(enumerate(labels)),
        label2id={label: number for number, label in enumerate(labels)},
        classifier_dropout=model.dropout,
    )
    write(model, config, tokenizer, directory)


def size_of(directory: Path) -> EncoderSize:
    """Sizes from a Hugging Face config.json.

    Raises:
        InputError: there is none, or it is of another architecture.
    """
    path = directory / "config.json"
    try:
        config = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: no model here ({error}): give a Hugging Face XLM-R directory") from None
    if config.get("model_type") != "xlm-roberta":
        raise InputError(f"{path}: model_type is {config.get('model_type')!r}, not 'xlm-roberta': give an XLM-R model")
    try:
        return EncoderSize(
            vocabulary=config["vocab_size"],
            layers=config["num_hidden_layers"],
            hidden=config["hidden_size"],
            ffn=config["intermediate_size"],
            heads=config["num_attention_heads"],
            positions=config["max_position_embeddings"],
            epsilon=config.get("layer_norm_eps", 1e-5),
        )
    except KeyError as missing:
        raise InputError(f"{path} has no {missing}: give a complete XLM-R model") from None


def digest_of(directory: Path) -> str:
    """Digest of the weights in a Hugging Face directory."""
    return "sha256:" + manifests.file_sha256(directory / WEIGHTS)


def load_into(module: nn.Module, directory: Path, optional: tuple[str, ...] = ("projection",)) -> None:
    """Fill a model of ours from a Hugging Face directory, safetensors only.

    XLM-R's single token-type row, zeros in every published model, is added to the positions: equal by construction.

    Args:
        optional: parameters (or prefixes) that may be missing there and then keep their values.

    Raises:
        InputError: a weight is missing or has another shape.
    """
    path = directory / WEIGHTS
    if not path.is_file():
        raise InputError(f"{path} is missing: convert the model to safetensors (pickled weights are not read)")
    try:
        found = load_file(path)
    except SafetensorError as error:
        raise InputError(f"{path} is damaged ({error}): copy it again") from None
    if not any(name.startswith("roberta.") for name in found):  # saved from the bare encoder
        found = {name if name.startswith("lm_head") else f"roberta.{name}": value for name, value in found.items()}
    if (directory / PROJECTION).is_file():
        found |= load_file(directory / PROJECTION)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            theirs = name if name == "projection" else hugging_face_name(name)
            if theirs not in found:
                if name.startswith(optional):
                    continue
                raise InputError(f"{path} has no {theirs}: give a complete XLM-R model")
            value: Tensor = found[theirs]
            if value.shape != parameter.shape:
                raise InputError(f"{path}: {theirs} is {tuple(value.shape)}, not {tuple(parameter.shape)}")
            parameter.copy_(value)
            if name == "encoder.position_embedding.weight" and TYPE_ROW in found:
                parameter.add_(found[TYPE_ROW][0])


def load_encoder(directory: Path, dropout: float = 0.0) -> Encoder:
    """The bare encoder of a Hugging Face XLM-R directory."""
    holder = nn.Module()
    holder.encoder = Encoder(size_of(directory), dropout)
    load_into(holder, directory)
    return holder.encoder
