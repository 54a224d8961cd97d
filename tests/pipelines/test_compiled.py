"""The compiled pipelines that a cluster gets: up to date, and safe to run."""

import json
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from infoxlm_core.run_file import RunConfig
from pipelines.cli import app
from pipelines.submit import PIPELINES

COMPILED = Path(__file__).parents[2] / "pipelines/compiled"
OF_ENCODERS = {"finetuning", "evaluation"}
"""Sections that a translator does not have."""


def read(name: str) -> dict:
    """Return the specification of a compiled pipeline."""
    return next(yaml.safe_load_all((COMPILED / f"{name}.yaml").read_text()))


def platform(name: str) -> dict:
    """Return the part of a compiled pipeline for Kubernetes: settings by executor."""
    _, second = yaml.safe_load_all((COMPILED / f"{name}.yaml").read_text())
    return second["platforms"]["kubernetes"]


def loop_tasks(name: str) -> dict:
    """Return the tasks inside the loop of a compiled pipeline."""
    components = read(name)["components"]
    return next(part["dag"]["tasks"] for key, part in components.items() if key.startswith("comp-for-loop"))


def test_the_committed_yaml_is_what_the_code_compiles_to(tmp_path):
    CliRunner().invoke(app, ["compile", "--output", str(tmp_path)])

    for name in PIPELINES:
        compiled = (tmp_path / f"{name}.yaml").read_text()
        assert compiled == (COMPILED / f"{name}.yaml").read_text(), "run `make compile` and commit the result"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("infoxlm", {*RunConfig.model_fields, "overrides", "store", "image", "cluster"} - {"translation"}),
        ("translation", {*RunConfig.model_fields, "overrides", "store", "image", "cluster"} - OF_ENCODERS),
        (
            "translation-ablations",
            {*RunConfig.model_fields, "trials", "overrides", "store", "image", "cluster"}
            - {*OF_ENCODERS, "pretraining", "registration", "translation"},
        ),
        (
            "ablations",
            {*RunConfig.model_fields, "trials", "overrides", "store", "image", "cluster"}
            - {"pretraining", "registration", "translation"},
        ),
        ("suite", {"suite", "overrides", "num_workers", "store", "image"}),
        ("promotion", {"model", "gate", "to", "by_hand", "store", "image"}),
    ],
)
def test_the_parameters_are_the_sections_of_a_config_and_where_to_run(name, expected):
    parameters = read(name)["root"]["inputDefinitions"]["parameters"]

    assert set(parameters) == expected
    assert "defaultValue" not in parameters["image"]  # a run without an image must not pull one that nobody pushed


@pytest.mark.item("S08", "S12")
@pytest.mark.parametrize("name", PIPELINES)
def test_no_step_installs_anything_or_branches_on_text(name):
    text = (COMPILED / f"{name}.yaml").read_text()

    assert "pip install" not in text
    assert "condition:" not in text
    images = {executor["container"]["image"] for executor in read(name)["deploymentSpec"]["executors"].values()}
    assert images == {"{{$.inputs.parameters['image']}}"} or all("pipelinechannel--image" in image for image in images)
    assert ":latest" not in text


@pytest.mark.item("S04")
@pytest.mark.parametrize("name", PIPELINES)
def test_every_step_runs_as_nobody_and_knows_its_pipeline_run(name):
    executors = platform(name)["deploymentSpec"]["executors"]

    assert set(executors) == set(read(name)["deploymentSpec"]["executors"])
    for settings in executors.values():
        assert settings["securityContext"] == {"runAsUser": "10001", "runAsGroup": "10001", "runAsNonRoot": True}
        assert {"name": "RUN_ID", "fieldPath": "metadata.labels['pipeline/runid']"} in settings["fieldPathAsEnv"]
        assert all(entry["optional"] for entry in settings["secretAsEnv"] + settings["configMapAsEnv"])


@pytest.mark.parametrize("name", PIPELINES)
def test_only_the_steps_that_register_or_promote_have_the_account_that_may(name):
    executors = platform(name)["deploymentSpec"]["executors"]

    trusted = {step for step, settings in executors.items() if "infoxlm-registry" in str(settings)}
    assert trusted == {step for step in executors if step in ("exec-register", "exec-promote")}
    assert all("infoxlm-mlflow" in str(settings) for settings in executors.values())


@pytest.mark.parametrize("name", PIPELINES)
def test_every_run_ends_and_a_step_may_be_tried_again_until_then(name):
    config = platform(name)["pipelineConfig"]
    longest = int(config["activeDeadlineSeconds"])
    parts = [part["dag"]["tasks"] for part in (read(name)["root"], *read(name)["components"].values()) if "dag" in part]
    policies = [task["retryPolicy"] for tasks in parts for task in tasks.values() if "retryPolicy" in task]

    assert 0 < longest <= 31 * 86_400 and int(config["resourceTtlOnCompletion"]) > 0
    assert config["resourceTtlOnSuccess"] == config["resourceTtlOnFailure"] == config["resourceTtlOnCompletion"]
    assert {policy.get("maxRetryCount") for policy in policies} == ({None} if name == "promotion" else {2})
    for policy in policies:
        assert policy["backoffDuration"] == "60s" or name == "promotion"
        assert int(policy["backoffMaxDuration"].removesuffix("s")) >= longest or name == "promotion"


