"""BERT (Devlin et al. 2019): MLM and NSP on sequences `[CLS] a [SEP] b [SEP]`.

The parts a and b come from one or two documents. Our corpora have no document boundaries, so 32 consecutive sentences
form a document. `<s>` and `</s>` serve as [CLS] and [SEP].
"""

import math
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

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
SHORT_SHARE = 0.1  # share of samples with a random length, as in BERT, so that the model also sees short sequences


class BERT(TextNetwork):
    """BERT's encoder with heads for masked language modeling and next-sentence prediction."""

    def __init__(self, size: EncoderSize, dropout: float = 0.0) -> None:
        super().__init__(size, dropout)
        self.head = MaskedLMHead(size)
        self.pooler = nn.Linear(size.hidden, size.hidden)
        self.follows = nn.Linear(size.hidden, 2)

    def compute_target_states(self, batch: TextBatch) -> TargetStates:
        """Compute the targets' hidden states and the logits of next-sentence prediction."""
        embeddings = self.encoder.embed(batch.ids, batch.positions, batch.types)  # (T, d)
        hidden = self.encoder.run_layers(embeddings, batch.lengths, 0, self.encoder.size.layers)  # (T, d)
        cls_states = pool(hidden, batch.lengths, "cls")  # (sequences, d)
        # Class 0: the second part follows the first. Class 1: it does not.
        nsp_logits = self.follows(torch.tanh(self.pooler(cls_states)))  # (sequences, 2)
        target_rows = batch.target_rows
        if batch.rows_with_target is not None:  # on GPUs, `TextBatch.to` adds rows without a target
            target_rows = target_rows[batch.rows_with_target]
        target_states = self.head.transform(hidden[target_rows])  # (N, d)
        return TargetStates(target_states, self.head.bias, {"nsp": nsp_logits})


class Document(NamedTuple):
    """A document, identified by its table and its index in the table."""

    table_number: int
    number: int


class NextSentencePair(NamedTuple):
    """The two parts of a sample, without special tokens."""

    first: np.ndarray
    second: np.ndarray
    label: int  # 0 if the second part follows the first, else 1


