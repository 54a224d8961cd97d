"""The common base of the systems XLM and BERT: builds networks, and reads and writes them as Hugging Face models."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing
from torch import nn
from transformers import PretrainedConfig

from infoxlm_core import outside
from infoxlm_core.config import PretrainingConfig
from infoxlm_core.data.shards import Shards
from infoxlm_core.data.vocabulary import BOS, EOS
from infoxlm_core.errors import ConfigError, InputError, TokenizerMismatch
from infoxlm_core.model.encoder import EncoderSize, initialise
from infoxlm_core.model.huggingface import pretrained, stored_weights, tokenizers
from infoxlm_core.model.huggingface.pretrained import WEIGHTS
from infoxlm_core.systems.system import System
from infoxlm_core.systems.text_batches import TextSampler, languages_of
from infoxlm_core.systems.text_learner import Loss, TextLearner, TextNetwork
from infoxlm_core.training import distributed

EPSILON = 1e-12  # epsilon of LayerNorm in XLM and BERT


class TextSystem(System):
    """A base class of systems. Subclasses set the attributes below. Positions count from 0."""

    network: ClassVar[type[TextNetwork]]
    sampler: ClassVar[type[TextSampler]]
    losses: ClassVar[Mapping[str, Loss]]  # name of a sentence objective -> its loss
    config_class: ClassVar[type[PretrainedConfig]]
    parameter_names: ClassVar[list[tuple[str, str]]]  # rules (pattern, replacement) that precede XLM-R's
    first_token: ClassVar[str]  # the token that starts every sequence
    second_segment: ClassVar[int]  # the token type of a pair's second text

    def types(self, languages: Sequence[str]) -> int:
        """Return the number of token types, or 0 if there is no type table."""
        raise NotImplementedError

    def size_from(self, config: PretrainedConfig) -> dict[str, int]:
        """Return `ffn` and `types` of an exported model. The other sizes have the same names in all systems."""
        raise NotImplementedError

    def hugging_face_config(
        self, size: EncoderSize, config: PretrainingConfig, languages: Sequence[str]
    ) -> PretrainedConfig:
        """Return the configuration to export."""
        raise NotImplementedError

    def check(self, config: PretrainingConfig) -> None:
        """Raise ConfigError if a size does not fit the system."""

    def check_start(self, config: PretrainedConfig, directory: Path, shards: Shards) -> None:
        """Raise ConfigError if an exported model cannot be trained on these shards."""

    def initialise(self, model: nn.Module, seed: int) -> None:
        """Set the weights to random values by the seed."""
        initialise(model, seed)

    def build(self, config: PretrainingConfig, shards: Shards) -> TextNetwork:
        """Return the network with random weights by the seed, or with the weights of the model `model.start`.

        Raises:
            ConfigError: a size does not fit the system, or the start.
            TokenizerMismatch: the tokenizer of the shards does not have XLM-R's layout; see also `size_of`.
            InputError: see `size_of` and `load_into`.
        """
        self.check(config)
        shards.vocabulary.check_xlm_r(config.system)
        if config.model.start:
            directory = Path(config.model.start)
            size = self.size_of(directory, shards)
            self.check_start_files(config, directory)
            model = self.network(size, config.model.dropout)
            self.load_into(model, directory)
        else:
            size = EncoderSize.of(
                config.model,
                shards.vocabulary_size,
                positions=config.model.max_tokens,
                epsilon=EPSILON,
                types=self.types(languages_of(shards)),
                first_position=0,
            )
            model = self.network(size, config.model.dropout)
            self.initialise(model, config.seed)
        return model.to(distributed.device())

    def check_start_files(self, config: PretrainingConfig, directory: Path) -> None:
        positions = self._read_config(directory).max_position_embeddings
        if config.max_sequence_tokens > positions:
            raise ConfigError(
                f"sequences of {config.max_sequence_tokens} tokens exceed the {positions} positions of {directory}: "
                "lower batches.block_tokens and batches.side_tokens"
            )

    def learner(self, config: PretrainingConfig, model: TextNetwork, shards: Shards) -> TextLearner:
        return TextLearner(config, model, self.sampler(shards, config), self.losses)

    def count_tokens(self, config: PretrainingConfig, shards: Shards, steps: range) -> int:
        sampler = self.sampler(shards, config)
        token_count = 0
        for step in steps:
            for shard in range(config.batches.virtual_shards):
                token_count += len(sampler.draw(step, shard).inputs.flat)
        return token_count

    def export(self, model: TextNetwork, config: PretrainingConfig, shards: Shards, directory: Path) -> None:
        """Write a directory that `XLMWithLMHeadModel` or `BertForPreTraining` loads, with the shards' tokenizer."""
        size = model.encoder.size
        weights = {self.hugging_face_name(name): value for name, value in model.named_parameters()}
        exported_config = self.hugging_face_config(size, config, languages_of(shards))
        pretrained.write_model(weights, exported_config, directory)
        self._write_tokenizer(size, shards.directory / "tokenizer", directory)

    def hugging_face_name(self, name: str) -> str:
        """Return Hugging Face's name of a parameter: `encoder.layers.0.up.bias` -> `transformer.ffns.0.lin1.bias`."""
        return pretrained.hugging_face_name(name, self.parameter_names).replace("roberta.", "bert.", 1)

    def _write_tokenizer(self, size: EncoderSize, tokenizer: Path, directory: Path) -> None:
        """Copy the tokenizer with the system's template: `</s> a </s> b </s>` in XLM, `<s> a </s> b </s>` in BERT."""
        tokenizers.copy(tokenizer, directory, size.positions)
        path = directory / "tokenizer.json"
        if not path.exists():
            return
        with tokenizers.reading(str(path)):
            fast_tokenizer = Tokenizer.from_file(str(path))
        first_token = self.first_token
        segment = self.second_segment  # token type of the second text
        fast_tokenizer.post_processor = TemplateProcessing(
            single=f"{first_token} $A </s>",
            pair=f"{first_token} $A </s> $B:{segment} </s>:{segment}",
            special_tokens=[("<s>", BOS), ("</s>", EOS)],
        )
        fast_tokenizer.save(str(path))
        settings_path = directory / "tokenizer_config.json"
        settings = outside.read_json(settings_path, dict[str, Any], "copy it again")
        settings |= {"bos_token": first_token, "cls_token": first_token}
        settings_path.write_text(json.dumps(settings, indent=1) + "\n")

    def size_of(self, directory: Path, shards: Shards) -> EncoderSize:
        """Return the sizes in the config.json of an exported model that is to be trained on these shards.

        Raises:
            InputError: the file is missing, of another architecture, or does not describe the stored weights.
            TokenizerMismatch: the model has another vocabulary than the shards.
            ConfigError: see `check_start`.
        """
        config = self._read_config(directory)
        if config.vocab_size != shards.vocabulary_size:
            raise TokenizerMismatch(
                f"{directory} has {config.vocab_size} embeddings, but {shards.directory} has {shards.vocabulary_size} "
                "ids: tokenize with the model's own SentencePiece model (tokenization.model)"
            )
        self.check_start(config, directory, shards)
        system_sizes = self.size_from(config)
        type_count = system_sizes["types"]
        size = EncoderSize(
            vocabulary=config.vocab_size,
            layers=config.num_hidden_layers,
            hidden=config.hidden_size,
            ffn=system_sizes["ffn"],
            heads=config.num_attention_heads,
            positions=config.max_position_embeddings,
            epsilon=config.layer_norm_eps,
            types=type_count if type_count > 1 else 0,
            first_position=0,
        )
        with torch.device("meta"):
            network = self.network(size, 0.0)
        self._check_stored_shapes(network, directory)
        return size

    def _read_config(self, directory: Path) -> PretrainedConfig:
        """Read the config.json of an exported model. Raise InputError if it is missing or of another architecture."""
        path = directory / "config.json"
        model_type = self.config_class.model_type
        content = outside.read_json(path, dict[str, Any], f"give a directory of system {model_type}")
        stored_weights.check_counts(content, path)
        if content.get("model_type") != model_type:
            raise InputError(
                f"{path}: model_type is {content.get('model_type')!r}, not {model_type!r}: give a model of this system"
            )
        return self.config_class.from_dict(content)

    def _check_stored_shapes(self, network: nn.Module, directory: Path) -> None:
        """Raise InputError if the directory has weight files, but not the weights of this network."""
        expected_shapes = {self.hugging_face_name(name): tuple(p.shape) for name, p in network.named_parameters()}
        stored_shapes = {name: weight.shape for name, weight in stored_weights.read_headers(directory).items()}
        if stored_shapes:
            stored_weights.compare_shapes(expected_shapes, stored_shapes, directory)

    def load_into(self, model: TextNetwork, directory: Path) -> None:
        """Copy the weights of an exported model into another model.

        Raises:
            InputError: the file of weights is missing or damaged, or a weight is missing, has another shape, or is not
                finite.
        """
        path = directory / WEIGHTS
        if not path.is_file():
            raise InputError(f"{path} is missing: give the directory of a trained model")
        stored_weights.check_dtypes(directory)
        self._check_stored_shapes(model, directory)
        weights = pretrained.read_tensors(path)
        model.load_state_dict({name: weights[self.hugging_face_name(name)] for name, _ in model.named_parameters()})
        stored_weights.check_numbers(model, directory)
