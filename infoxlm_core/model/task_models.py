"""Models for a task: an encoder with the head that the task declares.

All models are called with packed sequences: `module(ids, types, lengths)`. XLM-R, RoBERTa and BERT compute them
packed, and other models pad them inside (`padded.py`). Models are stored in Hugging Face's format: its `AutoModelFor…`
classes load them and compute the same logits.
"""

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PretrainedConfig

from infoxlm_core.data.examples import Examples
from infoxlm_core.model import devices, padded
from infoxlm_core.model.attention import cumulative_lengths
from infoxlm_core.model.encoder import Encoder, evaluating, initialise
from infoxlm_core.model.huggingface import pretrained, tokenizers
from infoxlm_core.model.objectives import full_precision
from infoxlm_core.model.task_head import Head, NameRules


class Packed(nn.Module):
    """The base class of task models that compute packed sequences."""

    dropout_mask_count = 0  # number of dropout layers whose masks the caller draws and passes as `dropout_masks`

    def __init__(self, encoder: Encoder, config: PretrainedConfig, head: Head, dropout: float = 0.0) -> None:
        super().__init__()
        self.encoder = encoder
        self.config = config
        self.head = head
        self.dropout = dropout

    @property
    def labels(self) -> tuple[str, ...]:
        return padded.labels_of(self.config)

    @property
    def is_bert(self) -> bool:
        return self.config.model_type == "bert"

    @property
    def name_rules(self) -> NameRules:
        """The rules that map the names of the head's parameters to Hugging Face's names."""
        return self.head.bert_name_rules if self.is_bert else self.head.name_rules

    def run_encoder(self, ids: Tensor, types: Tensor, lengths: Sequence[int], only_first_tokens: bool) -> Tensor:
        """Return the output of the top layer for N packed sequences.

        Args:
            ids: (T,) token ids.
            types: (T,) token types; types that the encoder lacks are replaced by its last one.
            lengths: number of tokens of each sequence.
            only_first_tokens: whether the top layer computes only the first token of each sequence.

        Returns:
            (T, d), or (N, d) with `only_first_tokens`.
        """
        size = self.encoder.size
        cu_seqlens = cumulative_lengths(tuple(lengths), ids.device).long()  # (N + 1,)
        first_rows = cu_seqlens[:-1]
        first_row_of_token = torch.repeat_interleave(first_rows, cu_seqlens.diff(), output_size=len(ids))  # (T,)
        positions = torch.arange(len(ids), device=ids.device) - first_row_of_token
        types = types.clamp(max=max(0, size.types - 1))
        hidden = self.encoder.embed(ids, positions, types)  # (T, d)
        if only_first_tokens:
            row_counts = (1,) * len(lengths)
            return full_precision(self.encoder.run_layers(hidden, lengths, 0, size.layers, first_rows, row_counts))
        return full_precision(self.encoder.run_layers(hidden, lengths, 0, size.layers))


class SequenceModel(Packed):
    """A model with a head on the first token, as in Hugging Face: dropout, dense, tanh, dropout, linear.

    In BERT, `dense` is the pooler, which has no dropout before it.
    """

    dropout_mask_count = 2

    def __init__(self, encoder: Encoder, config: PretrainedConfig, head: Head, dropout: float = 0.0) -> None:
        super().__init__(encoder, config, head, dropout)
        self.dense = nn.Linear(encoder.size.hidden, encoder.size.hidden)
        self.output = nn.Linear(encoder.size.hidden, head.output_count or len(self.labels))

    def forward(
        self, ids: Tensor, types: Tensor, lengths: Sequence[int], dropout_masks: Tensor | None = None
    ) -> Tensor:
        """Return the logits of N packed sequences, (N, labels).

        Args:
            ids: (T,) token ids.
            types: (T,) token types.
            lengths: number of tokens of each sequence.
            dropout_masks: (N, 2, d) false where one of the two dropout layers drops a value; None: no dropout. The
                caller draws them for each example, so that they do not depend on the other examples of a batch.
        """
        hidden = self.run_encoder(ids, types, lengths, only_first_tokens=True)  # (N, d)
        if dropout_masks is None:
            return self.output(torch.tanh(self.dense(hidden)))
        scaled_masks = dropout_masks.to(hidden.dtype) / (1.0 - self.dropout)  # (N, 2, d)
        dense_mask, output_mask = scaled_masks.unbind(dim=1)  # (N, d) each
        if not self.is_bert:
            hidden = hidden * dense_mask
        return self.output(torch.tanh(self.dense(hidden)) * output_mask)


class TokenModel(Packed):
    """A model with a head on every token: dropout and a linear layer."""

    def __init__(self, encoder: Encoder, config: PretrainedConfig, head: Head, dropout: float = 0.0) -> None:
        super().__init__(encoder, config, head, dropout)
        self.output = nn.Linear(encoder.size.hidden, head.output_count or len(self.labels))

    def forward(
        self,
        ids: Tensor,
        types: Tensor,
        lengths: Sequence[int],
        dropout_masks: Tensor | None = None,  # noqa: ARG002 - all task models have the same signature
    ) -> Tensor:
        """Return the logits of all tokens, (T, outputs), given ids and types (T,)."""
        hidden = self.run_encoder(ids, types, lengths, only_first_tokens=False)  # (T, d)
        if self.training and self.dropout:
            hidden = F.dropout(hidden, self.dropout)
        return self.output(hidden)


