"""Task models for other encoders (XLM, DistilBERT, DeBERTa, …): Hugging Face's own classes, which pad their input.

They have the same signature as our packed models, so that training and prediction need not distinguish them.
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

_DROPOUT = ("dropout", "attention_dropout", "hidden_dropout_prob", "attention_probs_dropout_prob")
_HEAD_DROPOUT = ("classifier_dropout", "classifier_dropout_prob", "seq_classif_dropout", "summary_first_dropout",
                 "cls_dropout", "pooler_dropout")  # fmt: skip


class Padded(nn.Module):
    """A task model of Hugging Face that is called with packed sequences and draws its own dropout."""

    external_dropouts = 0

    def __init__(self, model: "PreTrainedModel", head: Head) -> None:
        super().__init__()
        self.model = model.train()  # like every new module; Hugging Face loads models in evaluation mode
        self.head = head
        self.type_count = 0
        if "token_type_ids" in inspect.signature(model.forward).parameters:
            self.type_count = getattr(model.config, "type_vocab_size", 0) or 0
        self.has_languages = bool(languages_of(model.config))

    @property
    def config(self) -> PretrainedConfig:
        return self.model.config

    @property
    def labels(self) -> tuple[str, ...]:
        return labels_of(self.config)

    def forward(
        self,
        ids: Tensor,
        types: Tensor,
        lengths: Sequence[int],
        dropout_masks: Tensor | None = None,  # noqa: ARG002 - the signature of all task models
    ) -> Tensor:
        """Return (N, outputs) logits of N packed sequences, or (T, outputs) for token heads. Ids and types are (T,).

        For a model with language embeddings, types are numbers of languages; see `set_languages`.
        """
        sequence_lengths = list(lengths)
        padding_id = getattr(self.config, "pad_token_id", None) or 0
        input_ids = pad_sequence(list(ids.split(sequence_lengths)), batch_first=True, padding_value=padding_id)
        ones = torch.ones_like(ids)
        attention_mask = pad_sequence(list(ones.split(sequence_lengths)), batch_first=True)  # (N, longest)
        inputs = {"input_ids": input_ids, "attention_mask": attention_mask}
        if self.has_languages:
            inputs["langs"] = pad_sequence(list(types.split(sequence_lengths)), batch_first=True)
        elif self.type_count > 1:  # XLM, for example, has no types and would look them up in the word embeddings
            inputs["token_type_ids"] = pad_sequence(list(types.split(sequence_lengths)), batch_first=True)
        outputs = self.model(**inputs)
        columns = [outputs[field] for field in self.head.output_fields]
        logits = columns[0] if len(columns) == 1 else torch.stack(columns, dim=-1)
        if self.head.is_per_token:
            return logits[attention_mask.bool()]  # (N, longest, outputs) -> (T, outputs)
        return logits  # (N, outputs)


def languages_of(config: PretrainedConfig) -> dict[str, int]:
    """Return the number of each language's embedding. Only models of type XLM have any."""
    if getattr(config, "n_langs", 1) < 2 or not getattr(config, "use_lang_emb", False):
        return {}
    return dict(getattr(config, "lang2id", None) or {})


def number_language(config: PretrainedConfig, language: str) -> int | None:
    """Return the number of a language's embedding, or None if the model has no language embeddings.

    Raises:
        InputError: the model has language embeddings, but not of this language.
    """
    language_numbers = languages_of(config)
    if not language_numbers:
        return None
    code = language if language in language_numbers else two_letters(language)
    if code not in language_numbers:
        available = ", ".join(language_numbers)
        raise InputError(f"the model has no embedding of language {language}: give text in {available}")
    return language_numbers[code]


def set_languages(examples: Examples, config: PretrainedConfig, languages: Sequence[str]) -> Examples:
    """Return N examples whose types are the numbers of their N languages, if the model has language embeddings.

    Both sides of a pair have one number, as in XLM. Examples of other models are returned unchanged.
    """
    if not languages_of(config):
        return examples
    language_numbers = {language: number_language(config, language) for language in set(languages)}
    number_by_example = np.array([language_numbers[language] for language in languages], np.int16)  # (N,)
    return replace(examples, types=np.repeat(number_by_example, examples.lengths))  # types are (T,)


def labels_of(config: PretrainedConfig) -> tuple[str, ...]:
    """Return the names of a classifier's labels, in the order of their numbers."""
    name_by_number: Any = config.id2label
    return tuple(name_by_number[number] for number in sorted(name_by_number))


def read_config(directory: Path) -> PretrainedConfig:
    """Return the config of any model. Raise InputError if it is missing, damaged, or of an unknown type."""
    pretrained.read_config(directory)  # raises InputError for impossible sizes
    try:
        return AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # a damaged file can raise almost any exception
        raise InputError(
            f"{directory}/config.json: unknown or damaged model ({one_line(error)}): give a Hugging Face model"
        ) from None


def load(directory: Path, head: Head, config: PretrainedConfig, fresh: bool) -> Padded:
    """Load a task model, or with `fresh` an encoder with a random head. See `load_model` for errors."""
    auto_class = getattr(transformers, f"AutoModelFor{head.architecture}")
    model = stored_weights.load_model(auto_class, directory, config, new_head=fresh)
    return Padded(model, head)


def set_dropout(config: PretrainedConfig, dropout: float, head_dropout: float) -> None:
    """Set the dropout of encoder and head in every field that a config has for them."""
    for field_names, probability in ((_DROPOUT, dropout), (_HEAD_DROPOUT, head_dropout)):
        for field_name in field_names:
            if hasattr(config, field_name):
                setattr(config, field_name, probability)
