"""XLM and BERT in and out: our parameters under the names of Hugging Face's own classes."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing
from transformers import BertConfig, PretrainedConfig, XLMConfig

from infoxlm_core.data.shards import Shards
from infoxlm_core.data.vocabulary import BOS, EOS, PAD, UNK
from infoxlm_core.errors import ConfigError, InputError, TokenizerMismatch
from infoxlm_core.model import pretrained
from infoxlm_core.model.encoder import EncoderSize
from infoxlm_core.model.pretrained import WEIGHTS
from infoxlm_core.model.tokenizers import MODEL
from infoxlm_core.systems.baseline_models import BERT, XLM
from infoxlm_core.systems.baseline_samples import languages_of

_XLM_NAMES = [  # ours -> Hugging Face's, the first that fits
    (r"^encoder\.token_embedding\.", "transformer.embeddings."),
    (r"^encoder\.position_embedding\.", "transformer.position_embeddings."),
    (r"^encoder\.type_embedding\.", "transformer.lang_embeddings."),
    (r"^encoder\.embedding_norm\.", "transformer.layer_norm_emb."),
    (r"^encoder\.layers\.(\d+)\.(q|k|v)(?:uery|ey|alue)\.", r"transformer.attentions.\1.\2_lin."),
    (r"^encoder\.layers\.(\d+)\.attention_output\.", r"transformer.attentions.\1.out_lin."),
    (r"^encoder\.layers\.(\d+)\.attention_norm\.", r"transformer.layer_norm1.\1."),
    (r"^encoder\.layers\.(\d+)\.up\.", r"transformer.ffns.\1.lin1."),
    (r"^encoder\.layers\.(\d+)\.down\.", r"transformer.ffns.\1.lin2."),
    (r"^encoder\.layers\.(\d+)\.output_norm\.", r"transformer.layer_norm2.\1."),
    (r"^bias$", "pred_layer.proj.bias"),
]
_BERT_NAMES = [  # the others are XLM-R's with another prefix
    (r"^head\.dense\.", "cls.predictions.transform.dense."),
    (r"^head\.norm\.", "cls.predictions.transform.LayerNorm."),
    (r"^head\.bias$", "cls.predictions.bias"),
    (r"^pooler\.", "bert.pooler.dense."),
    (r"^follows\.", "cls.seq_relationship."),
]


def export(
    model: XLM | BERT, tokenizer: Path, directory: Path, languages: Sequence[str] = (), causal: bool = False
) -> None:
    """Write a directory that `XLMWithLMHeadModel` or `BertForPreTraining` loads.

    Args:
        model: the trained model.
        tokenizer: a directory with tokenizer.json and its settings; their special tokens become the system's.
        directory: gets configuration, weights and tokenizer.
        languages: names of the language embedding's rows, for XLM.
        causal: the model was trained on CLM.
    """
    weights = {hugging_face_name(name, _names_of(model)): value for name, value in model.named_parameters()}
    config = _xlm_config(model, languages, causal) if isinstance(model, XLM) else _bert_config(model)
    pretrained.write_model(weights, config, directory)
    _write_tokenizer(model, tokenizer, directory)


def _names_of(model: XLM | BERT) -> list[tuple[str, str]]:
    return _XLM_NAMES if isinstance(model, XLM) else _BERT_NAMES


def hugging_face_name(name: str, names: list[tuple[str, str]]) -> str:
    """`encoder.layers.0.up.bias` -> `transformer.ffns.0.lin1.bias` or BERT's name for it."""
    return pretrained.hugging_face_name(name, names).replace("roberta.", "bert.", 1)


def _xlm_config(model: XLM, languages: Sequence[str], causal: bool) -> PretrainedConfig:
    size = model.encoder.size
    names: dict[str, Any] = {
        "lang2id": {name: i for i, name in enumerate(languages)},
        "id2lang": dict(enumerate(languages)),
    }
    return XLMConfig(
        architectures=["XLMWithLMHeadModel"],
        vocab_size=size.vocabulary,
        emb_dim=size.hidden,
        n_layers=size.layers,
        n_heads=size.heads,
        max_position_embeddings=size.positions,
        layer_norm_eps=size.epsilon,
        causal=causal,
        n_langs=max(1, size.types),
        **names,
        embed_init_std=size.hidden**-0.5,
        dropout=0.0,
        attention_dropout=0.0,
        bos_token_id=BOS,
        pad_token_id=PAD,
        eos_token_id=EOS,
        unk_index=UNK,
        mask_index=size.vocabulary - 1,
        mask_token_id=size.vocabulary - 1,
    )


