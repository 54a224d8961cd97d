"""BERT (Devlin et al. 2019): MLM and NSP on two parts of one or two documents, as `[CLS] a [SEP] b [SEP]`.

Our corpora have no document boundaries, so 32 consecutive sentences of a corpus are treated as a document. `<s>` and
`</s>` serve as [CLS] and [SEP].
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
    """BERT's encoder with a masked-LM head, and a pooler with a classifier for next-sentence prediction."""

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
    """Draws next-sentence pairs: a language with n sentences with probability proportional to n^alpha, then a sentence.

    Raises CorpusTooSmall if a language has only one document, since a wrong continuation comes from another document.
    """

    def __init__(self, shards: Shards, config: PretrainingConfig) -> None:
        super().__init__(shards, config)
        names = sorted(shards.mono)
        self.tables = [table for name in names for table in shards.mono[name]]
        self.language = np.array([number for number, name in enumerate(names) for _ in shards.mono[name]])
        self.documents = np.array([-(-len(table) // DOCUMENT) for table in self.tables], np.int64)
        for number, name in enumerate(names):
            count = int(self.documents[self.language == number].sum())
            if count < 2:
                raise CorpusTooSmall(
                    f"next sentences need two documents of {DOCUMENT} sentences of each language: {name} have={count} "
                    "need=2; add text or remove the language"
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
        positions = from_zero(sequences.lengths)
        in_second_part = positions >= np.repeat(sides[0].lengths + 2, sequences.lengths)  # after the first [SEP]
        seen, rows = self.mask(sequences, generator(self.config.seed, step, shard, "bert mask"))
        return Samples(
            "mlm",
            Sequences(seen, sequences.lengths),
            positions,
            in_second_part.astype(np.int64),
            rows,
            sequences.flat[rows],
            {"nsp": np.array(labels, np.int64)},
        )

    def _pair(self, table: int, row: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray, int]:
        """Return both parts without special tokens, and the label: 0 if the second part follows, else 1.

        No sample starts with the last sentence of a document, unless it is the only one.
        """
        limit = self.config.batches.block_tokens - 3  # without [CLS] and two [SEP]
        target = int(rng.integers(2, limit + 1)) if rng.random() < SHORTER else limit
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
        return *truncate(a, b, limit, rng), label

    def _document(self, table: int, document: int) -> tuple[int, int]:
        """Return the first row of a document, and the row after its last."""
        return document * DOCUMENT, min((document + 1) * DOCUMENT, len(self.tables[table]))

    def _other(self, table: int, document: int, rng: np.random.Generator) -> tuple[int, int]:
        """Draw another document of the same language; return its table and number."""
        tables = np.flatnonzero(self.language == self.language[table])
        counts = self.documents[tables]
        current = counts[tables < table].sum() + document  # its number among all documents of the language
        other = int(rng.integers(0, counts.sum() - 1))
        other += int(other >= current)
        index = int(np.searchsorted(counts.cumsum(), other, side="right"))
        return int(tables[index]), other - int(counts[:index].sum())


def _until(table: Table, row: int, last: int, tokens: int) -> int:
    """Return the end row of the shortest run of sentences from `row` on with `tokens` tokens; at most `last`."""
    pieces = table.offsets[row + 1 : last + 1] - table.offsets[row] - np.arange(1, last - row + 1)  # without </s>
    return row + 1 + min(int(np.searchsorted(pieces, tokens)), last - row - 1)


def _read(table: Table, first: int, last: int) -> np.ndarray:
    """Return the tokens of sentences without their `</s>`."""
    tokens = table.tokens[table.offsets[first] : table.offsets[last]].astype(np.int64)
    return tokens[tokens != EOS]


def truncate(a: np.ndarray, b: np.ndarray, limit: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Drop tokens of the longer part, from either end with equal chance, until both together have `limit` tokens."""
    drops = [0, 0]
    for _ in range(len(a) + len(b) - limit):
        longer = 0 if len(a) - drops[0] > len(b) - drops[1] else 1
        drops[longer] += 1
    parts = []
    for part, drop in zip((a, b), drops, strict=True):
        front = int(rng.binomial(drop, 0.5))
        parts.append(part[front : len(part) - (drop - front)])
    return parts[0], parts[1]


class BERTSystem(TextSystem):
    """BERT as a system, with its parameter names in Hugging Face's class."""

    network, sampler = BERT, BERTSampler
    losses: ClassVar[Mapping[str, Loss]] = {"nsp": cross_entropy}
    config_class, first_token, second_segment = BertConfig, "<s>", 1
    parameter_names: ClassVar[list[tuple[str, str]]] = [  # the other names are XLM-R's, with the prefix `bert.`
        (r"^head\.dense\.", "cls.predictions.transform.dense."),
        (r"^head\.norm\.", "cls.predictions.transform.LayerNorm."),
        (r"^head\.bias$", "cls.predictions.bias"),
        (r"^pooler\.", "bert.pooler.dense."),
        (r"^follows\.", "cls.seq_relationship."),
    ]

    def types(self, languages: Sequence[str]) -> int:  # noqa: ARG002 - the two segments, whatever the languages
        return 2

    def size_from(self, config: PretrainedConfig) -> dict[str, int]:
        return {"ffn": config.intermediate_size, "types": config.type_vocab_size}

    def hugging_face_config(
        self,
        size: EncoderSize,
        config: PretrainingConfig,  # noqa: ARG002
        languages: Sequence[str],  # noqa: ARG002
    ) -> PretrainedConfig:
        return pretrained.hugging_face_config(size, BertConfig, architectures=["BertForPreTraining"])
