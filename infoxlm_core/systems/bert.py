"""BERT (Devlin et al. 2019): two parts of a document, or of two, in one sequence `[CLS] a [SEP] b [SEP]`; MLM and NSP.

Our corpora keep no document boundaries: a run of 32 consecutive sentences of one corpus stands for a document.
[CLS] and [SEP] are our `<s>` and `</s>`.
"""

from collections.abc import Mapping, Sequence
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from transformers import BertConfig, PretrainedConfig

from infoxlm_core.config import PretrainingConfig
from infoxlm_core.data.layouts import Sequences, lay_out
from infoxlm_core.data.sampling import TableSampler, generator
from infoxlm_core.data.shards import Shards, Table
from infoxlm_core.data.vocabulary import EOS
from infoxlm_core.errors import CorpusTooSmall
from infoxlm_core.model.encoder import EncoderSize, pool
from infoxlm_core.model.heads import MaskedLMHead
from infoxlm_core.model.huggingface import pretrained
from infoxlm_core.model.objectives import cross_entropy
from infoxlm_core.systems.text_batches import Samples, TextBatch, TextSampler, from_zero
from infoxlm_core.systems.text_learner import Loss, TextNetwork
from infoxlm_core.systems.text_system import TextSystem

DOCUMENT = 32  # sentences of a document
SHORTER = 0.1  # share of samples with a random target length, so that short sequences occur


