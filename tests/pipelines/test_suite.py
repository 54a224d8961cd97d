"""`infoxlm suite` as a user runs it: refusals before anything starts, and a whole one of which a point fails."""

import json
import re
import subprocess
from pathlib import Path

import pytest
from typer.testing import CliRunner

from infoxlm_core import run_file
from infoxlm_core.results import trials
from infoxlm_core.results.suite_config import SuiteConfig
from pipelines.cli import app
from tests.helpers.commands import infoxlm, only, runs_of
from tests.toys.suite import write_suite

PAPER = Path(__file__).parents[2] / "configs/suite.yaml"


def run(*arguments: str):
    return CliRunner().invoke(app, ["suite", *arguments])


def test_the_papers_suite_is_its_grids_and_seeds():
    config = run_file.load_as(SuiteConfig, PAPER)
    planned = trials.plan(config)

    mine = [item.trial.task for item in planned if item.trial.model == "infoxlm"]
    assert {task: mine.count(task) for task in mine} == {
        "tatoeba": 1, "xnli": 3 * 5, "translate-train-all": 3 * 5, "translate-test": 3 * 5,
        "mlqa": 2 * 3 * 3 * 5, "mlqa-translate-train-all": 2 * 3 * 3 * 5, "mlqa-translate-test": 2 * 3 * 3 * 5,
    }  # fmt: skip
    xnli, both, mlqa = (config.tasks[name].settings for name in ("xnli", "translate-train-all", "mlqa"))
    assert xnli.optimization.steps == -(-10 * 392_702 // 32) and both.optimization.steps == -(-150 * 392_702 // 32)
    assert (xnli.optimization.warmup_steps, xnli.selection.rule, xnli.selection.every) == (12_500, "joint", 5_000)
    assert xnli.optimization.weight_decay == mlqa.optimization.weight_decay == 0
    assert (mlqa.warmup_share, mlqa.selection.rule, mlqa.normaliser, mlqa.stride) == (0.1, "last", "mlqa", 128)
    assert len(json.dumps(config.listed())) < 128 * 1024


def test_the_suites_on_the_page_of_the_papers_are_tasks_of_the_papers_suite():
    page = (PAPER.parents[1] / "docs/paper-and-release.md").read_text(encoding="utf-8")
    commands = re.findall(r"`infoxlm suite configs/suite.yaml [^`]*--only (\S+)(?: --set (\S+))?`", page)

    chosen = [
        run_file.load_as(SuiteConfig, PAPER, [set_] if set_ else []).choose(only.split(",")) for only, set_ in commands
    ]

    assert {name for suite in chosen for name in suite.tasks} >= {"tatoeba", "xnli", "translate-test", "mlqa"}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--only", "tatoeba,xnil"], "no task 'xnil'. Choose from tatoeba, xnli"),
        (["--set", "tasks.xnli.settings.batchsize=3"], "tasks.xnli.settings.classification.batchsize: unknown name"),
        (["--set", "tasks.xnli.grid={optimization.lr: [1]}"], "tasks.xnli.settings.optimization.lr: unknown name"),
        (["--set", "tasks.xnli.grid={batch_size: [8, 0]}"], "tasks.xnli.settings.batch_size: Input should be greater"),
        (["--model", "my model=/models/mine"], "models.my model"),
        (["--model", "mine"], "write section.name=value"),
        (["--model", "XLM_R=/models/mine"], "The models xlm-r and XLM_R would have the same metric names"),
    ],
)
def test_a_wrong_suite_is_refused_in_one_line_before_anything_runs(tmp_path, arguments, said):
    result = run(str(PAPER), "--store", str(tmp_path / "store"), *arguments)

    assert result.exit_code == 2
    (line,) = result.stderr.strip().splitlines()
    assert line.startswith("infoxlm: ConfigError") and said in line
    assert not (tmp_path / "store").exists()


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> subprocess.CompletedProcess:
    """A suite with a peer from the command line, one task left out, and one that no model can do."""
    base = tmp_path_factory.mktemp("suite")
    projected = {"settings": {"task": "retrieval", "data": str(base / "aligned"), "vectors": ["contrast@contrast"]}}
    config = write_suite(base, projected=projected)
    arguments = [str(config), "--store", str(base / "store"), "--only", "riddles,pairs,projected"]
    return infoxlm("suite", *arguments, "--set", "tasks.riddles.seeds=[2]")


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_point_that_fails_is_named_and_does_not_sink_the_others(finished):
    assert finished.returncode == 2
    *_, last = finished.stderr.strip().splitlines()
    assert last.startswith("infoxlm: InputError: measure toy projected: ") and "names no contrast layer" in last
    assert "3 trials: toy on riddles, pairs, projected" in finished.stdout
    assert "**Unfinished trials** are not included: toy projected." in finished.stdout
    riddles = finished.stdout.split("riddles: F1")[1]
    assert "1, last step" in next(line for line in riddles.splitlines() if line.startswith("| toy "))
    assert "| InfoXLM" in finished.stdout and "InfoXLM paper: 1,000 pairs" in finished.stdout


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_all_of_it_is_one_suite_in_mlflow_and_the_report_is_where_it_says(finished, monkeypatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    store = Path(finished.args[finished.args.index("--store") + 1])
    _, parent, nested = runs_of(store)
    points = {found.data.tags["point"]: found for found in nested}

    assert {name: found.info.status for name, found in points.items()} == {
        "toy riddles seed 2": "FINISHED", "toy pairs": "FINISHED", "toy projected": "FAILED",
    }  # fmt: skip
    summary = json.loads((only(store, "suite/*") / "suite.json").read_text())
    assert summary["model"] == "toy" and summary["unfinished"] == ["toy projected"]
    assert parent.data.metrics["riddles/f1"] == points["toy riddles seed 2"].data.metrics["riddles/f1"]
    assert f"report      {only(store, 'suite/*')}/suite.html" in finished.stdout
    assert (parent.info.run_name, parent.info.status) == ("toy", "FAILED")
