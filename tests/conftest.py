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
import pytest
import torch

from tests.helpers import checklists
from tests.helpers.workers import fp64
from tests.toys.pretraining import write_shards

pytest_plugins = ["tests.servers.fixtures"]
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
    """See `tests.helpers.workers.fp64`."""
    with fp64():
        yield


@pytest.fixture(scope="session")
def tiny_shards(tmp_path_factory) -> Path:
    return write_shards(tmp_path_factory.mktemp("shards"), {"one": 40, "two": 25})


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
    f"tests/components/{name}": "Ray" for name in ("adapters/ray/", "adapters/kuberay/", "adapters/torchrun/")
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
