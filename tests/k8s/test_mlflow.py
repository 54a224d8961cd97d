"""The MLflow server of the manifests: requires accounts, uses PostgreSQL, and runs no code of its users."""

import configparser
import json
import urllib.request

import pytest
import yaml

from components.adapters.mlflow import model_registry, runs, user
from components.adapters.mlflow.outbox import MlflowTracker
from components.settings import environment
from infoxlm_core.errors import InputError, StorageUnavailable
from tests.components.conftest import history
from tests.k8s.manifests import (
    OVERLAYS,
    ROOT,
    environment_of,
    get_manifest,
    pod_templates,
    read_cluster_pages,
    secret_data,
)
from tests.servers.processes import balanced, kill, port_of
from tests.servers.tracking import ADMIN, READER, USER, logged_in, replica
from tests.toys.evaluation import evaluated

ANY_SECRETS = {
    "mlflow-database": {"username": "u", "password": "p"},
    "mlflow-server": {"admin-password": "a", "flask-secret-key": "f"},
    "mlflow-store": {"AWS_ACCESS_KEY_ID": "k", "AWS_SECRET_ACCESS_KEY": "s"},
}


def get_option(arguments: list[str], name: str) -> str:
    """Return the value of the only argument --NAME=VALUE."""
    [value] = [argument.partition("=")[2] for argument in arguments if argument.startswith(f"--{name}=")]
    return value


def read_auth_config(overlay: str) -> str:
    return get_manifest(overlay, "ConfigMap", "mlflow-auth")["data"]["basic_auth.ini"]


def tracking_uri(overlay: str) -> str:
    """Return the address of MLflow that steps get."""
    return get_manifest(overlay, "ConfigMap", "infoxlm-environment")["data"]["MLFLOW_TRACKING_URI"]


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_server_requires_accounts_and_known_host_names(overlay):
    [container] = pod_templates(overlay)["Deployment/mlflow"]["spec"]["containers"]
    variables = environment_of(container, ANY_SECRETS)
    config = configparser.ConfigParser()
    config.read_string(read_auth_config(overlay))

    assert get_option(container["args"], "app-name") == "basic-auth"
    assert config["mlflow"]["default_permission"] == "NO_PERMISSIONS"
    assert variables["MLFLOW_AUTH_CONFIG_PATH"] == "/etc/mlflow/basic_auth.ini"
    allowed_hosts = set(get_option(container["args"], "allowed-hosts").split(","))
    service_names = {f"mlflow{suffix}" for suffix in ("", ".infoxlm", ".infoxlm.svc", ".infoxlm.svc.cluster.local")}
    assert service_names | {f"{name}:5000" for name in service_names} <= allowed_hosts
    assert tracking_uri(overlay).removeprefix("http://") in allowed_hosts
    assert not any("*" in host for host in allowed_hosts)


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_server_runs_no_jobs_and_no_pickles_and_sends_no_telemetry(overlay):
    [container] = pod_templates(overlay)["Deployment/mlflow"]["spec"]["containers"]
    variables = environment_of(container, ANY_SECRETS)

    assert variables["MLFLOW_SERVER_ENABLE_JOB_EXECUTION"] == "false"
    assert variables["MLFLOW_ALLOW_PICKLE_DESERIALIZATION"] == "false"
    assert variables["MLFLOW_DISABLE_TELEMETRY"] == "true"


def test_the_database_of_the_overlay_small_can_store_any_text():
    [container] = pod_templates("small")["StatefulSet/postgres"]["spec"]["containers"]

    options = environment_of(container, ANY_SECRETS)["POSTGRES_INITDB_ARGS"].split()
    assert "--encoding=UTF8" in options


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_server_uses_postgresql_and_s3_and_no_argument_contains_a_login(overlay):
    spec = pod_templates(overlay)["Deployment/mlflow"]["spec"]
    [upgrade] = spec["initContainers"]  # creates all tables, so that replicas do not create them at the same time
    [container] = spec["containers"]
    variables = environment_of(container, ANY_SECRETS)
    database_variables = {name: value for name, value in variables.items() if name.startswith("PG")}

    uri = get_option(container["args"], "backend-store-uri")
    assert uri.startswith("postgresql+psycopg2://")
    assert "@" not in uri
    assert f"database_uri = {uri}\n" in read_auth_config(overlay)
    assert upgrade["command"] == ["python", "-m", "components.adapters.mlflow.tables", uri]
    assert {"PGHOST", "PGUSER", "PGPASSWORD"} <= set(database_variables)
    assert database_variables.items() <= environment_of(upgrade, ANY_SECRETS).items()
    assert variables["MLFLOW_ARTIFACTS_DESTINATION"].startswith("s3://infoxlm/")
    assert "--serve-artifacts" in container["args"]


