"""The compiled pipeline that a cluster gets: current, small, and without surprises."""

from pathlib import Path

import pytest
import yaml
from kfp import compiler

from infoxlm_core.run_file import RunConfig
from pipelines.infoxlm import infoxlm

COMPILED = Path(__file__).parents[2] / "pipelines/compiled/infoxlm.yaml"


@pytest.fixture(scope="module")
def spec() -> dict:
    return next(yaml.safe_load_all(COMPILED.read_text()))


def test_the_committed_yaml_is_what_the_code_compiles_to(tmp_path):
    compiler.Compiler().compile(infoxlm, str(tmp_path / "now.yaml"))

    assert (tmp_path / "now.yaml").read_text() == COMPILED.read_text(), "run `make compile` and commit the result"


def test_its_parameters_are_the_sections_of_a_config_and_the_place_to_run(spec):
    parameters = set(spec["root"]["inputDefinitions"]["parameters"])

    assert parameters == set(RunConfig.model_fields) | {"store"}
    assert len(parameters) <= 10


def test_no_step_installs_anything_or_branches_on_text(spec):
    text = COMPILED.read_text()

    assert "pip install" not in text
    assert "triggerPolicy" not in text
    images = {executor["container"]["image"] for executor in spec["deploymentSpec"]["executors"].values()}
    assert len(images) == 1 and not images.pop().endswith(":latest")


def test_every_step_has_its_inputs_from_the_step_before(spec):
    tasks = spec["root"]["dag"]["tasks"]

    order = ["prepare-corpus", "tokenize-corpus", "pretrain", "finetune", "finetune-2", "evaluate", "register"]
    assert set(tasks) == set(order)
    for number, task in enumerate(order):
        assert set(tasks[task].get("dependentTasks", [])) <= set(order[:number])