@pytest.mark.parametrize("name", PIPELINES)
def test_no_parameter_stands_in_the_resources_of_a_pod(name):
    """Kubeflow 2.17 resolves a numeric parameter there to an empty string, and the GPUs are gone."""
    for executor in read(name)["deploymentSpec"]["executors"].values():
        assert "{{$" not in str(executor["container"].get("resources"))


def test_a_step_that_starts_a_rayjob_passes_its_environment_on_and_has_no_gpus_itself():
    spec = read("infoxlm")
    for name in ("prepare-corpus", "tokenize-corpus", "pretrain", "finetune"):
        passed = spec["components"][f"comp-{name}"]["taskConfigPassthroughs"]
        assert {entry["field"]: entry.get("applyToTask") for entry in passed} == {"ENV": True, "RESOURCES": True}
    resources = {
        name.removeprefix("exec-"): executor["container"].get("resources", {})
        for name, executor in spec["deploymentSpec"]["executors"].items()
    }
    assert not any("accelerator" in amounts for amounts in resources.values())
    for name in ("prepare-corpus", "tokenize-corpus", "merge", "evaluate", "register"):
        assert resources[name]["resourceMemoryLimit"] == "16Gi"


def tasks_of_infoxlm() -> dict:
    """Return the tasks of the main pipeline, without the one that ends its run."""
    return read("infoxlm")["components"]["comp-exit-handler-1"]["dag"]["tasks"]


def test_the_run_is_ended_whatever_ends_the_other_steps():
    tasks = read("infoxlm")["root"]["dag"]["tasks"]

    assert set(tasks) == {"exit-handler-1", "end-run"}
    assert tasks["end-run"]["triggerPolicy"] == {"strategy": "ALL_UPSTREAM_TASKS_COMPLETED"}
    assert tasks["end-run"]["dependentTasks"] == ["exit-handler-1"]


def test_a_cached_result_neither_decides_a_promotion_nor_ends_a_run():
    tasks = tasks_of_infoxlm() | read("infoxlm")["root"]["dag"]["tasks"]

    cached = {name for name, task in tasks.items() if task.get("cachingOptions", {}).get("enableCache")}
    assert cached == set(tasks) - {"register", "end-run", "exit-handler-1"}


def test_every_step_has_its_inputs_from_the_step_before():
    tasks = tasks_of_infoxlm()
    names = {task: tasks[task]["taskInfo"]["name"] for task in tasks}

    order = ["check-settings", "prepare-corpus", "tokenize-corpus", "pretrain", "merge", "finetune", "finetune-2"]
    order += ["evaluate", "register"]
    assert set(tasks) == set(order)
    for number, task in enumerate(order):
        assert set(tasks[task].get("dependentTasks", [])) <= set(order[:number])
    for task in ("finetune", "evaluate", "register"):  # the merged encoder, and for the start the start itself
        assert "merge" in tasks[task]["dependentTasks"]
    assert "merge" not in tasks["finetune-2"]["dependentTasks"]
    assert names["finetune-2"] == "fine-tune the untrained encoder" and len(set(names.values())) == len(names)


def test_an_override_reaches_a_step_only_as_the_section_that_it_changes():
    """Kubeflow's cache compares the inputs of a step, so steps before the changed section are found again."""
    sections = {
        "prepare-corpus": "preparation",
        "tokenize-corpus": "tokenization",
        "pretrain": "pretraining",
        "merge": "evaluation",
        "finetune": "finetuning",
        "finetune-2": "finetuning",
        "evaluate": "evaluation",
        "register": "registration",
    }
    tasks = tasks_of_infoxlm()
    given = {name: task["inputs"]["parameters"] for name, task in tasks.items()}

    for name, section in sections.items():
        assert given[name]["config"]["taskOutputParameter"] == {
            "producerTask": "check-settings",
            "outputParameterKey": section,
        }
        assert "overrides" not in json.dumps(given[name])
    assert given["check-settings"]["overrides"] == {"componentInputParameter": "pipelinechannel--overrides"}


def test_the_results_of_an_evaluation_are_pages_and_metrics():
    outputs = read("infoxlm")["components"]["comp-evaluate"]["outputDefinitions"]["artifacts"]

    kinds = {name: output["artifactType"]["schemaTitle"] for name, output in outputs.items()}
    expected = {"report": "system.HTML", "model_card": "system.Markdown", "metrics": "system.Metrics"}
    assert kinds.items() >= expected.items()


@pytest.mark.parametrize(
    ("name", "before", "loop", "last"),
    [
        (
            "ablations",
            {"check-settings", "prepare-corpus", "tokenize-corpus"},
            {"pretrain", "finetune", "evaluate"},
            "compare",
        ),
        ("suite", {"plan-suite"}, {"measure"}, "summarise"),
    ],
)
def test_a_sweep_prepares_once_loops_over_its_trials_and_always_sums_up(name, before, loop, last):
    spec = read(name)
    final, looped = spec["root"]["dag"]["tasks"][last], loop_tasks(name)

    assert set(spec["components"]["comp-exit-handler-1"]["dag"]["tasks"]) == before | {"for-loop-2"}
    assert set(looped) == loop
    assert final["triggerPolicy"] == {"strategy": "ALL_UPSTREAM_TASKS_COMPLETED"}
    for task in [*looped.values(), final]:  # each reports to the MLflow run of this pipeline run
        assert not task.get("cachingOptions", {}).get("enableCache")
