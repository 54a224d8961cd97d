"""MLflow as the manifests start it, on PostgreSQL and S3: whom it lets in, to what, and what our clients refuse."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from components.adapters.mlflow import connection, model_registry, runs
from components.adapters.mlflow.errors import translate_errors
from components.adapters.mlflow.tracker import MlflowTracker
from infoxlm_core.errors import InputError
from tests.components.conftest import history, open_run
from tests.k8s.manifests import environment_of, made, pods
from tests.servers import s3
from tests.servers.tracking import ADMIN, READER, USER
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


def test_what_one_user_makes_another_neither_sees_nor_changes_until_he_may_read_it(locked_server):
    model = {"name": "guarded"}
    assert locked_server.call("POST", f"{API}/registered-models/create", model, USER)[0] == 200
    source, champion = {**model, "source": "mlflow-artifacts:/0/x"}, {**model, "alias": "champion", "version": "1"}

    def as_reader(method: str, path: str, body: dict | None = None) -> int:
        return locked_server.call(method, API + path, body, READER)[0]

    assert as_reader("GET", "/registered-models/get?name=guarded") == 403  # nothing is anybody's by default
    grant = {"username": READER[0], "resource_type": "registered_model", "resource_id": "guarded", "permission": "READ"}
    status, text = locked_server.call("POST", "/api/3.0/mlflow/users/permissions/grant", grant, ADMIN)
    assert status == 200, text

    assert as_reader("GET", "/registered-models/get?name=guarded") == 200
    assert as_reader("POST", "/registered-models/alias", champion) == 403
    assert locked_server.call("POST", f"{API}/registered-models/alias", champion, USER)[0] == 404  # no such version
    assert as_reader("POST", "/model-versions/create", source) == 403
    assert as_reader("POST", "/users/create", {"username": "x", "password": "long enough for it"}) == 403
    assert as_reader("POST", "/users/update-admin", {"username": READER[0], "is_admin": True}) == 403


@pytest.mark.item("S03")
@pytest.mark.parametrize("host", ["10.evil.example", "evil.example:5000", "192.168.evil.example", "localhost.evil"])
def test_foreign_host_names_are_refused_even_with_the_right_password(locked_server, host):
    status, text = locked_server.call("GET", f"{API}/experiments/search?max_results=1", user=ADMIN, Host=host)

    assert status == 403 and "Host" in text


@pytest.mark.parametrize(
    "host", ["mlflow", "mlflow:5000", "mlflow.infoxlm.svc", "mlflow.infoxlm.svc.cluster.local:5000"]
)
def test_the_names_of_the_service_pass(locked_server, host):
    assert locked_server.call("GET", f"{API}/experiments/search?max_results=1", user=ADMIN, Host=host)[0] == 200


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


def test_our_clients_work_as_an_ordinary_user_and_artifacts_go_through_the_server(
    on_locked_server, tmp_path, s3_server
):
    run_id = open_run(tmp_path, "auth")
    runs.log_params(run_id, {"pretraining": {"seed": 1}})
    tracker = MlflowTracker(tmp_path / "metrics.jsonl", run_id)
    tracker.resume(0)
    tracker.log(1, {"loss": 0.5})
    tracker.close()
    (tmp_path / "report.html").write_text("<p>good</p>")
    runs.log_artifacts(run_id, tmp_path / "report.html", "evaluation")
    runs.end_run(run_id)

    assert history(run_id, "loss") == [(1, 0.5)]
    stored = [item.key for item in s3.bucket(s3_server, "infoxlm").objects.filter(Prefix="mlflow/")]
    assert [key for key in stored if run_id in key and key.endswith("/evaluation/report.html")]


@pytest.fixture
def accounts(locked_server) -> dict[str, tuple[str, str]]:
    """Name -> login of the users that the manifests' Job makes, with the passwords of the script; no model yet."""
    locked_server.call("DELETE", f"{API}/registered-models/delete", {"name": "infoxlm"}, ADMIN)
    secrets = made("small")
    secrets["mlflow-server"]["admin-password"] = ADMIN[1]
    spec = pods("small")["Job/make-user"]["spec"]
    logins = {}
    for container in [*spec["initContainers"], *spec["containers"]] * 2:  # the Job of the next deploy changes nothing
        known = environment_of(container, secrets) | {"MLFLOW_TRACKING_URI": locked_server.url}
        command = [sys.executable, *container["command"][1:], *container.get("args", [])]
        subprocess.run(command, env=os.environ | known, check=True)
        logins[container["name"]] = (known["MLFLOW_TRACKING_USERNAME"], known["MLFLOW_TRACKING_PASSWORD"])
    return logins


def become(login: tuple[str, str], monkeypatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_USERNAME", login[0])
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", login[1])


@pytest.mark.item("S03")
def test_a_training_logs_runs_and_reads_models_and_only_the_account_of_the_registry_moves_the_champion(
    accounts, on_locked_server, tiny_encoders, tmp_path, monkeypatch
):
    def register(encoder: str, score: float) -> model_registry.Registration:
        figures, origin = {"retrieval/best": score}, {"test_set": "sha256:t"}
        path, judged = tiny_encoders[encoder], evaluated(tmp_path / "evaluation", score)
        gate = {"retrieval/best": 0.0}
        return model_registry.register("infoxlm", path, f"sha256:{encoder}", figures, gate, run_id, origin, judged)

    become(accounts["trainings"], monkeypatch)
    run_id = open_run(tmp_path, "trained")
    runs.log_params(run_id, {"pretraining": {"seed": 1}})
    (tmp_path / "report.html").write_text("<p>good</p>")
    runs.log_artifacts(run_id, tmp_path / "report.html", "evaluation")
    with pytest.raises(InputError, match=r"registered model infoxlm: MLflow refuses this account \(403\)") as refused:
        register("first", 0.5)
    assert "\n" not in str(refused.value)

    become(accounts["pipelines"], monkeypatch)
    assert register("first", 0.5).champion
    runs.end_run(run_id)

    become(accounts["trainings"], monkeypatch)
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
    become(accounts["pipelines"], monkeypatch)
    connection.connect(tmp_path).delete_run(run_id)  # of two stages that open a run at once one takes its own away


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


def test_a_wrong_password_is_one_line_without_the_password(on_locked_server, monkeypatch, tmp_path):
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", "canary-of-a-typo")

    with pytest.raises(InputError) as refused:
        open_run(tmp_path)

    said = str(refused.value)
    assert "\n" not in said and "401" in said
    assert "canary" not in said and USER[0] + ":" not in said


def test_a_password_in_the_address_is_not_said_either(on_locked_server, monkeypatch, tmp_path):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", on_locked_server.url.replace("//", "//infoxlm:canary-of-a-url@"))
    for name in ("MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD"):
        monkeypatch.delenv(name)

    with pytest.raises(InputError) as refused:
        open_run(tmp_path)

    assert "canary" not in str(refused.value)


def test_the_server_writes_no_password_into_its_log(locked_server):
    assert "canary" not in Path(locked_server.log).read_text()
