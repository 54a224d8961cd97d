"""Task models: an encoder with the head that the task declares.

All models accept packed sequences: `module(ids, types, lengths)`. XLM-R, RoBERTa and BERT compute packed sequences
directly; other models pad the sequences first (`padded.py`). Hugging Face's `AutoModelFor…` classes load the stored
models and compute the same logits.
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
    """Base class of task models that run on packed sequences."""

    dropout_mask_count = 0  # number of dropout layers whose masks the caller draws (`dropout_masks`)

    def __init__(self, encoder: Encoder, config: PretrainedConfig, head: Head, dropout: float = 0.0) -> None:
        super().__init__()
        self.encoder = encoder
        self.config = config
        self.head = head
        self.dropout = dropout

    @property
    def labels(self) -> tuple[str, ...]:
        return padded.read_labels(self.config)

    @property
    def is_bert(self) -> bool:
        return self.config.model_type == "bert"

    @property
    def name_rules(self) -> NameRules:
        """The rules that map the head's parameter names to Hugging Face's names."""
        return self.head.bert_name_rules if self.is_bert else self.head.name_rules

    def embed(self, ids: Tensor, types: Tensor, lengths: Sequence[int]) -> Tensor:
        """Return the (T, d) embeddings of packed sequences.

        Args:
            ids: (T,) token ids.
            types: (T,) token types. Types that the encoder lacks become its last type: XLM-R has only one.
            lengths: number of tokens in each sequence.
        """
        cu_seqlens = cumulative_lengths(tuple(lengths), ids.device).long()  # (N + 1,)
        sequence_starts = torch.repeat_interleave(cu_seqlens[:-1], cu_seqlens.diff(), output_size=len(ids))  # (T,)
        positions = torch.arange(len(ids), device=ids.device) - sequence_starts  # (T,)
        largest_type = max(0, self.encoder.size.types - 1)
        return self.encoder.embed(ids, positions, types.clamp(max=largest_type))

    def encode_tokens(self, ids: Tensor, types: Tensor, lengths: Sequence[int]) -> Tensor:
        """Return the top layer's (T, d) output for packed sequences. See `embed` for the arguments."""
        hidden = self.embed(ids, types, lengths)  # (T, d)
        return full_precision(self.encoder.run_layers(hidden, lengths, 0, self.encoder.size.layers))

    def encode_first_tokens(self, ids: Tensor, types: Tensor, lengths: Sequence[int]) -> Tensor:
        """Return the top layer's (N, d) output for the first token of each sequence. See `embed` for the arguments."""
        hidden = self.embed(ids, types, lengths)  # (T, d)
        first_rows = cumulative_lengths(tuple(lengths), ids.device).long()[:-1]  # (N,)
        row_counts = (1,) * len(lengths)
        top_layer = self.encoder.size.layers
        return full_precision(self.encoder.run_layers(hidden, lengths, 0, top_layer, first_rows, row_counts))


class SequenceModel(Packed):
    """A model with Hugging Face's head on the first token: dropout, dense, tanh, dropout, linear.

    In BERT, `dense` is the pooler. No dropout precedes the pooler.
    """

    dropout_mask_count = 2

    def __init__(self, encoder: Encoder, config: PretrainedConfig, head: Head, dropout: float = 0.0) -> None:
        super().__init__(encoder, config, head, dropout)
        self.dense = nn.Linear(encoder.size.hidden, encoder.size.hidden)
        self.output = nn.Linear(encoder.size.hidden, head.output_count or len(self.labels))

    def forward(
        self, ids: Tensor, types: Tensor, lengths: Sequence[int], dropout_masks: Tensor | None = None
    ) -> Tensor:
        """Return (N, labels) logits for N packed sequences.

        Args:
            ids: (T,) token ids.
            types: (T,) token types.
            lengths: number of tokens in each sequence.
            dropout_masks: (N, 2, d) masks of the values that the two dropout layers keep; None: no dropout.
        """
        hidden = self.encode_first_tokens(ids, types, lengths)  # (N, d)
        if dropout_masks is None:
            return self.output(torch.tanh(self.dense(hidden)))
        # The caller draws the masks, so that an example's masks do not depend on the rest of the batch.
        scaled_masks = dropout_masks.to(hidden.dtype) / (1.0 - self.dropout)  # (N, 2, d)
        dense_mask, output_mask = scaled_masks.unbind(dim=1)  # (N, d) each
        if not self.is_bert:  # in BERT, no dropout precedes the pooler
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
        """Return (T, outputs) logits for all tokens of packed sequences.

        Args:
            ids: (T,) token ids.
            types: (T,) token types.
            lengths: number of tokens in each sequence.
            dropout_masks: ignored, because this model draws its own dropout.
        """
        hidden = self.encode_tokens(ids, types, lengths)  # (T, d)
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
    """Load a pre-trained encoder on the CPU and add a head with random weights.

    Args:
        directory: Hugging Face directory of the encoder.
        head: the task's head.
        labels: the task's labels, ordered by id; empty for a task without labels.
        dropout: dropout probability in the encoder.
        head_dropout: dropout probability in the head.
        seed: random seed for the head's weights.

    Raises:
        InputError: the directory does not contain a complete encoder.
    """
    config = padded.load_config(directory)
    if labels:
        config.id2label = dict(enumerate(labels))
        config.label2id = {label: label_id for label_id, label in enumerate(labels)}
    if getattr(config, "causal", False):
        config.causal = False  # the first token of a causal XLM would attend only to itself
    if pretrained.can_run_packed(pretrained.read_config(directory)):
        module = _build_packed(directory, head, config, dropout, head_dropout)
        for name, child in module.named_children():
            if name != "encoder":
                initialise(child, seed)
        _load_encoder_weights(module, directory)
        return module
    padded.set_dropout(config, dropout, head_dropout)
    with torch.random.fork_rng():
        torch.manual_seed(seed)  # Transformers uses the global random generator for the head's weights
        return padded.load(directory, head, config, new_head=True)


