"""The models of Hugging Face and of fairseq, with our weights and on our batches.

This project does not depend on fairseq. If fairseq is not installed, comparisons with it are skipped.
"""

import logging
import re
import warnings
from argparse import Namespace
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import XLMRobertaConfig, XLMRobertaForMaskedLM

from benchmarks.speed.inputs import pad, padded_targets, split
from infoxlm_core.data.batches import PackedBatch
from infoxlm_core.data.vocabulary import BOS, EOS, PAD, UNK
from infoxlm_core.model.encoder import EncoderSize
from infoxlm_core.model.heads import InfoXLM
from infoxlm_core.model.huggingface.pretrained import TYPE_ROW, hugging_face_name

ZERO_GRADIENTS = ("attention.self.key.bias",)
"""The bias of keys adds the same number to all scores of a query, so its gradient is rounding noise."""

FAIRSEQ_NAMES = [  # Hugging Face -> fairseq, applied one after the other
    (r"^lm_head\.", "encoder.lm_head."),
    (r"^roberta\.embeddings\.word_embeddings", "encoder.sentence_encoder.embed_tokens"),
    (r"^roberta\.embeddings\.position_embeddings", "encoder.sentence_encoder.embed_positions"),
    (r"^roberta\.embeddings\.LayerNorm", "encoder.sentence_encoder.layernorm_embedding"),
    (r"^roberta\.encoder\.layer\.", "encoder.sentence_encoder.layers."),
    (r"\.attention\.self\.query\.", ".self_attn.q_proj."),
    (r"\.attention\.self\.key\.", ".self_attn.k_proj."),
    (r"\.attention\.self\.value\.", ".self_attn.v_proj."),
    (r"\.attention\.output\.dense\.", ".self_attn.out_proj."),
    (r"\.attention\.output\.LayerNorm\.", ".self_attn_layer_norm."),
    (r"\.intermediate\.dense\.", ".fc1."),
    (r"\.output\.dense\.", ".fc2."),
    (r"\.output\.LayerNorm\.", ".final_layer_norm."),
]


def fairseq_name(name: str) -> str:
    """Return fairseq's name of a parameter for Hugging Face's."""
    for pattern, replacement in FAIRSEQ_NAMES:
        name = re.sub(pattern, replacement, name)
    return name


def weights_of(model: InfoXLM) -> dict[str, Tensor]:
    """Return our parameters, without the contrast projection, under Hugging Face's names."""
    named = model.named_parameters()
    return {hugging_face_name(name): p.detach().clone() for name, p in named if name != "projection"}


def gradients_of(model: InfoXLM) -> dict[str, Tensor]:
    """Return our gradients under Hugging Face's names. The projection keeps its own name."""
    gradients = {}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            peer_name = name if name == "projection" else hugging_face_name(name)
            gradients[peer_name] = parameter.grad.clone()
    return gradients


def hugging_face_config(size: EncoderSize) -> XLMRobertaConfig:
    return XLMRobertaConfig(
        vocab_size=size.vocabulary, hidden_size=size.hidden, num_hidden_layers=size.layers,
        num_attention_heads=size.heads, intermediate_size=size.ffn, max_position_embeddings=size.positions,
        type_vocab_size=1, layer_norm_eps=size.epsilon, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        pad_token_id=PAD, bos_token_id=BOS, eos_token_id=EOS, attn_implementation="sdpa",
    )  # fmt: skip


class HuggingFace:
    """`XLMRobertaForMaskedLM` on padded batches, `model(**batch).loss`."""

    about = "transformers XLMRobertaForMaskedLM, eager, sdpa, dropout 0, padded to the longest, labels -100"

    def __init__(self, model: InfoXLM) -> None:
        self.model = XLMRobertaForMaskedLM(hugging_face_config(model.encoder.size))
        missing, unexpected = self.model.load_state_dict(weights_of(model), strict=False)
        allowed = {TYPE_ROW, "lm_head.decoder.weight", "lm_head.decoder.bias"}
        assert set(missing) <= allowed and not unexpected, (missing, unexpected)
        row = self.model.get_parameter(TYPE_ROW)
        row.requires_grad_(False).zero_()  # fairseq has no such row, and ours is part of the positions

    def inputs(self, batch: PackedBatch) -> dict[str, Tensor]:
        counts = split(batch)["lm"]
        ids = pad(batch.ids[: sum(counts)], counts)
        return {"input_ids": ids, "attention_mask": (ids != PAD).long(), "labels": padded_targets(batch)}

    def loss(self, inputs: dict[str, Tensor]) -> Tensor:
        return self.model(**inputs).loss

    def gradients(self) -> dict[str, Tensor]:
        tied = {"lm_head.decoder.weight": "roberta.embeddings.word_embeddings.weight"}
        tied |= {"lm_head.decoder.bias": "lm_head.bias"}
        named = self.model.named_parameters()
        return {tied.get(name, name): p.grad.clone() for name, p in named if p.grad is not None}


