"""Models for a task: an encoder with the head that the task declares.

All are called with packed sequences: `module(ids, types, lengths)`. XLM-R, RoBERTa and BERT run packed; other models
are padded inside (`padded.py`). Directories are in Hugging Face's format; exported models load in its `AutoModelFor…`
classes and give equal logits.
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
from infoxlm_core.model.task_head import Head


class Packed(nn.Module):
    """The base of task models: an encoder over packed sequences."""

    drawn_outside = 0  # dropout layers whose masks the caller draws, by the example, and passes as `keep`

    def __init__(self, encoder: Encoder, config: PretrainedConfig, head: Head, dropout: float = 0.0) -> None:
        super().__init__()
        self.encoder, self.config, self.head, self.dropout = encoder, config, head, dropout

    @property
    def labels(self) -> tuple[str, ...]:
        return padded.labels_of(self.config)

    @property
    def bert(self) -> bool:
        return self.config.model_type == "bert"

    @property
    def names(self) -> pretrained.Names:
        """Names of the head's parameters -> Hugging Face's."""
        return self.head.bert_names if self.bert else self.head.names

    def hidden(self, ids: Tensor, types: Tensor, lengths: Sequence[int], first_rows: bool) -> Tensor:
        """Return the last layer, (T, d), of N packed sequences, or with `first_rows` only its N rows at position 0."""
        size, edges = self.encoder.size, cumulative_lengths(tuple(lengths), ids.device).long()  # (N + 1,)
        begins = torch.repeat_interleave(edges[:-1], edges.diff(), output_size=len(ids))
        positions = torch.arange(len(ids), device=ids.device) - begins + size.first
        hidden = self.encoder.embed(ids, positions, types.clamp(max=max(0, size.types - 1)))
        rows, counts = (edges[:-1], (1,) * len(lengths)) if first_rows else (None, None)
        return full_precision(self.encoder.run(hidden, lengths, 0, size.layers, rows, counts))


class SequenceModel(Packed):
    """A head on position 0, as in Hugging Face: dropout, dense, tanh, dropout, linear.

    In BERT, `dense` is the pooler, with no dropout before it.
    """

    drawn_outside = 2

    def __init__(self, encoder: Encoder, config: PretrainedConfig, head: Head, dropout: float = 0.0) -> None:
        super().__init__(encoder, config, head, dropout)
        self.dense = nn.Linear(encoder.size.hidden, encoder.size.hidden)
        self.output = nn.Linear(encoder.size.hidden, head.outputs or len(self.labels))

    def forward(self, ids: Tensor, types: Tensor, lengths: Sequence[int], keep: Tensor | None = None) -> Tensor:
        """Return (N, labels) logits of N packed sequences; ids and types are (T,).

        `keep` (N, 2, d) are the masks of dropout before each linear map; None keeps everything. The caller draws them
        by the example, so that they do not depend on which examples are computed together.
        """
        hidden = self.hidden(ids, types, lengths, first_rows=True)  # (N, d)
        scale = 1.0 if keep is None else keep.to(hidden.dtype) / (1.0 - self.dropout)  # (N, 2, d)
        first, second = (scale, scale) if isinstance(scale, float) else scale.unbind(dim=1)
        return self.output(torch.tanh(self.dense(hidden if self.bert else hidden * first)) * second)


class TokenModel(Packed):
    """A head on every token: dropout and a linear map. Dropout is drawn for all tokens of a forward pass."""

    def __init__(self, encoder: Encoder, config: PretrainedConfig, head: Head, dropout: float = 0.0) -> None:
        super().__init__(encoder, config, head, dropout)
        self.output = nn.Linear(encoder.size.hidden, head.outputs or len(self.labels))

    def forward(self, ids: Tensor, types: Tensor, lengths: Sequence[int], keep: Tensor | None = None) -> Tensor:  # noqa: ARG002
        """Return (T, outputs) logits of packed sequences; ids and types are (T,)."""
        hidden = self.hidden(ids, types, lengths, first_rows=False)
        if self.training and self.dropout:
            hidden = F.dropout(hidden, self.dropout)
        return self.output(hidden)


TaskModel = SequenceModel | TokenModel | padded.Padded
_PREFIXES = {"bert": "Bert", "roberta": "Roberta", "xlm-roberta": "XLMRoberta"}


def create(
    directory: Path,
    head: Head,
    labels: Sequence[str] = (),
    dropout: float = 0.0,
    head_dropout: float = 0.0,
    seed: int = 1,
) -> TaskModel:
    """Load a pre-trained encoder and put a new head on it, whose weights are random by the seed; on the CPU.

    Args:
        directory: of the encoder.
        head: the task's head.
        labels: in the order of their numbers, if the task has labels.
        dropout: in the encoder.
        head_dropout: in the head.
        seed: of the head's weights.

    Raises:
        InputError: the directory has no complete encoder.
    """
    ours = pretrained.is_ours(pretrained.read_config(directory))
    config = padded.read_config(directory)
    if labels:
        config.id2label = dict(enumerate(labels))
        config.label2id = {label: number for number, label in enumerate(labels)}
    if not ours:
        padded.set_dropout(config, dropout, head_dropout)
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            return padded.load(directory, head, config, fresh=True)
    module = _build(directory, head, config, dropout, head_dropout)
    for name, child in module.named_children():
        if name != "encoder":
            initialise(child, seed)
    loaded = nn.Module()  # the encoder and BERT's pooler, but not the head of another task
    loaded.encoder = module.encoder
    if isinstance(module, SequenceModel) and module.bert:
        loaded.dense = module.dense
    pretrained.load_into(loaded, directory, optional=("dense.",), names=module.names)
    return module


def load(directory: Path, head: Head) -> TaskModel:
    """Load a fine-tuned model in evaluation mode, on a GPU if available; InputError if it does not have this head."""
    config = padded.read_config(directory)
    module: TaskModel
    if pretrained.is_ours(pretrained.read_config(directory)):
        module = _build(directory, head, config, 0.0, 0.0)
        pretrained.load_into(module, directory, names=module.names)
    else:
        module = padded.load(directory, head, config, fresh=False)
    return module.eval().to(devices.choose())


def _build(
    directory: Path, head: Head, config: PretrainedConfig, dropout: float, head_dropout: float
) -> SequenceModel | TokenModel:
    encoder = Encoder(pretrained.size_of(directory, pretrained.KINDS), dropout)
    return (TokenModel if head.by_token else SequenceModel)(encoder, config, head, head_dropout)


def export(module: TaskModel, tokenizer: Path, directory: Path) -> None:
    """Write the model for the head's `AutoModelFor…` class, with the tokenizer, into a directory."""
    directory.mkdir(parents=True, exist_ok=True)
    if isinstance(module, padded.Padded):
        module.model.save_pretrained(directory)
        tokenizers.copy(tokenizer, directory, pretrained.longest_of(module.config.to_dict()))
        return
    config: Any = copy.deepcopy(module.config)
    config.architectures = [f"{_PREFIXES[config.model_type]}For{module.head.architecture}"]
    config.dtype = torch.float32
    if not module.head.outputs:
        config.classifier_dropout = module.dropout
    pretrained.write(module, config, tokenizer, directory, module.names)


