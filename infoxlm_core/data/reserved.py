"""What is reserved for evaluation, noted while corpora are read; and the proof that training text holds none of it.

Two kinds of text are reserved: the sentences of held-out corpora, and a drawn share of the messages of all others,
the labelled test set.
"""

from dataclasses import dataclass, field, replace
from pathlib import Path

from infoxlm_core.config import PreparationConfig
from infoxlm_core.data import cleaning
from infoxlm_core.data.tables import HELD_OUT, read_rows
from infoxlm_core.errors import EvaluationLeak

LABELLED_CHARACTERS = 20  # shorter messages do not tell which corpus they are from


@dataclass
class Reserved:
    """What training text must not contain, as 64-bit digests."""

    held_out: set[int] = field(default_factory=set)
    """Sentences of held-out corpora, as they are compared and as near duplicates are."""

    messages: dict[int, set[int]] = field(default_factory=dict)
    """Near key of a pivot message of the labelled test set -> near keys of its translations."""

    labelled: set[int] = field(default_factory=set)
    """All near keys of `messages`."""

    owners: dict[int, str | None] = field(default_factory=dict)
    """Near key of a text -> its corpus; None if it stands in several, so that its label is ambiguous."""

    def note(self, texts: tuple[str, ...], corpus: str, config: PreparationConfig) -> None:
        """Note the texts of a clean row, if they are kept for evaluation or might be."""
        if corpus in config.held_out:
            self.held_out.update(digest for text in texts for digest in digests(text))
        elif config.labelled_share:
            keys = [near_digest(text) for text in texts]
            for key in keys:
                if self.owners.setdefault(key, corpus) != corpus:
                    self.owners[key] = None
            if len(texts) == 2 and len(texts[0]) >= LABELLED_CHARACTERS:
                # drawn by the pivot's message: the same ones in all languages
                draw = cleaning.digest(str(config.seed), str(keys[0])) / 2**64
                if draw < config.labelled_share:
                    self.messages.setdefault(keys[0], set()).add(keys[1])

    def settle(self) -> "Reserved":
        """Return what stays reserved when all corpora are read: a message of several corpora has no label."""
        messages = {key: targets for key, targets in self.messages.items() if self.owners[key]}
        return replace(self, messages=messages, labelled=set(messages).union(*messages.values()))

    def reason(self, *texts: str) -> str | None:
        """Return why a row with these texts is no training text, or None."""
        if any(not self.held_out.isdisjoint(digests(text)) for text in texts):
            return "held_out"
        return None if self.labelled.isdisjoint(map(near_digest, texts)) else "labelled"


def digests(text: str) -> tuple[int, int]:
    return cleaning.digest("equal", cleaning.comparable(text)), cleaning.digest("near", cleaning.near_key(text))


def near_digest(text: str) -> int:
    """Digest of what near duplicates of a text have in common."""
    return cleaning.digest(cleaning.near_key(text))


def check_leaks(output: Path, reserved: Reserved) -> None:
    """Read again what was written; raise EvaluationLeak if training text contains what is kept for evaluation."""
    for path in sorted(output.rglob("*.parquet")):
        if path.relative_to(output).parts[0] in HELD_OUT:
            continue
        for number, row in enumerate(read_rows(path), start=1):
            texts, split = (row[:1], row[3]) if len(row) == 4 else (row, "train")
            reason = reserved.reason(*texts)
            if reason == "held_out" or (reason and split == "train"):
                raise EvaluationLeak(
                    f"{path} row {number} is kept for evaluation ({reason}): {texts[0]!r:.80}: report it"
                )
