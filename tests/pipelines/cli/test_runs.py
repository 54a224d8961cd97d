"""`infoxlm plan` estimates a run from its config alone, and `infoxlm suite` refuses options before a trial starts."""

import json

import pytest

from pipelines.cli.app import CONFIGS
from tests.pipelines.commands import assert_refused, invoke


@pytest.mark.parametrize("name", ["base", "large", "base15", "demo"])
def test_every_packaged_run_is_planned_without_data_weights_or_network(name):
    result = invoke("plan", CONFIGS / f"{name}.yaml", "--gpus", "4", "--gpu", "h100")

    assert result.exit_code == 0, result.stderr
    for text in ("key encoder", "PFLOP", "word embeddings", "assumed MFU", "4 GPUs", "checkpoint"):
        assert text in result.stdout


def test_override_changes_the_plan():
    assert "K 65,536 keys" in invoke("plan", "base", "--set", "pretraining.contrast.queue_size=65536").stdout


def test_default_number_of_gpus_is_at_most_the_number_of_virtual_shards():
    assert "4 GPUs" in invoke("plan", "demo").stdout


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [("--gpus", "1" + 30 * "0", "give 1 to 256"), ("--gpu", "abacus", "give one of A100, B200, H100,")],
)
def test_impossible_hardware_is_refused(option, value, message):
    assert_refused(invoke("plan", "base", option, value), message)


def test_refused_sweep_does_not_print_the_summary_of_an_earlier_run(tmp_path, monkeypatch):
    monkeypatch.setenv("INFOXLM_LAUNCHER", "ray")  # the command sets both variables; pytest restores them
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    run_id = "other-20261127-010203"
    (tmp_path / "run.json").write_text(json.dumps({"run": run_id, "config": "", "status": "FINISHED"}))
    (tmp_path / "outcome" / run_id).mkdir(parents=True)
    (tmp_path / "outcome" / run_id / "summary.txt").write_text("an older table")

    result = invoke("suite", "suite", "--only", "tatoeba", "--store", tmp_path, "--launcher", "mpi")

    assert_refused(result, "INFOXLM_LAUNCHER: 'mpi' cannot start workers on this machine")
    assert "an older table" not in result.stdout


def test_model_without_a_source_is_refused():
    assert_refused(invoke("suite", "suite", "--model", "mine"), "--model 'mine' has no source. Write NAME=SOURCE")
