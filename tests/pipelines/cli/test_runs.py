"""`infoxlm plan` estimates a run from its config alone."""

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
