"""The compiled pipelines that a cluster gets: current, small, and without surprises."""

import json
from pathlib import Path

import pytest
import yaml
from kfp import compiler

from infoxlm_core.run_file import RunConfig
from pipelines.ablations import ablations
from pipelines.infoxlm import infoxlm
from pipelines.promotion import promotion
from pipelines.suite import suite

COMPILED = Path(__file__).parents[2] / "pipelines/compiled"
DAGS = {"infoxlm": infoxlm, "ablations": ablations, "suite": suite, "promotion": promotion}
PLACE = {"store", "image", "cluster"}


def read(name: str) -> dict:
    return next(yaml.safe_load_all((COMPILED / f"{name}.yaml").read_text()))


def platform(name: str) -> dict:
    """What only Kubernetes understands: settings by executor."""
    _, second = yaml.safe_load_all((COMPILED / f"{name}.yaml").read_text())
    return second["platforms"]["kubernetes"]


@pytest.mark.parametrize("name", DAGS)
def test_the_committed_yaml_is_what_the_code_compiles_to(tmp_path, name):
    compiler.Compiler().compile(DAGS[name], str(tmp_path / "now.yaml"))

    committed = (COMPILED / f"{name}.yaml").read_text()
    assert (tmp_path / "now.yaml").read_text() == committed, "run `make compile` and commit the result"


def test_its_parameters_are_the_sections_of_a_config_and_the_place_to_run():
    parameters = set(read("infoxlm")["root"]["inputDefinitions"]["parameters"])

    assert parameters == set(RunConfig.model_fields) | PLACE | {"overrides"}


def test_an_ablation_has_trials_where_a_run_has_pretraining_and_registers_nothing():
    parameters = set(read("ablations")["root"]["inputDefinitions"]["parameters"])

    assert parameters == set(RunConfig.model_fields) - {"pretraining", "registration"} | PLACE | {"trials", "overrides"}


@pytest.mark.parametrize("name", DAGS)
def test_a_run_without_an_image_is_refused_and_does_not_look_for_one_that_nobody_has_pushed(name):
    image = read(name)["root"]["inputDefinitions"]["parameters"]["image"]

    assert set(image) == {"description", "parameterType"}


@pytest.mark.item("S08", "S12")
@pytest.mark.parametrize("name", DAGS)
def test_no_step_installs_anything_or_branches_on_text(name):
    text = (COMPILED / f"{name}.yaml").read_text()

    assert "pip install" not in text
    assert "condition:" not in text
    images = {executor["container"]["image"] for executor in read(name)["deploymentSpec"]["executors"].values()}
    assert images == {"{{$.inputs.parameters['image']}}"} or all("pipelinechannel--image" in image for image in images)
    assert ":latest" not in text


@pytest.mark.item("S04")
@pytest.mark.parametrize("name", DAGS)
def test_every_step_runs_as_nobody_and_knows_its_pipeline_run(name):
    executors = platform(name)["deploymentSpec"]["executors"]

    assert set(executors) == set(read(name)["deploymentSpec"]["executors"])
    for settings in executors.values():
        assert settings["securityContext"] == {"runAsUser": "10001", "runAsGroup": "10001", "runAsNonRoot": True}
        assert {"name": "RUN_ID", "fieldPath": "metadata.labels['pipeline/runid']"} in settings["fieldPathAsEnv"]
        assert all(entry["optional"] for entry in settings["secretAsEnv"] + settings["configMapAsEnv"])


@pytest.mark.parametrize("name", DAGS)
def test_only_the_steps_that_register_or_promote_have_the_account_that_may(name):
    executors = platform(name)["deploymentSpec"]["executors"]

    trusted = {step for step, settings in executors.items() if "infoxlm-registry" in str(settings)}
    assert trusted == {step for step in executors if step in ("exec-register", "exec-promote")}
    assert all("infoxlm-mlflow" in str(settings) for settings in executors.values())


@pytest.mark.parametrize("name", DAGS)
def test_nothing_runs_for_ever(name):
    said = platform(name)["pipelineConfig"]

    assert 0 < int(said["activeDeadlineSeconds"]) <= 31 * 86_400 and int(said["resourceTtlOnCompletion"]) > 0
    assert said["resourceTtlOnSuccess"] == said["resourceTtlOnFailure"] == said["resourceTtlOnCompletion"]


@pytest.mark.parametrize("name", DAGS)
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
    for name in ("prepare-corpus", "tokenize-corpus", "evaluate", "register"):
        assert resources[name]["resourceMemoryLimit"] == "16Gi"


@pytest.mark.parametrize("name", DAGS)
def test_every_parameter_reaches_its_step_through_all_loops(name):
    spec = read(name)

    for part in [component for component in spec["components"].values() if "dag" in component]:
        given = set(part["inputDefinitions"]["parameters"])
        for task in part["dag"]["tasks"].values():
            asked = {
                said.get("componentInputParameter") for said in task.get("inputs", {}).get("parameters", {}).values()
            }
            assert asked - {None} <= given


