"""XNLI and MLQA at toy size, in the folders and files that their authors released."""

import random
from pathlib import Path

from infoxlm_core.results import published
from tests.toys.questions import WORDS, riddles, write_squad

LABELS = ("entailment", "neutral", "contradiction")
XNLI = published.tables()["xnli"].columns
MLQA = published.tables()["mlqa/f1"].columns


def _translate(text: str, language: str) -> str:
    """Return an invented translation: the words in reverse order after the name of the language."""
    return " ".join([language, *reversed(text.split())]) if language != "en" else text


def write_xnli(folder: Path) -> None:
    """Write XNLI-1.0 and XNLI-MT-1.0. The machine translations into English are the English test."""
    rng = random.Random(1)
    rows = []
    for number in range(12):
        premise, hypothesis = (" ".join(rng.choices(WORDS, k=4)) for _ in range(2))
        rows.append((premise, hypothesis, LABELS[number % 3]))
    for name in ("XNLI-1.0", "XNLI-MT-1.0/multinli", "XNLI-MT-1.0/xnli"):
        (folder / name).mkdir(parents=True)
    header = "language\tgold_label\tsentence1\tsentence2\n"
    tests = {"original": header, "translated": header}
    for language in XNLI:
        training = "premise\thypo\tlabel\n"
        for premise, hypothesis, label in rows:
            texts = f"{_translate(premise, language)}\t{_translate(hypothesis, language)}"
            training += f"{texts}\t{label.replace('contradiction', 'contradictory')}\n"
            tests["original"] += f"{language}\t{label}\t{texts}\n"
            tests["translated"] += f"{language}\t{label}\t{premise}\t{hypothesis}\n"
        (folder / f"XNLI-MT-1.0/multinli/multinli.train.{language}.tsv").write_text(training.replace("stone", "river"))
    for split in ("dev", "test"):
        (folder / f"XNLI-1.0/xnli.{split}.tsv").write_text(tests["original"])
        (folder / f"XNLI-MT-1.0/xnli/xnli.{split}.en.tsv").write_text(tests["translated"])


def write_mlqa(folder: Path) -> None:
    """Write SQuAD, MLQA_V1 and MLQA's translations. The machine translations into English are the English test."""
    training, test = riddles(12, seed=1, words=4), riddles(6, seed=2, words=4)
    write_squad(folder / "squad/train-v1.1.json", training)
    for language in MLQA:
        translated = []
        for name, paragraph, question, answer in test:
            translated.append((name, _translate(paragraph, language), question, answer))
        cell = f"context-{language}-question-{language}.json"
        for split in ("dev", "test"):
            write_squad(folder / f"MLQA_V1/{split}/{split}-{cell}", translated)
        if language == "en":
            continue
        write_squad(folder / f"mlqa-translate-test/translate-test-{cell}", test)
        for split, rows in (("train", training), ("dev", test)):
            name = f"{language}_squad-translate-train-{split}-v1.1.json"
            write_squad(folder / "mlqa-translate-train" / name, rows)