def _bert_config(model: BERT) -> PretrainedConfig:
    return pretrained.hugging_face_config(model.encoder.size, BertConfig, architectures=["BertForPreTraining"])


def _write_tokenizer(model: XLM | BERT, tokenizer: Path, directory: Path) -> None:
    """Copy the tokenizer; `</s> a </s> b </s>` is how XLM reads a text or two, `<s> a </s> b </s>` how BERT does."""
    if (tokenizer / MODEL).exists():
        shutil.copy(tokenizer / MODEL, directory / MODEL)
    if not (tokenizer / "tokenizer.json").exists():
        return
    fast, first = Tokenizer.from_file(str(tokenizer / "tokenizer.json")), "</s>" if isinstance(model, XLM) else "<s>"
    second = 0 if isinstance(model, XLM) else 1
    fast.post_processor = TemplateProcessing(
        single=f"{first} $A </s>",
        pair=f"{first} $A </s> $B:{second} </s>:{second}",
        special_tokens=[("<s>", BOS), ("</s>", EOS)],
    )
    fast.save(str(directory / "tokenizer.json"))
    settings = json.loads((tokenizer / "tokenizer_config.json").read_bytes())
    settings |= {"model_max_length": model.encoder.size.positions, "bos_token": first, "cls_token": first}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=1) + "\n")


def size_of(directory: Path, shards: Shards) -> EncoderSize:
    """Sizes from the config.json of an exported XLM or BERT that shall go on with these shards.

    Raises:
        InputError: there is none, or it is of another architecture.
        TokenizerMismatch: it has another vocabulary than the shards.
        ConfigError: it is an XLM of other languages.
    """
    path = directory / "config.json"
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: no model here ({error}): give a directory of system xlm or bert") from None
    kinds: dict[str, type[PretrainedConfig]] = {"xlm": XLMConfig, "bert": BertConfig}
    if found.get("model_type") not in kinds:
        raise InputError(f"{path}: model_type is {found.get('model_type')!r}, neither 'xlm' nor 'bert'")
    config = kinds[found["model_type"]].from_dict(found)
    if config.vocab_size != shards.vocabulary_size:
        raise TokenizerMismatch(
            f"{directory} has {config.vocab_size} embeddings, {shards.directory} {shards.vocabulary_size} ids: "
            "tokenize with the model's own SentencePiece model (tokenization.model)"
        )
    xlm = isinstance(config, XLMConfig)
    types = config.n_langs if xlm else config.type_vocab_size
    if xlm and (known := list(found.get("lang2id", {}))) != (wanted := languages_of(shards)):
        raise ConfigError(f"{directory} knows the languages {known}, the shards have {wanted}: they must be the same")
    return EncoderSize(
        vocabulary=config.vocab_size,
        layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        ffn=4 * config.hidden_size if xlm else config.intermediate_size,
        heads=config.num_attention_heads,
        positions=config.max_position_embeddings,
        epsilon=config.layer_norm_eps,
        types=types if types > 1 else 0,
        first=0,
    )


def load_into(model: XLM | BERT, directory: Path) -> None:
    """Fill a model from an exported directory.

    Raises:
        InputError: a weight is missing or has another shape.
    """
    path = directory / WEIGHTS
    if not path.is_file():
        raise InputError(f"{path} is missing: give the directory of a trained model")
    found = load_file(path)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            theirs = hugging_face_name(name, _names_of(model))
            shape = tuple(found[theirs].shape) if theirs in found else "missing"
            if shape != tuple(parameter.shape):
                raise InputError(
                    f"{path}: {theirs} is {shape}, not {tuple(parameter.shape)}: give a model of this size"
                )
            parameter.copy_(found[theirs])
