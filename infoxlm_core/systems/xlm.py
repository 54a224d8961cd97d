"""XLM (Lample and Conneau 2019): language embeddings, text streams, and one objective and language per step.

A text stream is the concatenation `</s> a b </s> c </s> …` of a corpus (letters are tokens), split into windows of
equal length. A translation pair is one sequence:

    ids         </s>  a   b  </s> </s>  x   y   z  </s>
    positions     0   1   2    3    0   1   2   3    4       restart with the second language
    types        de  de  de   de   fr  fr  fr  fr   fr       language numbers

CLM, MLM and TLM alternate from step to step. Each step uses one language or language pair.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import nn
from transformers import PretrainedConfig, XLMConfig

from infoxlm_core.config import PretrainingConfig
from infoxlm_core.data.layouts import Sequences, number_positions
from infoxlm_core.data.sampling import TableSampler, choose_indices, make_rng, probabilities
from infoxlm_core.data.shards import Shards, Table, concatenate_int64
from infoxlm_core.data.vocabulary import BOS, EOS, PAD, UNK
from infoxlm_core.errors import ConfigError, CorpusTooSmall
from infoxlm_core.model.encoder import EncoderSize, initialise
from infoxlm_core.model.huggingface import pretrained
from infoxlm_core.systems.text_batches import (
    Samples,
    ShortRows,
    TextBatch,
    TextSampler,
    draw_rows,
    list_languages,
    wrap,
)
from infoxlm_core.systems.text_learner import TargetStates, TextNetwork
from infoxlm_core.systems.text_system import TextSystem


class XLM(TextNetwork):
    """XLM's encoder. Its only output parameter is a bias, because the output matrix is the word embeddings."""

    def __init__(self, size: EncoderSize, dropout: float = 0.0) -> None:
        super().__init__(size, dropout)
        self.bias = nn.Parameter(torch.zeros(size.vocabulary))

    def compute_target_states(self, batch: TextBatch) -> TargetStates:
        """Compute the targets' hidden states."""
        embeddings = self.encoder.embed(batch.ids, batch.positions, batch.types)  # (T, d)
        last_layer = self.encoder.size.layers
        is_causal = batch.objective == "clm"
        hidden = self.encoder.run_layers(
            embeddings, batch.lengths, 0, last_layer, batch.target_rows, batch.target_counts, causal=is_causal
        )  # (N, d)
        if batch.rows_with_target is not None:  # on GPUs, `TextBatch.to` adds rows without a target
            hidden = hidden[batch.rows_with_target]
        return TargetStates(hidden, self.bias, {})


class XLMInputs(NamedTuple):
    """The inputs of XLM's encoder: packed sequences with T tokens in total."""

    sequences: Sequences
    positions: np.ndarray  # (T,)
    types: np.ndarray  # (T,) language numbers


def lay_out_pairs(first: Sequences, second: Sequences, language_numbers: tuple[int, int]) -> XLMInputs:
    """Join N translation pairs x, y into sequences `</s> x </s> </s> y </s>`.

    Args:
        first: the N sentences x.
        second: the N sentences y.
        language_numbers: language numbers of x and y.
    """
    first = wrap(first)
    second = wrap(second)
    sentences = []  # alternates between first and second sentences
    for first_sentence, second_sentence in zip(first.rows, second.rows, strict=True):
        sentences += [first_sentence, second_sentence]
    pair_lengths = np.stack([first.lengths, second.lengths], axis=1)  # (N, 2)
    sentence_lengths = pair_lengths.ravel()  # (2N,)
    sentence_languages = np.tile(language_numbers, len(pair_lengths))  # (2N,)
    types = np.repeat(sentence_languages, sentence_lengths)  # (T,)
    positions = number_positions(sentence_lengths)  # (T,) restart with each sentence
    sequences = Sequences(concatenate_int64(sentences), pair_lengths.sum(axis=1))
    return XLMInputs(sequences, positions, types)


