"""The finished run that all tests of the whole DAG examine."""

import json
import shutil
from pathlib import Path

import pytest

from tests.helpers.commands import infoxlm, kill_in_pretraining, only
from tests.toys.run import STEPS, write_config

ROOT = Path(__file__).parents[2]


def copy_code(directory: Path) -> Path:
    """Copy the product, so that a test can change its source."""
    for package in ("infoxlm_core", "components", "pipelines"):
        shutil.copytree(ROOT / package, directory / package, ignore=shutil.ignore_patterns("__pycache__"))
    return directory


def run_with_a_kill(base: Path) -> Path:
    """Kill a run in the middle of pre-training, change a comment in the code, repeat the run, and return its store."""
    config, store, code = write_config(base), base / "store", copy_code(base / "code")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(code))
        patch.chdir(code)  # steps import from their working directory first
        kill_in_pretraining(["run", str(config), "--store", str(store)], store)
        checkpoint = only(store, "runs/pretrained-*/saved.json")
        assert json.loads(checkpoint.read_text())["step"] < STEPS, "the kill came too late"
        with (code / "infoxlm_core/progress.py").open("a") as source:
            source.write("# a comment\n")

        done = infoxlm("run", str(config), "--store", str(store))

    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "resuming after step" in done.stdout
    (base / "stdout").write_text(done.stdout)
    return store


@pytest.fixture(scope="session")
def finished(tmp_path_factory) -> Path:
    """Return the store of a run that was killed in pre-training and repeated; its config is `toy.yaml` beside it."""
    return run_with_a_kill(tmp_path_factory.mktemp("e2e"))
