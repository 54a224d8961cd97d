"""Models of a task: an encoder, and what stands on it to classify texts or to mark an answer.

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
from torch import Tensor, nn
from transformers import PretrainedConfig

from infoxlm_core.data.examples import Examples
from infoxlm_core.model import padded, pretrained, tokenizers
from infoxlm_core.model.encoder import Encoder, initialise, starts
from infoxlm_core.model.padded import Kind


class Packed(nn.Module):
    """An encoder over packed sequences, and what its task puts on top."""

    kind: Kind

    def __init__(self, encoder: Encoder, config: PretrainedConfig) -> None:
        super().__init__()
        self.encoder, self.config = encoder, config

    def hidden(self, ids: Tensor, types: Tensor, lengths: Sequence[int], first_rows: bool) -> Tensor:
        """(T,) ids and types of N sequences -> (T, d) of the last layer, or only its N rows at position 0."""
        size, edges = self.encoder.size, starts(tuple(lengths), ids.device).long()  # (N + 1,)
        begins = torch.repeat_interleave(edges[:-1], edges.diff(), output_size=len(ids))
        positions = torch.arange(len(ids), device=ids.device) - begins + size.first
        hidden = self.encoder.embed(ids, positions, types.clamp(max=max(0, size.types - 1)))
        rows, counts = (edges[:-1], (1,) * len(lengths)) if first_rows else (None, None)
        return self.encoder.run(hidden, lengths, 0, size.layers, rows, counts)


class Classifier(Packed):
    """The classification head of Hugging Face's class on position 0: dropout, dense, tanh, dropout, linear.

    BERT's has its pooler as `dense` and no dropout before it.
    """

    kind: Kind = "classification"

    def __init__(self, encoder: Encoder, config: PretrainedConfig, dropout: float = 0.0) -> None:
        super().__init__(encoder, config)
        self.dropout, self.bert = dropout, config.model_type == "bert"
        self.dense = nn.Linear(encoder.size.hidden, encoder.size.hidden)
        self.output = nn.Linear(encoder.size.hidden, len(self.labels))

    @property
    def labels(self) -> tuple[str, ...]:
        return padded.labels_of(self.config)

    def forward(self, ids: Tensor, types: Tensor, lengths: Sequence[int], kept: Tensor | None = None) -> Tensor:
        """(T,) ids and types of N packed sequences -> (N, labels) logits.

        `kept` (N, 2, d) says what dropout keeps before each linear map; None: everything. It is drawn by the sample,
        outside, so that it does not depend on which samples are computed together.
        """
        hidden = self.hidden(ids, types, lengths, first_rows=True)  # (N, d)
        scale = 1.0 if kept is None else kept.to(hidden.dtype) / (1.0 - self.dropout)  # (N, 2, d)
        first, second = (scale, scale) if isinstance(scale, float) else scale.unbind(dim=1)
        return self.output(torch.tanh(self.dense(hidden if self.bert else hidden * first)) * second)


class Reader(Packed):
    """A linear map of every token to two logits: the answer starts here, the answer ends here."""

    kind: Kind = "question_answering"

    def __init__(self, encoder: Encoder, config: PretrainedConfig) -> None:
        super().__init__(encoder, config)
        self.output = nn.Linear(encoder.size.hidden, 2)

    def forward(self, ids: Tensor, types: Tensor, lengths: Sequence[int], kept: Tensor | None = None) -> Tensor:  # noqa: ARG002 - as all task models
        """(T,) ids and types of N packed sequences -> (T, 2) logits of start and end."""
        return self.output(self.hidden(ids, types, lengths, first_rows=False))


TaskModel = Classifier | Reader | padded.Padded

_NAMES: dict[tuple[type, bool], pretrained.Names] = {  # our heads -> Hugging Face's; whether of BERT
    (Classifier, False): [(r"^dense\.", "classifier.dense."), (r"^output\.", "classifier.out_proj.")],
    (Classifier, True): [(r"^dense\.", "roberta.pooler.dense."), (r"^output\.", "classifier.")],
    (Reader, False): [(r"^output\.", "qa_outputs.")],
    (Reader, True): [(r"^output\.", "qa_outputs.")],
}
_ARCHITECTURES = {
    Classifier: {"bert": "BertForSequenceClassification", "roberta": "RobertaForSequenceClassification",
                 "xlm-roberta": "XLMRobertaForSequenceClassification"},
    Reader: {"bert": "BertForQuestionAnswering", "roberta": "RobertaForQuestionAnswering",
             "xlm-roberta": "XLMRobertaForQuestionAnswering"},
}  # fmt: skip


def create(
    directory: Path,
    kind: Kind,
    labels: Sequence[str] = (),
    dropout: float = 0.0,
    head_dropout: float = 0.0,
    seed: int = 1,
) -> TaskModel:
    """A fresh head, random by the seed, on a pre-trained encoder; on the CPU.

    Args:
        directory: a Hugging Face directory of the encoder.
        kind: what the head is for.
        labels: of a classifier, in the order of their numbers.
        dropout: in the encoder.
        head_dropout: in the head.
        seed: of the head's weights.

    Raises:
        InputError: there is no complete encoder in the directory.
    """
    ours = pretrained.is_ours(pretrained.read_config(directory))
    config = padded.read_config(directory)
    if kind == "classification":
        config.id2label = dict(enumerate(labels))
        config.label2id = {label: number for number, label in enumerate(labels)}
    if not ours:
        padded.set_dropout(config, dropout, head_dropout)
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            return padded.load(directory, kind, config, fresh=True)
    module = _build(directory, kind, config, dropout, head_dropout)
    for name, head in module.named_children():
        if name != "encoder":
            initialise(head, seed)
    known = nn.Module()  # the encoder and, of BERT, the pooler: a head of another task stays where it is
    known.encoder = module.encoder
    if isinstance(module, Classifier) and module.bert:
        known.dense = module.dense
    pretrained.load_into(known, directory, optional=("dense.",), names=_names(module))
    return module


def load(directory: Path, kind: Kind) -> TaskModel:
    """A fine-tuned model, ready to predict; on the GPU if there is one.

    Raises:
        InputError: there is no complete model of this kind in the directory.
    """
    config = padded.read_config(directory)
    module: TaskModel
    if pretrained.is_ours(pretrained.read_config(directory)):
        module = _build(directory, kind, config, 0.0, 0.0)
        pretrained.load_into(module, directory, names=_names(module))
    else:
        module = padded.load(directory, kind, config, fresh=False)
    return module.eval().to("cuda" if torch.cuda.is_available() else "cpu")


def _build(directory: Path, kind: Kind, config: PretrainedConfig, dropout: float, head: float) -> Classifier | Reader:
    encoder = Encoder(pretrained.size_of(directory, pretrained.KINDS), dropout)
    return Classifier(encoder, config, head) if kind == "classification" else Reader(encoder, config)


def _names(module: Classifier | Reader) -> pretrained.Names:
    return _NAMES[type(module), module.config.model_type == "bert"]


def hugging_face_name(module: Classifier | Reader, name: str) -> str:
    """What Hugging Face's class calls a parameter of ours."""
    found = pretrained.hugging_face_name(name, _names(module))
    return found.replace("roberta.", "bert.", 1) if module.config.model_type == "bert" else found


