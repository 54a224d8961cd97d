"""The local runner: what it imports, opens and says for the tracker that is chosen."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

DAG = """
import sys
from pathlib import Path
from kfp import dsl
from components.prepare_corpus import prepare_corpus
from pipelines import local

@dsl.pipeline(name="infoxlm-toy")
def toy(store: str, config: dict):
    prepare_corpus(config=config, store=store)

store = Path(sys.argv[1])
(store / "text.tsv").write_text("".join(f"a page of number {n}\\teine Seite mit Nummer {n}\\n" for n in range(40)))
source = {"name": "one", "format": "tsv", "languages": ["en", "de"], "path": [str(store / "text.tsv")]}
run = local.run(toy, {"config": {"languages": ["en", "de"], "corpora": [source]}}, store, "toy")
print("described", repr(run.describe()), "mlflow" in sys.modules)
"""


def run_toy(store: Path, tracker: str, **environment: str) -> subprocess.CompletedProcess:
    """Run one stage by the local runner, in a process of its own."""
    known = {name: value for name, value in os.environ.items() if not name.startswith("MLFLOW_")}
    known |= {"INFOXLM_TRACKER": tracker, "OMP_NUM_THREADS": "1", **environment}
    command = [sys.executable, "-c", DAG, str(store)]
    return subprocess.run(command, env=known, capture_output=True, text=True, timeout=200)


@pytest.mark.slow
def test_a_run_without_a_tracker_never_imports_mlflow_in_the_runner_or_a_step(tmp_path):
    trap = tmp_path / "trap"
    trap.mkdir()
    (trap / "mlflow.py").write_text("raise RuntimeError('somebody imports MLflow')")
    store = tmp_path / "store"
    store.mkdir()

    done = run_toy(store, "none", PYTHONPATH=os.pathsep.join([str(trap), os.environ.get("PYTHONPATH", "")]))

    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert "described '' False" in done.stdout and list(store.glob("corpus/*/manifest.json"))
    assert not (store / "mlflow.db").exists()


@pytest.mark.slow
def test_a_run_with_mlflow_ends_there_and_says_where_to_look(tmp_path):
    done = run_toy(tmp_path, "mlflow")

    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert "described 'MLflow      mlflow ui --backend-store-uri sqlite:///" in done.stdout
    assert "?workflowType=machine_learning' True" in done.stdout and (tmp_path / "mlflow.db").is_file()


def test_a_tracker_that_there_is_not_is_found_out_before_anything_runs(tmp_path):
    done = run_toy(tmp_path, "paper")

    assert done.returncode == 1 and "INFOXLM_TRACKER: 'paper' is no tracker; known are mlflow, none" in done.stderr
    assert not (tmp_path / "run.json").exists()
