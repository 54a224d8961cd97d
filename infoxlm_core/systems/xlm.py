"""XLM (Lample and Conneau 2019): language embeddings, streams of text, and one objective and language per step.

A stream is a corpus `</s> a b </s> c </s> …`, where letters are tokens, split into windows of equal length. A pair is

    ids         </s>  a   b  </s> </s>  x   y   z  </s>
    positions     0   1   2    3    0   1   2   3    4       they restart for the other language
    types        de  de  de   de   fr  fr  fr  fr   fr       numbers of languages

CLM, MLM and TLM take turns by the step, and a step has one language (pair).
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, XLMConfig

from infoxlm_core.config import PretrainingConfig
from infoxlm_core.data.layouts import Sequences, gather
from infoxlm_core.data.sampling import TableSampler, generator, pick, probabilities
from infoxlm_core.data.shards import Pairs, Shards, Table, end_to_end
from infoxlm_core.data.vocabulary import BOS, EOS, PAD, UNK
from infoxlm_core.errors import ConfigError, CorpusTooSmall
from infoxlm_core.model.encoder import EncoderSize, initialise
from infoxlm_core.model.huggingface import pretrained
from infoxlm_core.systems.text_batches import Samples, TextBatch, TextSampler, from_zero, languages_of, wrap
from infoxlm_core.systems.text_learner import Loss, TextNetwork
from infoxlm_core.systems.text_system import TextSystem


class XLM(TextNetwork):
    """XLM's encoder, whose output matrix is its word embeddings plus a bias, without another head."""

    def __init__(self, size: EncoderSize, dropout: float = 0.0) -> None:
        super().__init__(size, dropout)
        self.bias = nn.Parameter(torch.zeros(size.vocabulary))

    def states(self, batch: TextBatch) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Return the top layer's rows. In a CLM batch each row attends only to itself and earlier rows."""
        hidden = self.encoder.embed(batch.ids, batch.positions, batch.types)
        top, causal = self.encoder.size.layers, batch.objective == "clm"
        hidden = self.encoder.run(hidden, batch.lengths, 0, top, batch.rows, batch.row_counts, causal)  # (N, d)
        if batch.answered is not None:
            hidden = hidden[batch.answered]
        return hidden, self.bias, {}


def first_weights(model: nn.Module, seed: int) -> None:
    """Initialise like BERT, except that embeddings have a standard deviation of d^-0.5."""
    initialise(model, seed)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.Embedding):
                module.weight.mul_(module.embedding_dim**-0.5 / 0.02)


def lay_out_pairs(
    first: Sequences, second: Sequences, languages: tuple[int, int]
) -> tuple[Sequences, np.ndarray, np.ndarray]:
    """Return XLM pairs `</s> x </s> </s> y </s>`, their positions (T,) and languages (T,)."""
    x, y = wrap(first), wrap(second)
    lengths = np.stack([x.lengths, y.lengths], axis=1)  # (N, 2)
    flat = end_to_end([side for pair in zip(x.rows, y.rows, strict=True) for side in pair])
    types = np.repeat(np.tile(languages, len(lengths)), lengths.ravel())
    return Sequences(flat, lengths.sum(axis=1)), from_zero(lengths.ravel()), types