@pytest.mark.parametrize(("overlay", "replicas"), [("small", 1), ("production", 2)])
def test_server_has_time_to_start_and_disk_for_concurrent_uploads(overlay, replicas):
    deployment = get_manifest(overlay, "Deployment", "mlflow")
    pod = deployment["spec"]["template"]["spec"]
    [container] = pod["containers"]
    [scratch_volume] = [volume for volume in pod["volumes"] if volume["name"] == "tmp"]
    disk_gib = int(scratch_volume["emptyDir"]["sizeLimit"].removesuffix("Gi"))
    largest_model_gib = 2  # a base model

    probe = container["startupProbe"]
    assert probe["periodSeconds"] * probe["failureThreshold"] >= 120
    assert get_option(container["args"], "workers") == "1"
    assert deployment["spec"]["replicas"] == replicas
    assert deployment["spec"]["strategy"]["type"] == "Recreate"
    assert disk_gib >= 6 * largest_model_gib


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_the_documented_plugin_settings_agree_with_the_namespace(overlay):
    """Multi-user Kubeflow reads some settings from the namespace's kfp-launcher, single-user Kubeflow reads none."""
    plugin = json.loads(read_cluster_pages().partition("```json\n")[2].partition("```")[0])
    launcher = get_manifest(overlay, "ConfigMap", "kfp-launcher")
    namespace_settings = json.loads(launcher["data"]["plugins.mlflow"])["settings"]

    assert plugin["endpoint"] == tracking_uri(overlay)
    assert namespace_settings.items() <= plugin["settings"].items()
    assert set(plugin["settings"]) - set(namespace_settings) == {"authType", "workspacesEnabled"}
    secret_keys = set(plugin["settings"]["credentialSecretRef"].values())
    assert secret_keys == set(secret_data(overlay)["kfp-mlflow-credentials"])


def test_the_models_of_our_configs_are_created_by_the_registry_account():
    """Whoever creates a registered model has all rights to it, so trainings must not create them."""
    [container] = pod_templates("small")["Job/make-user"]["spec"]["containers"]
    _, *created_models = container["args"]

    configs = [yaml.safe_load(path.read_text()) for path in (ROOT / "configs").glob("*.yaml")]
    model_names = {config["registration"]["name"] for config in configs if "registration" in config}
    assert model_names == set(created_models)


@pytest.mark.slow
def test_user_is_created_and_a_changed_password_is_updated(locked_server):
    def create_experiment(password: str) -> int:
        body = {"name": password}
        status, _ = locked_server.call("POST", "/api/2.0/mlflow/experiments/create", body, ("steps", password))
        return status

    with logged_in(ADMIN):
        user.create_user(locked_server.url, "steps", "first-password")
        assert create_experiment("first-password") == 200
        user.create_user(locked_server.url, "steps", "second-password")

    assert create_experiment("first-password") == 401
    assert create_experiment("second-password") == 200
    with logged_in(("admin", "not-the-password")), pytest.raises(InputError, match="MLFLOW_AUTH_ADMIN_PASSWORD"):
        user.create_user(locked_server.url, "steps", "third-password")


