"""python -m benchmarks.quality.few_shot --data DIR: XNLI with the little training text that is freely available.

A public encoder (multilingual-e5-small, see `e5`) is fine-tuned on English and tested in 15 languages by
`infoxlm suite`. DIR holds `xnli/dev-*.tsv` (XTREME's layout) and `nli_en/all.tsv` (source, premise, hypothesis, label).

Only XNLI's development sets are freely available, so both training and test use them, never with the same items: every
third premise, with its three hypotheses, is the test in all languages. English of the other premises and
counterfactually augmented SNLI (`cad_train`) are the training text; the checkpoint is selected on `cad_dev`. Test items
must not be translations of training items: with those the mean accuracy is 3.3 points higher.

Never compare these figures with those of papers, which train on 392,702 examples.
"""

import argparse
import csv
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pandas as pd
import yaml

from benchmarks import machine
from benchmarks.quality import e5
from benchmarks.speed.report import DIRECTORY

LANGUAGES = ("en", "fr", "es", "de", "el", "bg", "ru", "tr", "ar", "vi", "th", "zh", "hi", "sw", "ur")
HYPOTHESES = 3
"""Hypotheses per premise; they are neighbours in XNLI's files."""
TEST_SHARE = 3
"""Every third premise is tested."""
SETTINGS = {
    "task": "classification", "text": "premise", "text_pair": "hypothesis", "max_tokens": 128, "epochs": 3,
    "optimization": {"learning_rate": 1e-4},
    "selection": {"rule": "source", "every": 250}, "dropout": 0.0, "head_dropout": 0.1,
}  # fmt: skip


def main() -> int:
    """Fine-tune and test the encoder with a suite, and write the result as Markdown."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.quality.few_shot", description=__doc__.split("\n")[0])
    parser.add_argument("--data", type=Path, required=True, help="folder with xnli and nli_en")
    parser.add_argument("--workers", type=int, default=2, help="Ray workers, one per core")
    parser.add_argument("--store", type=Path, default=Path("build/few-shot"))
    options = parser.parse_args()
    store = options.store.resolve()
    store.mkdir(parents=True, exist_ok=True)
    table = store / "xnli.parquet"
    make_table(options.data).to_parquet(table, index=False)
    suite = {
        "models": {"e5-small": str(e5.make(store / "models"))},
        "tasks": {"xnli": {"settings": SETTINGS | {"data": str(table)}, "table": "xnli"}},
    }
    path = store / "suite.yaml"
    path.write_text(yaml.safe_dump(suite), encoding="utf-8")
    began = time.monotonic()
    command = [str(Path(sys.executable).parent / "infoxlm"), "suite", str(path)]
    command += ["--store", str(store), "--num-workers", str(options.workers)]
    done = subprocess.run(command, env=os.environ | {"TOKENIZERS_PARALLELISM": "false"}, check=False)
    if done.returncode:
        return done.returncode
    summaries = sorted(store.rglob("suite.json"), key=lambda path: path.stat().st_mtime)
    summary = json.loads(summaries[-1].read_bytes())["tasks"]["xnli"]
    text = "\n".join(describe(summary, options.workers, (time.monotonic() - began) / 60)) + "\n"
    result = DIRECTORY / f"{time.strftime('%Y-%m-%d-%H%M', time.gmtime())}-few-shot-xnli.md"
    result.write_text(text, encoding="utf-8")
    print(text)
    return 0


def make_table(data: Path) -> pd.DataFrame:
    """Return the rows of training, selection and test."""
    rows = []
    for language in LANGUAGES:
        for number, (premise, hypothesis, label) in enumerate(read_tsv(data / "xnli" / f"dev-{language}.tsv")):
            if (number // HYPOTHESES) % TEST_SHARE == 0:
                rows.append((premise, hypothesis, label, language, "test"))
            elif language == "en":
                rows.append((premise, hypothesis, label, language, "train"))
    for source, premise, hypothesis, label in read_tsv(data / "nli_en" / "all.tsv"):
        if source in ("cad_train", "cad_dev"):
            rows.append((premise, hypothesis, label, "en", source.removeprefix("cad_")))
    return pd.DataFrame(rows, columns=["premise", "hypothesis", "label", "language", "split"])


def read_tsv(path: Path) -> list[list[str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.reader(file, delimiter="\t", quoting=csv.QUOTE_NONE))


def describe(summary: dict, workers: int, minutes: float) -> list[str]:
    """Return the accuracies as Markdown lines."""
    facts = machine.facts()
    languages = summary["languages"]
    row = summary["models"]["e5-small"]
    accuracies = []
    for language in languages:
        accuracies.append(row["languages"][language]["accuracy"]["mean"])
    accuracies.append(row["mean"]["accuracy"]["mean"])
    cells = " | ".join(f"{100 * accuracy:.1f}" for accuracy in accuracies)
    return [
        f"# Few-shot XNLI with multilingual-e5-small, {time.strftime('%Y-%m-%d', time.gmtime())}",
        "",
        f"Commit {facts['commit']}; {facts['cores']} × {facts['cpu']}, {workers} Ray workers; {minutes:.1f} minutes, "
        f"training included. Settings: `{json.dumps(SETTINGS)}`.",
        "",
        f"| % | {' | '.join(languages)} | mean |",
        "|---" * (len(languages) + 2) + "|",
        f"| accuracy | {cells} |",
        "",
        f"Transfer gap: {100 * row['transfer_gap']['accuracy']['mean']:.1f} points.",
    ]


if __name__ == "__main__":
    sys.exit(main())
