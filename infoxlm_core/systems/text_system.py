"""The base of the systems XLM and BERT: builds networks, and reads and writes them as Hugging Face models."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing
from torch import nn
from transformers import PretrainedConfig

from infoxlm_core import user_files
from infoxlm_core.config import PretrainingConfig
from infoxlm_core.data.shards import Shards
from infoxlm_core.data.vocabulary import BOS, EOS
from infoxlm_core.errors import ConfigError, InputError, TokenizerMismatch, one_line
from infoxlm_core.model.encoder import EncoderSize, initialise
from infoxlm_core.model.huggingface import pretrained, stored_weights, tokenizers
from infoxlm_core.model.huggingface.pretrained import WEIGHTS
from infoxlm_core.systems.system import System, check_tokenizer_file, name_tokenizer_file
from infoxlm_core.systems.text_batches import TextSampler, list_languages
from infoxlm_core.systems.text_learner import TextLearner, TextNetwork
from infoxlm_core.training import distributed

EPSILON = 1e-12  # LayerNorm epsilon of XLM and BERT


class TextSystem(System):
    """The base class of XLM and BERT. Positions count from 0. Subclasses set the attributes below."""

    network_class: ClassVar[type[TextNetwork]]
    sampler_class: ClassVar[type[TextSampler]]
    config_class: ClassVar[type[PretrainedConfig]]
    supported_settings: ClassVar[dict[str, Any]]  # the only supported values of fields of config.json
    parameter_names: ClassVar[list[tuple[str, str]]]  # (pattern, replacement) rules, applied before XLM-R's
    first_token: ClassVar[str]  # the token that starts every sequence
    second_type: ClassVar[int]  # token type of a pair's second text

    def count_types(self, languages: Sequence[str]) -> int:
        """Return the number of token types, or 0 if the model has no type embeddings."""
        raise NotImplementedError

    def read_ffn_size(self, config: PretrainedConfig) -> int:
        """Return an exported model's feed-forward size."""
        raise NotImplementedError

    def read_type_count(self, config: PretrainedConfig) -> int:
        """Return an exported model's number of token types."""
        raise NotImplementedError

    def make_config(self, size: EncoderSize, config: PretrainingConfig, languages: Sequence[str]) -> PretrainedConfig:
        """Return the Hugging Face config of an exported model."""
        raise NotImplementedError

    def check_sizes(self, config: PretrainingConfig) -> None:
        """Raise ConfigError if the system does not support a configured size."""

    def check_languages(self, config: PretrainedConfig, directory: Path, shards: Shards) -> None:
        """Raise ConfigError if an exported model's languages differ from those of the shards."""

    def initialise(self, model: nn.Module, seed: int) -> None:
        """Initialize the weights randomly from the seed."""
        initialise(model, seed)

    def build(self, config: PretrainingConfig, shards: Shards) -> TextNetwork:
        """Return the network on this worker's device, with the weights of `model.start` or random weights.

        Raises:
            ConfigError: the system or the start model does not support a configured size.
            TokenizerMismatch: the shards' tokenizer does not have XLM-R's layout; see also `read_size`.
            InputError: see `read_size` and `load_weights`.
        """
        self.check_sizes(config)
        shards.vocabulary.check_xlm_r(config.system)
        if config.model.start:
            model = self._load_start(Path(config.model.start), config, shards)
        else:
            model = self._create_random(config, shards)
        return model.to(distributed.device())

    def _load_start(self, start: Path, config: PretrainingConfig, shards: Shards) -> TextNetwork:
        """Load an exported model, after checking that it matches the config and the shards."""
        size = self.read_size(start, shards)
        self.check_start_files(config, start)
        model = self.network_class(size, config.model.dropout)
        self.load_weights(model, start)
        return model

    def _create_random(self, config: PretrainingConfig, shards: Shards) -> TextNetwork:
        """Return a network of the configured size, with random weights drawn from the seed."""
        size = EncoderSize.from_config(
            config.model,
            shards.vocabulary_size,
            positions=config.model.max_tokens,
            epsilon=EPSILON,
            types=self.count_types(list_languages(shards)),
            first_position=0,
        )
        model = self.network_class(size, config.model.dropout)
        self.initialise(model, config.seed)
        return model

    def check_start_files(self, config: PretrainingConfig, directory: Path) -> None:
        """Raise ConfigError if an exported model has too few positions for the configured sequences."""
        positions = self._read_config(directory).max_position_embeddings
        if config.max_sequence_tokens > positions:
            raise ConfigError(
                f"sequences of {config.max_sequence_tokens} tokens exceed the {positions} positions of {directory}: "
                "lower batches.block_tokens and batches.side_tokens"
            )

    def create_learner(self, config: PretrainingConfig, model: TextNetwork, shards: Shards) -> TextLearner:
        return TextLearner(config, model, self.sampler_class(shards, config))

    def count_tokens(self, config: PretrainingConfig, shards: Shards, steps: range) -> int:
        """Count the tokens that all workers process in these steps."""
        sampler = self.sampler_class(shards, config)
        token_count = 0
        for step in steps:
            for shard in range(config.batches.virtual_shards):
                token_count += len(sampler.draw(step, shard).inputs.flat)
        return token_count

    def export(self, model: TextNetwork, config: PretrainingConfig, shards: Shards, directory: Path) -> None:
        """Write the network and the shards' tokenizer as `XLMWithLMHeadModel` or `BertForPreTraining`."""
        size = model.encoder.size
        weights = {self.hugging_face_name(name): parameter for name, parameter in model.named_parameters()}
        exported_config = self.make_config(size, config, list_languages(shards))
        pretrained.write_model(weights, exported_config, directory)
        self._write_tokenizer(shards.directory / "tokenizer", directory, size.positions)

    def hugging_face_name(self, name: str) -> str:
        """Translate a parameter name: in XLM, `encoder.layers.0.up.bias` -> `transformer.ffns.0.lin1.bias`."""
        # XLM's rules cover all names. The other names of BERT are those of XLM-R with another prefix.
        return pretrained.to_hugging_face_name(name, self.parameter_names).replace("roberta.", "bert.", 1)

    def _write_tokenizer(self, tokenizer: Path, directory: Path, max_tokens: int) -> None:
        """Copy the shards' tokenizer, and set the system's special tokens.

        A pair becomes `</s> a </s> b </s>` in XLM and `<s> a </s> b </s>` in BERT.
        """
        tokenizers.copy(tokenizer, directory, max_tokens)
        tokenizer_path = directory / "tokenizer.json"
        if not tokenizer_path.exists():  # the tokenizer has only a SentencePiece model
            return
        with tokenizers.reading(str(tokenizer_path)):
            fast_tokenizer = Tokenizer.from_file(str(tokenizer_path))
        fast_tokenizer.post_processor = TemplateProcessing(
            single=f"{self.first_token} $A </s>",
            pair=f"{self.first_token} $A </s> $B:{self.second_type} </s>:{self.second_type}",
            special_tokens=[("<s>", BOS), ("</s>", EOS)],
        )
        fast_tokenizer.save(str(tokenizer_path))
        settings_path = directory / "tokenizer_config.json"
        settings = user_files.read_json(settings_path, dict[str, Any], "copy it again")
        settings |= {"bos_token": self.first_token, "cls_token": self.first_token}
        settings_path.write_text(json.dumps(settings, indent=1) + "\n")

    def read_size(self, directory: Path, shards: Shards) -> EncoderSize:
        """Read an exported model's size from config.json, and check that the model matches the shards.

        Raises:
            InputError: config.json is missing or damaged, names another architecture or contradicts the stored weights.
            TokenizerMismatch: the vocabulary sizes or the SentencePiece models of the model and the shards differ.
            ConfigError: see `check_languages`.
        """
        config = self._read_config(directory)
        if config.vocab_size != shards.vocabulary_size:
            raise TokenizerMismatch(
                f"{directory} has {config.vocab_size} embeddings, but {shards.directory} has {shards.vocabulary_size} "
                "ids: tokenize with the model's own SentencePiece model (tokenization.model)"
            )
        if name_tokenizer_file(shards) == tokenizers.MODEL:  # an export changes tokenizer.json, see `_write_tokenizer`
            check_tokenizer_file(directory, shards)
        self.check_languages(config, directory, shards)
        type_count = self.read_type_count(config)
        size = EncoderSize(
            vocabulary=config.vocab_size,
            layers=config.num_hidden_layers,
            hidden=config.hidden_size,
            ffn=self.read_ffn_size(config),
            heads=config.num_attention_heads,
            positions=config.max_position_embeddings,
            epsilon=config.layer_norm_eps,
            types=type_count if type_count > 1 else 0,  # token types; a single type needs no embedding
            first_position=0,
        )
        self._check_stored_shapes(size, directory)
        return size

    def _read_config(self, directory: Path) -> PretrainedConfig:
        """Read an exported model's config.json.

        Raises:
            InputError: the file is missing or damaged, or describes another architecture.
        """
        path = directory / "config.json"
        model_type = self.config_class.model_type
        content = user_files.read_json(path, dict[str, Any], f"give a directory of system {model_type}")
        stored_weights.check_counts(content, path)
        if content.get("model_type") != model_type:
            raise InputError(
                f"{path}: model_type is {content.get('model_type')!r}, not {model_type!r}: give a model of this system"
            )
        try:
            config = self.config_class.from_dict(content)
        except Exception as error:  # a wrong type can raise several errors of Transformers and huggingface_hub
            raise InputError(f"{path} cannot be read ({one_line(error)}): give a model of this system") from None
        if config.num_attention_heads < 1 or config.hidden_size % config.num_attention_heads:
            raise InputError(
                f"{path}: {config.num_attention_heads} attention heads do not divide a hidden size of "
                f"{config.hidden_size}: give a model of this system"
            )
        for name, supported_value in self.supported_settings.items():
            value = getattr(config, name)
            if value != supported_value:
                raise InputError(f"{path}: {name} is {value!r}, not {supported_value!r}: give a model of this system")
        return config

    def _check_stored_shapes(self, size: EncoderSize, directory: Path) -> None:
        """Raise InputError if the shapes of the stored weights contradict the size."""
        weights = stored_weights.read_headers(directory)
        if not weights:  # the directory may contain only a model's small files, such as config.json
            return
        with torch.device("meta"):
            network = self.network_class(size)
        expected_shapes = {}
        for name, parameter in network.named_parameters():
            expected_shapes[self.hugging_face_name(name)] = tuple(parameter.shape)
        stored_shapes = {name: weight.shape for name, weight in weights.items()}
        stored_weights.compare_shapes(expected_shapes, stored_shapes, directory)

    def load_weights(self, model: TextNetwork, directory: Path) -> None:
        """Copy an exported model's weights into a network of the same size.

        Raises:
            InputError: the weight file is missing or damaged, or a weight is not finite.
        """
        path = directory / WEIGHTS
        if not path.is_file():
            raise InputError(f"{path} is missing: give the directory of a trained model")
        stored_weights.check_dtypes(directory)
        stored_tensors = pretrained.read_tensors(path)
        weights = {name: stored_tensors[self.hugging_face_name(name)] for name, _ in model.named_parameters()}
        model.load_state_dict(weights)
        stored_weights.check_finite(model, directory)
