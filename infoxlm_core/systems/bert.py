"""BERT (Devlin et al. 2019): MLM and NSP on two parts of one or two documents, as `[CLS] a [SEP] b [SEP]`.

Our corpora have no document boundaries, so 32 consecutive sentences of a corpus are treated as a document. `<s>` and
`</s>` serve as [CLS] and [SEP].
"""

import math
from collections.abc import Sequence
from typing import ClassVar, NamedTuple

import numpy as np
import torch
from torch import nn
from transformers import BertConfig, PretrainedConfig

from infoxlm_core.config import PretrainingConfig
from infoxlm_core.data.layouts import Sequences, lay_out, number_positions
from infoxlm_core.data.sampling import TableSampler, make_rng
from infoxlm_core.data.shards import Shards, Table
from infoxlm_core.data.vocabulary import EOS
from infoxlm_core.errors import CorpusTooSmall
from infoxlm_core.model.encoder import EncoderSize, pool
from infoxlm_core.model.heads import MaskedLMHead
from infoxlm_core.model.huggingface import pretrained
from infoxlm_core.systems.text_batches import Samples, TextBatch, TextSampler, pack_segments
from infoxlm_core.systems.text_learner import TargetStates, TextNetwork
from infoxlm_core.systems.text_system import TextSystem

DOCUMENT_SENTENCES = 32
SHORT_SHARE = 0.1  # share of samples with a random length, as in BERT, so that short sequences occur too


class BERT(TextNetwork):
    """BERT's encoder with a masked-LM head, and a pooler with a classifier for next-sentence prediction."""

    def __init__(self, size: EncoderSize, dropout: float = 0.0) -> None:
        super().__init__(size, dropout)
        self.head = MaskedLMHead(size)
        self.pooler = nn.Linear(size.hidden, size.hidden)
        self.follows = nn.Linear(size.hidden, 2)

    def states(self, batch: TextBatch) -> TargetStates:
        """Compute the states of the targets, and the logits (sequences, 2) of NSP: follows (0), or not (1)."""
        hidden = self.encoder.embed(batch.ids, batch.positions, batch.types)
        hidden = self.encoder.run(hidden, batch.lengths, 0, self.encoder.size.layers)  # (T, d)
        first_tokens = pool(hidden, batch.lengths, "cls")  # (sequences, d)
        nsp_logits = self.follows(torch.tanh(self.pooler(first_tokens)))
        target_rows = batch.target_rows
        if batch.rows_with_target is not None:  # on GPUs each sequence has a row, also if it has no target
            target_rows = target_rows[batch.rows_with_target]
        return TargetStates(self.head.transform(hidden[target_rows]), self.head.bias, {"nsp": nsp_logits})


class NextSentencePair(NamedTuple):
    """The two parts of a sample, without special tokens."""

    first: np.ndarray
    second: np.ndarray
    label: int  # 0 if the second part follows the first, else 1


