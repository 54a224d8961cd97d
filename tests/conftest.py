"""Fixtures that tests of several packages share, the order of tests, and the reports of the checklists.

A test marked `item("A13")` proves an item of a checklist: A of docs/acceptance.md, all others of docs/promises.md. At
its end, a run prints a table for each page.
"""

import contextlib
import logging
import os
import sqlite3
import sys

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
# Ray gives its workers the lowest priority but four: beside another test process, they would hardly ever run.
os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112

import string
from collections import Counter
from pathlib import Path

import hypothesis
import pytest
import torch

from tests.helpers import checklists
from tests.helpers.workers import fp64
from tests.toys.models import save_model
from tests.toys.pretraining import write_shards

pytest_plugins = ["tests.servers.fixtures", "tests.toys.finetuning"]
hypothesis.settings.register_profile("ours", deadline=None)  # tests must not fail because the machine is busy
hypothesis.settings.load_profile("ours")


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def restore_logging():
    """Remove the handlers that a command adds: they write to an output that pytest closes after the test."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.setLevel(level)
    for handler in root.handlers[:]:
        if type(handler) is logging.StreamHandler and handler not in handlers:
            root.removeHandler(handler)


@pytest.fixture(autouse=True)
def migrate_databases_once(tmp_path_factory):
    """Run MLflow's dozens of migrations for one new SQLite file, and copy this file for all later ones."""
    yield
    utils = sys.modules.get("mlflow.store.db.utils")  # do not import MLflow for tests without it: that takes seconds
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
        with contextlib.closing(sqlite3.connect(source)) as old, contextlib.closing(sqlite3.connect(target)) as new:
            old.backup(new)

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
    """Return two Hugging Face directories, `first` and `second`: XLM-R of 2 layers x 32 with random weights."""
    words, plain = list(string.ascii_lowercase), {"max_position_embeddings": 66, "infoxlm": None}
    return {
        name: save_model(tmp_path_factory.mktemp(name), words=words, seed=seed, **plain)
        for seed, name in enumerate(("first", "second"))
    }


LONGEST_FIRST = ("tests/e2e/", "tests/infoxlm_core/systems/test_ranking", "tests/pipelines/", "tests/components/",
                 "tests/infoxlm_core/stages/", "tests/infoxlm_core/systems/translation/")  # fmt: skip
ONE_WORKER = {
    "Ray": [f"tests/components/adapters/{name}/" for name in ("ray", "kuberay", "torchrun")],
    "MLflow": ["tests/components/adapters/mlflow/", "tests/pipelines/cli/test_registry.py"],
    "locked MLflow": ["tests/e2e/", "tests/pipelines/cli/test_adapt.py",
                      "tests/security/test_mlflow_auth.py", "tests/k8s/test_mlflow.py", "tests/k8s/test_serving.py"],
}  # fmt: skip
"""Tests that run in one worker, because they share a Ray cluster, a server, or a finished run of the DAG."""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log):
    """Give whole files to the workers: each worker starts its own servers and clusters once."""
    from xdist.scheduler.loadscope import LoadScopeScheduling

    class FileScheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            for group, paths in ONE_WORKER.items():
                if nodeid.startswith(tuple(paths)):
                    return group
            return nodeid.partition("::")[0]

    return FileScheduling(config, log)


def rank_by_length(item: pytest.Item) -> int:
    """Return a number that is lower the longer the tests of an item's folder take."""
    for rank, prefix in enumerate(LONGEST_FIRST):
        if item.nodeid.startswith(prefix):
            return rank
    return len(LONGEST_FIRST)


SERVERS = {"s3_server", "database", "mlflow_server", "empty_database", "ray_here"}
"""Fixtures that start processes: a test that uses one, directly or not, is slow."""


@pytest.hookimpl(tryfirst=True)  # before `-m "not slow"` selects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=rank_by_length)
    for item in items:
        if not SERVERS.isdisjoint(item.fixturenames):
            item.add_marker("slow")
        proved = sorted({name for marker in item.iter_markers("item") for name in marker.args})
        item.user_properties.append(("items", proved))


def pytest_terminal_summary(terminalreporter) -> None:
    """Print the checklists by item, and write them with all tests and their figures to build/PAGE.md."""
    runs = []
    for outcome in ("passed", "failed", "error", "skipped"):
        for report in terminalreporter.stats.get(outcome, ()):
            if report.when != "call" and outcome == "passed":
                continue  # of setup and teardown
            properties = dict(getattr(report, "user_properties", ()))
            test, figure = report.nodeid.removeprefix("tests/"), str(properties.get("figure", ""))
            runs += [checklists.Run(item, test, figure, outcome) for item in properties.get("items", ())]
    for page, kinds in checklists.PAGES.items():
        items = sorted({run.item for run in runs if checklists.kind(run.item) in kinds}, key=checklists.order)
        if not items:
            continue
        terminalreporter.section(f"checklist: {page}")
        for item in items:
            of_item = [run for run in runs if run.item == item]
            counts = ", ".join(f"{n} {outcome}" for outcome, n in Counter(run.outcome for run in of_item).items())
            figures = "; ".join(run.figure for run in of_item if run.figure)
            terminalreporter.write_line(f"{item:4} {counts:22} {figures}".rstrip())
        table = Path("build") / f"{page}.md"
        table.parent.mkdir(exist_ok=True)
        table.write_text(checklists.report(page, runs), encoding="utf-8")
        terminalreporter.write_line(f"{table} has every item with what is expected and what was observed.")
