"""`infoxlm submit`, and Kubeflow's own command, against a server that keeps what it is sent."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from kfp import components
from typer.testing import CliRunner

from components.platform import parameters, runtime
from components.settings.cluster import ClusterFile
from infoxlm_core import run_file
from infoxlm_core.errors import Preempted, ResourcesUnavailable, TrainingDiverged, WorkerLost
from pipelines import submit
from pipelines.cli import app
from pipelines.cli import cluster as cluster_commands
from pipelines.progress import Progress
from tests.pipelines.kubeflow_server import running_kubeflow

CONFIGS = Path(__file__).parents[2] / "configs"
K8S = Path(__file__).parents[2] / "k8s"
IMAGE = f"registry.example/infoxlm@sha256:{'a1' * 32}"
RUN = """
preparation:
  languages: [en, de]
  held_out_share: 0.1
  corpora:
    - {name: a, format: tsv, path: "s3://data/a.tsv", languages: [en, de]}
num_workers: 8
"""


@pytest.fixture(scope="module")
def compiled(tmp_path_factory) -> Path:
    """What the code compiles to now."""
    folder = tmp_path_factory.mktemp("compiled")
    run("compile", "--output", folder)
    return folder


@pytest.fixture
def kubeflow(compiled, monkeypatch):
    monkeypatch.setattr(submit, "COMPILED", compiled)
    monkeypatch.setattr(submit.time, "sleep", lambda seconds: None)
    for name in [name for name in os.environ if name.startswith("KF_PIPELINES_")]:
        monkeypatch.delenv(name)
    with running_kubeflow() as server:
        yield server


@pytest.fixture
def config(tmp_path) -> Path:
    (tmp_path / "run.yaml").write_text(RUN)
    return tmp_path / "run.yaml"


@pytest.fixture
def cluster(tmp_path) -> Path:
    values = yaml.safe_load((CONFIGS / "cluster.yaml").read_text()) | {"image": IMAGE}
    (tmp_path / "cluster.yaml").write_text(yaml.safe_dump(values))
    return tmp_path / "cluster.yaml"


def run(*arguments: str | Path):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_what_arrives_is_the_whole_pipeline_with_its_parameters_account_root_and_plugin(kubeflow, config, cluster):
    result = run("submit", config, "--cluster", cluster, "--host", kubeflow.host, "--no-wait",
                 "--set", "pretraining.optimization.steps=77000")  # fmt: skip

    assert result.exit_code == 0, result.stderr
    assert f"{kubeflow.host}/#/runs/details/r-1" in result.stdout
    [body] = kubeflow.sent("POST", "/runs")
    spec, platform = submit.read_for_cluster(run_file.load_as(ClusterFile, cluster), "infoxlm")
    assert body["pipeline_spec"] == {"pipeline_spec": spec, "platform_spec": platform}
    assert (body["display_name"], body["service_account"], body["experiment_id"]) == ("run", "infoxlm-runner", "e-1")
    assert body["plugins_input"] == {"mlflow": {"experiment_name": "infoxlm"}}
    assert body["runtime_config"]["pipeline_root"] == "s3://infoxlm/runs"
    parameters = body["runtime_config"]["parameters"]
    assert parameters["store"] == "s3://infoxlm/store"
    assert parameters["image"] == parameters["cluster"]["image"] == IMAGE
    assert (parameters["cluster"]["pool"]["gpus"], parameters["num_workers"]) == (8, 8)
    assert parameters["pretraining"]["optimization"]["steps"] == 77_000
    assert set(parameters) <= set(spec["root"]["inputDefinitions"]["parameters"])
    assert kubeflow.experiments[0]["display_name"] == "infoxlm"


def test_pods_request_what_the_file_of_the_cluster_says(cluster):
    place = run_file.load_as(ClusterFile, cluster, ["steps={cpu: 500m, memory: 2Gi}", "pool.node_selector={a: b}"])

    spec, platform = submit.read_for_cluster(place, "suite")

    resources = {name: one["container"].get("resources") for name, one in spec["deploymentSpec"]["executors"].items()}
    assert resources["exec-plan-suite"] == {
        **{"resourceCpuLimit": "500m", "resourceCpuRequest": "500m"},
        **{"resourceMemoryLimit": "2Gi", "resourceMemoryRequest": "2Gi"},
    }
    assert resources["exec-measure"] == {
        **{"resourceCpuLimit": "64", "resourceCpuRequest": "64"},
        **{"resourceMemoryLimit": "512Gi", "resourceMemoryRequest": "512Gi"},
        "accelerator": {"resourceType": "nvidia.com/gpu", "resourceCount": "8"},
    }
    measure = platform["platforms"]["kubernetes"]["deploymentSpec"]["executors"]["exec-measure"]
    assert measure["nodeSelector"] == {"labels": {"a": "b"}}
    assert measure["tolerations"] == [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}]


def test_ablations_suites_and_promotions_get_what_they_get_on_one_machine(kubeflow, config, cluster, tmp_path):
    (tmp_path / "suite.yaml").write_text("""
