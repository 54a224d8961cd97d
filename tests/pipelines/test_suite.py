"""`infoxlm suite` plans the paper's suite, refuses invalid ones, and reports a suite of which one trial fails."""

import json
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from infoxlm_core import run_file
from infoxlm_core.results import trials
from infoxlm_core.results.suite_config import SuiteConfig
from pipelines.cli.app import CONFIGS
from tests.helpers.commands import infoxlm, only, runs_of
from tests.pipelines.commands import assert_refused, invoke
from tests.toys.suite import write_suite

SUITE_OF_PAPER = CONFIGS / "suite.yaml"


def test_suite_of_the_paper_has_its_grids_seeds_and_recipes():
    suite = run_file.load_config(SuiteConfig, SUITE_OF_PAPER)
    tasks = [item.trial.task for item in trials.plan(suite) if item.trial.model == "infoxlm"]
    xnli, translate_train, mlqa = [suite.tasks[name].settings for name in ("xnli", "translate-train-all", "mlqa")]

    assert {task: tasks.count(task) for task in tasks} == {
        "tatoeba": 1, "xnli": 3 * 5, "translate-train-all": 3 * 5, "translate-test": 3 * 5,
        "mlqa": 2 * 3 * 3 * 5, "mlqa-translate-train-all": 2 * 3 * 3 * 5, "mlqa-translate-test": 2 * 3 * 3 * 5,
    }  # fmt: skip
    assert xnli.optimization.steps == -(-10 * 392_702 // 32)
    assert translate_train.optimization.steps == -(-150 * 392_702 // 32)
    assert (xnli.optimization.warmup_steps, xnli.selection.rule, xnli.selection.every) == (12_500, "joint", 5_000)
    assert xnli.optimization.weight_decay == mlqa.optimization.weight_decay == 0
    assert (mlqa.warmup_share, mlqa.selection.rule, mlqa.normaliser, mlqa.stride) == (0.1, "last", "mlqa", 128)
    assert len(json.dumps(suite.listed())) < 128 * 1024  # the limit of Linux for an argument of a process


def test_suite_commands_of_the_documentation_name_tasks_of_the_suite():
    page = (SUITE_OF_PAPER.parents[1] / "docs/paper-and-release.md").read_text(encoding="utf-8")
    commands = re.findall(r"`infoxlm suite configs/suite.yaml [^`]*--only (\S+)(?: --set (\S+))?`", page)

    documented_tasks = set()
    for task_names, override in commands:
        suite = run_file.load_config(SuiteConfig, SUITE_OF_PAPER, [override] if override else [])
        documented_tasks |= set(suite.choose(task_names.split(",")).tasks)

    assert documented_tasks >= {"tatoeba", "xnli", "translate-test", "mlqa"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--only", "tatoeba,xnil"], "no task 'xnil'. Choose from tatoeba, xnli"),
        (["--set", "tasks.xnli.settings.batchsize=3"], "tasks.xnli.settings.batchsize: unknown name"),
        (["--model", "my model=/models/mine"], "models.my model"),
        (["--model", "mine"], "--model 'mine' has no source. Write NAME=SOURCE"),
    ],
)
def test_invalid_suite_is_refused_before_anything_runs(tmp_path, options, message):
    result = invoke("suite", SUITE_OF_PAPER, "--store", tmp_path / "store", *options)

    assert_refused(result, message)
    assert not (tmp_path / "store").exists()


@dataclass(frozen=True)
class Finished:
    """A suite that has run."""

    process: subprocess.CompletedProcess
    store: Path


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Finished:
    """Run three of the tasks of a suite, of which one needs a vector that the model does not have."""
    folder = tmp_path_factory.mktemp("suite")
    store = folder / "store"
    projected = {"settings": {"task": "retrieval", "data": str(folder / "aligned"), "vectors": ["contrast@contrast"]}}
    config = write_suite(folder, projected=projected)
    options = ["--only", "riddles,pairs,projected", "--set", "tasks.riddles.seeds=[2]"]
    return Finished(infoxlm("suite", str(config), "--store", str(store), *options), store)


@pytest.mark.slow
def test_failed_trial_is_named_and_the_others_are_in_the_table(finished):
    process = finished.process
    assert process.returncode == 2
    last_line = process.stderr.splitlines()[-1]
    assert last_line.startswith("infoxlm: InputError: measure toy projected: ")
    assert "names no contrast layer" in last_line
    for text in (
        "3 trials: toy on riddles, pairs, projected",
        "**Unfinished trials** are not included: toy projected.",
        "| InfoXLM",
        "InfoXLM paper: 1,000 pairs",
        f"report      {only(finished.store, 'suite/*')}/suite.html",
    ):
        assert text in process.stdout
    table_of_riddles = process.stdout.split("## Riddles")[1].splitlines()
    assert "1, last step" in next(line for line in table_of_riddles if line.startswith("| toy "))


@pytest.mark.slow
def test_mlflow_has_a_run_for_each_trial_below_the_run_of_the_suite(finished):
    _, parent, trial_runs = runs_of(finished.store)
    run_by_trial = {run.data.tags["point"]: run for run in trial_runs}

    assert {name: run.info.status for name, run in run_by_trial.items()} == {
        "toy riddles seed 2": "FINISHED", "toy pairs": "FINISHED", "toy projected": "FAILED",
    }  # fmt: skip
    assert (parent.info.run_name, parent.info.status) == ("toy", "FAILED")
    assert parent.data.metrics["riddles/f1"] == run_by_trial["toy riddles seed 2"].data.metrics["riddles/f1"]
    summary = json.loads((only(finished.store, "suite/*") / "suite.json").read_text())
    assert (summary["model"], summary["unfinished"]) == ("toy", ["toy projected"])