TaskModel = SequenceModel | TokenModel | padded.Padded


def create(
    directory: Path,
    head: Head,
    labels: Sequence[str] = (),
    dropout: float = 0.0,
    head_dropout: float = 0.0,
    seed: int = 1,
) -> TaskModel:
    """Load a pre-trained encoder on the CPU, and add a new head with random weights.

    Args:
        directory: Hugging Face directory of the encoder.
        head: the head of the task.
        labels: the labels in the order of their numbers, if the task has labels.
        dropout: probability of dropout in the encoder.
        head_dropout: probability of dropout in the head.
        seed: seed of the weights of the head.

    Raises:
        InputError: the directory does not contain a complete encoder.
    """
    config = padded.read_config(directory)
    if labels:
        config.id2label = dict(enumerate(labels))
        config.label2id = {label: number for number, label in enumerate(labels)}
    if getattr(config, "causal", False):
        config.causal = False  # in a causal XLM, the first token could not attend to any other token
    if not pretrained.runs_packed(pretrained.read_config(directory)):
        padded.set_dropout(config, dropout, head_dropout)
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            return padded.load(directory, head, config, new_head=True)

    module = _build(directory, head, config, dropout, head_dropout)
    for name, child in module.named_children():
        if name != "encoder":
            initialise(child, seed)
    pretrained_part = nn.Module()  # the encoder and BERT's pooler, but not a stored head of another task
    pretrained_part.encoder = module.encoder
    if isinstance(module, SequenceModel) and module.is_bert:
        pretrained_part.dense = module.dense
    pretrained.load_into(pretrained_part, directory, optional=("dense.",), name_rules=module.name_rules)
    return module


def load(directory: Path, head: Head) -> TaskModel:
    """Load a fine-tuned model for evaluation, on a GPU if possible. Raise InputError if it does not have this head."""
    config = padded.read_config(directory)
    module: TaskModel
    if pretrained.runs_packed(pretrained.read_config(directory)):
        module = _build(directory, head, config, 0.0, 0.0)
        pretrained.load_into(module, directory, name_rules=module.name_rules)
    else:
        module = padded.load(directory, head, config, new_head=False)
    return module.eval().to(devices.choose())


def _build(
    directory: Path, head: Head, config: PretrainedConfig, dropout: float, head_dropout: float
) -> SequenceModel | TokenModel:
    """Return a model of the size that the directory describes, with uninitialised weights."""
    encoder = Encoder(pretrained.size_of(directory), dropout)
    model_class = TokenModel if head.is_per_token else SequenceModel
    return model_class(encoder, config, head, head_dropout)


def export(module: TaskModel, tokenizer: Path, directory: Path) -> None:
    """Write a model and its tokenizer in the format of the `AutoModelFor…` class of its head."""
    directory.mkdir(parents=True, exist_ok=True)
    if isinstance(module, padded.Padded):
        module.model.save_pretrained(directory)
        tokenizers.copy(tokenizer, directory, pretrained.max_tokens_of(module.config.to_dict()))
        return
    config: Any = copy.deepcopy(module.config)
    config.architectures = [f"{pretrained.CLASS_PREFIXES[config.model_type]}For{module.head.architecture}"]
    config.dtype = torch.float32
    if not module.head.output_count:
        config.classifier_dropout = module.dropout
    pretrained.write(module, config, tokenizer, directory, module.name_rules)


@torch.inference_mode()
def compute_logits(module: TaskModel, examples: Examples, tokens_per_batch: int = 8192) -> list[Tensor] | Tensor:
    """Compute the logits of all examples, in fp32 on the CPU.

    Args:
        module: the model.
        examples: N encoded texts or pairs of texts.
        tokens_per_batch: maximum number of tokens that are computed together, padding included.

    Returns:
        (N, outputs), or for a head on every token a list with (length, outputs) for each example.
    """
    device = next(module.parameters()).device
    logits_of_examples: list[Tensor] = [torch.empty(0)] * len(examples)
    with evaluating(module):
        for rows in split_by_length(examples.lengths, tokens_per_batch):
            batch = examples.take(rows)
            lengths = tuple(batch.lengths.tolist())
            ids = devices.send(torch.from_numpy(batch.ids), device)
            types = devices.send(torch.from_numpy(batch.types), device)
            with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
                logits = module(ids, types, lengths)  # (N, outputs) or (T, outputs)
            rows_per_example = lengths if module.head.is_per_token else 1
            for row, logits_of_example in zip(rows, logits.float().cpu().split(rows_per_example), strict=True):
                logits_of_examples[row] = logits_of_example
    return logits_of_examples if module.head.is_per_token else torch.cat(logits_of_examples)


def split_by_length(lengths: np.ndarray, tokens: int) -> list[np.ndarray]:
    """Split rows into batches of similar length, the longest first.

    A padded batch has at most `tokens` tokens. A longer row has a batch of its own.
    """
    longest_first = np.argsort(-lengths, kind="stable")
    row_batches = []
    start = 0
    while start < len(longest_first):
        batch_length = int(lengths[longest_first[start]])
        end = start + max(1, tokens // batch_length)
        row_batches.append(longest_first[start:end])
        start = end
    return row_batches
