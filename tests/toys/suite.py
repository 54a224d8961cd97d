"""A suite that a test can run: an encoder with random weights, and three generated tasks."""

import csv
import json
import random
from pathlib import Path
from typing import Any

from transformers import XLMRobertaConfig, XLMRobertaForMaskedLM

from tests.toys.questions import CLASSES, WORDS, riddles, write_squad, write_xlmr_tokenizer

STEPS = {"learning_rate": 0.003, "steps": 12, "warmup_steps": 2}


def write_model(directory: Path) -> Path:
    """Write an encoder of 2 layers x 32."""
    write_xlmr_tokenizer(directory, [" ".join([*WORDS, *sum(CLASSES.values(), ()), "which", *CLASSES])], 200)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    XLMRobertaForMaskedLM(XLMRobertaConfig(vocab_size=300, max_position_embeddings=80, **sizes)).save_pretrained(
        directory
    )
    return directory


def write_data(directory: Path) -> dict[str, Any]:
    """Write sets of two languages and return the tasks that read them."""
    rng = random.Random(1)
    with (directory / "labelled.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["text", "label", "language", "split"])
        for split, count in (("train", 40), ("dev", 8), ("test", 12)):
            for language in ("en", "de"):
                for _ in range(count):
                    label = rng.choice(sorted(CLASSES))
                    writer.writerow(
                        [" ".join([*rng.choices(WORDS, k=3), rng.choice(CLASSES[label])]), label, language, split]
                    )
    train = write_squad(directory / "train.en.json", riddles(24, seed=1, words=4))
    for language in ("en", "de"):
        write_squad(directory / f"questions/test-context-{language}-question-{language}.json", riddles(6, 2, words=4))
    (directory / "aligned").mkdir()
    for language in ("en", "de"):
        lines = [" ".join(rng.choices(WORDS, k=5)) for _ in range(20)]
        (directory / f"aligned/toy.en-de.{language}").write_text("\n".join(lines) + "\n")
    return {
        "words": {
            "settings": {"task": "classification", "data": str(directory / "labelled.csv"), "max_tokens": 32,
                         "dropout": 0.0, "batch_size": 8, "selection": {"rule": "joint", "every": 6},
                         "optimization": STEPS},
            "grid": {"optimization.learning_rate": [0.003, 0.001]},
        },
        "riddles": {
            "settings": {"task": "question_answering", "train": [str(train)], "test": [str(directory / "questions")],
                         "max_tokens": 64, "question_tokens": 8, "stride": 16, "dropout": 0.0, "batch_size": 8,
                         "optimization": STEPS},
        },
        "pairs": {"settings": {"task": "retrieval", "data": str(directory / "aligned")}, "table": "tatoeba"},
    }  # fmt: skip


def write_suite(directory: Path, **changes: dict[str, Any]) -> Path:
    """Write data, an encoder and the config of a suite; `changes` are tasks to add or replace."""
    tasks = write_data(directory) | changes
    path = directory / "toy.yaml"
    path.write_text(
        json.dumps({"models": {"toy": str(write_model(directory / "toy"))}, "tasks": tasks})
    )  # JSON is valid YAML
    return path