def count_windows(table: Table, window_tokens: int) -> int:
    """Count the windows of a corpus's text stream, which has one `</s>` before the first sentence."""
    if not len(table.tokens):
        return 0
    return math.ceil((len(table.tokens) + 1) / window_tokens)


def read_windows(table: Table, window_numbers: np.ndarray, window_tokens: int) -> np.ndarray:
    """Read windows of a corpus's text stream, and return their tokens (N, window_tokens).

    The stream `</s> s1 </s> s2 </s> …` is padded at the front with `</s>`, so that all windows are full.

    Args:
        table: the corpus.
        window_numbers: zero-based window numbers (N,).
        window_tokens: number of tokens per window.
    """
    padding_tokens = count_windows(table, window_tokens) * window_tokens - len(table.tokens)
    stream_positions = window_numbers[:, None] * window_tokens + np.arange(window_tokens)  # (N, window_tokens)
    indices = stream_positions - padding_tokens  # indices into `table.tokens`; negative in the padding
    tokens = table.tokens[indices.clip(0)].astype(np.int64)  # in the padding, any token, replaced below
    return np.where(indices < 0, EOS, tokens)


class StepChoice(NamedTuple):
    """The objective and the language or language pair of a step."""

    objective: str
    languages: str  # a language or a language pair, such as de or en-de
    is_reversed: bool  # whether the second language of a pair comes first