@pytest.mark.slow
def test_a_reading_user_can_read_and_a_promoting_user_can_move_the_champion(locked_server):
    def call(login: tuple[str, str], method: str, path: str, body: dict | None = None) -> tuple[int, str]:
        return locked_server.call(method, f"/api/2.0/mlflow/{path}", body, login)

    def status(*request) -> int:
        return call(*request)[0]

    _, experiment = call(USER, "POST", "experiments/create", {"name": "of-people"})
    _, run = call(USER, "POST", "runs/create", {"experiment_id": json.loads(experiment)["experiment_id"]})
    run_info = json.loads(run)["run"]["info"]
    run_id = run_info["run_id"]
    call(USER, "POST", "registered-models/create", {"name": "people"})
    version = {"name": "people", "source": f"{run_info['artifact_uri']}/model", "run_id": run_id}
    assert status(USER, "POST", "model-versions/create", version) == 200
    ada, grace = ("ada", "password-of-ada"), ("grace", "password-of-grace")
    for login, permission in ((ada, "read"), (grace, "promote"), (grace, "promote")):  # twice: nothing changes
        with logged_in(ADMIN):
            user.create_user(locked_server.url, *login)
            user.grant_access(locked_server.url, login[0], "of-people", "people", permission)

    alias = {"name": "people", "alias": "champion", "version": "1"}
    tag = {"run_id": run_id, "key": "decision", "value": "yes"}
    for login, status_of_reads, status_of_promotions in ((READER, 403, 403), (ada, 200, 403), (grace, 200, 200)):
        assert status(login, "GET", f"runs/get?run_id={run_id}") == status_of_reads
        assert status(login, "GET", "registered-models/get?name=people") == status_of_reads
        assert status(login, "POST", "registered-models/alias", alias) == status_of_promotions
        assert status(login, "POST", "runs/set-tag", tag) == status_of_promotions
    assert status(grace, "DELETE", "registered-models/delete", {"name": "people"}) == 403
    assert status(grace, "POST", "users/create", {"username": "x", "password": "long enough for it"}) == 403
    with logged_in(ADMIN), pytest.raises(InputError, match="no experiment nowhere: the first run creates it"):
        user.grant_access(locked_server.url, "ada", "nowhere", "people", "read")


@pytest.mark.slow
def test_a_run_loses_and_repeats_nothing_when_one_of_two_servers_dies(
    on_locked_server, database, s3_server, tiny_encoders, tmp_path, monkeypatch
):
    """The servers share tables, bucket and session key, as the replicas of `production` do."""
    steps = 60
    evaluation = evaluated(tmp_path / "evaluation", 0.5)
    first_port = int(on_locked_server.url.rpartition(":")[2])
    listener = on_locked_server.service
    service_port = port_of(listener)
    with (
        replica(tmp_path, database, s3_server, service_port) as (second_port, second_server),
        balanced(listener, first_port, second_port) as connections_by_port,
    ):
        monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://localhost:{service_port}")
        run_id = runs.open_run("two-servers", "demo", {runs.RUN_TAG: "two-servers"}, tmp_path)
        tracker = MlflowTracker(tmp_path / "metrics.jsonl", run_id)
        tracker.resume(0)
        for step in range(1, steps + 1):
            tracker.log(step, {"loss": 1 / step})
            if step == steps // 2:
                for _ in range(4):  # further connections, so that both servers receive some
                    with urllib.request.urlopen(f"http://localhost:{service_port}/health") as answer:
                        assert answer.status == 200
                kill(second_server)
        tracker.close()
        encoder = model_registry.EvaluatedEncoder(
            tiny_encoders["first"],
            "sha256:1",
            {"retrieval/served": 0.5},
            run_id,
            {"test_set": "sha256:t"},
            evaluation,
        )
        gate = {"retrieval/served": 0.0}
        versions = [model_registry.register("two-servers", encoder, gate).version for _ in range(2)]

        assert history(run_id, "loss") == [(step, 1 / step) for step in range(1, steps + 1)]
        assert versions == [1, 1]
        assert connections_by_port[first_port] > 0
        assert connections_by_port[second_port] > 0


def test_unreachable_server_is_reported_as_temporary(clean_environment, monkeypatch):
    monkeypatch.setitem(environment.MLFLOW, "MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")

    with pytest.raises(StorageUnavailable, match="does not answer"):
        user.create_user("http://127.0.0.1:9", "steps", "password")