models: {ours: "models:/infoxlm@champion"}
tasks: {tatoeba: {settings: {task: retrieval, data: "s3://data/tatoeba"}}}
""")
    common = ("--cluster", cluster, "--host", kubeflow.host, "--no-wait", "--pipeline")
    for arguments in (
        (config, *common, "ablations", "--variants", CONFIGS / "ablations.yaml", "--seeds", "1,2"),
        (tmp_path / "suite.yaml", *common, "suite"),
        (config, *common, "promotion", "--set", "registration.gate={classification/mean: -0.01}"),
    ):
        result = run("submit", *arguments)
        assert result.exit_code == 0, result.stderr

    first, second, third = (body["runtime_config"]["parameters"] for body in kubeflow.sent("POST", "/runs"))
    assert {trial["trial"]["seed"] for trial in first["trials"]} == {1, 2}
    assert second["suite"]["models"][0]["name"] == "ours" and second["num_workers"] == 8
    assert cluster_commands.list_iterations(first)[:2] == ["full seed 1", "-XLCO seed 1"]
    assert cluster_commands.list_iterations(second) == ["ours tatoeba"]
    assert cluster_commands.list_iterations({"preparation": {}}) == []
    assert third == {
        "model": "models:/infoxlm@candidate",
        "gate": {"retrieval/served": 0.0, "classification/mean": -0.01},
        "store": "s3://infoxlm/store",
        "image": IMAGE,
    }


def test_a_translator_is_submitted_with_its_section_and_a_sweep_with_its_trials(kubeflow, config, cluster):
    translator = CONFIGS / "translation.yaml"
    common = ("--cluster", cluster, "--host", kubeflow.host, "--no-wait", "--pipeline")
    sweep = ("translation-ablations", "--variants", CONFIGS / "initialisations.yaml", "--seeds", "1")
    shards = ("--set", "translation.virtual_shards=8", "--set", "pretraining.batches.virtual_shards=8")
    for pipeline in (("translation",), sweep):
        result = run("submit", translator, *common, *pipeline, "--set", "num_workers=8", *shards)
        assert result.exit_code == 0, result.stderr

    single, swept = (body["runtime_config"]["parameters"] for body in kubeflow.sent("POST", "/runs"))
    assert single["translation"]["languages"] == ["en", "fr"] and "finetuning" not in single
    assert [item["trial"]["variant"] for item in swept["trials"]] == ["random", "embeddings", "CLM", "MLM"]
    refused = run("submit", config, *common, "translation")
    assert refused.exit_code == 2 and "has no section translation" in refused.stderr


def test_the_cache_can_be_switched_off_inside_loops_too(kubeflow, config, cluster):
    run("submit", config, "--cluster", cluster, "--host", kubeflow.host, "--no-wait", "--no-cache")

    [body] = kubeflow.sent("POST", "/runs")
    assert "enableCache" not in json.dumps(body["pipeline_spec"])
    committed, _ = submit.read_compiled("infoxlm")
    assert "enableCache" in json.dumps(committed)


def test_submit_prints_each_change_once_and_then_what_the_last_step_wrote_for_people(
    kubeflow, config, cluster, monkeypatch
):
    kubeflow.states = ["PENDING", "RUNNING", "RUNNING", "RUNNING", "SUCCEEDED"]
    summary = "retrieval/best   0.4\nversion     models:/infoxlm/1 is champion\nreport      s3://infoxlm/report.html"
    monkeypatch.setattr(runtime, "read_summary", lambda store, run: f"{summary} {store} {run}")

    result = run("submit", config, "--cluster", cluster, "--host", kubeflow.host)

    assert result.exit_code == 0
    assert [line.partition("  ")[2] for line in result.stdout.splitlines() if line.startswith("0:00:")] == [
        "run: pending",
        "pre-train the encoder: started",
        "run: running",
        "pre-train the encoder: succeeded",
        "run: succeeded",
    ]
    assert result.stdout.rstrip().endswith(f"{summary} s3://infoxlm/store r-1")


@pytest.mark.parametrize(
    ("error", "sent"), [(TrainingDiverged("pretrain: diverged"), 1), (WorkerLost("pretrain: a worker is gone"), 4)]
)
def test_a_failed_run_ends_as_its_stage_and_is_submitted_again_only_if_that_may_help(
    kubeflow, config, cluster, monkeypatch, error, sent
):
    kubeflow.states = ["FAILED"]
    monkeypatch.setattr(runtime, "read_failure", lambda store, run: error)
    monkeypatch.setattr(runtime, "read_summary", lambda store, run: "")

    result = run("submit", config, "--cluster", cluster, "--host", kubeflow.host)

    assert result.exit_code == error.exit_code
    assert result.stderr.splitlines()[-1] == f"infoxlm: {type(error).__name__}: {error}"
    assert len(kubeflow.sent("POST", "/runs")) == sent


def test_a_suite_or_an_ablation_that_argo_could_not_hold_is_refused_before_anything_is_sent(kubeflow, config, cluster):
    common = ("--cluster", cluster, "--host", kubeflow.host, "--no-wait", "--pipeline")
    suite = ("submit", CONFIGS / "suite.yaml", *common, "suite", "--set", f"tasks.mlqa.seeds={list(range(130))}")
    ablation = ("submit", config, *common, "ablations", "--variants", CONFIGS / "ablations.yaml", "--only", "full")

    for result, message in (
        (run(*suite), "14132 trials need 1414 steps, but Argo allows 150"),
        (run(*ablation, "--seeds", ",".join(map(str, range(51)))), "51 trials need 153 steps, but Argo allows 150"),
    ):
        assert result.exit_code == 2 and message in result.stderr and result.stderr.count("\n") == 1
    assert not kubeflow.requests
    assert run(*ablation, "--seeds", ",".join(map(str, range(50)))).exit_code == 0


@pytest.mark.slow
def test_settings_that_are_too_large_for_kubeflow_travel_through_the_store(kubeflow, cluster, tmp_path, bucket):
    sources = "\n".join(
        f'    - {{name: c{number}, format: tsv, path: "s3://data/{"x" * 300}/{number}.tsv", languages: [en, de]}}'
        for number in range(400)
    )
    preparation = f"preparation:\n  languages: [en, de]\n  held_out_share: 0.1\n  corpora:\n{sources}\n"
    (tmp_path / "run.yaml").write_text(f"{preparation}num_workers: 8\n")
    cluster.write_text(cluster.read_text().replace("store: s3://infoxlm/store", "store: s3://models/store"))

    result = run("submit", tmp_path / "run.yaml", "--cluster", cluster, "--host", kubeflow.host, "--no-wait")

    assert result.exit_code == 0, result.stderr
    [body] = kubeflow.sent("POST", "/runs")
    sent = body["runtime_config"]["parameters"]
    assert len(json.dumps(sent)) < 4096
    assert len(parameters.resolve("s3://models/store", sent["preparation"])["corpora"]) == 400


def test_a_run_that_ends_with_try_again_is_submitted_again_until_it_succeeds(kubeflow, config, cluster, monkeypatch):
    kubeflow.states = ["RUNNING", "FAILED", "RUNNING", "FAILED", "RUNNING", "SUCCEEDED"]
    lost = ResourcesUnavailable("pretrain: no GPUs after 3600 s")
    monkeypatch.setattr(runtime, "read_failure", lambda store, run: lost)
    monkeypatch.setattr(runtime, "read_summary", lambda store, run: "")

    result = run("submit", config, "--cluster", cluster, "--host", kubeflow.host)

    assert result.exit_code == 0, result.stderr
    sent = kubeflow.sent("POST", "/runs")
    assert len(sent) == 3 and sent[0] == sent[1] == sent[2]
    assert "pretrain: no GPUs after 3600 s; submitting it again in 60 s (2 of 3)" in result.stdout


@pytest.mark.parametrize("last_state", ["FAILED", "CANCELED"])
def test_a_cancelled_run_has_its_own_exit_code_and_is_not_submitted_again(
    kubeflow, config, cluster, monkeypatch, last_state
):
    """Kubeflow 2.17 ends a terminated run as FAILED. The step that was stopped has written exit code 75."""
    kubeflow.states = ["PENDING", "RUNNING", "CANCELING", "CANCELING", last_state]
    stopped = Preempted("pretrain: rayjob/j-1 was stopped and deleted: run again to continue")
    monkeypatch.setattr(runtime, "read_failure", lambda store, run: stopped)

    result = run("submit", config, "--cluster", cluster, "--host", kubeflow.host)

    assert result.exit_code == 6
    assert result.stderr.splitlines()[-1].startswith("infoxlm: Cancelled: Run r-1 was cancelled. Submit it again")
    assert len(kubeflow.sent("POST", "/runs")) == 1
    assert "run: canceling" in result.stdout and "run: canceled" in result.stdout


def test_a_run_that_cancel_terminates_ends_the_submit_that_follows_it(kubeflow, config, cluster, monkeypatch):
    kubeflow.states = ["RUNNING"]
    cancelled = []

    def cancel_once(seconds: float) -> None:
        if not cancelled:
            cancelled.append(submit.connect(kubeflow.host).terminate_run("r-1"))

    monkeypatch.setattr(submit.time, "sleep", cancel_once)

    result = run("submit", config, "--cluster", cluster, "--host", kubeflow.host)

    assert result.exit_code == 6 and len(kubeflow.sent("POST", "/runs")) == 1
    assert len(kubeflow.sent("POST", "/runs/r-1:terminate")) == 1


@pytest.mark.parametrize(
    ("health", "said"),
    [
        ("<html>Log in</html>", "is not the API of Kubeflow Pipelines. If it is a login page"),
        ({"status": "ok"}, "is not the API of Kubeflow Pipelines"),
        ({"multi_user": False, "tag_name": "2.16.1"}, "2.16.1, which is too old. Update it to 2.17 or newer."),
    ],
)
def test_a_login_page_another_server_and_an_old_kubeflow_are_one_clear_line(kubeflow, config, cluster, health, said):
    kubeflow.health = health

    result = run("submit", config, "--cluster", cluster, "--host", kubeflow.host)

    assert result.exit_code == 2 and said in result.stderr and result.stderr.count("\n") == 1
    assert not kubeflow.sent("POST", "/runs")


@pytest.mark.parametrize("host", ["", "/etc", "a\nb", "ftp://x", "https://"])
def test_a_host_that_is_no_address_is_refused_not_looked_for(host):
    result = run("cancel", "r-1", "--host", host)

    assert result.exit_code == 2 and result.stderr.count("\n") == 1
    assert f"--host {host!r} is not a URL. Give the URL of Kubeflow Pipelines" in result.stderr


@pytest.mark.parametrize("version", ["2.17.0", "2.18.1", "unknown", "10.0.0"])
def test_a_kubeflow_that_is_new_enough_or_does_not_say_is_taken(kubeflow, version):
    kubeflow.health = {"multi_user": False, "tag_name": version}

    assert submit.connect(kubeflow.host)


def test_the_namespace_of_the_cluster_s_file_is_that_of_the_run(kubeflow, config, cluster):
    kubeflow.health = {"multi_user": True, "tag_name": "2.17.0"}
    cluster.write_text(cluster.read_text() + "namespace: team-a\n")

    result = run("submit", config, "--cluster", cluster, "--host", kubeflow.host, "--no-wait")

    assert result.exit_code == 0, result.stderr
    assert kubeflow.experiments[0]["namespace"] == "team-a"


def test_a_run_whose_reason_cannot_be_read_is_still_a_failure(kubeflow, config, cluster, monkeypatch):
    kubeflow.states = ["FAILED"]
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "k")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "s")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")

    result = run("submit", config, "--cluster", cluster, "--host", kubeflow.host)

    assert result.exit_code == 70 and "error message in the store cannot be read" in result.stderr.splitlines()[-1]


def test_a_server_that_is_gone_for_a_while_does_not_end_the_waiting(kubeflow):
    client = submit.connect(kubeflow.host)
    kubeflow.refusal, lines = (503, "upgrading"), []

    def say(line: str) -> None:
        lines.append(line)
        kubeflow.refusal = None

    progress = Progress(submit.read_compiled("infoxlm")[0])
    assert submit.follow(client, kubeflow.host, "r-1", progress, say) == "SUCCEEDED"
    assert "503: upgrading" in lines[0] and "The run continues on the cluster" in lines[0]


def test_ctrl_c_leaves_the_run_alone_and_says_how_to_end_it(kubeflow, config, cluster, monkeypatch):
    def interrupt(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(submit, "follow", interrupt)

    result = run("submit", config, "--cluster", cluster, "--host", kubeflow.host)

    assert result.exit_code == 0
    assert f"the run continues on the cluster; to end it: infoxlm cancel r-1 --host {kubeflow.host}" in result.stdout
    assert not kubeflow.sent("POST", "/runs/r-1:terminate")
    assert run("cancel", "r-1", "--host", kubeflow.host).exit_code == 0
    assert len(kubeflow.sent("POST", "/runs/r-1:terminate")) == 1


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (["pretraining.optimization.stepz=1"], "stepz: unknown name"),
        (["num_workers=12"], "num_workers (12) must be 1 or more, and a multiple of pool.gpus"),
        (["num_workers=300"], "num_workers (300) must not exceed"),
        (["num_workers=0"], "num_workers (0) must be 1 or more"),
    ],
)
def test_wrong_settings_are_refused_before_anything_is_sent(kubeflow, config, cluster, changes, said):
    options = [part for change in changes for part in ("--set", change)]

    result = run("submit", config, "--cluster", cluster, "--host", kubeflow.host, *options)

    assert result.exit_code == 2 and said in result.stderr and result.stderr.count("\n") == 1
    assert kubeflow.requests == []


def test_a_server_that_is_not_there_or_refuses_is_one_line(kubeflow, config, cluster):
    result = run("submit", config, "--cluster", cluster, "--host", "http://127.0.0.1:9")
    assert result.exit_code == 75
    assert "http://127.0.0.1:9 does not answer" in result.stderr.splitlines()[-1]

    kubeflow.refusal = (403, "infoxlm-runner may not")
    result = run("submit", config, "--cluster", cluster, "--host", kubeflow.host)
    assert (result.exit_code, "refuses the request (403: infoxlm-runner may not)" in result.stderr) == (2, True)


def test_a_token_of_the_environment_is_sent(kubeflow, config, cluster, monkeypatch):
    monkeypatch.setenv("KF_PIPELINES_TOKEN", "t0ken")

    run("submit", config, "--cluster", cluster, "--host", kubeflow.host, "--no-wait")

    headers = [headers for _, path, _, headers in kubeflow.requests if path == "/runs"]
    assert headers[0]["authorization"] == "Bearer t0ken"


@pytest.mark.slow
def test_submit_the_page_and_kfp_make_runs_that_share_cached_results(kubeflow, config, cluster, tmp_path):
    """Kubeflow's cache compares steps, and a result of one pipeline root is not readable by a run of another."""
    run("submit", config, "--cluster", cluster, "--host", kubeflow.host, "--no-wait")
    run("upload", cluster, "--host", kubeflow.host, "--run", config)
    run("submit", config, "--cluster", cluster, "--save", tmp_path / "run.yaml")
    command = [Path(sys.executable).with_name("kfp"), "--endpoint", kubeflow.host, "run", "create", "-e", "infoxlm"]
    subprocess.run([*command, "-r", "by hand", "-f", tmp_path / "run.yaml"], check=True, capture_output=True)

    of_submit, of_kfp = kubeflow.sent("POST", "/runs")
    uploaded = next(
        text
        for text in kubeflow.uploads
        if yaml.safe_load(text.split("\n---\n")[0])["pipelineInfo"]["name"] == "infoxlm"
    )
    of_page, platform_of_page = yaml.safe_load_all(uploaded)
    runs = {
        "submit": (of_submit["pipeline_spec"], of_submit["runtime_config"]["parameters"]),
        "page": ({"pipeline_spec": of_page, "platform_spec": platform_of_page}, {}),
        "kfp": (of_kfp["pipeline_spec"], of_kfp["runtime_config"].get("parameters", {})),
    }
    inputs_of_runs = {origin: inputs_of_steps(*content) for origin, content in runs.items()}
    assert inputs_of_runs["submit"] == inputs_of_runs["page"] == inputs_of_runs["kfp"]

    launcher_config = yaml.safe_load((K8S / "base/kfp-launcher.yaml").read_text())["data"]
    root = launcher_config["defaultPipelineRoot"]  # the root of runs that name none
    assert of_submit["runtime_config"]["pipeline_root"] == of_page["defaultPipelineRoot"] == root
    assert "pipeline_root" not in of_kfp["runtime_config"]
    assert f"defaultPipelineRoot: {root}" in (K8S.parent / "docs/cluster/install.md").read_text()