def test_steps_are_tried_again_and_promotions_are_not():
    for task in read("infoxlm")["root"]["dag"]["tasks"].values():
        assert task["retryPolicy"]["maxRetryCount"] == 2 and task["retryPolicy"]["backoffDuration"] == "60s"
    assert not read("promotion")["root"]["dag"]["tasks"]["promote"].get("retryPolicy", {}).get("maxRetryCount")


@pytest.mark.parametrize("name", DAGS)
def test_a_step_that_has_run_for_days_may_still_be_tried_again(name):
    longest = int(platform(name)["pipelineConfig"]["activeDeadlineSeconds"])
    parts = [part["dag"]["tasks"] for part in (read(name)["root"], *read(name)["components"].values()) if "dag" in part]
    retried = [task["retryPolicy"] for tasks in parts for task in tasks.values() if "retryPolicy" in task]

    assert retried
    for policy in retried:
        assert int(policy["backoffMaxDuration"].removesuffix("s")) >= longest or not policy.get("maxRetryCount")


def test_every_step_has_its_inputs_from_the_step_before():
    tasks = read("infoxlm")["root"]["dag"]["tasks"]

    order = [
        "check-settings",
        "prepare-corpus",
        "tokenize-corpus",
        "pretrain",
        "finetune",
        "finetune-2",
        "evaluate",
        "register",
    ]
    assert set(tasks) == set(order)
    for number, task in enumerate(order):
        assert set(tasks[task].get("dependentTasks", [])) <= set(order[:number])


def test_an_override_reaches_a_step_only_as_the_section_that_it_changes():
    """Kubeflow compares the values that a step is given: those before the changed section are found again."""
    sections = {
        "prepare-corpus": "preparation",
        "tokenize-corpus": "tokenization",
        "pretrain": "pretraining",
        "finetune": "finetuning",
        "finetune-2": "finetuning",
        "evaluate": "evaluation",
        "register": "registration",
    }
    tasks = read("infoxlm")["root"]["dag"]["tasks"]
    given = {name: task["inputs"]["parameters"] for name, task in tasks.items()}

    for name, section in sections.items():
        assert given[name]["config"]["taskOutputParameter"] == {
            "producerTask": "check-settings",
            "outputParameterKey": section,
        }
        assert "overrides" not in json.dumps(given[name])
    assert given["check-settings"]["overrides"] == {"componentInputParameter": "overrides"}


def test_the_names_of_the_steps_tell_the_story_and_results_are_pages():
    tasks = read("infoxlm")["root"]["dag"]["tasks"]
    names = {name: task["taskInfo"]["name"] for name, task in tasks.items()}
    pages = read("infoxlm")["components"]["comp-evaluate"]["outputDefinitions"]["artifacts"]

    assert len(set(names.values())) == len(tasks) and not [name for name in names if names[name] == name]
    assert names["finetune-2"] == "fine-tune the untrained encoder"
    kinds = {name: said["artifactType"]["schemaTitle"] for name, said in pages.items()}
    assert (kinds["report"], kinds["model_card"], kinds["metrics"]) == (
        "system.HTML",
        "system.Markdown",
        "system.Metrics",
    )


def test_an_ablation_prepares_once_loops_over_trials_and_always_compares():
    spec = read("ablations")
    loop = next(part for name, part in spec["components"].items() if name.startswith("comp-for-loop"))
    body = spec["components"]["comp-exit-handler-1"]["dag"]["tasks"]

    assert set(body) == {"check-settings", "prepare-corpus", "tokenize-corpus", "for-loop-2"}
    assert set(loop["dag"]["tasks"]) == {"pretrain", "finetune", "evaluate"}
    compare = spec["root"]["dag"]["tasks"]["compare"]
    assert compare["triggerPolicy"] == {"strategy": "ALL_UPSTREAM_TASKS_COMPLETED"}


def test_the_steps_of_a_trial_always_run_so_that_its_mlflow_run_is_complete():
    spec = read("ablations")
    loop = next(part for name, part in spec["components"].items() if name.startswith("comp-for-loop"))

    for task in [*loop["dag"]["tasks"].values(), spec["root"]["dag"]["tasks"]["compare"]]:
        assert not task["cachingOptions"].get("enableCache")


def test_a_suite_plans_once_loops_over_batches_of_points_and_always_sums_up():
    spec = read("suite")
    loop = next(part for name, part in spec["components"].items() if name.startswith("comp-for-loop"))
    body = spec["components"]["comp-exit-handler-1"]["dag"]["tasks"]

    assert set(spec["root"]["inputDefinitions"]["parameters"]) == {
        *("suite", "overrides", "num_workers"),
        *PLACE - {"cluster"},
    }
    assert set(body) == {"plan-suite", "for-loop-2"} and set(loop["dag"]["tasks"]) == {"measure"}
    assert body["for-loop-2"]["dependentTasks"] == ["plan-suite"]
    last = spec["root"]["dag"]["tasks"]["summarise"]
    assert last["triggerPolicy"] == {"strategy": "ALL_UPSTREAM_TASKS_COMPLETED"}
    for task in [*loop["dag"]["tasks"].values(), *body.values(), last]:
        assert not task.get("cachingOptions", {}).get("enableCache")