def windows(table: Table, size: int) -> int:
    """Return the number of windows of `size` tokens in a corpus with one `</s>` before its first sentence."""
    return -(-(len(table.tokens) + 1) // size) if len(table.tokens) else 0


def read_windows(table: Table, rows: np.ndarray, size: int) -> np.ndarray:
    """Return windows (N, size) of the stream `</s> … </s> s1 </s> s2 </s> …`, padded at the front with `</s>`."""
    padding = windows(table, size) * size - len(table.tokens)
    indices = rows[:, None] * size + np.arange(size) - padding  # (N, size) into the table's tokens
    return np.where(indices < 0, EOS, table.tokens[indices.clip(0)].astype(np.int64))


class XLMSampler(TextSampler):
    """Draws XLM's samples: objectives alternate, and each step has one language (pair).

    A language (pair) with n sentences is drawn with probability proportional to n^alpha, and both directions of a pair
    are equally likely. Raises CorpusTooSmall if an objective has no text.
    """

    def __init__(self, shards: Shards, config: PretrainingConfig) -> None:
        super().__init__(shards, config)
        batches, weights = config.batches, config.objectives
        self.objectives = list(weights.weights())
        self.numbers = {language: number for number, language in enumerate(languages_of(shards))}
        self.streams = {name: tables for name, tables in shards.mono.items() if any(len(t.tokens) for t in tables)}
        self.pairs = {}  # tables of a language pair, each with the rows that are short enough
        for name, tables in shards.pairs.items():
            tables_and_rows = [(pairs, self._short(pairs)) for pairs in tables]
            if any(len(rows) for _, rows in tables_and_rows):
                self.pairs[name] = tables_and_rows
        if not self.streams and (weights.mlm or weights.clm):
            raise CorpusTooSmall("MLM and CLM have no monolingual text: have=0 need=1 sentence; add text")
        if not self.pairs and weights.tlm:
            raise CorpusTooSmall(
                f"TLM has no pair with sides of at most {batches.side_tokens} tokens: have=0 need=1; add pairs or set "
                "objectives.tlm to 0"
            )
        sentences = {name: sum(map(len, tables)) for name, tables in self.streams.items()}
        pairs = {name: sum(len(rows) for _, rows in tables) for name, tables in self.pairs.items()}
        self.sizes = {"mlm": sentences, "tlm": pairs, "clm": sentences}

    def _short(self, pairs: Pairs) -> np.ndarray:
        """Return the rows whose sides are both within the limit; XLM drops the others."""
        lengths = np.maximum(np.diff(pairs.source.offsets), np.diff(pairs.target.offsets))
        return np.flatnonzero(lengths <= self.config.batches.side_tokens)

    def draw(self, step: int, shard: int) -> Samples:
        """Return the samples of a virtual shard at a step."""
        key = (self.config.seed, step)
        objective, name, direction = self._choose(step)
        rng, mask_rng = generator(*key, shard, objective), generator(*key, shard, objective, "mask")
        if objective == "tlm":
            sequences, positions, types = self._pair(name, direction < 0.5, rng)
        else:
            sequences = self._stream(name, rng)
            positions, types = from_zero(sequences.lengths), np.full(len(sequences.flat), self.numbers[name])
        if objective == "clm":
            seen, rows = sequences.flat, np.flatnonzero(positions < self.config.batches.block_tokens - 1)
            answers = sequences.flat[rows + 1]
        else:
            seen, rows = self.mask(sequences, mask_rng)
            answers = sequences.flat[rows]
        return Samples(objective, Sequences(seen, sequences.lengths), positions, types, rows, answers)

    def kind_of(self, step: int) -> str:
        return "/".join(self._choose(step)[:2])

    def _choose(self, step: int) -> tuple[str, str, float]:
        """Return objective and language (pair) of a step, and a uniform number for the direction of a pair."""
        objective = self.objectives[step % len(self.objectives)]
        choice = generator(self.config.seed, step, "language").random(2)
        sizes = self.sizes[objective]
        chances = probabilities(np.array(list(sizes.values())), self.config.batches.alpha)
        return objective, list(sizes)[int(pick(chances, choice[:1])[0])], float(choice[1])

    def _stream(self, language: str, rng: np.random.Generator) -> Sequences:
        tables, size = self.streams[language], self.config.batches.block_tokens
        which, rows = TableSampler([[windows(table, size) for table in tables]], 1.0).draw(self.per_shard, rng)
        found = np.empty((self.per_shard, size), np.int64)
        for number in np.unique(which):
            found[which == number] = read_windows(tables[number], rows[which == number], size)
        return Sequences(found.ravel(), np.full(self.per_shard, size))

    def _pair(self, name: str, swap: bool, rng: np.random.Generator) -> tuple[Sequences, np.ndarray, np.ndarray]:
        found, limit = self.pairs[name], self.config.batches.side_tokens
        which, drawn = TableSampler([[len(rows) for _, rows in found]], 1.0).draw(self.per_shard, rng)
        rows = np.array([found[number][1][row] for number, row in zip(which, drawn, strict=True)])
        source = gather([pairs.source for pairs, _ in found], which, rows, limit)
        target = gather([pairs.target for pairs, _ in found], which, rows, limit)
        mine, other = (self.numbers[side] for side in name.split("-"))
        return lay_out_pairs(target, source, (other, mine)) if swap else lay_out_pairs(source, target, (mine, other))


class XLMSystem(TextSystem):
    """XLM as a system, and its names in Hugging Face's class."""

    network, sampler = XLM, XLMSampler
    losses: ClassVar[Mapping[str, Loss]] = {}
    config_class, first_token, second_segment = XLMConfig, "</s>", 0
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

    def first_weights(self, model: nn.Module, seed: int) -> None:
        first_weights(model, seed)

    def types(self, languages: Sequence[str]) -> int:
        return len(languages) if len(languages) > 1 else 0

    def check(self, config: PretrainingConfig) -> None:
        model = config.model
        if model.start is None and model.ffn != 4 * model.hidden:
            raise ConfigError(f"model.ffn ({model.ffn}) must be 4 * model.hidden ({4 * model.hidden}) with system xlm")

    def size_from(self, config: PretrainedConfig) -> dict[str, int]:
        return {"ffn": 4 * config.hidden_size, "types": config.n_langs}

    def check_start(self, config: PretrainedConfig, directory: Path, shards: Shards) -> None:
        model_languages, languages = list(config.lang2id or {}), languages_of(shards)
        if model_languages != languages:
            raise ConfigError(
                f"{directory} has the languages {model_languages}, but the shards have {languages}: "
                "prepare the shards with the model's languages"
            )

    def hugging_face_config(
        self, size: EncoderSize, config: PretrainingConfig, languages: Sequence[str]
    ) -> PretrainedConfig:
        names: dict[str, Any] = {
            "lang2id": {name: i for i, name in enumerate(languages)},
            "id2lang": dict(enumerate(languages)),
        }
        return XLMConfig(
            architectures=["XLMWithLMHeadModel"],
            vocab_size=size.vocabulary,
            emb_dim=size.hidden,
            n_layers=size.layers,
            n_heads=size.heads,
            max_position_embeddings=size.positions,
            layer_norm_eps=size.epsilon,
            causal=not config.objectives.mlm and not config.objectives.tlm,
            n_langs=max(1, size.types),
            **names,
            embed_init_std=size.hidden**-0.5,
            dropout=pretrained.FINETUNING_DROPOUT,
            attention_dropout=pretrained.FINETUNING_DROPOUT,
            bos_token_id=BOS,
            pad_token_id=PAD,
            eos_token_id=EOS,
            unk_index=UNK,
            mask_index=size.vocabulary - 1,
            mask_token_id=size.vocabulary - 1,
        )
