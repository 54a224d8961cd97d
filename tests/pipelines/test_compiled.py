"""The compiled pipelines are current, are safe to run, and pass settings and results between the right steps."""

import functools
import json
from typing import Any

import pytest
import yaml

from infoxlm_core.run_file import RunConfig
from pipelines.submit import COMPILED, PIPELINES, read_declarations
from tests.pipelines.commands import invoke

RUN_PARAMETERS = {*RunConfig.model_fields, "overrides", "store", "image", "cluster"}
ENCODER_SECTIONS = {"finetuning", "evaluation"}
"""Sections that the training of a translator does not have."""
AFTER_SUCCESS_OR_FAILURE = {"strategy": "ALL_UPSTREAM_TASKS_COMPLETED"}


@functools.cache
def read(name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the specification of a compiled pipeline, and its settings for Kubernetes."""
    spec, platform = yaml.load_all((COMPILED / f"{name}.yaml").read_text(), yaml.CSafeLoader)
    return spec, platform["platforms"]["kubernetes"]


def read_executors(name: str) -> dict[str, Any]:
    """Return the settings for Kubernetes of each step of a compiled pipeline."""
    _, platform = read(name)
    return platform["deploymentSpec"]["executors"]


def read_tasks(name: str, component: str = "comp-exit-handler-1") -> dict[str, Any]:
    """Return the tasks of a group of a compiled pipeline. By default, of all steps but the one that always runs."""
    spec, _ = read(name)
    return spec["components"][component]["dag"]["tasks"]


def is_cached(task: dict[str, Any]) -> bool:
    return task.get("cachingOptions", {}).get("enableCache", False)


def test_committed_pipelines_are_current(tmp_path):
    invoke("compile", "--output", tmp_path)

    for name in PIPELINES:
        compiled = (tmp_path / f"{name}.yaml").read_text()
        assert compiled == (COMPILED / f"{name}.yaml").read_text(), "run `make compile` and commit the result"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("infoxlm", RUN_PARAMETERS - {"translation"}),
        ("translation", RUN_PARAMETERS - ENCODER_SECTIONS),
        ("ablations", RUN_PARAMETERS - {"pretraining", "registration", "translation"} | {"trials"}),
        (
            "translation-ablations",
            RUN_PARAMETERS - ENCODER_SECTIONS - {"pretraining", "registration", "translation"} | {"trials"},
        ),
        ("suite", {"suite", "overrides", "num_workers", "store", "image"}),
        ("promotion", {"model", "gate", "to", "by_hand", "store", "image"}),
    ],
)
def test_parameters_are_the_sections_of_a_config_and_the_location_of_the_run(name, expected):
    parameters = read_declarations(read(name)[0])

    assert set(parameters) == expected
    assert "defaultValue" not in parameters["image"]  # a run without an image must not pull one that does not exist


@pytest.mark.item("S08", "S12")
@pytest.mark.parametrize("name", PIPELINES)
def test_steps_run_the_given_image_and_branch_on_no_text(name):
    text = (COMPILED / f"{name}.yaml").read_text()

    assert "condition:" not in text
    assert ":latest" not in text
    for executor in read(name)[0]["deploymentSpec"]["executors"].values():
        image = executor["container"]["image"]
        assert image == "{{$.inputs.parameters['image']}}" or "pipelinechannel--image" in image


@pytest.mark.item("S04")
@pytest.mark.parametrize("name", PIPELINES)
def test_every_step_runs_without_root_and_knows_its_run(name):
    executors = read_executors(name)

    assert set(executors) == set(read(name)[0]["deploymentSpec"]["executors"])
    for settings in executors.values():
        assert settings["securityContext"] == {"runAsUser": "10001", "runAsGroup": "10001", "runAsNonRoot": True}
        assert {"name": "RUN_ID", "fieldPath": "metadata.labels['pipeline/runid']"} in settings["fieldPathAsEnv"]
        assert all(entry["optional"] for entry in settings["secretAsEnv"] + settings["configMapAsEnv"])


@pytest.mark.parametrize("name", PIPELINES)
def test_only_steps_that_register_or_promote_have_the_registry_account(name):
    executors = read_executors(name)

    trusted_steps = {step for step, settings in executors.items() if "infoxlm-registry" in str(settings)}
    assert trusted_steps == {"exec-register", "exec-promote"} & set(executors)
    assert all("infoxlm-mlflow" in str(settings) for settings in executors.values())


@pytest.mark.parametrize("name", PIPELINES)
def test_every_run_has_a_deadline_until_which_steps_are_retried(name):
    spec, platform = read(name)
    config = platform["pipelineConfig"]
    deadline = int(config["activeDeadlineSeconds"])
    groups = [group["dag"]["tasks"] for group in (spec["root"], *spec["components"].values()) if "dag" in group]
    policies = [task["retryPolicy"] for tasks in groups for task in tasks.values() if "retryPolicy" in task]

    assert 0 < deadline <= 31 * 86_400
    assert int(config["resourceTtlOnCompletion"]) > 0
    assert config["resourceTtlOnSuccess"] == config["resourceTtlOnFailure"] == config["resourceTtlOnCompletion"]
    for policy in policies:
        if name == "promotion":  # a second attempt would be refused as well
            assert "maxRetryCount" not in policy
        else:
            assert (policy["maxRetryCount"], policy["backoffDuration"]) == (2, "60s")
            assert int(policy["backoffMaxDuration"].removesuffix("s")) >= deadline


@pytest.mark.parametrize("name", PIPELINES)
def test_resources_of_a_pod_are_no_parameters(name):
    """Kubeflow 2.17 resolves a numeric parameter there to an empty string, so the pod would have no GPUs."""
    for executor in read(name)[0]["deploymentSpec"]["executors"].values():
        assert "{{$" not in str(executor["container"].get("resources"))


def test_step_that_starts_a_rayjob_passes_its_environment_on_and_has_no_gpus_itself():
    spec, _ = read("infoxlm")
    for name in ("prepare-corpus", "tokenize-corpus", "pretrain", "finetune"):
        passthroughs = spec["components"][f"comp-{name}"]["taskConfigPassthroughs"]
        applied_fields = {entry["field"]: entry.get("applyToTask") for entry in passthroughs}
        assert applied_fields == {"ENV": True, "RESOURCES": True}
    executors = spec["deploymentSpec"]["executors"]
    assert "accelerator" not in json.dumps(executors)
    for name in ("prepare-corpus", "tokenize-corpus", "merge", "evaluate", "register"):
        assert executors[f"exec-{name}"]["container"]["resources"]["resourceMemoryLimit"] == "16Gi"


def test_run_is_ended_after_success_and_failure_of_the_other_steps():
    tasks = read("infoxlm")[0]["root"]["dag"]["tasks"]

    assert set(tasks) == {"exit-handler-1", "end-run"}
    assert tasks["end-run"]["triggerPolicy"] == AFTER_SUCCESS_OR_FAILURE
    assert tasks["end-run"]["dependentTasks"] == ["exit-handler-1"]


def test_all_steps_are_cached_but_the_promotion_and_the_end_of_the_run():
    tasks = read_tasks("infoxlm") | read("infoxlm")[0]["root"]["dag"]["tasks"]

    cached_tasks = {name for name, task in tasks.items() if is_cached(task)}
    assert cached_tasks == set(tasks) - {"register", "end-run", "exit-handler-1"}


def test_merged_encoder_and_untrained_encoder_are_fine_tuned():
    tasks = read_tasks("infoxlm")

    for name in ("finetune", "evaluate", "register"):
        assert "merge" in tasks[name]["dependentTasks"]
    assert tasks["finetune-2"]["taskInfo"]["name"] == "fine-tune the untrained encoder"
    assert "merge" not in tasks["finetune-2"]["dependentTasks"]


def test_each_step_reads_only_its_section_of_the_overridden_settings():
    """Kubeflow's cache compares the inputs of a step, so an override invalidates only the steps that it concerns."""
    section_by_step = {
        "prepare-corpus": "preparation",
        "tokenize-corpus": "tokenization",
        "pretrain": "pretraining",
        "merge": "evaluation",
        "finetune": "finetuning",
        "finetune-2": "finetuning",
        "evaluate": "evaluation",
        "register": "registration",
    }
    inputs_by_step = {name: task["inputs"]["parameters"] for name, task in read_tasks("infoxlm").items()}

    settings = inputs_by_step.pop("check-settings")
    assert settings["overrides"] == {"componentInputParameter": "pipelinechannel--overrides"}
    assert set(inputs_by_step) == set(section_by_step)
    for step, inputs in inputs_by_step.items():
        output = {"producerTask": "check-settings", "outputParameterKey": section_by_step[step]}
        assert inputs["config"]["taskOutputParameter"] == output
        assert "overrides" not in json.dumps(inputs)


@pytest.mark.parametrize(
    ("name", "first_steps", "looped_steps", "last_step"),
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
def test_sweep_loops_over_its_trials_and_is_always_summarised(name, first_steps, looped_steps, last_step):
    summary = read(name)[0]["root"]["dag"]["tasks"][last_step]
    looped_tasks = read_tasks(name, "comp-for-loop-2")

    assert set(read_tasks(name)) == first_steps | {"for-loop-2"}
    assert set(looped_tasks) == looped_steps
    assert summary["triggerPolicy"] == AFTER_SUCCESS_OR_FAILURE
    # a cached step would not report to the MLflow run of this pipeline run
    assert not any(is_cached(task) for task in [*looped_tasks.values(), summary])