def inputs_of_steps(specs: dict, parameters: dict) -> dict:
    """Return what decides the inputs of a run's steps: executors, components, pods, and parameters with defaults."""
    spec = specs["pipeline_spec"]
    defaults = {name: declared.get("defaultValue") for name, declared in submit.declared_parameters(spec).items()}
    return {
        "executors": spec["deploymentSpec"],
        "components": spec["components"],
        "pods": specs["platform_spec"],
        "parameters": defaults | parameters,
    }


def test_a_saved_pipeline_has_its_parameters_filled_in_and_nothing_was_sent(kubeflow, config, cluster, tmp_path):
    result = run("submit", config, "--cluster", cluster, "--save", tmp_path / "mine.yaml")

    assert result.exit_code == 0, result.stderr
    assert not kubeflow.sent("POST", "/runs")
    assert "--host is missing. Give the URL of Kubeflow Pipelines" in run("submit", config, "--cluster", cluster).stderr
    text = (tmp_path / "mine.yaml").read_text()
    spec, platform = yaml.safe_load_all(text)
    known = submit.declared_parameters(spec)
    assert (known["image"]["defaultValue"], known["num_workers"]["defaultValue"]) == (IMAGE, 8)
    assert known["preparation"]["defaultValue"]["languages"] == ["en", "de"]
    assert not [name for name, said in known.items() if not said.get("isOptional")]
    assert platform["platforms"]["kubernetes"]
    assert components.load_component_from_text(text).component_spec.inputs["store"].default == "s3://infoxlm/store"
