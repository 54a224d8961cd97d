"""Collect the text reserved for evaluation while corpora are read, then prove that no training text contains it.

Four kinds of text are reserved: held-out corpora, the test sets of the config, and two random shares of the messages of
all other corpora. One share is held out as the held-out corpora are; the other becomes the labelled test set.
"""

import functools
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pyarrow as pa

from infoxlm_core.config import PreparationConfig
from infoxlm_core.corpora import cleaning, fingerprints, row_chunks
from infoxlm_core.corpora.fingerprints import Keys
from infoxlm_core.corpora.parallel import CHUNK, ParallelMap, in_process
from infoxlm_core.corpora.tables import HELD_OUT, LABELLED, read_rows, rows_of
from infoxlm_core.errors import EvaluationLeak

LABELLED_CHARACTERS = 20  # the corpus of a shorter message cannot be predicted from its text


@dataclass
class Reserved:
    """Text that training text must not contain, as 64-bit digests."""

    held_out: set[int] = field(default_factory=set)  # sentences of held-out corpora and messages, equal or near
    evaluation_sets: set[int] = field(default_factory=set)  # the same for sentences of test sets
    runs: set[int] = field(default_factory=set)  # runs of `overlap` consecutive words of both
    overlap: int = 0
    messages: dict[int, set[int]] = field(default_factory=dict)
    """Messages of the labelled test set: near key of the pivot's text -> near keys of its translations."""
    labelled: set[int] = field(default_factory=set)  # all near keys of `messages`
    owners: dict[int, str | None] = field(default_factory=dict)  # near key -> its corpus; None if several contain it

    def add_row(self, texts: Sequence[str], keys: Keys, corpus: str, config: PreparationConfig) -> None:
        """Add a clean row if it is held out. Otherwise collect it as a candidate for the labelled test set."""
        if corpus in config.held_out or is_held_out_message(keys, config):
            self.held_out.update(keys.equal, keys.near)
            self.runs.update(keys.runs)
        elif config.labelled_share:
            for key in keys.near:
                if self.owners.setdefault(key, corpus) != corpus:
                    self.owners[key] = None
            if len(texts) == 2 and len(texts[0]) >= LABELLED_CHARACTERS:
                # The pivot's message decides, so that all languages have the same test messages.
                source, target = keys.near
                if _draw(str(config.seed), str(source)) < config.labelled_share:
                    self.messages.setdefault(source, set()).add(target)

    def add_test_text(self, text: str) -> None:
        """Add a text of a test set, unchanged from its file."""
        clean = cleaning.normalise(text)
        if clean:
            keys = fingerprints.keys([clean], self.overlap)
            self.evaluation_sets.update(keys.equal, keys.near)
            self.runs.update(keys.runs)

    def finalise(self) -> "Reserved":
        """Return the final sets after all corpora are read, without messages that several corpora contain."""
        messages = {key: targets for key, targets in self.messages.items() if self.owners[key]}
        return replace(self, messages=messages, labelled=set(messages).union(*messages.values()))

    def reason(self, keys: Keys) -> str | None:
        """Return why a row with these keys is excluded from training, or None."""
        for name, digests in (("held_out", self.held_out), ("evaluation_set", self.evaluation_sets)):
            if not (digests.isdisjoint(keys.equal) and digests.isdisjoint(keys.near)):
                return name
        if not self.labelled.isdisjoint(keys.near):
            return "labelled"
        return None if self.runs.isdisjoint(keys.runs) else "overlap"


def is_held_out_message(keys: Keys, config: PreparationConfig) -> bool:
    """Return whether `held_out_share` holds out a row of a training corpus: a pair whose pivot's message is drawn."""
    if not config.held_out_share or len(keys.near) != 2:
        return False
    return _draw("held_out", str(config.seed), str(keys.near[0])) < config.held_out_share


def _draw(*values: str) -> float:
    """Return a number from 0 to 1 that is equal for equal values in every process."""
    return cleaning.digest(*values) / 2**64


def check_leaks(output: Path, reserved: Reserved, parallel_map: ParallelMap = in_process) -> None:
    """Read the written corpora again. Raise EvaluationLeak if training text contains reserved text."""
    mark = functools.partial(row_chunks.mark, overlap=reserved.overlap if reserved.runs else 0)
    for marked in parallel_map(mark, _read_training_rows(output)):
        for path, number, texts, split, *keys in rows_of(marked):
            reason = reserved.reason(Keys(*keys))
            if reason in ("held_out", "evaluation_set") or (reason and split == "train"):
                raise EvaluationLeak(
                    f"{path} row {number} is reserved for evaluation ({reason}): {texts[0]!r:.80}: report this as a bug"
                )


def _read_training_rows(output: Path) -> Iterator[pa.Table]:
    """Yield the rows of all training tables with their file, number, texts and split."""
    for path in sorted(output.rglob("*.parquet")):
        if path.relative_to(output).parts[0] in HELD_OUT:
            continue
        rows = read_rows(path)
        first_number = 1
        while True:
            chunk = list(itertools.islice(rows, CHUNK))
            if not chunk:
                break
            texts: list[Any] = chunk
            splits = ["train"] * len(chunk)
            if len(chunk[0]) == len(LABELLED):  # text, label, language, split
                texts = [row[:1] for row in chunk]
                splits = [row[3] for row in chunk]
            row_numbers = list(range(first_number, first_number + len(chunk)))
            first_number += len(chunk)
            yield pa.table({"path": [str(path)] * len(chunk), "number": row_numbers, "texts": texts, "split": splits})
