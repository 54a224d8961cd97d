"""Filter clean rows by comparison with other rows, and write the remaining rows to the tables of a prepared corpus."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from infoxlm_core.config import PreparationConfig
from infoxlm_core.corpora import cleaning, length_ratio
from infoxlm_core.corpora.fingerprints import Keys
from infoxlm_core.corpora.reserved import LABELLED_CHARACTERS, Reserved, is_held_out_message
from infoxlm_core.corpora.tables import HELD_OUT, Tables

HELD_OUT_SHARE = "held_out_share"
"""Reason for which a row is dropped from the training text if it is held out by the setting of this name."""


class FileKey(NamedTuple):
    """Identifies the rows of one file in one language, which the report counts together."""

    corpus: str
    language: str  # of a pair: that of its target
    kind: str  # the folder of their table: mono, pairs, held_out_mono or held_out
    file: str


RowCounts = defaultdict[FileKey, Counter[str]]
"""The numbers of rows that were `read`, `kept`, and dropped for each reason."""


class CleanedRow(NamedTuple):
    """A sentence or pair after cleaning."""

    corpus: str
    languages: tuple[str, ...]
    kind: str  # the folder of its table
    file: str
    texts: Sequence[str]
    keys: Keys
    reason_to_drop: str | None = None

    @property
    def file_key(self) -> FileKey:
        return FileKey(self.corpus, self.languages[-1], self.kind, self.file)

    @property
    def language_pair(self) -> str:
        """Return the languages as in file names: "en-de" for a pair, "de" for a sentence."""
        return "-".join(self.languages)

    def split_sides(self) -> list["CleanedRow"]:
        """Return each side of a pair as a monolingual sentence."""
        sentences = []
        for side, language in enumerate(self.languages):
            sentences.append(
                self._replace(languages=(language,), kind="mono", texts=[self.texts[side]], keys=self.keys.of(side))
            )
        return sentences


@dataclass
class RowWriter:
    """Drops rows that are reserved, duplicates or of unusual length, and writes the others to their tables."""

    config: PreparationConfig
    reserved: Reserved
    medians: dict[str, float]  # language pair -> median log length ratio
    tables: Tables
    counts: RowCounts
    text_digests: dict[int, int] = field(default_factory=dict)
    """For each written row: digest of its near keys, folder and languages -> digest of its unchanged texts."""

    def add(self, row: CleanedRow) -> None:
        """Write a row to the table of its kind, or drop it for a reason.

        A training pair is also written as two sentences and as labelled text. A pair that `held_out_share` drops from
        the training text is counted again and written as a held-out pair.
        """
        reason = self._find_reason_to_drop(row)
        if reason:
            self.counts[row.file_key][reason] += 1
            if reason == HELD_OUT_SHARE:
                held_out_row = row._replace(kind="held_out")
                self.counts[held_out_row.file_key]["read"] += 1
                self.write_unless_duplicate(held_out_row)
            if reason == "labelled" and row.kind == "pairs" and row.keys.near[0] in self.reserved.messages:
                self.write_labelled(row, "test")
            return
        is_written = self.write_unless_duplicate(row)
        if not is_written or row.kind != "pairs":
            return
        if self.config.labelled_share and len(row.texts[0]) >= LABELLED_CHARACTERS:
            self.write_labelled(row, "train")
        if self.config.monolingual_from_pairs:
            for sentence in row.split_sides():
                self.counts[sentence.file_key]["read"] += 1
                self.write_unless_duplicate(sentence)

    def _find_reason_to_drop(self, row: CleanedRow) -> str | None:
        if len(row.texts) == 2:
            median = self.medians[row.language_pair]
            if length_ratio.exceeds(self.config.cleaning.max_length_ratio, row.texts, median):
                return "length_ratio"
        if row.kind in HELD_OUT:
            return None
        if is_held_out_message(row.keys, self.config):
            return HELD_OUT_SHARE
        return self.reserved.reason(row.keys)

    def write_unless_duplicate(self, row: CleanedRow) -> bool:
        """Write a row, or count it as a duplicate of a written row. Return whether it was written."""
        folder = f"{row.kind}/{row.language_pair}"
        near_digest = cleaning.digest(folder, *map(str, row.keys.near))
        text_digest = cleaning.digest(*map(str, row.keys.exact))
        is_new = near_digest not in self.text_digests
        if is_new:
            self.text_digests[near_digest] = text_digest
            self.tables.add(f"{folder}/{row.corpus}.parquet", tuple(row.texts))
            self.counts[row.file_key]["kept"] += 1
        elif self.text_digests[near_digest] == text_digest:
            self.counts[row.file_key]["duplicate"] += 1
        else:
            self.counts[row.file_key]["near_duplicate"] += 1
        return is_new

    def write_labelled(self, row: CleanedRow, split: str) -> None:
        """Write each side with its corpus as the label, unless another corpus has the same text."""
        for language, text, near_key in zip(row.languages, row.texts, row.keys.near, strict=True):
            digest = cleaning.digest("labelled", language, str(near_key))
            if self.reserved.owners[near_key] and digest not in self.text_digests:
                self.text_digests[digest] = 0
                self.tables.add("labelled.parquet", (text, row.corpus, language, split))
