"""Sentences with tagged words, from which a model soon learns which words are names."""

import random
from pathlib import Path

from infoxlm_core.tasks.named_entities.files import Sentence
from infoxlm_core.tasks.named_entities.settings import NamedEntitiesConfig

FIRST, LAST, PLACES = ("anna", "bob", "cleo"), ("stone", "river", "field"), ("york", "lima", "oslo")
PLAIN = ("we", "saw", "then", "once", "river", "stone", "field", "york")  # of a name only where one stands
LABELS = ("B-LOC", "B-PER", "I-PER", "O")


def sentences(count: int, seed: int) -> list[Sentence]:
    """`mr anna stone` is a person, `in york` a place; the same words elsewhere are neither."""
    rng, rows = random.Random(seed), []
    for _ in range(count):
        parts = [(rng.choice(PLAIN), "O") for _ in range(rng.randint(1, 4))]
        for _ in range(rng.randint(0, 2)):
            person = [("mr", "O"), (rng.choice(FIRST), "B-PER"), (rng.choice(LAST), "I-PER")]
            parts += rng.choice((person, [("in", "O"), (rng.choice(PLACES), "B-LOC")]))
            parts.append((rng.choice(PLAIN), "O"))
        rows.append(Sentence(*map(tuple, zip(*parts, strict=True))))
    return rows


def write(path: Path, rows: list[Sentence], prefix: str = "") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    blocks = ["".join(f"{prefix}{word}\t{tag}\n" for word, tag in zip(*row, strict=True)) for row in rows]
    path.write_text("\n".join(blocks))
    return path


def settings(data: Path, **changes) -> NamedEntitiesConfig:
    return NamedEntitiesConfig.parse({"data": str(data), "max_tokens": 30, "dropout": 0.0} | changes)