class _Words:
    """The part of fairseq's dictionary that its model uses."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.pad = lambda: PAD
        self.bos = lambda: BOS
        self.eos = lambda: EOS
        self.unk = lambda: UNK

    def __len__(self) -> int:
        return self.size

    def index(self, word: str) -> int:
        return self.size - 1


class Fairseq:
    """fairseq's RoBERTa on padded batches: head on masked rows only, log-softmax and NLL in fp32."""

    about = "fairseq RobertaModel (ve-fairseq 0.12.3), dropout 0, padded, masked_tokens, log-softmax + NLL in fp32"

    def __init__(self, model: InfoXLM) -> None:
        self.model = make_fairseq(model.encoder.size)
        load_fairseq(self.model, weights_of(model))

    def inputs(self, batch: PackedBatch) -> dict[str, Tensor]:
        counts = split(batch)["lm"]
        labels = padded_targets(batch)
        return {"ids": pad(batch.ids[: sum(counts)], counts), "targets": labels}

    def loss(self, inputs: dict[str, Tensor]) -> Tensor:
        """Return the mean over the targets."""
        return fairseq_mlm(self.model, inputs["ids"], inputs["targets"])

    def gradients(self) -> dict[str, Tensor]:
        return gradients_of_fairseq(self.model)


def fairseq_mlm(model: nn.Module, ids: Tensor, targets: Tensor) -> Tensor:
    """Return the mean masked-LM loss as fairseq's criterion computes it. Targets are -100 where none is predicted."""
    masked = targets != -100
    logits = model(ids, masked_tokens=masked)[0]
    log_probabilities = F.log_softmax(logits, dim=-1, dtype=torch.float32)
    return F.nll_loss(log_probabilities, targets[masked], reduction="sum") / masked.sum()


def why_no_fairseq() -> str | None:
    """Return why fairseq cannot be imported, or None if it can."""
    try:
        import_fairseq()
    except ImportError as error:
        return f"fairseq is not installed ({error}); `make bench` installs it into .venv-peers"
    return None


def import_fairseq() -> Any:
    level = logging.root.level
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from fairseq.models.roberta import model as roberta
    logging.root.setLevel(level)
    logging.getLogger("fairseq").setLevel(logging.WARNING)
    return roberta


def make_fairseq(size: EncoderSize) -> nn.Module:
    """Return a fairseq RoBERTa of these sizes with random weights and tied embeddings."""
    roberta = import_fairseq()
    args = Namespace(
        encoder_layers=size.layers, encoder_embed_dim=size.hidden, encoder_ffn_embed_dim=size.ffn,
        encoder_attention_heads=size.heads, dropout=0.0, attention_dropout=0.0, activation_dropout=0.0,
        pooler_dropout=0.0, tokens_per_sample=size.positions - 2, max_positions=size.positions - 2,
        untie_weights_roberta=False,
    )  # fmt: skip
    roberta.base_architecture(args)
    words = _Words(size.vocabulary)
    return roberta.RobertaModel.build_model(args, SimpleNamespace(source_dictionary=words, dictionary=words))


@torch.no_grad()
def load_fairseq(model: nn.Module, weights: dict[str, Tensor]) -> None:
    """Copy weights, given under Hugging Face's names, into every parameter."""
    by_name = {fairseq_name(name): value for name, value in weights.items()}
    for name, parameter in model.named_parameters():
        parameter.copy_(by_name[name])


def gradients_of_fairseq(model: nn.Module) -> dict[str, Tensor]:
    """Return fairseq's gradients under Hugging Face's names."""
    layers = len({name.split(".")[3] for name, _ in model.named_parameters() if ".layers." in name})
    plain = XLMRobertaForMaskedLM(XLMRobertaConfig(vocab_size=8, hidden_size=2, num_hidden_layers=layers,
                                                   num_attention_heads=1, intermediate_size=2))  # fmt: skip
    names = {fairseq_name(name): name for name, _ in plain.named_parameters()}
    names |= {"encoder.sentence_encoder.embed_tokens.weight": "roberta.embeddings.word_embeddings.weight"}
    names |= {"encoder.lm_head.bias": "lm_head.bias"}
    return {names[name]: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
