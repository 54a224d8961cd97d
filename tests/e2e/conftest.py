"""The one run in directories that the tests of the whole DAG look at."""

import json
import shutil
from pathlib import Path

import pytest

from tests.helpers.commands import infoxlm, kill_in_pretraining
from tests.toys.run import STEPS, write_config

ROOT = Path(__file__).parents[2]


def copy_code(directory: Path) -> Path:
    """A copy of the product, to change its source."""
    for package in ("infoxlm_core", "components", "pipelines"):
        shutil.copytree(ROOT / package, directory / package, ignore=shutil.ignore_patterns("__pycache__"))
    return directory


def kill_and_start_again(base: Path) -> Path:
    """The store of a run whose driver was killed in the middle of pre-training and that was then started again.

    In between somebody has mended a comment.
    """
    config, store, code = write_config(base), base / "store", copy_code(base / "code")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(code))
        patch.chdir(code)  # a step imports from its working directory first
        kill_in_pretraining(["run", str(config), "--store", str(store)], store, patience=60)
        (saved,) = store.glob("runs/pretrained-*/saved.json")
        assert json.loads(saved.read_text())["step"] < STEPS, "the kill came too late to show anything"
        with (code / "infoxlm_core/progress.py").open("a") as source:
            source.write("# how far something is, and how long it will take\n")

        second = infoxlm("run", str(config), "--store", str(store))

    assert second.returncode == 0, second.stdout[-3000:] + second.stderr[-3000:]
    assert "resuming after step" in second.stdout
    (base / "stdout").write_text(second.stdout)
    return store


@pytest.fixture(scope="session")
def finished(tmp_path_factory) -> Path:
    """The store of a run that was killed in pre-training, and started again; its config is `toy.yaml` beside it."""
    return kill_and_start_again(tmp_path_factory.mktemp("e2e"))
