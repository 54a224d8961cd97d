"""MLflow as the manifests start it: locked by accounts and names, on PostgreSQL, running nobody else's code."""

import configparser
import json
import urllib.request

import pytest
import yaml

from components.adapters.mlflow import model_registry, runs, user
from components.adapters.mlflow.curves import MlflowTracker
from components.settings import environment
from infoxlm_core.errors import InputError, StorageUnavailable
from tests.components.conftest import history
from tests.k8s.manifests import OVERLAYS, ROOT, environment_of, made, named, pods, read_cluster_pages
from tests.servers.processes import balanced, kill, port_of
from tests.servers.tracking import ADMIN, READER, USER, logged_in, replica
from tests.toys.evaluation import evaluated

ANY = {
    "mlflow-database": {"username": "u", "password": "p"},
    "mlflow-server": {"admin-password": "a", "flask-secret-key": "f"},
    "mlflow-store": {"AWS_ACCESS_KEY_ID": "k", "AWS_SECRET_ACCESS_KEY": "s"},
}


def option(arguments: list[str], name: str) -> str:
    [value] = [argument.partition("=")[2] for argument in arguments if argument.startswith(f"--{name}=")]
    return value


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_the_server_asks_for_an_account_and_knows_its_own_names_only(overlay):
    [container] = pods(overlay)["Deployment/mlflow"]["spec"]["containers"]
    arguments, variables = container["args"], environment_of(container, ANY)
    config = configparser.ConfigParser()
    config.read_string(named(overlay, "ConfigMap", "mlflow-auth")["data"]["basic_auth.ini"])

    assert option(arguments, "app-name") == "basic-auth"
    assert config["mlflow"]["default_permission"] == "NO_PERMISSIONS"
    assert variables["MLFLOW_AUTH_CONFIG_PATH"] == "/etc/mlflow/basic_auth.ini"
    hosts = set(option(arguments, "allowed-hosts").split(","))
    services = {f"mlflow{suffix}" for suffix in ("", ".infoxlm", ".infoxlm.svc", ".infoxlm.svc.cluster.local")}
    assert services | {f"{name}:5000" for name in services} <= hosts
    assert not any("*" in host for host in hosts)
    tracking = named(overlay, "ConfigMap", "infoxlm-environment")["data"]["MLFLOW_TRACKING_URI"]
    assert tracking.removeprefix("http://") in hosts
    for name in ("SERVER_ENABLE_JOB_EXECUTION", "ALLOW_PICKLE_DESERIALIZATION"):
        assert variables[f"MLFLOW_{name}"] == "false"
    assert variables["MLFLOW_DISABLE_TELEMETRY"] == "true"


def test_the_database_of_the_overlay_small_can_store_any_text():
    [container] = pods("small")["StatefulSet/postgres"]["spec"]["containers"]

    assert "--encoding=UTF8" in environment_of(container, ANY)["POSTGRES_INITDB_ARGS"].split()


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_tables_are_in_postgresql_whose_login_stands_in_no_argument(overlay):
    spec = pods(overlay)["Deployment/mlflow"]["spec"]
    upgrades, [container] = spec["initContainers"], spec["containers"]
    config = named(overlay, "ConfigMap", "mlflow-auth")["data"]["basic_auth.ini"]

    uri = option(container["args"], "backend-store-uri")
    assert uri.startswith("postgresql+psycopg2://") and "@" not in uri
    assert f"database_uri = {uri}\n" in config
    [upgrade] = upgrades  # of all tables: those of accounts would else be made by each server as it starts
    assert upgrade["command"] == ["python", "-m", "components.adapters.mlflow.tables", uri]
    known = environment_of(container, ANY)
    assert {name: known[name] for name in known if name.startswith("PG")}.items() <= environment_of(
        upgrade, ANY
    ).items()
    assert {"PGHOST", "PGUSER", "PGPASSWORD"} <= set(known)
    assert environment_of(container, ANY)["MLFLOW_ARTIFACTS_DESTINATION"].startswith("s3://infoxlm/")
    assert "--serve-artifacts" in container["args"]


@pytest.mark.parametrize(("overlay", "replicas"), [("small", 1), ("production", 2)])
def test_it_has_time_to_start_and_room_for_several_models_that_pass_through_it(overlay, replicas):
    deployment = named(overlay, "Deployment", "mlflow")
    pod = deployment["spec"]["template"]["spec"]
    [container] = pod["containers"]

    probe = container["startupProbe"]
    assert probe["periodSeconds"] * probe["failureThreshold"] >= 120
    assert option(container["args"], "workers") == "1"
    assert (deployment["spec"]["replicas"], deployment["spec"]["strategy"]["type"]) == (replicas, "Recreate")
    [scratch] = [volume for volume in pod["volumes"] if volume["name"] == "tmp"]
    assert int(scratch["emptyDir"]["sizeLimit"].removesuffix("Gi")) >= 6 * 2  # six uploads of a model of base


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_the_plugin_of_the_document_asks_for_what_the_namespace_has(overlay):
    """With many users Kubeflow reads some settings from the namespace's kfp-launcher, with one user none."""
    document = read_cluster_pages()
    plugin = json.loads(document.partition("```json\n")[2].partition("```")[0])
    namespace = json.loads(named(overlay, "ConfigMap", "kfp-launcher")["data"]["plugins.mlflow"])["settings"]

    assert plugin["endpoint"] == named(overlay, "ConfigMap", "infoxlm-environment")["data"]["MLFLOW_TRACKING_URI"]
    assert {name: plugin["settings"][name] for name in namespace} == namespace
    assert set(plugin["settings"]) - set(namespace) == {"authType", "workspacesEnabled"}
    reference = plugin["settings"]["credentialSecretRef"]
    assert set(reference.values()) == set(made(overlay)["kfp-mlflow-credentials"])


