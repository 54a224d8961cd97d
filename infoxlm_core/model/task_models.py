"""Models of a task: an encoder, and the head that the task declares.

All are called with packed sequences: `module(ids, types, lengths)`. XLM-R, RoBERTa and BERT run packed, other kinds
padded inside (`padded.py`). Directories are Hugging Face's, in and out.

    create     a pre-trained encoder with a fresh head      load    a fine-tuned model
    run        logits of many examples                      export  loads in AutoModelFor…, with equal logits
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
from infoxlm_core.model.attention import starts
from infoxlm_core.model.encoder import Encoder, evaluating, initialise
from infoxlm_core.model.huggingface import pretrained, tokenizers
from infoxlm_core.model.objectives import full_precision
from infoxlm_core.model.task_head import Head


class Packed(nn.Module):
    """An encoder over packed sequences, and what its task puts on top."""

    drawn_outside = 0  # layers before which dropout is drawn by the example, by the caller: the `keep` of `forward`

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
        """Our parameters on the encoder -> Hugging Face's."""
        return self.head.bert_names if self.bert else self.head.names

    def hidden(self, ids: Tensor, types: Tensor, lengths: Sequence[int], first_rows: bool) -> Tensor:
        """(T,) ids and types of N sequences -> (T, d) of the last layer, or only its N rows at position 0."""
        size, edges = self.encoder.size, starts(tuple(lengths), ids.device).long()  # (N + 1,)
        begins = torch.repeat_interleave(edges[:-1], edges.diff(), output_size=len(ids))
        positions = torch.arange(len(ids), device=ids.device) - begins + size.first
        hidden = self.encoder.embed(ids, positions, types.clamp(max=max(0, size.types - 1)))
        rows, counts = (edges[:-1], (1,) * len(lengths)) if first_rows else (None, None)
        return full_precision(self.encoder.run(hidden, lengths, 0, size.layers, rows, counts))


class SequenceModel(Packed):
    """A head on position 0, as Hugging Face's: dropout, dense, tanh, dropout, linear. BERT's has its pooler as `dense`
    and no dropout before it."""

    drawn_outside = 2

    def __init__(self, encoder: Encoder, config: PretrainedConfig, head: Head, dropout: float = 0.0) -> None:
        super().__init__(encoder, config, head, dropout)
        self.dense = nn.Linear(encoder.size.hidden, encoder.size.hidden)
        self.output = nn.Linear(encoder.size.hidden, head.outputs or len(self.labels))

    def forward(self, ids: Tensor, types: Tensor, lengths: Sequence[int], keep: Tensor | None = None) -> Tensor:
        """(T,) ids and types of N packed sequences -> (N, labels) logits.

        `keep` (N, 2, d) says what dropout keeps before each linear map; None: everything. It is drawn by the sample,
        outside, so that it does not depend on which samples are computed together.
        """
        hidden = self.hidden(ids, types, lengths, first_rows=True)  # (N, d)
        scale = 1.0 if keep is None else keep.to(hidden.dtype) / (1.0 - self.dropout)  # (N, 2, d)
        first, second = (scale, scale) if isinstance(scale, float) else scale.unbind(dim=1)
        return self.output(torch.tanh(self.dense(hidden if self.bert else hidden * first)) * second)


class TokenModel(Packed):
    """A head on every token: dropout, drawn for the tokens that are computed together, and a linear map."""

    def __init__(self, encoder: Encoder, config: PretrainedConfig, head: Head, dropout: float = 0.0) -> None:
        super().__init__(encoder, config, head, dropout)
        self.output = nn.Linear(encoder.size.hidden, head.outputs or len(self.labels))

    def forward(self, ids: Tensor, types: Tensor, lengths: Sequence[int], keep: Tensor | None = None) -> Tensor:  # noqa: ARG002 - as all task models
        """(T,) ids and types of N packed sequences -> (T, outputs) logits."""
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
    """A fresh head, random by the seed, on a pre-trained encoder; on the CPU.

    `labels` are in the order of their numbers, where the task has labels; `dropout` is the encoder's. Raises InputError
    if there is no complete encoder in the Hugging Face directory.
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
    for name, part in module.named_children():
        if name != "encoder":
            initialise(part, seed)
    known = nn.Module()  # the encoder and, of BERT, the pooler: a head of another task stays where it is
    known.encoder = module.encoder
    if isinstance(module, SequenceModel) and module.bert:
        known.dense = module.dense
    pretrained.load_into(known, directory, optional=("dense.",), names=module.names)
    return module


def load(directory: Path, head: Head) -> TaskModel:
    """A fine-tuned model, ready to predict, on the GPU if there is one; InputError if there is none with this head."""
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
    """Write a directory that the head's `AutoModelFor…` loads, and the tokenizer."""
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
    """Logits of examples, in their order, float32 on the CPU: (N, outputs), or by token a list of (length, outputs).

    Similar lengths are computed together, at most `tokens_per_batch` tokens at a time (or one example).
    """
    device = next(module.parameters()).device
    found: list[Tensor] = [torch.empty(0)] * len(examples)
    with evaluating(module):
        for rows in batches(examples.lengths, tokens_per_batch):
            batch = examples.take(rows)
            lengths = tuple(batch.lengths.tolist())
            ids, types = (devices.send(torch.from_numpy(values), device) for values in (batch.ids, batch.types))
            with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
                logits = module(ids, types, lengths)
            parts = logits.float().cpu().split(lengths if module.head.by_token else 1)
            for row, part in zip(rows, parts, strict=True):
                found[row] = part
    return found if module.head.by_token else torch.cat(found)


def batches(lengths: np.ndarray, tokens: int) -> list[np.ndarray]:
    """Rows to compute together, the longest first, so that also padded they have at most `tokens` tokens (or one)."""
    order = np.argsort(-lengths, kind="stable")
    parts, start = [], 0
    while start < len(order):
        end = start + max(1, tokens // int(lengths[order[start]]))
        parts.append(order[start:end])
        start = end
    return parts
