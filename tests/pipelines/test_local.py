"""The local runner resumes runs, stops loops when it is interrupted, and hides lines of KFP and Ray."""

import io
import json
import os
import signal
import subprocess
import sys
import threading

import pytest

from infoxlm_core.errors import DataCorrupt
from pipelines import local
from tests.helpers.commands import environment

SCRIPT = """
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
source = {"name": "pages", "format": "tsv", "languages": ["en", "de"], "path": [str(store / "text.tsv")]}
config = {"languages": ["en", "de"], "corpora": [source]}
local.run_pipeline(toy, {"config": config}, store, "toy")
print("mlflow imported:", "mlflow" in sys.modules)
"""


@pytest.mark.slow
def test_run_without_a_tracker_imports_mlflow_neither_in_the_runner_nor_in_a_step(tmp_path):
    unimportable = tmp_path / "unimportable"
    unimportable.mkdir()
    (unimportable / "mlflow.py").write_text("raise RuntimeError('MLflow was imported')")
    store = tmp_path / "store"
    store.mkdir()
    python_path = os.pathsep.join([str(unimportable), os.environ.get("PYTHONPATH", "")])
    variables = {"INFOXLM_TRACKER": "none", "PYTHONPATH": python_path}

    command = [sys.executable, "-c", SCRIPT, str(store)]
    process = subprocess.run(command, env=environment() | variables, capture_output=True, text=True)

    assert process.returncode == 0, process.stdout[-2000:] + process.stderr[-2000:]
    assert "mlflow imported: False" in process.stdout
    assert list(store.glob("corpus/*/manifest.json"))
    assert not (store / "mlflow.db").exists()


@pytest.mark.parametrize("name", ["demo", ".demo", "(copy) demo", "été"])
def test_summary_of_a_run_is_found_whatever_the_name_of_its_config_file(tmp_path, name):
    run_id = local._resume_or_create_run("infoxlm", {}, tmp_path, name)["run"]
    directory = tmp_path / "outcome" / run_id
    directory.mkdir(parents=True)
    (directory / "summary.txt").write_text("scores")

    assert local.read_summary(tmp_path) == "scores"


@pytest.mark.parametrize("run_id", ["../x-20261127-010203", "..", "x", ""])
def test_run_record_that_names_no_run_is_refused(tmp_path, run_id):
    (tmp_path / "run.json").write_text(json.dumps({"run": run_id, "config": "", "status": "RUNNING"}))

    with pytest.raises(DataCorrupt, match="run: String should match"):
        local.read_summary(tmp_path)


def test_only_an_unfinished_run_with_the_same_arguments_is_continued(tmp_path):
    def start(name: str, num_workers: int) -> str:
        """Return the id of the run that a command with these arguments starts or continues."""
        return local._resume_or_create_run("infoxlm", {"num_workers": num_workers}, tmp_path, name)["run"]

    first_run = start("first", 0)

    assert start("second", 0) == first_run
    assert start("third", 1).startswith("third-")
    identity = tmp_path / "run.json"
    identity.write_text(identity.read_text().replace("RUNNING", "FINISHED"))
    assert start("fourth", 1).startswith("fourth-")


def test_console_shows_only_lines_of_our_stages_and_the_log_file_has_all_lines(tmp_path):
    console = io.StringIO()
    output = local.QuietOutput(console, tmp_path / "log.txt")
    text = (
        '    [KFP Executor 2026 INFO]: Got executor_input:\n    {\n        "inputs": {\n        }\n    }\n'
        "    14:00:00 pretrain: filled the queue with 8 keys\n"
        "    \x1b[36m(RayTrainWorker pid=7)\x1b[0m step 5/10 loss/mlm 2.0\n"
        "    \x1b[36m(TrainController pid=9)\x1b[0m Requesting resources: {'CPU': 1} * 2\n"
        "    uri='/store/pretrain/start',\n"
    )

    output.write(text[:50])
    output.write(text[50:])

    assert console.getvalue() == "14:00:00 pretrain: filled the queue with 8 keys\nstep 5/10 loss/mlm 2.0\n"
    assert (tmp_path / "log.txt").read_text() == text


def test_lines_of_concurrent_steps_are_not_mixed(tmp_path):
    console = io.StringIO()
    barrier = threading.Barrier(2)
    output = local.QuietOutput(console, tmp_path / "log.txt")

    def write(name: str) -> None:
        for part in (f"    14:00:00 pretrain {name}: ", "step 1", "\n"):
            output.write(part)
            barrier.wait(5)

    threads = [threading.Thread(target=write, args=(name,)) for name in ("full seed 1", "-TLM seed 1")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    lines = sorted(console.getvalue().splitlines())
    assert lines == ["14:00:00 pretrain -TLM seed 1: step 1", "14:00:00 pretrain full seed 1: step 1"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_no_step_can_start_after_a_signal(number):
    step = ["sh", "-c", "true"]
    with pytest.raises(KeyboardInterrupt), local._stop_loops_on_signals():
        subprocess.run(step, check=True)
        try:
            signal.raise_signal(number)
        except KeyboardInterrupt:
            with pytest.raises(FileNotFoundError):
                subprocess.run(step)
            raise

    subprocess.run(step, check=True)