def test_no_model_of_our_configs_can_be_made_by_a_training_before_the_registry_has_it():
    """Whoever makes a registered model may all of it."""
    [container] = pods("small")["Job/make-user"]["spec"]["containers"]
    _, *made_first = container["args"]

    configs = [yaml.safe_load(path.read_text()) for path in (ROOT / "configs").glob("*.yaml")]
    assert {config["registration"]["name"] for config in configs if "registration" in config} == set(made_first)


@pytest.mark.slow
def test_the_user_of_the_steps_is_made_once_and_gets_the_password_of_its_secret(locked_server):
    def experiment(password: str) -> int:
        body = {"name": password}
        return locked_server.call("POST", "/api/2.0/mlflow/experiments/create", body, ("steps", password))[0]

    with logged_in(ADMIN):
        user.ensure(locked_server.url, "steps", "first-password")
        assert experiment("first-password") == 200
        user.ensure(locked_server.url, "steps", "second-password")

    assert experiment("first-password") == 401
    assert experiment("second-password") == 200
    with logged_in(("admin", "not-the-password")), pytest.raises(InputError, match="MLFLOW_AUTH_ADMIN_PASSWORD"):
        user.ensure(locked_server.url, "steps", "third-password")


@pytest.mark.slow
def test_a_person_reads_and_one_who_promotes_moves_the_champion(locked_server):
    def call(login: tuple[str, str], method: str, path: str, body: dict | None = None) -> tuple[int, str]:
        return locked_server.call(method, f"/api/2.0/mlflow/{path}", body, login)

    created = call(USER, "POST", "experiments/create", {"name": "of-people"})
    run = call(USER, "POST", "runs/create", {"experiment_id": json.loads(created[1])["experiment_id"]})
    info = json.loads(run[1])["run"]["info"]
    run_id = info["run_id"]
    call(USER, "POST", "registered-models/create", {"name": "people"})
    version = {"name": "people", "source": f"{info['artifact_uri']}/model", "run_id": run_id}
    assert call(USER, "POST", "model-versions/create", version)[0] == 200
    ada, grace = ("ada", "password-of-ada"), ("grace", "password-of-grace")
    for login, may in ((ada, "read"), (grace, "promote"), (grace, "promote")):
        with logged_in(ADMIN):
            user.ensure(locked_server.url, *login)
            user.allow(locked_server.url, login[0], "of-people", "people", may)

    alias = {"name": "people", "alias": "champion", "version": "1"}
    tag = {"run_id": run_id, "key": "decision", "value": "yes"}
    for login, may_read, may_promote in ((READER, 403, 403), (ada, 200, 403), (grace, 200, 200)):
        assert call(login, "GET", f"runs/get?run_id={run_id}")[0] == may_read
        assert call(login, "GET", "registered-models/get?name=people")[0] == may_read
        assert call(login, "POST", "registered-models/alias", alias)[0] == may_promote
        assert call(login, "POST", "runs/set-tag", tag)[0] == may_promote
    assert call(grace, "DELETE", "registered-models/delete", {"name": "people"})[0] == 403
    assert call(grace, "POST", "users/create", {"username": "x", "password": "long enough for it"})[0] == 403
    with logged_in(ADMIN), pytest.raises(InputError, match="no experiment nowhere: the first run creates it"):
        user.allow(locked_server.url, "ada", "nowhere", "people", "read")


@pytest.mark.slow
def test_a_run_that_reports_to_two_servers_misses_and_doubles_nothing_when_one_of_them_dies(
    on_locked_server, database, s3_server, tiny_encoders, tmp_path, monkeypatch
):
    """They share the tables, the bucket and the key of the sessions, as the replicas of `production` do."""
    steps = 60
    evaluation = evaluated(tmp_path / "evaluation", 0.5)
    first = int(on_locked_server.url.rpartition(":")[2])
    listener = on_locked_server.service
    service = port_of(listener)
    with replica(tmp_path, database, s3_server, service) as (port, other), balanced(listener, first, port) as taken:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://localhost:{service}")
        run_id = runs.open_run("two-servers", "demo", {runs.RUN_TAG: "two-servers"}, tmp_path)
        tracker = MlflowTracker(tmp_path / "metrics.jsonl", run_id)
        tracker.resume(0)
        for step in range(1, steps + 1):
            tracker.log(step, {"loss": 1 / step})
            if step == steps // 2:
                for _ in range(4):  # connections of others, so that each server has its turn
                    with urllib.request.urlopen(f"http://localhost:{service}/health") as answer:
                        assert answer.status == 200
                kill(other)
        tracker.close()
        origin = {"test_set": "sha256:t"}
        scores, gate = {"retrieval/served": 0.5}, {"retrieval/served": 0.0}
        encoder = model_registry.EvaluatedEncoder(
            tiny_encoders["first"], "sha256:1", scores, run_id, origin, evaluation
        )
        versions = [model_registry.register("two-servers", encoder, gate).version for _ in range(2)]

        assert history(run_id, "loss") == [(step, 1 / step) for step in range(1, steps + 1)]
        assert versions == [1, 1]
        assert taken[first] and taken[port]


def test_a_server_that_is_not_there_yet_is_worth_another_try(clean_environment, monkeypatch):
    monkeypatch.setitem(environment.MLFLOW, "MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")

    with pytest.raises(StorageUnavailable, match="does not answer"):
        user.ensure("http://127.0.0.1:9", "steps", "password")
