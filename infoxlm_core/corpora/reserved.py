"""What is reserved for evaluation, noted while corpora are read; and the proof that training text holds none of it.

Three kinds of text are reserved: the sentences of held-out corpora, those of test sets that the config names, and a
drawn share of the messages of all other corpora, the labelled test set.
"""

import functools
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pyarrow as pa

from infoxlm_core.config import PreparationConfig
from infoxlm_core.corpora import cleaning, fingerprints, row_chunks
from infoxlm_core.corpora.fingerprints import Keys
from infoxlm_core.corpora.parallel import CHUNK, ParallelMap, in_process
from infoxlm_core.corpora.tables import HELD_OUT, LABELLED, read_rows, rows_of
from infoxlm_core.errors import EvaluationLeak

LABELLED_CHARACTERS = 20  # shorter messages do not tell which corpus they are from


@dataclass
class Reserved:
    """What training text must not contain, as 64-bit digests."""

    held_out: set[int] = field(default_factory=set)  # sentences of held-out corpora, equal or near
    evaluation_sets: set[int] = field(default_factory=set)  # of test sets, likewise
    runs: set[int] = field(default_factory=set)  # of `overlap` words of both
    overlap: int = 0
    messages: dict[int, set[int]] = field(default_factory=dict)  # near key of a pivot message -> of its translations
    labelled: set[int] = field(default_factory=set)  # all near keys of `messages`
    owners: dict[int, str | None] = field(default_factory=dict)  # near key -> its corpus; None if it stands in several

    def note(self, texts: Sequence[str], keys: Keys, corpus: str, config: PreparationConfig) -> None:
        """Note the texts of a clean row, if they are kept for evaluation or might be."""
        if corpus in config.held_out:
            self.held_out.update(keys.equal, keys.near)
            self.runs.update(keys.runs)
        elif config.labelled_share:
            for key in keys.near:
                if self.owners.setdefault(key, corpus) != corpus:
                    self.owners[key] = None
            if len(texts) == 2 and len(texts[0]) >= LABELLED_CHARACTERS:
                # drawn by the pivot's message: the same ones in all languages
                source, target = keys.near
                if cleaning.digest(str(config.seed), str(source)) / 2**64 < config.labelled_share:
                    self.messages.setdefault(source, set()).add(target)

    def note_test(self, text: str) -> None:
        """Note a text of a test set, as it is in its file."""
        clean = cleaning.normalise(text)
        if clean:
            found = fingerprints.keys([clean], self.overlap)
            self.evaluation_sets.update(found.equal, found.near)
            self.runs.update(found.runs)

    def settle(self) -> "Reserved":
        """Return what stays reserved when all corpora are read: a message of several corpora has no label."""
        messages = {key: targets for key, targets in self.messages.items() if self.owners[key]}
        return replace(self, messages=messages, labelled=set(messages).union(*messages.values()))

    def reason(self, keys: Keys) -> str | None:
        """Return why a row with these keys is no training text, or None."""
        for name, digests in (("held_out", self.held_out), ("evaluation_set", self.evaluation_sets)):
            if not (digests.isdisjoint(keys.equal) and digests.isdisjoint(keys.near)):
                return name
        if not self.labelled.isdisjoint(keys.near):
            return "labelled"
        return None if self.runs.isdisjoint(keys.runs) else "overlap"


def check_leaks(output: Path, reserved: Reserved, parallel_map: ParallelMap = in_process) -> None:
    """Read again what was written; raise EvaluationLeak if training text contains what is kept for evaluation."""
    mark = functools.partial(row_chunks.mark, overlap=reserved.overlap if reserved.runs else 0)
    for marked in parallel_map(mark, _written(output)):
        for path, number, texts, split, *keys in rows_of(marked):
            reason = reserved.reason(Keys(*keys))
            if reason in ("held_out", "evaluation_set") or (reason and split == "train"):
                raise EvaluationLeak(
                    f"{path} row {number} is kept for evaluation ({reason}): {texts[0]!r:.80}: report it"
                )


def _written(output: Path) -> Iterator[pa.Table]:
    """Yield the rows of all tables of training text, each with its file, number, texts and split."""
    for path in sorted(output.rglob("*.parquet")):
        if path.relative_to(output).parts[0] in HELD_OUT:
            continue
        rows = enumerate(read_rows(path), start=1)
        while some := list(itertools.islice(rows, CHUNK)):
            is_labelled = len(some[0][1]) == len(LABELLED)
            yield pa.table({
                "path": [str(path)] * len(some),
                "number": [number for number, _ in some],
                "texts": [row[:1] if is_labelled else row for _, row in some],
                "split": [row[3] if is_labelled else "train" for _, row in some],
            })  # fmt: skip
