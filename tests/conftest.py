"""One torch thread for all tests, and what several rooms share: tiny token shards, a config for them, two encoders.

Tests marked `item("A13")` show an item of a checklist: A of docs/acceptance.md, all others of docs/promises.md. The run
ends with a table of each page.
"""

import contextlib
import logging
import os
import sqlite3
import sys

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import string
from collections import Counter
from pathlib import Path

import hypothesis
import numpy as np
import pytest
import torch

from infoxlm_core import manifests
from infoxlm_core.config import PretrainingConfig
from infoxlm_core.data import shards
from infoxlm_core.data.vocabulary import EOS, FIRST_PIECE
from tests import checklists
from tests.workers import fp64

pytest_plugins = ["tests.servers.fixtures"]
VOCABULARY = 64
hypothesis.settings.register_profile("ours", deadline=None)  # other work on this machine is no failure
hypothesis.settings.load_profile("ours")


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def no_log_of_others():
    """What a command of ours logs to, and from which level on, goes with its test: pytest closes the output."""
    root = logging.getLogger()
    before, level = root.handlers[:], root.level
    yield
    root.setLevel(level)
    for handler in root.handlers[:]:
        if type(handler) is logging.StreamHandler and handler not in before:
            root.removeHandler(handler)


@pytest.fixture(autouse=True)
def databases_are_migrated_once(tmp_path_factory):
    """MLflow's new SQLite file goes through dozens of migrations: one does, and is copied for all other tests."""
    yield
    utils = sys.modules.get("mlflow.store.db.utils")  # many tests never import it, and it takes seconds
    if utils is None or hasattr(utils, "migrate"):
        return
    from sqlalchemy import inspect

    utils.migrate = utils._upgrade_db
    template = tmp_path_factory.mktemp("mlflow") / "migrated.db"

    def upgrade(engine):
        if engine.dialect.name != "sqlite" or "alembic_version" in inspect(engine).get_table_names():
            utils.migrate(engine)
        elif template.exists():
            engine.dispose()
            copy(template, engine.url.database)
        else:
            utils.migrate(engine)
            copy(engine.url.database, template.with_suffix(".part"))
            template.with_suffix(".part").rename(template)

    def copy(source, target):
        with contextlib.closing(sqlite3.connect(source)) as whole, contextlib.closing(sqlite3.connect(target)) as new:
            whole.backup(new)

    utils._upgrade_db = upgrade


@pytest.fixture
def in_fp64():
    """See `tests.workers.fp64`."""
    with fp64():
        yield


def write_shards(directory: Path, corpora: dict[str, int], languages: tuple[str, ...] = ("de", "fr")) -> Path:
    """Random but learnable pairs: a target token is its source token plus half the pieces."""
    rng = np.random.default_rng(7)
    tables, half = {}, (VOCABULARY - FIRST_PIECE - 1) // 2
    for language in languages:
        for corpus, count in corpora.items():
            lengths = rng.integers(3, 9, count)
            source = rng.integers(FIRST_PIECE, FIRST_PIECE + half, lengths.sum())
            target = source + half
            stem = f"pairs/en-{language}/{corpus}"
            tables[f"{stem}.source"] = shards.write_table(directory / f"{stem}.source", [(source, lengths)])
            tables[f"{stem}.target"] = shards.write_table(directory / f"{stem}.target", [(target, lengths)])
            rng.integers(0, 2**63, count).astype(shards.SENTENCE_IDS).tofile(directory / f"{stem}.meanings")
            ends = np.insert(target, lengths.cumsum(), EOS)
            name = f"mono/{language}/{corpus}"
            tables[name] = shards.write_table(directory / name, [(ends, lengths + 1)])
    facts = {"vocabulary_size": VOCABULARY, "tables": tables, "corpus": "sha256:c", "tokenizer": "sha256:t"}
    manifests.write(directory, "shards", facts)
    return directory


@pytest.fixture(scope="session")
def tiny_shards(tmp_path_factory) -> Path:
    return write_shards(tmp_path_factory.mktemp("shards"), {"one": 40, "two": 25})


