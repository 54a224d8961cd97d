"""What all components share: one run in the tracker, and one artifact for the same inputs."""

import logging
from pathlib import Path

import pytest

from components.platform import artifacts, launchers
from components.platform.builds import BuildSpec
from components.platform.stage_run import stage_run
from infoxlm_core.config import EvaluationConfig, PretrainingConfig
from infoxlm_core.errors import InputError, StorageUnavailable


def test_settings_and_figures_are_logged_to_one_run(recorder, tmp_path):
    with stage_run("evaluate", str(tmp_path)) as step:
        step.report(evaluation=EvaluationConfig(retrieval_pairs=7), model="toy")
        step.report({"retrieval/served": 0.5})

    opened, settings, figures = recorder.calls
    assert opened == ("opened", "toy-1")
    assert (settings["evaluation"]["retrieval_pairs"], settings["model"]) == (7, "toy")
    assert figures == {"retrieval/served": 0.5}


def test_step_without_reports_opens_no_run(recorder, tmp_path):
    with stage_run("plan_suite", str(tmp_path), reports_to_tracker=False) as step:
        step.report()

    assert recorder.calls == []


def test_first_line_of_the_log_is_the_address_of_the_run(recorder, tmp_path, capsys):
    recorder.page = "https://mlflow.example/#/experiments/1/runs/7"

    with stage_run("evaluate", str(tmp_path)):
        logging.getLogger("infoxlm").info("working")

    first_line, *_ = capsys.readouterr().err.splitlines()
    assert first_line.endswith(f"run: {recorder.page}")


def test_step_works_although_the_tracker_does_not_answer(recorder, tmp_path, monkeypatch):
    def refuse(*_) -> None:
        raise StorageUnavailable("MLflow does not answer")

    monkeypatch.setattr(recorder, "open_run", refuse)
    has_worked = False

    with pytest.raises(SystemExit) as exit_info, stage_run("evaluate", str(tmp_path)) as step:
        has_worked = True
        step.report({"retrieval/served": 0.5})

    assert has_worked
    assert exit_info.value.code == 75


def test_artifact_is_built_once_and_a_followed_training_knows_the_run(recorder, tmp_path, monkeypatch):
    specs: list[BuildSpec] = []

    def launch(spec: BuildSpec, *_) -> None:
        specs.append(spec)
        artifacts.get_or_build(spec.store, spec.kind, spec.name, lambda output: {"loss/mlm": 0.5})

    monkeypatch.setitem(launchers.LAUNCHERS, "process", launch)

    def build(key: str, send_curves: bool) -> Path:
        config, inputs = PretrainingConfig(seed=7), {"shards_path": "location"}
        with stage_run("pretrain", str(tmp_path), {"variant": "full", "seed": 1.0}) as step:
            return step.build(
                "pretrained", key, config, 0, {}, None, inputs, checkpoint_directory="run-1", send_curves=send_curves
            )

    assert build("a", send_curves=True) == build("a", send_curves=True) == tmp_path / "pretrained/a"
    build("b", send_curves=False)

    assert [(spec.name, spec.tracker_run) for spec in specs] == [("a", "full seed 1"), ("b", "")]
    assert (specs[0].stage, specs[0].run, specs[0].artifacts) == ("pretrain", "run-1", {"shards_path": "location"})
    assert PretrainingConfig.parse(specs[0].config) == PretrainingConfig(seed=7)


@pytest.mark.parametrize(
    ("ends_run_on_failure", "endings"), [(True, [("FAILED", "toy-1", "promote", "no such model")]), (False, [])]
)
def test_failure_of_the_last_step_ends_the_run(recorder, tmp_path, ends_run_on_failure, endings):
    with pytest.raises(SystemExit), stage_run("promote", str(tmp_path), ends_run_on_failure=ends_run_on_failure):
        raise InputError("no such model")

    assert recorder.calls == [("opened", "toy-1"), *endings]