class XLMSampler(TextSampler):
    """Draws XLM's samples. Objectives alternate, and each step uses one language or language pair.

    A language or language pair with n sentences is drawn with probability proportional to n^alpha. Both directions of a
    pair are equally likely. Raises CorpusTooSmall if an objective has no text.
    """

    def __init__(self, shards: Shards, config: PretrainingConfig) -> None:
        super().__init__(shards, config)
        self.objectives = list(config.objectives.weights())
        self.language_numbers = {language: number for number, language in enumerate(list_languages(shards))}
        self.texts: dict[str, list[Table]] = {}
        text_counts: dict[str, int] = {}  # language -> number of sentences
        for language, stored_tables in shards.mono.items():
            tables = [table.read_text() for table in stored_tables]
            if any(len(table.tokens) for table in tables):
                self.texts[language] = tables
                text_counts[language] = sum(len(table) for table in tables)
        self.pairs: dict[str, list[ShortRows]] = {}
        pair_counts: dict[str, int] = {}  # language pair -> number of translation pairs
        for language_pair, stored_tables in shards.pairs.items():
            corpora = []
            for stored_table in stored_tables:
                pairs = stored_table.read_pairs()
                # Like XLM, drop pairs with a long side rather than truncate it.
                corpora.append(ShortRows.select((pairs.source, pairs.target), config.batches.side_tokens))
            if any(len(corpus) for corpus in corpora):
                self.pairs[language_pair] = corpora
                pair_counts[language_pair] = sum(len(corpus) for corpus in corpora)
        self._check_amount_of_text()
        # Objective -> language or language pair -> number of samples.
        self.sample_counts = {"mlm": text_counts, "tlm": pair_counts, "clm": text_counts}

    def _check_amount_of_text(self) -> None:
        """Raise CorpusTooSmall if an enabled objective has no text."""
        objectives = self.config.objectives
        if not self.texts and (objectives.mlm or objectives.clm):
            raise CorpusTooSmall("MLM and CLM need monolingual text, but the shards have none: add text")
        if not self.pairs and objectives.tlm:
            raise CorpusTooSmall(
                f"TLM needs pairs with sides of at most {self.config.batches.side_tokens} tokens, but the shards have "
                "none: add pairs or set objectives.tlm to 0"
            )

    def draw(self, step: int, shard: int) -> Samples:
        """Draw a virtual shard's samples for a step. Targets are masked tokens (MLM, TLM) or next tokens (CLM)."""
        seed = self.config.seed
        choice = self._choose_step(step)
        objective = choice.objective
        rng = make_rng(seed, step, shard, objective)
        mask_rng = make_rng(seed, step, shard, objective, "mask")
        if objective == "tlm":
            sequences, positions, types = self._draw_pairs(choice.languages, choice.is_reversed, rng)
        else:
            sequences, positions, types = self._draw_windows(choice.languages, rng)
        if objective == "clm":
            input_ids = sequences.flat
            last_position = self.config.batches.block_tokens - 1
            target_rows = np.flatnonzero(positions < last_position)  # the last token has no next token
            target_ids = sequences.flat[target_rows + 1]
        else:
            input_ids, target_rows = self.mask(sequences, mask_rng)
            target_ids = sequences.flat[target_rows]
        inputs = Sequences(input_ids, sequences.lengths)
        return Samples(objective, inputs, positions, types, target_rows, target_ids)

    def kind_of(self, step: int) -> str:
        choice = self._choose_step(step)  # losses of different objectives or languages are not comparable
        return f"{choice.objective}/{choice.languages}"

    def _choose_step(self, step: int) -> StepChoice:
        """Choose a step's objective, language or language pair, and direction."""
        objective = self.objectives[step % len(self.objectives)]
        uniform = make_rng(self.config.seed, step, "language").random(2)  # chooses the language and the direction
        sample_counts = self.sample_counts[objective]
        languages = list(sample_counts)
        language_probabilities = probabilities(np.array(list(sample_counts.values())), self.config.batches.alpha)
        language_index = int(choose_indices(language_probabilities, uniform[:1])[0])
        return StepChoice(objective, languages[language_index], is_reversed=bool(uniform[1] < 0.5))

    def _draw_windows(self, language: str, rng: np.random.Generator) -> XLMInputs:
        """Draw windows of a language, uniformly at random."""
        tables = self.texts[language]
        window_tokens = self.config.batches.block_tokens
        window_counts = [count_windows(table, window_tokens) for table in tables]
        sampler = TableSampler([window_counts], alpha=1.0)  # alpha has no effect on a single language
        table_numbers, window_numbers = sampler.draw(self.samples_per_shard, rng)
        tokens = np.empty((self.samples_per_shard, window_tokens), np.int64)
        for table_number in np.unique(table_numbers):  # read all windows of a corpus at once
            is_in_table = table_numbers == table_number
            tokens[is_in_table] = read_windows(tables[table_number], window_numbers[is_in_table], window_tokens)
        sequences = Sequences(tokens.ravel(), np.full(self.samples_per_shard, window_tokens))
        types = np.full(len(sequences.flat), self.language_numbers[language])
        return XLMInputs(sequences, number_positions(sequences.lengths), types)

    def _draw_pairs(self, language_pair: str, is_reversed: bool, rng: np.random.Generator) -> XLMInputs:
        """Draw translation pairs such as en-de, uniformly at random. If reversed, German comes first."""
        corpora = self.pairs[language_pair]
        sources, targets = draw_rows(corpora, self.samples_per_shard, self.config.batches.side_tokens, rng)
        source_language, target_language = language_pair.split("-")
        source_number = self.language_numbers[source_language]
        target_number = self.language_numbers[target_language]
        if is_reversed:
            return lay_out_pairs(targets, sources, (target_number, source_number))
        return lay_out_pairs(sources, targets, (source_number, target_number))


