"""`infoxlm submit` starts a run on Kubeflow and follows it; `infoxlm cancel` terminates it."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import Result
from kfp import components

from components.platform import parameters, runtime
from components.settings.cluster import ClusterFile
from infoxlm_core import run_file
from infoxlm_core.errors import Preempted, ResourcesUnavailable, TrainingDiverged, WorkerLost
from pipelines import submit
from pipelines.cli import cluster as cluster_commands
from pipelines.cli.app import CONFIGS
from pipelines.progress import Progress
from tests.pipelines.commands import assert_refused, invoke
from tests.pipelines.conftest import IMAGE, SUITE, write_cluster

ROOT = Path(__file__).parents[2]
RUN = """
preparation:
  languages: [en, de]
  held_out_share: 0.1
  corpora:
    - {name: a, format: tsv, path: "s3://data/a.tsv", languages: [en, de]}
num_workers: 8
"""
EIGHT_WORKERS = [
    "--set", "num_workers=8", "--set", "translation.virtual_shards=8", "--set", "pretraining.batches.virtual_shards=8",
]  # fmt: skip


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch) -> None:
    """Make the command wait neither between requests nor before it submits a run again."""
    monkeypatch.setattr(submit.time, "sleep", lambda seconds: None)


@pytest.fixture
def config(tmp_path) -> Path:
    (tmp_path / "run.yaml").write_text(RUN)
    return tmp_path / "run.yaml"


@pytest.fixture
def cluster(tmp_path) -> Path:
    return write_cluster(tmp_path)


@pytest.fixture
def submit_file(kubeflow, cluster) -> Callable[..., Result]:
    """Return a function that submits a file to the server with options of `infoxlm submit`."""
    return lambda file, *options: invoke("submit", file, "--cluster", cluster, "--host", kubeflow.host, *options)


@pytest.fixture
def submit_parameters(kubeflow, submit_file) -> Callable[..., dict[str, Any]]:
    """Return a function that submits a file and returns the parameters that the server has received."""

    def submit_and_read(file: Path, *options: object) -> dict[str, Any]:
        result = submit_file(file, "--no-wait", *options)
        assert result.exit_code == 0, result.stderr
        return kubeflow.list_bodies("/runs")[-1]["runtime_config"]["parameters"]

    return submit_and_read


def test_request_has_the_pipeline_its_parameters_and_where_it_runs(kubeflow, config, cluster, submit_file):
    result = submit_file(config, "--no-wait", "--set", "pretraining.optimization.steps=77000")

    assert result.exit_code == 0, result.stderr
    assert f"{kubeflow.host}/#/runs/details/r-1" in result.stdout
    assert kubeflow.experiments[0]["display_name"] == "infoxlm"
    [body] = kubeflow.list_bodies("/runs")
    spec, platform = submit.read_compiled_for_cluster(run_file.load_config(ClusterFile, cluster), "infoxlm")
    assert body["pipeline_spec"] == {"pipeline_spec": spec, "platform_spec": platform}
    assert (body["display_name"], body["service_account"], body["experiment_id"]) == ("run", "infoxlm-runner", "e-1")
    assert body["plugins_input"] == {"mlflow": {"experiment_name": "infoxlm"}}
    assert body["runtime_config"]["pipeline_root"] == "s3://infoxlm/runs"
    values = body["runtime_config"]["parameters"]
    assert values["store"] == "s3://infoxlm/store"
    assert values["image"] == values["cluster"]["image"] == IMAGE
    assert (values["cluster"]["pool"]["gpus"], values["num_workers"]) == (8, 8)
    assert values["pretraining"]["optimization"]["steps"] == 77_000
    assert set(values) <= set(submit.read_declarations(spec))


def test_pods_request_the_resources_of_the_cluster_file(cluster):
    cluster_file = run_file.load_config(
        ClusterFile, cluster, ["steps={cpu: 500m, memory: 2Gi}", "pool.node_selector={a: b}"]
    )

    spec, platform = submit.read_compiled_for_cluster(cluster_file, "suite")

    containers = {name: executor["container"] for name, executor in spec["deploymentSpec"]["executors"].items()}
    assert containers["exec-plan-suite"]["resources"] == {
        "resourceCpuLimit": "500m", "resourceCpuRequest": "500m",
        "resourceMemoryLimit": "2Gi", "resourceMemoryRequest": "2Gi",
    }  # fmt: skip
    assert containers["exec-measure"]["resources"] == {
        "resourceCpuLimit": "64", "resourceCpuRequest": "64",
        "resourceMemoryLimit": "512Gi", "resourceMemoryRequest": "512Gi",
        "accelerator": {"resourceType": "nvidia.com/gpu", "resourceCount": "8"},
    }  # fmt: skip
    pod = platform["platforms"]["kubernetes"]["deploymentSpec"]["executors"]["exec-measure"]
    assert pod["nodeSelector"] == {"labels": {"a": "b"}}
    assert pod["tolerations"] == [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}]


def test_ablation_has_its_trials_as_parameters(config, submit_parameters):
    options = ["--pipeline", "ablations", "--variants", CONFIGS / "ablations.yaml", "--seeds", "1,2"]

    values = submit_parameters(config, *options)

    assert {trial["trial"]["seed"] for trial in values["trials"]} == {1, 2}
    assert cluster_commands.list_iteration_names(values)[:2] == ["full seed 1", "-XLCO seed 1"]


def test_suite_has_its_models_as_parameters(tmp_path, submit_parameters):
    (tmp_path / "suite.yaml").write_text(SUITE)

    values = submit_parameters(tmp_path / "suite.yaml", "--pipeline", "suite")

    assert values["suite"]["models"][0]["name"] == "ours"
    assert values["num_workers"] == 8
    assert cluster_commands.list_iteration_names(values) == ["ours tatoeba"]


@pytest.mark.parametrize(
    ("pipeline", "option", "value"),
    [
        ("infoxlm", "--seeds", "1,2,3"),
        ("infoxlm", "--only", "full"),
        ("promotion", "--variants", "ablations"),
        ("suite", "--seeds", "7"),
    ],
)
def test_option_that_the_pipeline_does_not_use_is_refused(kubeflow, config, submit_file, pipeline, option, value):
    result = submit_file(config, "--no-wait", "--pipeline", pipeline, option, value)

    assert_refused(result, f"{option} has no effect on the pipeline {pipeline}. Remove it, or")
    assert kubeflow.list_bodies("/runs") == []


def test_override_of_a_seed_that_each_trial_replaces_is_refused(config, submit_file):
    result = submit_file(config, "--pipeline", "ablations", "--set", "pretraining.seed=5")

    assert_refused(result, "--set 'pretraining.seed=5' has no effect")


def test_promotion_has_the_candidate_and_its_gate_as_parameters(config, submit_parameters):
    gate = "registration.gate={classification/mean: -0.01}"

    assert submit_parameters(config, "--pipeline", "promotion", "--set", gate) == {
        "model": "models:/infoxlm@candidate",
        "gate": {"retrieval/served": 0.0, "classification/mean": -0.01},
        "store": "s3://infoxlm/store",
        "image": IMAGE,
    }


def test_translator_has_the_section_translation_as_a_parameter(config, submit_file, submit_parameters):
    values = submit_parameters(CONFIGS / "translation.yaml", "--pipeline", "translation", *EIGHT_WORKERS)

    assert values["translation"]["languages"] == ["en", "fr"]
    assert "finetuning" not in values
    assert_refused(submit_file(config, "--no-wait", "--pipeline", "translation"), "has no section translation")


@pytest.mark.parametrize(
    ("pipeline", "matching_pipeline"), [("infoxlm", "translation"), ("ablations", "translation-ablations")]
)
def test_pipeline_that_would_ignore_the_section_translation_is_refused(
    kubeflow, submit_file, pipeline, matching_pipeline
):
    result = submit_file(CONFIGS / "translation.yaml", "--no-wait", "--pipeline", pipeline, *EIGHT_WORKERS)

    assert_refused(result, f"the pipeline {pipeline} trains no translator. Use `infoxlm submit` with --pipeline")
    assert f"--pipeline {matching_pipeline}, or remove" in result.stderr
    assert not kubeflow.requests


def test_sweep_of_translators_has_its_trials_as_parameters(submit_parameters):
    options = ["--pipeline", "translation-ablations", "--variants", CONFIGS / "initialisations.yaml", "--seeds", "1"]

    values = submit_parameters(CONFIGS / "translation.yaml", *options, *EIGHT_WORKERS)

    assert [item["trial"]["variant"] for item in values["trials"]] == ["random", "embeddings", "CLM", "MLM"]


def test_no_cache_disables_the_cache_in_loops_too(kubeflow, config, submit_file):
    submit_file(config, "--no-wait", "--no-cache", "--pipeline", "ablations", "--variants", CONFIGS / "ablations.yaml")

    [body] = kubeflow.list_bodies("/runs")
    spec, _ = submit.read_compiled("ablations")
    assert "enableCache" in json.dumps(spec)
    assert "enableCache" not in json.dumps(body["pipeline_spec"])


def test_each_change_of_a_run_and_its_summary_are_printed_once(kubeflow, config, submit_file, monkeypatch):
    kubeflow.states = ["PENDING", "RUNNING", "RUNNING", "RUNNING", "SUCCEEDED"]
    monkeypatch.setattr(runtime, "read_summary", lambda store, run_id: f"summary of {run_id} in {store}")

    result = submit_file(config)

    assert result.exit_code == 0
    assert [line.partition("  ")[2] for line in result.stdout.splitlines() if line.startswith("0:00:")] == [
        "run: pending",
        "pre-train the encoder: started",
        "run: running",
        "pre-train the encoder: succeeded",
        "run: succeeded",
    ]
    assert result.stdout.endswith("\nsummary of r-1 in s3://infoxlm/store\n")


@pytest.mark.parametrize(
    ("error", "submissions"), [(TrainingDiverged("pretrain: diverged"), 1), (WorkerLost("pretrain: a worker"), 4)]
)
def test_only_a_temporary_failure_is_submitted_again_and_the_exit_code_is_that_of_the_step(
    kubeflow, config, submit_file, monkeypatch, error, submissions
):
    kubeflow.states = ["FAILED"]
    monkeypatch.setattr(runtime, "read_failure", lambda store, run_id: error)
    monkeypatch.setattr(runtime, "read_summary", lambda store, run_id: "")

    result = submit_file(config)

    assert_refused(result, f"{type(error).__name__}: {error}", error.exit_code)
    assert len(kubeflow.list_bodies("/runs")) == submissions


def test_run_is_submitted_again_until_it_succeeds(kubeflow, config, submit_file, monkeypatch):
    kubeflow.states = ["RUNNING", "FAILED", "RUNNING", "FAILED", "RUNNING", "SUCCEEDED"]
    error = ResourcesUnavailable("pretrain: no GPUs after 3600 s")
    monkeypatch.setattr(runtime, "read_failure", lambda store, run_id: error)
    monkeypatch.setattr(runtime, "read_summary", lambda store, run_id: "")

    result = submit_file(config)

    assert result.exit_code == 0, result.stderr
    first_body, *later_bodies = kubeflow.list_bodies("/runs")
    assert later_bodies == [first_body, first_body]
    assert "pretrain: no GPUs after 3600 s; submitting it again in 60 s (2 of 3)" in result.stdout


def test_sweep_with_too_many_steps_for_argo_is_refused_before_anything_is_sent(kubeflow, config, submit_file):
    suite = [CONFIGS / "suite.yaml", "--pipeline", "suite", "--set", f"tasks.mlqa.seeds={list(range(130))}"]
    ablation = [config, "--pipeline", "ablations", "--variants", CONFIGS / "ablations.yaml", "--only", "full"]
    seeds = ",".join(str(seed) for seed in range(51))

    suite_result = submit_file(*suite, "--no-wait")
    ablation_result = submit_file(*ablation, "--no-wait", "--seeds", seeds)

    assert_refused(suite_result, "14132 trials need 1414 steps, but Argo allows 150")
    assert_refused(ablation_result, "51 trials need 153 steps, but Argo allows 150")
    assert not kubeflow.requests
    assert submit_file(*ablation, "--no-wait", "--seeds", seeds.removesuffix(",50")).exit_code == 0


@pytest.mark.slow
def test_large_settings_are_passed_through_the_store(kubeflow, config, tmp_path, bucket):
    run = yaml.safe_load(RUN)
    (corpus,) = run["preparation"]["corpora"]
    corpora = [corpus | {"name": f"c{number}", "path": f"s3://data/{'x' * 300}/{number}.tsv"} for number in range(400)]
    run["preparation"]["corpora"] = corpora
    config.write_text(json.dumps(run))  # JSON, because safe_dump would write anchors, which are not allowed
    cluster = write_cluster(tmp_path, store="s3://models/store")

    result = invoke("submit", config, "--cluster", cluster, "--host", kubeflow.host, "--no-wait")

    assert result.exit_code == 0, result.stderr
    [body] = kubeflow.list_bodies("/runs")
    values = body["runtime_config"]["parameters"]
    assert len(json.dumps(values)) < 4096
    assert len(parameters.dereference("s3://models/store", values["preparation"])["corpora"]) == 400


@pytest.mark.parametrize("last_state", ["FAILED", "CANCELED"])
def test_cancelled_run_has_its_own_exit_code_and_is_not_submitted_again(
    kubeflow, config, submit_file, monkeypatch, last_state
):
    """Kubeflow 2.17 ends a terminated run as FAILED, and the stopped step has stored a temporary failure."""
    kubeflow.states = ["PENDING", "RUNNING", "CANCELING", "CANCELING", last_state]
    error = Preempted("pretrain: rayjob/j-1 was stopped and deleted: run again to continue")
    monkeypatch.setattr(runtime, "read_failure", lambda store, run_id: error)
    monkeypatch.setattr(runtime, "read_summary", lambda store, run_id: "")

    result = submit_file(config)

    assert_refused(result, "Cancelled: Run r-1 was cancelled. Submit it again", 6)
    assert len(kubeflow.list_bodies("/runs")) == 1
    assert "run: canceling" in result.stdout
    assert "run: canceled" in result.stdout


def test_ctrl_c_ends_the_command_but_not_the_run_which_cancel_terminates(kubeflow, config, submit_file, monkeypatch):
    def interrupt(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(submit, "follow_run", interrupt)

    result = submit_file(config)

    assert result.exit_code == 0
    assert f"the run continues on the cluster; to end it: infoxlm cancel r-1 --host {kubeflow.host}" in result.stdout
    assert kubeflow.list_bodies("/runs/r-1:terminate") == []
    assert invoke("cancel", "r-1", "--host", kubeflow.host).exit_code == 0
    assert len(kubeflow.list_bodies("/runs/r-1:terminate")) == 1


@pytest.mark.parametrize(
    ("health", "message"),
    [
        ("<html>Log in</html>", "is not the API of Kubeflow Pipelines. If it is a login page"),
        ({"status": "ok"}, "is not the API of Kubeflow Pipelines"),
        ({"multi_user": False, "tag_name": "2.16.1"}, "2.16.1, which is too old. Update it to 2.17 or newer."),
    ],
)
def test_server_that_is_no_supported_kubeflow_is_refused(kubeflow, config, submit_file, health, message):
    kubeflow.health = health

    assert_refused(submit_file(config), message)
    assert kubeflow.list_bodies("/runs") == []


@pytest.mark.parametrize("version", ["2.17.0", "unknown", "10.0.0"])
def test_new_or_unknown_version_of_kubeflow_is_accepted(kubeflow, version):
    kubeflow.health = {"multi_user": False, "tag_name": version}

    assert submit.connect(kubeflow.host)


@pytest.mark.parametrize("host", ["", "a\nb", "ftp://x", "https://", "localhost:8080", "kubeflow.example"])
def test_host_that_is_no_url_is_refused(host):
    result = invoke("cancel", "r-1", "--host", host)

    assert_refused(result, f"--host {host!r} is not a URL. Give the URL of Kubeflow Pipelines")


def test_run_is_in_the_namespace_of_the_cluster_file(kubeflow, config, tmp_path):
    kubeflow.health = {"multi_user": True, "tag_name": "2.17.0"}
    cluster = write_cluster(tmp_path, namespace="team-a")

    result = invoke("submit", config, "--cluster", cluster, "--host", kubeflow.host, "--no-wait")

    assert result.exit_code == 0, result.stderr
    assert kubeflow.experiments[0]["namespace"] == "team-a"


def test_failed_run_is_a_failure_although_its_error_cannot_be_read(kubeflow, config, submit_file, monkeypatch):
    kubeflow.states = ["FAILED"]
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "k")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "s")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")

    result = submit_file(config)

    assert_refused(result, "error message in the store cannot be read", 70)


def test_run_is_followed_although_the_server_does_not_answer_for_a_while(kubeflow):
    client = submit.connect(kubeflow.host)
    kubeflow.refusal = (503, "upgrading")
    lines = []

    def record_and_recover(line: str) -> None:
        lines.append(line)
        kubeflow.refusal = None

    progress = Progress(submit.read_compiled("infoxlm")[0])
    assert submit.follow_run(client, kubeflow.host, "r-1", progress, record_and_recover) == "SUCCEEDED"
    assert "503: upgrading" in lines[0]
    assert "The run continues on the cluster" in lines[0]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("pretraining.optimization.stepz=1", "stepz: unknown name"),
        ("num_workers=12", "num_workers (12) must be 1 or more, and a multiple of pool.gpus"),
        ("num_workers=0", "num_workers (0) must be 1 or more"),
    ],
)
def test_invalid_settings_are_refused_before_anything_is_sent(kubeflow, config, submit_file, override, message):
    assert_refused(submit_file(config, "--set", override), message)
    assert kubeflow.requests == []


def test_missing_server_is_a_temporary_failure_and_a_refusal_is_not(kubeflow, config, cluster, submit_file):
    missing = invoke("submit", config, "--cluster", cluster, "--host", "http://127.0.0.1:9")
    kubeflow.refusal = (403, "infoxlm-runner may not")
    refused = submit_file(config)

    assert missing.exit_code == 75
    assert "http://127.0.0.1:9 does not answer" in missing.stderr.splitlines()[-1]
    assert refused.exit_code == 2
    assert "refuses the request (403: infoxlm-runner may not)" in refused.stderr


def test_token_of_the_environment_is_sent(kubeflow, config, submit_file, monkeypatch):
    monkeypatch.setenv("KF_PIPELINES_TOKEN", "t0ken")

    submit_file(config, "--no-wait")

    headers = next(headers for _, path, _, headers in kubeflow.requests if path == "/runs")
    assert headers["authorization"] == "Bearer t0ken"


@pytest.mark.slow
def test_runs_of_submit_of_the_page_and_of_kfp_share_cached_results(kubeflow, config, cluster, submit_file, tmp_path):
    """Kubeflow's cache compares steps, and a result of one pipeline root is not readable by a run of another."""
    submit_file(config, "--no-wait")
    invoke("upload", cluster, "--host", kubeflow.host, "--run", config)
    submit_file(config, "--save", tmp_path / "saved.yaml")
    command = [Path(sys.executable).with_name("kfp"), "--endpoint", kubeflow.host, "run", "create", "-e", "infoxlm"]
    subprocess.run([*command, "-r", "by hand", "-f", tmp_path / "saved.yaml"], check=True, capture_output=True)

    run_of_submit, run_of_kfp = kubeflow.list_bodies("/runs")
    pipelines = [list(yaml.load_all(text, yaml.CSafeLoader)) for text in kubeflow.uploads]
    spec_of_page, platform_of_page = next(p for p in pipelines if p[0]["pipelineInfo"]["name"] == "infoxlm")
    inputs_of_page = list_step_inputs({"pipeline_spec": spec_of_page, "platform_spec": platform_of_page}, {})
    for run in (run_of_submit, run_of_kfp):
        values = run["runtime_config"].get("parameters", {})
        assert list_step_inputs(run["pipeline_spec"], values) == inputs_of_page

    launcher_config = yaml.safe_load((ROOT / "k8s/base/kfp-launcher.yaml").read_text())["data"]
    default_root = launcher_config["defaultPipelineRoot"]
    assert run_of_submit["runtime_config"]["pipeline_root"] == spec_of_page["defaultPipelineRoot"] == default_root
    assert "pipeline_root" not in run_of_kfp["runtime_config"]
    assert f"defaultPipelineRoot: {default_root}" in (ROOT / "docs/cluster/install.md").read_text()