@torch.inference_mode()
def run(module: TaskModel, examples: Examples, tokens_per_batch: int = 8192) -> list[Tensor] | Tensor:
    """Return logits of examples in their order, float32 on the CPU: (N, outputs), or for token heads a list.

    The list has a tensor (length, outputs) for each example. Similar lengths are computed together, at most
    `tokens_per_batch` tokens at a time (or one example).
    """
    device = next(module.parameters()).device
    results: list[Tensor] = [torch.empty(0)] * len(examples)
    with evaluating(module):
        for rows in batches(examples.lengths, tokens_per_batch):
            batch = examples.take(rows)
            lengths = tuple(batch.lengths.tolist())
            ids, types = (devices.send(torch.from_numpy(values), device) for values in (batch.ids, batch.types))
            with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
                logits = module(ids, types, lengths)
            by_example = logits.float().cpu().split(lengths if module.head.by_token else 1)
            for row, values in zip(rows, by_example, strict=True):
                results[row] = values
    return results if module.head.by_token else torch.cat(results)


def batches(lengths: np.ndarray, tokens: int) -> list[np.ndarray]:
    """Return rows to compute together, the longest first; padded they have at most `tokens` tokens (or are one row)."""
    order = np.argsort(-lengths, kind="stable")
    result, start = [], 0
    while start < len(order):
        end = start + max(1, tokens // int(lengths[order[start]]))
        result.append(order[start:end])
        start = end
    return result