class BERTSampler(TextSampler):
    """Draws next-sentence pairs. A language with n sentences is drawn with probability proportional to n^alpha.

    Negative examples continue with another document of the same language. The constructor therefore raises
    CorpusTooSmall if a language has only one document.
    """

    def __init__(self, shards: Shards, config: PretrainingConfig) -> None:
        super().__init__(shards, config)
        languages = sorted(shards.mono)
        if not languages:
            raise CorpusTooSmall("next sentences need monolingual text, but the shards have none: add text")
        self.tables: list[Table] = []
        language_of_table: list[int] = []
        sentence_counts: list[list[int]] = []  # one list per language, one count per corpus
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
        """Draw a virtual shard's samples for a step, with masked tokens and NSP labels."""
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
        # Segments are 0 up to the first [SEP] and 1 after it.
        second_starts = np.repeat(first.lengths + 2, sequences.lengths)  # (T,) after [CLS], the first part and [SEP]
        segments = (positions >= second_starts).astype(np.int64)  # (T,)
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
        """Draw a sample's two parts, of which the first starts at the given row.

        If that row is the last sentence of a document, the first part starts one sentence earlier if possible,
        because a continuation must follow.
        """
        max_tokens = self.config.batches.block_tokens - 3  # leaves room for [CLS] and two [SEP]
        target_tokens = max_tokens
        if rng.random() < SHORT_SHARE:
            target_tokens = int(rng.integers(2, max_tokens + 1))
        table = self.tables[table_number]
        document = Document(table_number, row // DOCUMENT_SENTENCES)
        document_rows = self._find_rows(document)
        start = max(document_rows.start, min(row, document_rows.stop - 2))
        end = _find_end(table, start, document_rows.stop, target_tokens)
        if end - start == 1:  # a single sentence has no continuation
            middle = end
            is_random_continuation = True
        else:
            middle = int(rng.integers(start + 1, end))
            is_random_continuation = rng.random() < 0.5
        first_part = _read_tokens(table, start, middle)
        if is_random_continuation:
            second_part = self._draw_continuation(document, target_tokens - len(first_part), rng)
        else:
            second_part = _read_tokens(table, middle, end)
        first_part, second_part = truncate(first_part, second_part, max_tokens, rng)
        return NextSentencePair(first_part, second_part, int(is_random_continuation))

    def _draw_continuation(self, document: Document, min_tokens: int, rng: np.random.Generator) -> np.ndarray:
        """Draw a second part from another document of the same language, starting at a random sentence.

        The part has at least `min_tokens` tokens, unless the document ends earlier.
        """
        other_document = self._draw_other_document(document, rng)
        table = self.tables[other_document.table_number]
        rows = self._find_rows(other_document)
        start = int(rng.integers(rows.start, rows.stop))
        end = _find_end(table, start, rows.stop, min_tokens)
        return _read_tokens(table, start, end)

    def _find_rows(self, document: Document) -> range:
        """Return the document's rows in its table."""
        start = document.number * DOCUMENT_SENTENCES
        return range(start, min(start + DOCUMENT_SENTENCES, len(self.tables[document.table_number])))

    def _draw_other_document(self, document: Document, rng: np.random.Generator) -> Document:
        """Draw another document of the same language, uniformly at random."""
        language = self.language_of_table[document.table_number]
        table_numbers = np.flatnonzero(self.language_of_table == language)
        document_counts = self.document_counts[table_numbers]
        # Number the language's documents across its tables, then draw any number except that of `document`.
        first_numbers = document_counts.cumsum() - document_counts  # number of each table's first document
        table_index = int(np.searchsorted(table_numbers, document.table_number))
        own_number = int(first_numbers[table_index]) + document.number
        drawn_number = int(rng.integers(0, document_counts.sum() - 1))
        if drawn_number >= own_number:
            drawn_number += 1  # skips `document`
        drawn_index = int(np.searchsorted(first_numbers, drawn_number, side="right")) - 1
        return Document(int(table_numbers[drawn_index]), drawn_number - int(first_numbers[drawn_index]))


def _find_end(table: Table, start: int, document_end: int, min_tokens: int) -> int:
    """Return the end row of the shortest run of sentences that starts at `start` and has `min_tokens` tokens.

    The run has at least one sentence and ends with the document at the latest.
    """
    sentence_counts = np.arange(1, document_end - start + 1)
    stored_tokens = table.offsets[start + 1 : document_end + 1] - table.offsets[start]
    text_tokens = stored_tokens - sentence_counts  # do not count the </s> at the end of each stored sentence
    too_short_count = int(np.searchsorted(text_tokens, min_tokens))
    return min(start + too_short_count + 1, document_end)


def _read_tokens(table: Table, start: int, end: int) -> np.ndarray:
    """Return the tokens of rows `start` to `end - 1` without `</s>`."""
    tokens = table.tokens[table.offsets[start] : table.offsets[end]].astype(np.int64)
    return tokens[tokens != EOS]


def truncate(
    first: np.ndarray, second: np.ndarray, max_tokens: int, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Shorten a sample's two parts to `max_tokens` tokens in total.

    As in BERT, tokens are dropped one by one from the longer part, at its front or back with equal probability.
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
    """Shorten a part to `length` tokens. Each dropped token is at the front or the back with equal probability."""
    dropped_at_front = int(rng.binomial(len(tokens) - length, 0.5))
    return tokens[dropped_at_front : dropped_at_front + length]


class BERTSystem(TextSystem):
    """The system BERT, exported as Hugging Face's `BertForPreTraining`."""

    network_class = BERT
    sampler_class = BERTSampler
    config_class = BertConfig
    supported_settings: ClassVar[dict[str, Any]] = {"hidden_act": "gelu", "is_decoder": False}
    first_token = "<s>"  # noqa: S105 - a token of the vocabulary, not a password
    second_type = 1
    parameter_names: ClassVar[list[tuple[str, str]]] = [  # all other names are XLM-R's with the prefix `bert.`
        (r"^head\.dense\.", "cls.predictions.transform.dense."),
        (r"^head\.norm\.", "cls.predictions.transform.LayerNorm."),
        (r"^head\.bias$", "cls.predictions.bias"),
        (r"^pooler\.", "bert.pooler.dense."),
        (r"^follows\.", "cls.seq_relationship."),
    ]

    def count_types(self, languages: Sequence[str]) -> int:  # noqa: ARG002
        return 2  # one type per part

    def read_ffn_size(self, config: PretrainedConfig) -> int:
        return config.intermediate_size

    def read_type_count(self, config: PretrainedConfig) -> int:
        return config.type_vocab_size

    def make_config(self, size: EncoderSize, config: PretrainingConfig, languages: Sequence[str]) -> PretrainedConfig:  # noqa: ARG002
        return pretrained.make_hugging_face_config(size, BertConfig, architectures=["BertForPreTraining"])
