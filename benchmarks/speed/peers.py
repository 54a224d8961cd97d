"""The models of Hugging Face and fairseq, with our weights and on our batches.

This project does not depend on fairseq. Without fairseq, comparisons with fairseq are skipped.
"""

import logging
import warnings
from argparse import Namespace
from collections.abc import Iterable
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
from infoxlm_core.model.huggingface import fairseq
from infoxlm_core.model.huggingface.pretrained import TYPE_ROW, make_hugging_face_config, rename, to_hugging_face_name

ZERO_GRADIENTS = ("attention.self.key.bias",)
"""The key bias adds the same number to all scores of a query, so its gradient is rounding noise."""


def fairseq_name(name: str) -> str:
    """Return the name in ve-fairseq of one of our parameters. ve-fairseq renamed a LayerNorm of fairseq."""
    return f"encoder.{rename(name, fairseq.NAME_RULES)}".replace("emb_layer_norm", "layernorm_embedding")


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    """Return our model's parameters by name, without the contrast projection."""
    return {name: p.detach().clone() for name, p in model.named_parameters() if name != "projection"}


def gradients_of(model: InfoXLM) -> dict[str, Tensor]:
    """Return our gradients by Hugging Face's parameter names. The projection keeps its own name."""
    gradients = {}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            peer_name = name if name == "projection" else to_hugging_face_name(name)
            gradients[peer_name] = parameter.grad.clone()
    return gradients


class HuggingFace:
    """`XLMRobertaForMaskedLM` on padded batches, `model(**batch).loss`."""

    about = "transformers XLMRobertaForMaskedLM, eager, sdpa, dropout 0, padded to the longest, labels -100"

    def __init__(self, model: InfoXLM) -> None:
        config = make_hugging_face_config(model.encoder.size, attn_implementation="sdpa")
        assert isinstance(config, XLMRobertaConfig)
        config.hidden_dropout_prob = 0.0
        config.attention_probs_dropout_prob = 0.0
        self.model = XLMRobertaForMaskedLM(config)
        weights = {to_hugging_face_name(name): value for name, value in weights_of(model).items()}
        missing, unexpected = self.model.load_state_dict(weights, strict=False)
        # Our model has no row of token types, and no second name for tied parameters.
        allowed = {TYPE_ROW, "lm_head.decoder.weight", "lm_head.decoder.bias"}
        assert set(missing) <= allowed and not unexpected, (missing, unexpected)
        row = self.model.get_parameter(TYPE_ROW)
        row.requires_grad_(False).zero_()  # fairseq has no such row, and our position embeddings include it

    def inputs(self, batch: PackedBatch) -> dict[str, Tensor]:
        """Return the masked sequences of a batch as arguments of the model."""
        counts = split(batch)["lm"]
        ids = pad(batch.ids[: sum(counts)], counts)
        return {"input_ids": ids, "attention_mask": (ids != PAD).long(), "labels": padded_targets(batch)}

    def loss(self, inputs: dict[str, Tensor]) -> Tensor:
        """Return the mean loss over the targets."""
        return self.model(**inputs).loss

    def gradients(self) -> dict[str, Tensor]:
        """Return the gradients by Hugging Face's parameter names."""
        # A tied parameter has two names but is listed once, so choose the name that our gradients have.
        tied = {"lm_head.decoder.weight": "roberta.embeddings.word_embeddings.weight"}
        tied |= {"lm_head.decoder.bias": "lm_head.bias"}
        named = self.model.named_parameters()
        return {tied.get(name, name): p.grad.clone() for name, p in named if p.grad is not None}


class _Dictionary:
    """The part of fairseq's dictionary that the model uses."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.pad = lambda: PAD
        self.bos = lambda: BOS
        self.eos = lambda: EOS
        self.unk = lambda: UNK

    def __len__(self) -> int:
        return self.size

    def index(self, word: str) -> int:
        """Return the id of `<mask>`, the last word. The model looks up no other word."""
        return self.size - 1


class Fairseq:
    """fairseq's RoBERTa on padded batches, with the head only on masked rows, and log-softmax and NLL in fp32."""

    about = "fairseq RobertaModel (ve-fairseq 0.12.3), dropout 0, padded, masked_tokens, log-softmax + NLL in fp32"

    def __init__(self, model: InfoXLM) -> None:
        self.model = make_fairseq(model.encoder.size)
        weights = weights_of(model)
        load_fairseq(self.model, weights)
        self.names = list(weights)

    def inputs(self, batch: PackedBatch) -> dict[str, Tensor]:
        """Return the masked sequences of a batch and their targets, padded."""
        counts = split(batch)["lm"]
        return {"ids": pad(batch.ids[: sum(counts)], counts), "targets": padded_targets(batch)}

    def loss(self, inputs: dict[str, Tensor]) -> Tensor:
        """Return the mean loss over the targets."""
        return fairseq_mlm(self.model, inputs["ids"], inputs["targets"])

    def gradients(self) -> dict[str, Tensor]:
        """Return the gradients by Hugging Face's parameter names."""
        return gradients_of_fairseq(self.model, self.names)


def fairseq_mlm(model: nn.Module, ids: Tensor, targets: Tensor) -> Tensor:
    """Compute the mean masked-LM loss like fairseq's criterion. A target of -100 is not predicted."""
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
    """Import fairseq's RoBERTa without warnings, and restore the level of the root logger."""
    level = logging.root.level
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from fairseq.models.roberta import model as roberta
    logging.root.setLevel(level)
    logging.getLogger("fairseq").setLevel(logging.WARNING)
    return roberta


def make_fairseq(size: EncoderSize) -> nn.Module:
    """Make a fairseq RoBERTa with random weights and tied embeddings."""
    roberta = import_fairseq()
    # fairseq itself adds the positions 0 and 1, which no token has.
    args = Namespace(
        encoder_layers=size.layers, encoder_embed_dim=size.hidden, encoder_ffn_embed_dim=size.ffn,
        encoder_attention_heads=size.heads, dropout=0.0, attention_dropout=0.0, activation_dropout=0.0,
        pooler_dropout=0.0, tokens_per_sample=size.positions - 2, max_positions=size.positions - 2,
        untie_weights_roberta=False,
    )  # fmt: skip
    roberta.base_architecture(args)
    dictionary = _Dictionary(size.vocabulary)
    task = SimpleNamespace(source_dictionary=dictionary, dictionary=dictionary)
    return roberta.RobertaModel.build_model(args, task)


@torch.no_grad()
def load_fairseq(model: nn.Module, weights: dict[str, Tensor]) -> None:
    """Copy weights into a fairseq model. The keys of `weights` are our parameter names."""
    weights_by_name = {fairseq_name(name): value for name, value in weights.items()}
    for name, parameter in model.named_parameters():
        parameter.copy_(weights_by_name[name])


def gradients_of_fairseq(model: nn.Module, names: Iterable[str]) -> dict[str, Tensor]:
    """Return fairseq's gradients by Hugging Face's parameter names. `names` lists all parameters by our names."""
    new_names = {fairseq_name(name): to_hugging_face_name(name) for name in names}
    return {new_names[name]: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
