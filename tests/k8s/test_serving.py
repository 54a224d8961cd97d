"""The components that serve the champion: their pods, and the command of their container as a local process."""

import json
import os
import signal
import sys
import urllib.error
import urllib.request
from pathlib import Path

import kubernetes_validate
import pytest
import torch

from components.adapters.mlflow import connection, model_registry, runs, user
from infoxlm_core.tasks import reference_vectors
from tests.k8s.manifests import environment_of, render_with_components, select_kind
from tests.k8s.rules import find_violations
from tests.servers.processes import free_port, serving
from tests.servers.tracking import ADMIN, logged_in
from tests.toys.evaluation import evaluated
from tests.toys.models import save_model

POD_FIELDS = {"automountServiceAccountToken", "containers", "enableServiceLinks", "securityContext", "volumes"}
PREDICTOR_FIELDS = {"minReplicas", "maxReplicas", "labels"} | POD_FIELDS
"""Fields of `spec.predictor` in serving.kserve.io/v1beta1 (KServe 0.20) that we use."""
KSERVE_CONTAINER = "kserve-container"
"""Name that KServe requires of the container. KServe calls its first port."""
KSERVE_LABELS = {"serving.kserve.io/inferenceservice": "infoxlm"}
"""Labels that KServe gives the pod, and that our network policy selects."""


def read_deployment() -> dict:
    deployments = select_kind(render_with_components("small", "serving"), "Deployment")
    [deployment] = [item for item in deployments if item["metadata"]["name"] == "infoxlm-serving"]
    return deployment


def read_inference_service() -> dict:
    [service] = select_kind(render_with_components("small", "serving-kserve"), "InferenceService")
    return service


def read_pod_spec(component: str) -> dict:
    """Return the specification of the pods of a serving component."""
    if component == "serving":
        return read_deployment()["spec"]["template"]["spec"]
    predictor = read_inference_service()["spec"]["predictor"]
    return {name: value for name, value in predictor.items() if name in POD_FIELDS}


@pytest.mark.parametrize("component", ["serving", "serving-kserve"])
def test_pods_follow_our_rules_and_have_probes(component):
    spec = read_pod_spec(component)
    [container] = spec["containers"]

    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "serving"}, "spec": spec}
    kubernetes_validate.validate(pod, "1.37", strict=True)
    assert find_violations(spec) == []
    assert spec["securityContext"]["runAsUser"] == 10001
    paths = {name: value["httpGet"]["path"] for name, value in container.items() if name.endswith("Probe")}
    assert paths == {
        "startupProbe": "/v1/models/infoxlm",
        "readinessProbe": "/v1/models/infoxlm",
        "livenessProbe": "/",
    }


def test_both_components_run_the_same_container():
    [container] = read_pod_spec("serving")["containers"]
    [kserve_container] = read_pod_spec("serving-kserve")["containers"]

    assert container | {"name": KSERVE_CONTAINER} == kserve_container


def test_the_inference_service_has_known_fields_and_its_policy_selects_its_pod():
    service = read_inference_service()
    predictor = service["spec"]["predictor"]
    [container] = predictor["containers"]
    policies = select_kind(render_with_components("small", "serving-kserve"), "NetworkPolicy")
    [policy] = [item for item in policies if item["metadata"]["name"] == "allow-inference"]

    assert service["apiVersion"] == "serving.kserve.io/v1beta1"
    assert set(service["spec"]) == {"predictor"}
    assert set(predictor) == PREDICTOR_FIELDS
    assert container["name"] == KSERVE_CONTAINER
    assert container["ports"][0]["containerPort"] == 8080
    assert policy["spec"]["podSelector"] == {"matchLabels": KSERVE_LABELS}
    assert service["metadata"]["name"] == KSERVE_LABELS["serving.kserve.io/inferenceservice"]


def request_json(url: str, body: object) -> tuple[int, dict]:
    """POST a value as JSON and return the status and the parsed answer."""
    request = urllib.request.Request(url, json.dumps(body).encode())
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def register_champion(encoder: Path, folder: Path) -> None:
    """Register an encoder as the champion of the model `infoxlm`."""
    run_id = runs.open_run("infoxlm", "serving", {runs.RUN_TAG: "serving"}, folder)
    evaluation = evaluated(folder / "evaluation", 0.5)
    candidate = model_registry.EvaluatedEncoder(encoder, "sha256:s", {"retrieval/served": 0.5}, run_id, {}, evaluation)
    version = model_registry.register("infoxlm", candidate, {"retrieval/served": 0.0}).version
    # Other tests register models of this name on the shared server, so set the alias without the gate.
    connection.connect(folder).set_registered_model_alias("infoxlm", "champion", str(version))


@pytest.mark.slow
def test_the_deployments_command_serves_the_champion_with_read_only_rights(on_locked_server, tmp_path):
    model = save_model(tmp_path / "model")
    reference_vectors.write_reference(model)
    register_champion(model, tmp_path)
    login = {"MLFLOW_TRACKING_USERNAME": "serving", "MLFLOW_TRACKING_PASSWORD": "password-of-serving"}
    with logged_in(ADMIN):
        user.create_user(on_locked_server.url, *login.values())
        user.grant_access(on_locked_server.url, "serving", "infoxlm", "infoxlm", "read")

    [container] = read_pod_spec("serving")["containers"]
    from_config_map = {
        variable["name"] for variable in container["env"] if "configMapKeyRef" in variable.get("valueFrom", {})
    }
    assert from_config_map == {"MLFLOW_TRACKING_URI", "INFOXLM_VERIFYING_KEY"}
    variables = [variable for variable in container["env"] if variable["name"] not in from_config_map]
    port = free_port()
    writable_folder = tmp_path / "pod"
    writable_folder.mkdir()
    environment = environment_of({"env": variables}, {"infoxlm-serving": login}) | {
        "PATH": os.environ["PATH"],
        "HOME": str(writable_folder),
        "TMPDIR": str(writable_folder),
        "MLFLOW_TRACKING_URI": on_locked_server.url,
        "INFOXLM_PORT": str(port),
        "PYTHONPATH": str(Path(__file__).parents[2]),
    }
    program, *arguments = [word.replace("0.0.0.0", "127.0.0.1") for word in container["command"]]
    command = [str(Path(sys.executable).with_name(program)), *arguments]
    url = f"http://127.0.0.1:{port}/v1/models/infoxlm"
    log = tmp_path / "log.txt"

    with serving(command, url, log, environment) as server:
        reference = reference_vectors.read_reference(model)
        status, answer = request_json(f"{url}:predict", {"instances": list(reference.sentences)})
        _, answer_for_one = request_json(f"{url}:predict", {"instances": [reference.sentences[3]]})
        os.kill(server.pid, signal.SIGTERM)
        exit_code = server.wait(60)

    assert (status, exit_code) == (200, 0), log.read_text()
    vectors = torch.tensor(answer["predictions"])
    assert reference_vectors.compare_vectors(reference, vectors, "served").cosine > 0.999999
    assert torch.allclose(torch.tensor(answer_for_one["predictions"][0]), reference.vectors[3], atol=1e-5)
    assert "10 reference vectors are equal up to rounding, worst cosine" in log.read_text()
