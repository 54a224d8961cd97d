"""MLflow as the manifests start it, on PostgreSQL and S3: what each account may do, and what our clients refuse."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from components.adapters.mlflow import connection, model_registry, runs
from components.adapters.mlflow.errors import translate_errors
from components.adapters.mlflow.tracker import MlflowRun
from infoxlm_core.errors import InputError
from tests.components.conftest import open_run
from tests.k8s.manifests import environment_of, pod_templates, secret_data
from tests.servers import s3
from tests.servers.tracking import ADMIN, USER, logged_in
from tests.toys.evaluation import evaluated

pytestmark = pytest.mark.slow
API = "/api/2.0/mlflow"
ARTIFACTS = "/api/2.0/mlflow-artifacts/artifacts"
PUBLIC_ROUTE = "/mlflow/server-info"
"""Versions and features of the server. /health and the static files of the pages are public too."""


@pytest.mark.item("S03")
def test_every_route_refuses_requests_without_a_login(locked_server):
    from mlflow.server.handlers import get_endpoints

    routes = {(method, re.sub("<[^>]*>", "1", path)) for path, _, methods in get_endpoints() for method in methods}
    routes |= {("GET", "/"), ("GET", "/version"), ("POST", "/graphql"), ("GET", "/get-artifact?path=a&run_uuid=b")}
    routes |= {("POST", "/v1/traces"), ("POST", f"{API}/users/create"), ("GET", "/ajax-api/3.0/jobs/search")}
    routes |= {("GET", f"{ARTIFACTS}?path=0"), ("PUT", f"{ARTIFACTS}/0/x"), ("GET", f"{API}/users/list")}

    open_routes = set()
    for method, path in routes:
        status, _ = locked_server.call(method, path, None if method == "GET" else {})
        if status != 401:
            open_routes.add((method, path))

    assert len(routes) > 300
    assert open_routes <= {("GET", f"/{prefix}/3.0{PUBLIC_ROUTE}") for prefix in ("api", "ajax-api")}


@pytest.mark.item("S03")
@pytest.mark.parametrize(
    "login", [(USER[0], "wrong"), ("nobody", USER[1]), ("admin", "password1234"), ("admin", "password"), ("admin", "")]
)
def test_wrong_and_default_passwords_are_refused(locked_server, login):
    assert locked_server.call("GET", f"{API}/experiments/search?max_results=1", user=login)[0] == 401
    assert locked_server.call("GET", f"{API}/experiments/search?max_results=1", user=USER)[0] == 200


@pytest.mark.item("S03")
@pytest.mark.parametrize(
    ("host", "expected_status"),
    [
        *((host, 403) for host in ("10.evil.example", "evil.example:5000", "192.168.evil.example", "localhost.evil")),
        *((host, 200) for host in ("mlflow", "mlflow:5000", "mlflow.infoxlm.svc")),
    ],
)
def test_foreign_host_names_are_refused_even_with_a_valid_login(locked_server, host, expected_status):
    status, text = locked_server.call("GET", f"{API}/experiments/search?max_results=1", user=ADMIN, Host=host)

    assert status == expected_status
    if status != 200:
        assert "Host" in text


@pytest.mark.item("S03")
@pytest.mark.parametrize(
    "path",
    [
        "..%2f..%2fetc%2fpasswd",
        "%2e%2e%2f%2e%2e%2fetc/passwd",
        "..%252f..%252fetc%252fpasswd",
        "%252e%252e/x",
        "0/%2e%2e/%2e%2e/etc/passwd",
        "0/%2e%2e%2f1/of-another",
        "file:%2f%2f%2fetc%2fpasswd",
    ],
)
def test_encoded_paths_cannot_leave_the_folder_of_a_run(locked_server, path):
    assert locked_server.call("GET", f"{ARTIFACTS}/{path}", user=ADMIN)[0] == 400
    assert locked_server.call("PUT", f"{ARTIFACTS}/{path}", {}, ADMIN)[0] == 400
    assert locked_server.call("GET", f"{ARTIFACTS}/{path}", user=USER)[0] == 403


@pytest.fixture
def accounts(locked_server) -> dict[str, tuple[str, str]]:
    """Return the logins of the users that the Job of the manifests creates, by name. No model is registered yet."""
    locked_server.call("DELETE", f"{API}/registered-models/delete", {"name": "infoxlm"}, ADMIN)
    secrets = secret_data("small")
    secrets["mlflow-server"]["admin-password"] = ADMIN[1]
    spec = pod_templates("small")["Job/make-user"]["spec"]
    logins = {}
    for container in [*spec["initContainers"], *spec["containers"]] * 2:  # a second run must change nothing
        variables = environment_of(container, secrets) | {"MLFLOW_TRACKING_URI": locked_server.url}
        command = [sys.executable, *container["command"][1:], *container.get("args", [])]
        subprocess.run(command, env=os.environ | variables, check=True)
        logins[container["name"]] = (variables["MLFLOW_TRACKING_USERNAME"], variables["MLFLOW_TRACKING_PASSWORD"])
    return logins


@pytest.mark.item("S03")
def test_only_the_registry_account_can_register_models_and_move_the_champion(
    accounts, on_locked_server, tiny_encoders, tmp_path, s3_server
):
    def register() -> model_registry.Registration:
        candidate = model_registry.EvaluatedEncoder(
            tiny_encoders["first"],
            "sha256:first",
            {"retrieval/served": 0.5},
            run_id,
            {"test_set": "sha256:t"},
            evaluated(tmp_path / "evaluation", 0.5),
        )
        return model_registry.register("infoxlm", candidate, {"retrieval/served": 0.0})

    with logged_in(accounts["trainings"]):
        run_id = open_run(tmp_path, "trained")
        MlflowRun(run_id).log_params({"pretraining": {"seed": 1}})
        (tmp_path / "report.html").write_text("<p>good</p>")
        MlflowRun(run_id).log_artifacts(tmp_path / "report.html", "evaluation")
        keys = [item.key for item in s3.bucket(s3_server, "infoxlm").objects.filter(Prefix="mlflow/")]
        assert any(run_id in key and key.endswith("/evaluation/report.html") for key in keys)
        with pytest.raises(
            InputError, match=r"registered model infoxlm: MLflow refuses this account \(403\)"
        ) as refused:
            register()
        assert "\n" not in str(refused.value)

    with logged_in(accounts["pipelines"]):
        assert register().champion
        MlflowRun(run_id).end()

    with logged_in(accounts["trainings"]):
        assert model_registry.load_encoder("models:/infoxlm@champion", tmp_path / "cache")
        client = connection.connect(tmp_path)
        for forbidden_call in (
            lambda: client.set_registered_model_alias("infoxlm", "champion", "1"),
            lambda: client.delete_registered_model_alias("infoxlm", "champion"),
            lambda: client.set_model_version_tag("infoxlm", "1", "digest", "sha256:mine"),
            lambda: client.create_model_version("infoxlm", "mlflow-artifacts:/0/x"),
            lambda: client.delete_registered_model("infoxlm"),
            lambda: client.rename_registered_model("infoxlm", "mine"),
        ):
            with pytest.raises(InputError, match=r"\(403\)"), translate_errors("registered model infoxlm"):
                forbidden_call()
    with logged_in(accounts["pipelines"]):
        connection.connect(tmp_path).delete_run(run_id)  # for example of a second process that opened the same run


@pytest.mark.item("S03")
@pytest.mark.parametrize("location", ["s3://other/x", "file:///etc"])
def test_clients_refuse_experiments_and_models_with_other_artifact_locations(on_locked_server, tmp_path, location):
    name = re.sub(r"\W+", "-", location)
    body = {"name": name, "artifact_location": location}
    status, text = on_locked_server.call("POST", f"{API}/experiments/create", body, USER)
    if status == 200:  # MLflow allows some locations to any user
        with pytest.raises(InputError, match="not below mlflow-artifacts:/"):
            runs.open_run(name, "demo", {"infoxlm.run": "x"}, tmp_path)
    else:
        assert status == 400, text

    on_locked_server.call("POST", f"{API}/registered-models/create", {"name": name}, USER)
    status, text = on_locked_server.call(
        "POST", f"{API}/model-versions/create", {"name": name, "source": location}, USER
    )
    assert status in (200, 400), text
    with pytest.raises(InputError):
        model_registry.load_encoder(f"models:/{name}/1", tmp_path)


@pytest.mark.parametrize("password_is_in", ["variable", "address"])
def test_a_refused_login_is_reported_in_one_line_without_the_password(
    on_locked_server, monkeypatch, tmp_path, password_is_in
):
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", "canary-of-a-typo")
    if password_is_in == "address":
        monkeypatch.setenv("MLFLOW_TRACKING_URI", on_locked_server.url.replace("//", "//infoxlm:canary-of-a-url@"))
        for name in ("MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD"):
            monkeypatch.delenv(name)

    with pytest.raises(InputError) as refused:
        open_run(tmp_path)

    message = str(refused.value)
    assert "\n" not in message
    assert "401" in message
    assert "canary" not in message
    assert USER[0] + ":" not in message


def test_the_log_of_the_server_contains_no_password(locked_server):
    assert "canary" not in Path(locked_server.log).read_text()
