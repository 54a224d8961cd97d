"""MLflow as the manifests start it, on PostgreSQL and S3: whom it lets in, to what, and what our clients refuse."""

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
OPEN = "/mlflow/server-info"  # versions and switches; beside it /health and the files of the pages


@pytest.mark.item("S03")
def test_every_route_refuses_who_does_not_say_who_he_is(locked_server):
    from mlflow.server.handlers import get_endpoints

    routes = {(method, re.sub("<[^>]*>", "1", path)) for path, _, methods in get_endpoints() for method in methods}
    routes |= {("GET", "/"), ("GET", "/version"), ("POST", "/graphql"), ("GET", "/get-artifact?path=a&run_uuid=b")}
    routes |= {("POST", "/v1/traces"), ("POST", f"{API}/users/create"), ("GET", "/ajax-api/3.0/jobs/search")}
    routes |= {("GET", f"{ARTIFACTS}?path=0"), ("PUT", f"{ARTIFACTS}/0/x"), ("GET", f"{API}/users/list")}

    answers = {route: locked_server.call(*route, None if route[0] == "GET" else {})[0] for route in routes}

    assert len(answers) > 300
    assert {route for route, status in answers.items() if status != 401} <= {
        ("GET", f"/{prefix}/3.0{OPEN}") for prefix in ("api", "ajax-api")
    }


@pytest.mark.item("S03")
@pytest.mark.parametrize(
    "who", [(USER[0], "wrong"), ("nobody", USER[1]), ("admin", "password1234"), ("admin", "password"), ("admin", "")]
)
def test_wrong_and_well_known_passwords_are_refused(locked_server, who):
    assert locked_server.call("GET", f"{API}/experiments/search?max_results=1", user=who)[0] == 401
    assert locked_server.call("GET", f"{API}/experiments/search?max_results=1", user=USER)[0] == 200


@pytest.mark.item("S03")
@pytest.mark.parametrize(
    ("host", "expected"),
    [
        *((host, 403) for host in ("10.evil.example", "evil.example:5000", "192.168.evil.example", "localhost.evil")),
        *((host, 200) for host in ("mlflow", "mlflow:5000", "mlflow.infoxlm.svc")),
    ],
)
def test_foreign_host_names_are_refused_even_with_the_right_password(locked_server, host, expected):
    status, text = locked_server.call("GET", f"{API}/experiments/search?max_results=1", user=ADMIN, Host=host)

    assert status == expected and (status == 200 or "Host" in text)


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
def test_encoded_paths_lead_nowhere_else(locked_server, path):
    assert locked_server.call("GET", f"{ARTIFACTS}/{path}", user=ADMIN)[0] == 400
    assert locked_server.call("PUT", f"{ARTIFACTS}/{path}", {}, ADMIN)[0] == 400
    assert locked_server.call("GET", f"{ARTIFACTS}/{path}", user=USER)[0] == 403


@pytest.fixture
def accounts(locked_server) -> dict[str, tuple[str, str]]:
    """Name -> login of the users that the manifests' Job makes, with the passwords of the script; no model yet."""
    locked_server.call("DELETE", f"{API}/registered-models/delete", {"name": "infoxlm"}, ADMIN)
    secrets = secret_data("small")
    secrets["mlflow-server"]["admin-password"] = ADMIN[1]
    spec = pod_templates("small")["Job/make-user"]["spec"]
    logins = {}
    for container in [*spec["initContainers"], *spec["containers"]] * 2:  # the Job of the next deploy changes nothing
        known = environment_of(container, secrets) | {"MLFLOW_TRACKING_URI": locked_server.url}
        command = [sys.executable, *container["command"][1:], *container.get("args", [])]
        subprocess.run(command, env=os.environ | known, check=True)
        logins[container["name"]] = (known["MLFLOW_TRACKING_USERNAME"], known["MLFLOW_TRACKING_PASSWORD"])
    return logins


@pytest.mark.item("S03")
def test_a_training_logs_runs_and_reads_models_and_only_the_account_of_the_registry_moves_the_champion(
    accounts, on_locked_server, tiny_encoders, tmp_path, s3_server
):
    gate, tags = {"retrieval/served": 0.0}, {"test_set": "sha256:t"}

    def register() -> model_registry.Registration:
        scores, evaluation = {"retrieval/served": 0.5}, evaluated(tmp_path / "evaluation", 0.5)
        encoder = tiny_encoders["first"]
        candidate = model_registry.EvaluatedEncoder(encoder, "sha256:first", scores, run_id, tags, evaluation)
        return model_registry.register("infoxlm", candidate, gate)

    with logged_in(accounts["trainings"]):
        run_id = open_run(tmp_path, "trained")
        MlflowRun(run_id).log_params({"pretraining": {"seed": 1}})
        (tmp_path / "report.html").write_text("<p>good</p>")
        MlflowRun(run_id).log_artifacts(tmp_path / "report.html", "evaluation")
        stored = [item.key for item in s3.bucket(s3_server, "infoxlm").objects.filter(Prefix="mlflow/")]
        assert [key for key in stored if run_id in key and key.endswith("/evaluation/report.html")]
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
        for refuses in (
            lambda: client.set_registered_model_alias("infoxlm", "champion", "1"),
            lambda: client.delete_registered_model_alias("infoxlm", "champion"),
            lambda: client.set_model_version_tag("infoxlm", "1", "digest", "sha256:mine"),
            lambda: client.create_model_version("infoxlm", "mlflow-artifacts:/0/x"),
            lambda: client.delete_registered_model("infoxlm"),
            lambda: client.rename_registered_model("infoxlm", "mine"),
        ):
            with pytest.raises(InputError, match=r"\(403\)"), translate_errors("registered model infoxlm"):
                refuses()
    with logged_in(accounts["pipelines"]):
        connection.connect(tmp_path).delete_run(run_id)  # two stages may open one run; one deletes its own


@pytest.mark.item("S03")
@pytest.mark.parametrize("location", ["s3://other/x", "file:///etc"])
def test_an_experiment_or_model_that_points_elsewhere_is_refused_by_our_clients(on_locked_server, tmp_path, location):
    name = re.sub(r"\W+", "-", location)
    body = {"name": name, "artifact_location": location}
    status, text = on_locked_server.call("POST", f"{API}/experiments/create", body, USER)
    if status == 200:  # MLflow lets any user do so
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


@pytest.mark.parametrize("where", ["variable", "address"])
def test_a_refused_login_is_one_line_without_the_password(on_locked_server, monkeypatch, tmp_path, where):
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", "canary-of-a-typo")
    if where == "address":
        monkeypatch.setenv("MLFLOW_TRACKING_URI", on_locked_server.url.replace("//", "//infoxlm:canary-of-a-url@"))
        for name in ("MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD"):
            monkeypatch.delenv(name)

    with pytest.raises(InputError) as refused:
        open_run(tmp_path)

    message = str(refused.value)
    assert "\n" not in message and "401" in message
    assert "canary" not in message and USER[0] + ":" not in message


def test_the_server_writes_no_password_into_its_log(locked_server):
    assert "canary" not in Path(locked_server.log).read_text()
