"""Sentences with tagged words, from which a model soon learns which words are names."""

import random
from pathlib import Path

from infoxlm_core.tasks.named_entities.files import Sentence
from infoxlm_core.tasks.named_entities.task import NamedEntitiesConfig

FIRST, LAST, PLACES = ("anna", "bob", "cleo"), ("stone", "river", "field"), ("york", "lima", "oslo")
PLAIN = ("we", "saw", "then", "once", "river", "stone", "field", "york")  # some are also parts of names
LABELS = ("B-LOC", "B-PER", "I-PER", "O")


def sentences(count: int, seed: int) -> list[Sentence]:
    """Return random sentences with labels.

    `mr anna stone` is a person, and `in york` is a place. The same words in other positions are neither.
    """
    rng = random.Random(seed)
    examples = []
    for _ in range(count):
        labelled_words = [(rng.choice(PLAIN), "O") for _ in range(rng.randint(1, 4))]
        for _ in range(rng.randint(0, 2)):
            person = [("mr", "O"), (rng.choice(FIRST), "B-PER"), (rng.choice(LAST), "I-PER")]
            place = [("in", "O"), (rng.choice(PLACES), "B-LOC")]
            labelled_words += rng.choice((person, place))
            labelled_words.append((rng.choice(PLAIN), "O"))
        words = tuple(word for word, _ in labelled_words)
        labels = tuple(label for _, label in labelled_words)
        examples.append(Sentence(words, labels))
    return examples


def write(path: Path, rows: list[Sentence], prefix: str = "") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    blocks = []
    for row in rows:
        lines = [f"{prefix}{word}\t{tag}\n" for word, tag in zip(*row, strict=True)]
        blocks.append("".join(lines))
    path.write_text("\n".join(blocks))
    return path


def settings(data: Path, **changes) -> NamedEntitiesConfig:
    return NamedEntitiesConfig.parse({"data": str(data), "max_tokens": 30, "dropout": 0.0} | changes)