class BERTSampler(TextSampler):
    """Draws next-sentence pairs. A language with n sentences is drawn with probability proportional to n^alpha.

    Raises CorpusTooSmall if a language has only one document, because wrong second parts come from other documents.
    """

    def __init__(self, shards: Shards, config: PretrainingConfig) -> None:
        super().__init__(shards, config)
        languages = sorted(shards.mono)
        if not languages:
            raise CorpusTooSmall("next sentences need monolingual text, but the shards have none: add text")
        self.tables: list[Table] = []
        language_of_table: list[int] = []
        sentence_counts: list[list[int]] = []  # of each language, of each corpus
        for number, language in enumerate(languages):
            tables = [table.read_text() for table in shards.mono[language]]
            self.tables += tables
            language_of_table += [number] * len(tables)
            sentence_counts.append([len(table) for table in tables])
        self.language_of_table = np.array(language_of_table)
        self.document_counts = np.array([math.ceil(len(table) / DOCUMENT_SENTENCES) for table in self.tables], np.int64)
        self._check_amount_of_text(languages)
        self.sampler = TableSampler(sentence_counts, config.batches.alpha)

    def _check_amount_of_text(self, languages: Sequence[str]) -> None:
        """Raise CorpusTooSmall if a language has fewer than two documents."""
        for number, language in enumerate(languages):
            count = int(self.document_counts[self.language_of_table == number].sum())
            if count < 2:
                raise CorpusTooSmall(
                    f"next sentences need two documents of {DOCUMENT_SENTENCES} sentences of each language, but "
                    f"{language} has {count}: add text or remove the language"
                )

    def draw(self, step: int, shard: int) -> Samples:
        """Return the samples of a virtual shard at a step."""
        rng = make_rng(self.config.seed, step, shard, "bert")
        mask_rng = make_rng(self.config.seed, step, shard, "bert mask")
        first_parts = []
        second_parts = []
        labels = []
        table_numbers, rows = self.sampler.draw(self.samples_per_shard, rng)
        for table_number, row in zip(table_numbers.tolist(), rows.tolist(), strict=True):
            pair = self._draw_pair(table_number, row, rng)
            first_parts.append(pair.first)
            second_parts.append(pair.second)
            labels.append(pair.label)
        first = pack_segments(first_parts)
        second = pack_segments(second_parts)
        sequences = lay_out([first, second], self.vocabulary)  # [CLS] a [SEP] b [SEP]
        positions = number_positions(sequences.lengths)
        second_starts = np.repeat(first.lengths + 2, sequences.lengths)  # (T,) after [CLS], the first part and [SEP]
        segments = (positions >= second_starts).astype(np.int64)  # (T,) 0 in the first part, 1 in the second
        masked_ids, target_rows = self.mask(sequences, mask_rng)
        return Samples(
            objective="mlm",
            inputs=Sequences(masked_ids, sequences.lengths),
            positions=positions,
            types=segments,
            target_rows=target_rows,
            target_ids=sequences.flat[target_rows],
            labels={"nsp": np.array(labels, np.int64)},
        )

    def _draw_pair(self, table_number: int, row: int, rng: np.random.Generator) -> NextSentencePair:
        """Draw the two parts of a sample that starts at a sentence of a table.

        No sample starts with the last sentence of a document, unless it is the only one.
        """
        max_tokens = self.config.batches.block_tokens - 3  # without [CLS] and two [SEP]
        target_tokens = max_tokens
        if rng.random() < SHORT_SHARE:
            target_tokens = int(rng.integers(2, max_tokens + 1))
        table = self.tables[table_number]
        document = row // DOCUMENT_SENTENCES
        document_start, document_end = self._document_rows(table_number, document)
        start = max(document_start, min(row, document_end - 2))
        end = _find_end(table, start, document_end, target_tokens)
        has_several_sentences = end - start > 1
        middle = int(rng.integers(start + 1, end)) if has_several_sentences else end
        is_random_continuation = not has_several_sentences or rng.random() < 0.5
        first_part = _read_tokens(table, start, middle)
        if is_random_continuation:
            second_part = self._draw_continuation(table_number, document, target_tokens - len(first_part), rng)
        else:
            second_part = _read_tokens(table, middle, end)
        first_part, second_part = truncate(first_part, second_part, max_tokens, rng)
        return NextSentencePair(first_part, second_part, int(is_random_continuation))

    def _draw_continuation(
        self, table_number: int, document: int, token_count: int, rng: np.random.Generator
    ) -> np.ndarray:
        """Return about `token_count` tokens of another document of the same language, from a random sentence on."""
        other_table, other_document = self._draw_other_document(table_number, document, rng)
        document_start, document_end = self._document_rows(other_table, other_document)
        start = int(rng.integers(document_start, document_end))
        end = _find_end(self.tables[other_table], start, document_end, token_count)
        return _read_tokens(self.tables[other_table], start, end)

    def _document_rows(self, table_number: int, document: int) -> tuple[int, int]:
        """Return the first row of a document, and the row after its last row."""
        start = document * DOCUMENT_SENTENCES
        return start, min(start + DOCUMENT_SENTENCES, len(self.tables[table_number]))

    def _draw_other_document(self, table_number: int, document: int, rng: np.random.Generator) -> tuple[int, int]:
        """Draw another document of the same language. Return the number of its table, and its number in the table."""
        tables = np.flatnonzero(self.language_of_table == self.language_of_table[table_number])
        counts = self.document_counts[tables]  # documents of each of these tables
        # Number all documents of the language, draw a number other than that of `document`, and find its table.
        document_number = counts[tables < table_number].sum() + document
        drawn_number = int(rng.integers(0, counts.sum() - 1))
        if drawn_number >= document_number:
            drawn_number += 1
        index = int(np.searchsorted(counts.cumsum(), drawn_number, side="right"))
        documents_before = int(counts[:index].sum())
        return int(tables[index]), drawn_number - documents_before


