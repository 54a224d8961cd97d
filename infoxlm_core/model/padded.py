"""Task models for encoders that cannot run on packed sequences, such as XLM, DistilBERT and DeBERTa.

They pad the input of Hugging Face's classes. Their signature is that of our packed models, so that training and
prediction treat all models alike.
"""

import inspect
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import transformers
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoConfig, PretrainedConfig

from infoxlm_core.data.examples import Examples
from infoxlm_core.errors import InputError, one_line
from infoxlm_core.languages import two_letters
from infoxlm_core.model.huggingface import pretrained, stored_weights
from infoxlm_core.model.task_head import Head

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_ENCODER_DROPOUT_FIELDS = ("dropout", "attention_dropout", "hidden_dropout_prob", "attention_probs_dropout_prob")
_HEAD_DROPOUT_FIELDS = ("classifier_dropout", "classifier_dropout_prob", "seq_classif_dropout", "summary_first_dropout",
                 "cls_dropout", "pooler_dropout")  # fmt: skip


class Padded(nn.Module):
    """A Hugging Face task model that accepts packed sequences."""

    dropout_mask_count = 0  # see `task_models.Packed`

    def __init__(self, model: "PreTrainedModel", head: Head) -> None:
        super().__init__()
        self.model = model.train()  # the default of PyTorch; Hugging Face loads models in evaluation mode
        self.head = head
        self.type_count = 0  # some classes, such as DistilBERT's, accept no token types
        if "token_type_ids" in inspect.signature(model.forward).parameters:
            self.type_count = getattr(model.config, "type_vocab_size", 0) or 0
        self.has_languages = bool(read_language_ids(model.config))

    @property
    def config(self) -> PretrainedConfig:
        return self.model.config

    @property
    def labels(self) -> tuple[str, ...]:
        return read_labels(self.config)

    def forward(
        self,
        ids: Tensor,
        types: Tensor,
        lengths: Sequence[int],
        dropout_masks: Tensor | None = None,  # noqa: ARG002 - all task models have the same signature
    ) -> Tensor:
        """Return (N, outputs) logits for N packed sequences, or (T, outputs) logits if the head is on every token.

        Args:
            ids: (T,) token ids.
            types: (T,) token types, or language ids from `set_language_ids` if the model has language embeddings.
            lengths: number of tokens in each sequence.
            dropout_masks: ignored, because Hugging Face's classes draw their own dropout.
        """
        padding_id = getattr(self.config, "pad_token_id", None) or 0  # the mask hides padding, so any id will do
        attention_mask = _pad(torch.ones_like(ids), lengths)  # (N, longest)
        inputs = {"input_ids": _pad(ids, lengths, padding_id), "attention_mask": attention_mask}
        if self.has_languages:
            inputs["langs"] = _pad(types, lengths)
        elif self.type_count > 1:  # XLM has no type table, and would use types as word ids
            inputs["token_type_ids"] = _pad(types, lengths)
        outputs = self.model(**inputs)
        if len(self.head.output_fields) == 1:
            logits = outputs[self.head.output_fields[0]]  # (N, outputs) or (N, longest, outputs)
        else:  # for example, start_logits and end_logits, (N, longest) each
            logits = torch.stack([outputs[field] for field in self.head.output_fields], dim=-1)
        if self.head.is_per_token:
            return logits[attention_mask.bool()]  # (N, longest, outputs) -> (T, outputs)
        return logits


def _pad(values: Tensor, lengths: Sequence[int], padding_value: int = 0) -> Tensor:
    """Convert (T,) values of packed sequences to an (N, longest) batch of padded sequences."""
    return pad_sequence(list(values.split(list(lengths))), batch_first=True, padding_value=padding_value)


def read_language_ids(config: PretrainedConfig) -> dict[str, int]:
    """Map each language to its row in the language embeddings. Only XLM models have language embeddings."""
    if getattr(config, "n_langs", 1) < 2 or not getattr(config, "use_lang_emb", False):
        return {}
    return dict(getattr(config, "lang2id", None) or {})


def find_language_id(config: PretrainedConfig, language: str) -> int | None:
    """Return a language's row in the language embeddings, or None if the model has no language embeddings.

    Raises:
        InputError: the model has language embeddings, but not for this language.
    """
    language_ids = read_language_ids(config)
    if not language_ids:
        return None
    code = language if language in language_ids else two_letters(language)  # XLM uses two-letter codes
    if code not in language_ids:
        available_languages = ", ".join(language_ids)
        raise InputError(f"the model has no embedding of language {language}: give text in {available_languages}")
    return language_ids[code]


def set_language_ids(examples: Examples, config: PretrainedConfig, languages: Sequence[str]) -> Examples:
    """Set the token types of N examples to the ids of their N languages, if the model has language embeddings.

    Both sides of a pair get the same language id, as in XLM. Other models' examples are returned unchanged.
    """
    if not read_language_ids(config):
        return examples
    language_ids = np.array([find_language_id(config, language) for language in languages], np.int16)  # (N,)
    return replace(examples, types=np.repeat(language_ids, examples.lengths))  # types are (T,)


def read_labels(config: PretrainedConfig) -> tuple[str, ...]:
    """Return a classifier's labels, ordered by id."""
    label_by_id: Any = config.id2label
    return tuple(label_by_id[label_id] for label_id in sorted(label_by_id))


def load_config(directory: Path) -> PretrainedConfig:
    """Return the config of any model. Raise InputError if the config is missing or damaged, or its type is unknown."""
    pretrained.read_config(directory)  # raises InputError for impossible sizes
    try:
        return AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # a damaged file can raise almost any exception
        raise InputError(
            f"{directory}/config.json: unknown or damaged model ({one_line(error)}): give a Hugging Face model"
        ) from None


def load(directory: Path, head: Head, config: PretrainedConfig, new_head: bool) -> Padded:
    """Load a task model, or an encoder with a random head if `new_head`. Raise the errors of `load_model`."""
    auto_class = getattr(transformers, f"AutoModelFor{head.architecture}")
    model = stored_weights.load_model(auto_class, directory, config, new_head)
    return Padded(model, head)


def set_dropout(config: PretrainedConfig, dropout: float, head_dropout: float) -> None:
    """Set the encoder's and the head's dropout in a config. The field names depend on the model type."""
    for field in _ENCODER_DROPOUT_FIELDS:
        if hasattr(config, field):
            setattr(config, field, dropout)
    for field in _HEAD_DROPOUT_FIELDS:
        if hasattr(config, field):
            setattr(config, field, head_dropout)