class XLMSystem(TextSystem):
    """The system XLM, exported as Hugging Face's `XLMWithLMHeadModel`."""

    network_class = XLM
    sampler_class = XLMSampler
    config_class = XLMConfig
    supported_settings: ClassVar[dict[str, Any]] = {"gelu_activation": True, "sinusoidal_embeddings": False}
    first_token = "</s>"  # noqa: S105 - a token of the vocabulary, not a password
    second_type = 0
    parameter_names: ClassVar[list[tuple[str, str]]] = [
        (r"^encoder\.token_embedding\.", "transformer.embeddings."),
        (r"^encoder\.position_embedding\.", "transformer.position_embeddings."),
        (r"^encoder\.type_embedding\.", "transformer.lang_embeddings."),
        (r"^encoder\.embedding_norm\.", "transformer.layer_norm_emb."),
        (r"^encoder\.layers\.(\d+)\.(q|k|v)(?:uery|ey|alue)\.", r"transformer.attentions.\1.\2_lin."),
        (r"^encoder\.layers\.(\d+)\.attention_output\.", r"transformer.attentions.\1.out_lin."),
        (r"^encoder\.layers\.(\d+)\.attention_norm\.", r"transformer.layer_norm1.\1."),
        (r"^encoder\.layers\.(\d+)\.up\.", r"transformer.ffns.\1.lin1."),
        (r"^encoder\.layers\.(\d+)\.down\.", r"transformer.ffns.\1.lin2."),
        (r"^encoder\.layers\.(\d+)\.output_norm\.", r"transformer.layer_norm2.\1."),
        (r"^bias$", "pred_layer.proj.bias"),
    ]

    def initialise(self, model: nn.Module, seed: int) -> None:
        """Initialize like BERT, but draw embeddings with standard deviation d^-0.5."""
        initialise(model, seed)
        bert_deviation = 0.02  # standard deviation of the weights that `initialise` drew
        with torch.no_grad():
            for module in model.modules():
                if isinstance(module, nn.Embedding):
                    module.weight.mul_(module.embedding_dim**-0.5 / bert_deviation)

    def count_types(self, languages: Sequence[str]) -> int:
        """Return the number of languages, or 0 for a single language, which needs no embedding."""
        return len(languages) if len(languages) > 1 else 0

    def check_sizes(self, config: PretrainingConfig) -> None:
        """Raise ConfigError if a new model's FFN size is not 4 * hidden, because XLM's config.json has no FFN size."""
        model = config.model
        if model.start is None and model.ffn != 4 * model.hidden:
            raise ConfigError(f"model.ffn ({model.ffn}) must be 4 * model.hidden ({4 * model.hidden}) with system xlm")

    def read_ffn_size(self, config: PretrainedConfig) -> int:
        return 4 * config.hidden_size

    def read_type_count(self, config: PretrainedConfig) -> int:
        return config.n_langs

    def check_languages(self, config: PretrainedConfig, directory: Path, shards: Shards) -> None:
        """Raise ConfigError if an exported model's languages differ from those of the shards."""
        model_languages = list(config.lang2id or {})
        shard_languages = list_languages(shards)
        if model_languages != shard_languages:
            raise ConfigError(
                f"{directory} has the languages {model_languages}, but the shards have {shard_languages}: "
                "prepare the shards with the model's languages"
            )

    def make_config(self, size: EncoderSize, config: PretrainingConfig, languages: Sequence[str]) -> PretrainedConfig:
        """Return the Hugging Face config of an exported model."""
        language_numbers: dict[str, Any] = {
            "lang2id": {language: number for number, language in enumerate(languages)},
            "id2lang": dict(enumerate(languages)),
        }
        mask_id = size.vocabulary - 1  # the last id, as in XLM-R
        return XLMConfig(
            architectures=["XLMWithLMHeadModel"],
            vocab_size=size.vocabulary,
            emb_dim=size.hidden,
            n_layers=size.layers,
            n_heads=size.heads,
            max_position_embeddings=size.positions,
            layer_norm_eps=size.epsilon,
            causal=not config.objectives.mlm and not config.objectives.tlm,  # only after training with CLM alone
            n_langs=max(1, size.types),
            **language_numbers,
            embed_init_std=size.hidden**-0.5,
            dropout=pretrained.FINETUNING_DROPOUT,
            attention_dropout=pretrained.FINETUNING_DROPOUT,
            bos_token_id=BOS,
            pad_token_id=PAD,
            eos_token_id=EOS,
            unk_index=UNK,
            mask_index=mask_id,
            mask_token_id=mask_id,
        )