def _find_end(table: Table, start: int, document_end: int, token_count: int) -> int:
    """Return the row after the shortest run of sentences that begins at `start` and has `token_count` tokens.

    The run has at least one sentence, and ends at the latest at `document_end`.
    """
    sentence_counts = np.arange(1, document_end - start + 1)
    stored_tokens = table.offsets[start + 1 : document_end + 1] - table.offsets[start]
    run_tokens = stored_tokens - sentence_counts  # tokens of the run that ends after each sentence, without </s>
    shorter_runs = int(np.searchsorted(run_tokens, token_count))
    return min(start + 1 + shorter_runs, document_end)


def _read_tokens(table: Table, start: int, end: int) -> np.ndarray:
    """Return the tokens of the rows from `start` to before `end`, without their `</s>`."""
    tokens = table.tokens[table.offsets[start] : table.offsets[end]].astype(np.int64)
    return tokens[tokens != EOS]


def truncate(
    first: np.ndarray, second: np.ndarray, max_tokens: int, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Shorten two parts of a sample until both together have `max_tokens` tokens.

    As in BERT, each dropped token comes from the part that is longer at that time, from its front or back with equal
    probability.
    """
    first_length = len(first)
    second_length = len(second)
    while first_length + second_length > max_tokens:
        if first_length > second_length:
            first_length -= 1
        else:
            second_length -= 1
    return _drop_at_ends(first, first_length, rng), _drop_at_ends(second, second_length, rng)


def _drop_at_ends(tokens: np.ndarray, length: int, rng: np.random.Generator) -> np.ndarray:
    """Keep `length` tokens. Each dropped token is at the front with probability one half."""
    dropped_at_front = int(rng.binomial(len(tokens) - length, 0.5))
    return tokens[dropped_at_front : dropped_at_front + length]


class BERTSystem(TextSystem):
    """BERT as a system, exported as Hugging Face's `BertForPreTraining`."""

    network = BERT
    sampler = BERTSampler
    config_class = BertConfig
    first_token = "<s>"  # noqa: S105 - a token of the vocabulary, not a password
    second_type = 1
    parameter_names: ClassVar[list[tuple[str, str]]] = [  # the other names are XLM-R's, with the prefix `bert.`
        (r"^head\.dense\.", "cls.predictions.transform.dense."),
        (r"^head\.norm\.", "cls.predictions.transform.LayerNorm."),
        (r"^head\.bias$", "cls.predictions.bias"),
        (r"^pooler\.", "bert.pooler.dense."),
        (r"^follows\.", "cls.seq_relationship."),
    ]

    def count_types(self, languages: Sequence[str]) -> int:  # noqa: ARG002 - two segments, whatever the languages
        return 2

    def read_ffn_and_types(self, config: PretrainedConfig) -> tuple[int, int]:
        return config.intermediate_size, config.type_vocab_size

    def make_config(
        self,
        size: EncoderSize,
        config: PretrainingConfig,  # noqa: ARG002
        languages: Sequence[str],  # noqa: ARG002
    ) -> PretrainedConfig:
        return pretrained.hugging_face_config(size, BertConfig, architectures=["BertForPreTraining"])