def export(module: TaskModel, tokenizer: Path, directory: Path) -> None:
    """Write a directory that `AutoModelForSequenceClassification` or `…QuestionAnswering` loads, and the tokenizer."""
    directory.mkdir(parents=True, exist_ok=True)
    if isinstance(module, padded.Padded):
        padded.export(module, directory)
        tokenizers.copy(tokenizer, directory, pretrained.longest_of(module.config.to_dict()))
        return
    config: Any = copy.deepcopy(module.config)
    config.architectures = [_ARCHITECTURES[type(module)][config.model_type]]
    config.dtype = torch.float32
    if isinstance(module, Classifier):
        config.classifier_dropout = module.dropout
    pretrained.write(module, config, tokenizer, directory, _names(module))


@torch.inference_mode()
def run(module: TaskModel, examples: Examples, tokens_per_batch: int = 8192) -> list[Tensor] | Tensor:
    """Logits of examples, in their order, float32 on the CPU: (N, labels), or a list of (length, 2).

    Similar lengths are computed together, at most `tokens_per_batch` tokens at a time (or one example).
    """
    device = next(module.parameters()).device
    found: list[Tensor] = [torch.empty(0)] * len(examples)
    training = module.training
    module.eval()
    try:
        for rows in batches(examples.lengths, tokens_per_batch):
            batch = examples.take(rows)
            lengths = tuple(batch.lengths.tolist())
            ids, types = (torch.from_numpy(values).to(device) for values in (batch.ids, batch.types))
            with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
                logits = module(ids, types, lengths)
            parts = logits.float().cpu().split(lengths if module.kind == "question_answering" else 1)
            for row, part in zip(rows, parts, strict=True):
                found[row] = part
    finally:
        module.train(training)
    return found if module.kind == "question_answering" else torch.cat(found)


def batches(lengths: np.ndarray, tokens: int) -> list[np.ndarray]:
    """Rows to compute together, the longest first, so that also padded they have at most `tokens` tokens (or one)."""
    order = np.argsort(-lengths, kind="stable")
    parts, start = [], 0
    while start < len(order):
        end = start + max(1, tokens // int(lengths[order[start]]))
        parts.append(order[start:end])
        start = end
    return parts