def list_step_inputs(pipeline: dict[str, Any], values: dict[str, Any]) -> dict[str, Any]:
    """Return all parts of a run on which the cache keys of its steps depend. Parameters include the defaults."""
    spec = pipeline["pipeline_spec"]
    defaults = {name: field.get("defaultValue") for name, field in submit.read_declarations(spec).items()}
    return {
        "executors": spec["deploymentSpec"],
        "components": spec["components"],
        "pods": pipeline["platform_spec"],
        "parameters": defaults | values,
    }


def test_saved_pipeline_has_its_parameters_as_defaults_and_nothing_is_sent(
    kubeflow, config, cluster, submit_file, tmp_path
):
    result = submit_file(config, "--save", tmp_path / "saved.yaml")

    assert result.exit_code == 0, result.stderr
    assert kubeflow.requests == []
    text = (tmp_path / "saved.yaml").read_text()
    spec, platform = yaml.safe_load_all(text)
    declarations = submit.read_declarations(spec)
    assert (declarations["image"]["defaultValue"], declarations["num_workers"]["defaultValue"]) == (IMAGE, 8)
    assert declarations["preparation"]["defaultValue"]["languages"] == ["en", "de"]
    assert all(declaration.get("isOptional") for declaration in declarations.values())
    assert platform["platforms"]["kubernetes"]
    assert components.load_component_from_text(text).component_spec.inputs["store"].default == "s3://infoxlm/store"


def test_submission_without_a_host_is_refused(config, cluster):
    assert_refused(invoke("submit", config, "--cluster", cluster), "--host is missing. Give the URL of Kubeflow")