class BERT(TextNetwork):
    """BERT's encoder, masked-LM head, and pooler with the two-way question whether part two follows part one."""

    def __init__(self, size: EncoderSize, dropout: float = 0.0) -> None:
        super().__init__(size, dropout)
        self.head = MaskedLMHead(size)
        self.pooler = nn.Linear(size.hidden, size.hidden)
        self.follows = nn.Linear(size.hidden, 2)

    def states(self, batch: TextBatch) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Return the head's states at the batch's rows, and (sequences, 2) logits of NSP: follows (0), or not (1)."""
        hidden = self.encoder.embed(batch.ids, batch.positions, batch.types)
        hidden = self.encoder.run(hidden, batch.lengths, 0, self.encoder.size.layers)  # (T, d)
        pooled = torch.tanh(self.pooler(pool(hidden, batch.lengths, "cls")))
        rows = batch.rows if batch.answered is None else batch.rows[batch.answered]
        return self.head.states(hidden[rows]), self.head.bias, {"nsp": self.follows(pooled)}


class BERTSampler(TextSampler):
    """Draws next-sentence pairs: a language by n^alpha over sentences, a sentence, and what follows it.

    Raises CorpusTooSmall if a language has a single document, so that nothing is a wrong continuation.
    """

    def __init__(self, shards: Shards, config: PretrainingConfig) -> None:
        super().__init__(shards, config)
        names = sorted(shards.mono)
        self.tables = [table for name in names for table in shards.mono[name]]
        self.language = np.array([number for number, name in enumerate(names) for _ in shards.mono[name]])
        self.documents = np.array([-(-len(table) // DOCUMENT) for table in self.tables], np.int64)
        for number, name in enumerate(names):
            have = int(self.documents[self.language == number].sum())
            if have < 2:
                raise CorpusTooSmall(
                    f"next sentences need two documents of {DOCUMENT} sentences of each language: {name} have={have} "
                    "need=2; add text or leave the language out"
                )
        if not names:
            raise CorpusTooSmall("next sentences need monolingual text: have=0 need=2 documents; add text")
        self.sampler = TableSampler(
            [[len(table) for table in shards.mono[name]] for name in names], config.batches.alpha
        )

    def draw(self, step: int, shard: int) -> Samples:
        """Return the samples of a virtual shard at a step."""
        rng = generator(self.config.seed, step, shard, "bert")
        drawn = zip(*self.sampler.draw(self.per_shard, rng), strict=True)
        first, second, labels = zip(*(self._pair(int(table), int(row), rng) for table, row in drawn), strict=True)
        sides = [Sequences(np.concatenate(side), np.array([len(part) for part in side])) for side in (first, second)]
        sequences = lay_out(*sides)
        places = from_zero(sequences.lengths)
        seen, rows = self.mask(sequences, generator(self.config.seed, step, shard, "bert mask"))
        return Samples(
            "mlm",
            Sequences(seen, sequences.lengths),
            places,
            (places >= np.repeat(sides[0].lengths + 2, sequences.lengths)).astype(np.int64),  # after the first [SEP]
            rows,
            sequences.flat[rows],
            {"nsp": np.array(labels, np.int64)},
        )

    def _pair(self, table: int, row: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray, int]:
        """Return both parts without special tokens, and the label: 0 if the second part follows, else 1.

        The last sentence of a document begins no sample unless it is the only one.
        """
        most = self.config.batches.block_tokens - 3
        target = int(rng.integers(2, most + 1)) if rng.random() < SHORTER else most
        first, last = self._document(table, row // DOCUMENT)
        row = max(first, min(row, last - 2))
        end = _until(self.tables[table], row, last, target)
        middle = int(rng.integers(row + 1, end)) if end - row > 1 else end
        label = int(end - row == 1 or rng.random() < 0.5)
        a = _read(self.tables[table], row, middle)
        if label:
            other, document = self._other(table, row // DOCUMENT, rng)
            first, last = self._document(other, document)
            start = int(rng.integers(first, last))
            b = _read(self.tables[other], start, _until(self.tables[other], start, last, target - len(a)))
        else:
            b = _read(self.tables[table], middle, end)
        return *truncate(a, b, most, rng), label

    def _document(self, table: int, document: int) -> tuple[int, int]:
        """Return the first row of a document, and the row after its last."""
        return document * DOCUMENT, min((document + 1) * DOCUMENT, len(self.tables[table]))

    def _other(self, table: int, document: int, rng: np.random.Generator) -> tuple[int, int]:
        """Draw another document of the same language; return its table and number."""
        tables = np.flatnonzero(self.language == self.language[table])
        counts = self.documents[tables]
        own = counts[tables < table].sum() + document
        other = int(rng.integers(0, counts.sum() - 1))
        other += int(other >= own)
        which = int(np.searchsorted(counts.cumsum(), other, side="right"))
        return int(tables[which]), other - int(counts[:which].sum())


def _until(table: Table, row: int, last: int, tokens: int) -> int:
    """Return the row after the sentences from `row` on that reach `tokens` tokens: at least one, none after `last`."""
    pieces = table.offsets[row + 1 : last + 1] - table.offsets[row] - np.arange(1, last - row + 1)  # without </s>
    return row + 1 + min(int(np.searchsorted(pieces, tokens)), last - row - 1)


def _read(table: Table, first: int, last: int) -> np.ndarray:
    """Return the tokens of sentences without their `</s>`."""
    tokens = table.tokens[table.offsets[first] : table.offsets[last]].astype(np.int64)
    return tokens[tokens != EOS]


def truncate(a: np.ndarray, b: np.ndarray, most: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Drop tokens of the longer part, at the front or the back with equal chance, until both have `most` together."""
    drops = [0, 0]
    for _ in range(len(a) + len(b) - most):
        drops[len(a) - drops[0] <= len(b) - drops[1]] += 1
    parts = []
    for part, drop in zip((a, b), drops, strict=True):
        front = int(rng.binomial(drop, 0.5))
        parts.append(part[front : len(part) - (drop - front)])
    return parts[0], parts[1]


class BERTSystem(TextSystem):
    """BERT as a system, and its names in Hugging Face's class."""

    network, sampler = BERT, BERTSampler
    losses: ClassVar[Mapping[str, Loss]] = {"nsp": cross_entropy}
    config_class, first_token, second_segment = BertConfig, "<s>", 1
    parameter_names: ClassVar[list[tuple[str, str]]] = [  # all others are XLM-R's with another prefix
        (r"^head\.dense\.", "cls.predictions.transform.dense."),
        (r"^head\.norm\.", "cls.predictions.transform.LayerNorm."),
        (r"^head\.bias$", "cls.predictions.bias"),
        (r"^pooler\.", "bert.pooler.dense."),
        (r"^follows\.", "cls.seq_relationship."),
    ]

    def types(self, languages: Sequence[str]) -> int:  # noqa: ARG002 - the two segments, whatever the languages
        return 2

    def size_from(self, found: PretrainedConfig) -> dict[str, int]:
        return {"ffn": found.intermediate_size, "types": found.type_vocab_size}

    def hugging_face_config(
        self,
        size: EncoderSize,
        config: PretrainingConfig,  # noqa: ARG002
        languages: Sequence[str],  # noqa: ARG002
    ) -> PretrainedConfig:
        return pretrained.hugging_face_config(size, BertConfig, architectures=["BertForPreTraining"])