def tiny_config(**changes) -> PretrainingConfig:
    """Two layers of 16, a queue of 32, 8 samples an objective; `optimization={"steps": 3}` changes a section."""
    values = {
        "model": {"layers": 2, "hidden": 16, "ffn": 32, "heads": 2, "max_tokens": 32},
        "contrast": {"layer": 1, "queue_size": 32, "momentum": 0.9, "temperature": 0.1, "normalise": True},
        "batches": {"global_batch_size": 8, "virtual_shards": 4, "micro_batch_size": 4, "block_tokens": 24,
                    "side_tokens": 12},
        "optimization": {"steps": 6, "learning_rate": 0.01, "warmup_steps": 2},
        "checkpoints": {"every": 2},
        "log_every": 1,
    }  # fmt: skip
    for section, change in changes.items():
        values[section] = {**values.get(section, {}), **change} if isinstance(change, dict) else change
    return PretrainingConfig.parse(values)


@pytest.fixture(scope="session")
def tiny_encoders(tmp_path_factory) -> dict[str, Path]:
    """Two Hugging Face directories, `first` and `second`: XLM-R of 2 layers x 32 with random weights, 31 words."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast, XLMRobertaConfig, XLMRobertaForMaskedLM

    words = ["<s>", "<pad>", "</s>", "<unk>", *string.ascii_lowercase, "<mask>"]
    model = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>"))
    model.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    model.post_processor = processors.TemplateProcessing("<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 2)])
    special = {"bos_token": "<s>", "pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=model, mask_token="<mask>", cls_token="<s>", sep_token="</s>", **special
    )
    config = XLMRobertaConfig(
        vocab_size=len(words), hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64,
        max_position_embeddings=66,
    )  # fmt: skip
    encoders = {}
    for seed, name in enumerate(("first", "second")):
        torch.manual_seed(seed)
        directory = tmp_path_factory.mktemp(name)
        XLMRobertaForMaskedLM(config).save_pretrained(directory)
        tokenizer.save_pretrained(directory)
        encoders[name] = directory
    return encoders


LONGEST_FIRST = ("tests/e2e/", "tests/infoxlm_core/systems/test_ranking", "tests/pipelines/", "tests/components/",
                 "tests/infoxlm_core/stages/", "tests/infoxlm_core/systems/translation/")  # fmt: skip
TOGETHER = {"tests/e2e/": "e2e"} | {
    f"tests/components/{name}": "Ray"
    for name in ("adapters/ray/", "adapters/kuberay/", "adapters/torchrun/", "platform/test_overlay")
}
"""Files, by how their names begin, that share what takes long to start: one worker runs them all."""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log):
    """Give whole files to the workers: each starts its own servers and clusters once."""
    from xdist.scheduler.loadscope import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return next((name for begin, name in TOGETHER.items() if nodeid.startswith(begin)), nodeid.split("::")[0])

    return ByFile(config, log)


def _weight(item: pytest.Item) -> int:
    found = (number for number, begin in enumerate(LONGEST_FIRST) if item.nodeid.startswith(begin))
    return next(found, len(LONGEST_FIRST))


SERVERS = {"s3_server", "database", "mlflow_server", "empty_database", "ray_here"}
"""Fixtures that start processes: what asks for one is slow, directly or not."""


@pytest.hookimpl(tryfirst=True)  # before `-m "not slow"` chooses
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=_weight)
    for item in items:
        if not SERVERS.isdisjoint(item.fixturenames):
            item.add_marker("slow")
        proves = sorted({name for marker in item.iter_markers("item") for name in marker.args})
        item.user_properties.append(("items", proves))


def pytest_terminal_summary(terminalreporter) -> None:
    """The checklists by item on the console; with all tests and the figures that they recorded, in build/PAGE.md."""
    runs = [
        checklists.Run(item, report.nodeid.removeprefix("tests/"), str(given.get("figure", "")), outcome)
        for outcome in ("passed", "failed", "error", "skipped")
        for report in terminalreporter.stats.get(outcome, ())
        if report.when == "call" or outcome != "passed"
        for given in (dict(getattr(report, "user_properties", ())),)
        for item in given.get("items", ())
    ]
    for page, kinds in checklists.PAGES.items():
        items = sorted({run.item for run in runs if checklists.kind(run.item) in kinds}, key=checklists.order)
        if not items:
            continue
        terminalreporter.section(f"checklist: {page}")
        for item in items:
            mine = [run for run in runs if run.item == item]
            counts = ", ".join(f"{n} {outcome}" for outcome, n in Counter(run.outcome for run in mine).items())
            figures = "; ".join(run.figure for run in mine if run.figure)
            terminalreporter.write_line(f"{item:4} {counts:22} {figures}".rstrip())
        table = Path("build") / f"{page}.md"
        table.parent.mkdir(exist_ok=True)
        table.write_text(checklists.report(page, runs), encoding="utf-8")
        terminalreporter.write_line(f"every item, what is expected and what was observed: {table}")
