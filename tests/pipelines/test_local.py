"""The local runner: its console, interruptions, and the tracker that is chosen."""

import io
import os
import signal
import subprocess
import sys
import threading

import pytest

from pipelines import local

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
config = {"languages": ["en", "de"], "corpora": [source]}
local.run(toy, {"config": config}, store, "toy")
print("mlflow imported:", "mlflow" in sys.modules)
"""


@pytest.mark.slow
def test_a_run_without_a_tracker_never_imports_mlflow_in_the_runner_or_a_step(tmp_path):
    trap = tmp_path / "trap"
    trap.mkdir()
    (trap / "mlflow.py").write_text("raise RuntimeError('somebody imports MLflow')")
    store = tmp_path / "store"
    store.mkdir()

    variables = {name: value for name, value in os.environ.items() if not name.startswith("MLFLOW_")}
    variables |= {"INFOXLM_TRACKER": "none", "OMP_NUM_THREADS": "1"}
    variables["PYTHONPATH"] = os.pathsep.join([str(trap), os.environ.get("PYTHONPATH", "")])

    command = [sys.executable, "-c", DAG, str(store)]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=200)

    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert "mlflow imported: False" in done.stdout and list(store.glob("corpus/*/manifest.json"))
    assert not (store / "mlflow.db").exists()


def test_an_interrupted_run_continues_under_its_name_and_a_finished_run_does_not(tmp_path):
    first = local._continue_or_start("infoxlm", {"num_workers": 0}, tmp_path, "demo")

    assert local._continue_or_start("infoxlm", {"num_workers": 0}, tmp_path, "demo")["run"] == first["run"]
    assert local._continue_or_start("infoxlm", {"num_workers": 1}, tmp_path, "another")["run"] != first["run"]
    (tmp_path / "run.json").write_text((tmp_path / "run.json").read_text().replace("RUNNING", "FINISHED"))
    assert local._continue_or_start("infoxlm", {"num_workers": 1}, tmp_path, "third")["run"].startswith("third-")


def test_the_console_shows_lines_of_our_stages_and_the_log_file_shows_everything(tmp_path):
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


def test_steps_that_write_at_the_same_time_do_not_break_each_others_lines(tmp_path):
    console, turns = io.StringIO(), threading.Barrier(2)
    output = local.QuietOutput(console, tmp_path / "log.txt")

    def write(name: str) -> None:
        for part in (f"    14:00:00 pretrain {name}: ", "step 1", "\n"):
            output.write(part)
            turns.wait(5)

    threads = [threading.Thread(target=write, args=(name,)) for name in ("full seed 1", "-TLM seed 1")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    lines = [f"14:00:00 pretrain {name}: step 1" for name in ("-TLM seed 1", "full seed 1")]
    assert sorted(console.getvalue().splitlines()) == lines


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_keeps_a_loop_from_starting_further_steps(number):
    shell = ["sh", "-c", "true"]
    with pytest.raises(KeyboardInterrupt), local._interruptible_loops():
        subprocess.run(shell, check=True)
        try:
            signal.raise_signal(number)
        except KeyboardInterrupt:
            with pytest.raises(FileNotFoundError):
                subprocess.run(shell)
            raise

    subprocess.run(shell, check=True)