def _load_encoder_weights(module: SequenceModel | TokenModel, directory: Path) -> None:
    """Load the weights of the encoder and of BERT's pooler, but not a stored head for a different task."""
    pretrained_part = nn.Module()
    pretrained_part.encoder = module.encoder
    if isinstance(module, SequenceModel) and module.is_bert:
        pretrained_part.dense = module.dense
    # The pooler (`dense`) is optional, because some BERT models lack a pooler.
    pretrained.load_weights(pretrained_part, directory, optional=("dense.",), name_rules=module.name_rules)


def load(directory: Path, head: Head) -> TaskModel:
    """Load a fine-tuned model for evaluation, on a GPU if possible. Raise InputError if the model lacks this head."""
    config = padded.load_config(directory)
    module: TaskModel
    if pretrained.can_run_packed(pretrained.read_config(directory)):
        module = _build_packed(directory, head, config)
        pretrained.load_weights(module, directory, name_rules=module.name_rules)
    else:
        module = padded.load(directory, head, config, new_head=False)
    return module.eval().to(devices.choose())


def _build_packed(
    directory: Path, head: Head, config: PretrainedConfig, dropout: float = 0.0, head_dropout: float = 0.0
) -> SequenceModel | TokenModel:
    """Build a packed model with uninitialized weights. The directory's config.json determines the encoder's size."""
    encoder = Encoder(pretrained.read_encoder_size(directory), dropout)
    model_class = TokenModel if head.is_per_token else SequenceModel
    return model_class(encoder, config, head, head_dropout)


def export(module: TaskModel, tokenizer: Path, directory: Path) -> None:
    """Write a model and its tokenizer to a directory that Hugging Face's `AutoModelFor…` classes can load.

    Args:
        module: the model.
        tokenizer: the tokenizer's directory.
        directory: output directory.
    """
    directory.mkdir(parents=True, exist_ok=True)
    if isinstance(module, padded.Padded):
        module.model.save_pretrained(directory)
        tokenizers.copy(tokenizer, directory, pretrained.find_max_tokens(module.config.to_dict()))
        return
    config: Any = copy.deepcopy(module.config)
    config.architectures = [f"{pretrained.CLASS_PREFIXES[config.model_type]}For{module.head.architecture}"]
    config.dtype = torch.float32
    is_classifier = module.head.output_count == 0  # one logit per label
    if is_classifier:  # question-answering heads have no dropout
        config.classifier_dropout = module.dropout
    pretrained.write(module, config, tokenizer, directory, module.name_rules)


@torch.inference_mode()
def compute_logits(module: TaskModel, examples: Examples, max_batch_tokens: int = 8192) -> list[Tensor] | Tensor:
    """Compute the logits of all examples, and return them on the CPU in fp32.

    Args:
        module: the model.
        examples: N encoded texts or pairs of texts.
        max_batch_tokens: maximum number of tokens in a batch, padding included.

    Returns:
        (N, outputs) logits, or a list of N tensors (length, outputs) if the head is on every token.
    """
    logits_by_example: list[Tensor] = [torch.empty(0)] * len(examples)
    with evaluating(module):
        for indices in split_by_length(examples.lengths, max_batch_tokens):
            batch_logits = _compute_batch_logits(module, examples.take(indices))  # one 2-D tensor per example
            for index, logits in zip(indices, batch_logits, strict=True):
                logits_by_example[index] = logits
    return logits_by_example if module.head.is_per_token else torch.cat(logits_by_example)


def _compute_batch_logits(module: TaskModel, batch: Examples) -> Sequence[Tensor]:
    """Return each example's logits: (1, outputs), or (length, outputs) if the head is on every token."""
    device = next(module.parameters()).device
    lengths = tuple(batch.lengths.tolist())
    ids = devices.send(torch.from_numpy(batch.ids), device)
    types = devices.send(torch.from_numpy(batch.types), device)
    with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
        logits = module(ids, types, lengths).float().cpu()  # (N, outputs) or (T, outputs)
    return logits.split(lengths if module.head.is_per_token else 1)


def split_by_length(lengths: np.ndarray, max_batch_tokens: int) -> list[np.ndarray]:
    """Return the example indices of each batch. Batches group examples of similar length, longest first.

    Args:
        lengths: (N,) numbers of tokens in the examples.
        max_batch_tokens: maximum number of tokens in a batch, padding included. A longer example forms its own batch.
    """
    longest_first = np.argsort(-lengths, kind="stable")
    batches = []
    start = 0
    while start < len(longest_first):
        longest_length = int(lengths[longest_first[start]])
        batch_size = max(1, max_batch_tokens // longest_length)
        batches.append(longest_first[start : start + batch_size])
        start += batch_size
    return batches
