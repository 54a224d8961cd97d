"""What every component does around its own work: one run for all it reports, one artifact however often it is asked."""

import json
import logging
from pathlib import Path

import pytest
from kfp import dsl

from components.platform import artifacts, launchers, tracking
from components.platform.stage_run import stage_run
from components.platform.stage_work import Work
from infoxlm_core.config import EvaluationConfig, PretrainingConfig
from infoxlm_core.errors import InputError, StorageUnavailable

TRIAL = {"variant": "full", "seed": 1.0}


class Memory(tracking.Untracked):
    """A tracker that remembers what it is told."""

    def __init__(self) -> None:
        self.said: list[object] = []

    def open_run(self, key, name, store, here, trial) -> tracking.Run:
        self.id = trial.name if trial else key
        self.said.append(("opened", self.id))
        return self

    def end(self, status: str = "FINISHED", stage: str = "", message: str = "") -> None:
        self.said.append((status, self.id, stage, message))

    def log_params(self, config) -> None:
        self.said.append(dict(config))

    def log_metrics(self, metrics) -> None:
        self.said.append(dict(metrics))


@pytest.fixture
def memory(monkeypatch) -> Memory:
    memory = Memory()
    monkeypatch.setitem(tracking.TRACKERS, "memory", lambda: memory)
    monkeypatch.setenv(tracking.VARIABLE, "memory")
    monkeypatch.setenv("RUN_ID", "toy-1")
    return memory


@pytest.fixture
def works(monkeypatch) -> list[Work]:
    """What the launcher of this process was asked to do; each is done at once."""
    asked: list[Work] = []

    def launch(work: Work, *_) -> None:
        asked.append(work)
        artifacts.get_or_build(work.store, work.kind, work.name, lambda output: {"loss/mlm": 0.5})

    monkeypatch.setitem(launchers.LAUNCHERS, "process", launch)
    return asked


def test_settings_are_told_as_plain_values_by_section_and_figures_to_one_run(memory, tmp_path):
    with stage_run("evaluate", str(tmp_path)) as step:
        step.report(evaluation=EvaluationConfig(retrieval_pairs=7), model="toy")
        step.report({"retrieval/served": 0.5})

    opened, settings, figures = memory.said
    assert opened == ("opened", "toy-1") and figures == {"retrieval/served": 0.5}
    assert settings["evaluation"]["retrieval_pairs"] == 7 and settings["model"] == "toy"


def test_a_step_that_has_nothing_to_say_opens_no_run(memory, tmp_path):
    with stage_run("plan_suite", str(tmp_path), reports=False) as step:
        step.report()

    assert memory.said == []


def test_the_first_line_of_a_step_says_where_its_run_is_shown(memory, tmp_path, capsys):
    memory.page = "https://mlflow.example/#/experiments/1/runs/7"

    with stage_run("evaluate", str(tmp_path)):
        logging.getLogger("infoxlm").info("working")

    first, second = capsys.readouterr().err.splitlines()
    assert first.endswith(f"run: {memory.page}") and second.endswith("working")


def test_a_tracker_that_is_down_keeps_no_step_from_its_work(memory, tmp_path, monkeypatch):
    def refuse(*_) -> None:
        raise StorageUnavailable("MLflow does not answer")

    monkeypatch.setattr(memory, "open_run", refuse)
    worked = []

    with pytest.raises(SystemExit) as ended, stage_run("evaluate", str(tmp_path)) as step:
        worked.append(True)
        step.report({"retrieval/served": 0.5})

    assert worked and ended.value.code == 75


def test_a_registering_step_has_the_run_of_the_tracker_that_it_names(memory, tmp_path):
    with stage_run("register", str(tmp_path), tracker="none") as step:
        assert step.run.id == "" and memory.said == []


def test_what_is_made_is_found_again_and_only_a_followed_training_knows_the_run(memory, works, tmp_path):
    def make(key: str, **more) -> Path:
        with stage_run("pretrain", str(tmp_path), TRIAL) as step:
            return step.build(
                "pretrained",
                key,
                PretrainingConfig(seed=7),
                num_workers=0,
                cluster={},
                task_config=None,
                inputs={"shards_path": "there"},
                checkpoints="run-1",
                **more,
            )

    first, again = make("a", follow=True), make("a", follow=True)
    make("b")

    assert first == again == tmp_path / "pretrained/a"
    assert [(work.name, work.tracker_run) for work in works] == [("a", "full seed 1"), ("b", "")]
    assert (works[0].stage, works[0].run, works[0].artifacts) == ("pretrain", "run-1", {"shards_path": "there"})
    assert PretrainingConfig.parse(works[0].config) == PretrainingConfig(seed=7)


def test_the_numbers_of_what_is_published_are_shown_and_returned(memory, works, tmp_path):
    output, metrics = dsl.Model(uri=str(tmp_path / "out")), dsl.Metrics(uri=str(tmp_path / "metrics"))

    with stage_run("pretrain", str(tmp_path)) as step:
        made = step.build("pretrained", "a", PretrainingConfig(), num_workers=0, cluster={}, task_config=None)
        shown, silent = step.publish(output, made, metrics), step.publish(output, made)

    assert shown == {"loss/mlm": 0.5} and silent == {} and metrics.metadata == {"loss_mlm": 0.5}
    assert artifacts.resolve(output)[0] == made


def test_a_body_that_fails_says_why_under_the_name_of_its_trial(memory, tmp_path):
    with pytest.raises(SystemExit) as ended, stage_run("pretrain", str(tmp_path), TRIAL):
        raise InputError("no such text")

    outcome = json.loads((tmp_path / "outcome/toy-1/pretrain-full-seed-1.json").read_text())
    assert ended.value.code == 2 and (outcome["class"], outcome["message"]) == ("InputError", "no such text")


@pytest.mark.parametrize(("last", "ended"), [(True, [("FAILED", "toy-1", "promote", "no such model")]), (False, [])])
def test_the_run_of_a_pipeline_is_failed_if_its_last_step_is(memory, tmp_path, last, ended):
    with pytest.raises(SystemExit), stage_run("promote", str(tmp_path), last=last):
        raise InputError("no such model")

    assert memory.said == [("opened", "toy-1"), *ended]
