"""The components that serve the champion: their pods, and their container's command as a process of this machine."""

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
from tests.k8s.manifests import environment_of, with_components
from tests.k8s.rules import confined, restricted
from tests.servers.processes import free_port, serving
from tests.servers.tracking import ADMIN, logged_in
from tests.toys.evaluation import evaluated
from tests.toys.models import save_model

PODS_FIELDS = {"automountServiceAccountToken", "containers", "enableServiceLinks", "securityContext", "volumes"}
KSERVE = {"minReplicas", "maxReplicas", "labels"} | PODS_FIELDS
"""Of the fields of `spec.predictor` in serving.kserve.io/v1beta1 (KServe 0.20) those that are used here; its container
has this name, is called at its first port, and its pod has the label that the network policy selects."""
CONTAINER, LABEL = "kserve-container", {"serving.kserve.io/inferenceservice": "infoxlm"}


def deployment() -> dict:
    [found] = [item for item in with_components("small", "serving") if item["metadata"]["name"] == "infoxlm-serving"
               and item["kind"] == "Deployment"]  # fmt: skip
    return found


def inference_service() -> dict:
    [found] = [item for item in with_components("small", "serving-kserve") if item["kind"] == "InferenceService"]
    return found


def specifications() -> dict[str, dict]:
    predictor = inference_service()["spec"]["predictor"]
    return {
        "serving": deployment()["spec"]["template"]["spec"],
        "serving-kserve": {name: value for name, value in predictor.items() if name in PODS_FIELDS},
    }


@pytest.mark.parametrize("component", ["serving", "serving-kserve"])
def test_its_pods_are_as_confined_as_all_of_ours(component):
    spec = specifications()[component]
    [container] = spec["containers"]

    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "serving"}, "spec": spec}
    kubernetes_validate.validate(pod, "1.37", strict=True)
    assert restricted(spec) == [] and confined(spec) == []
    assert container["securityContext"]["readOnlyRootFilesystem"] and spec["securityContext"]["runAsUser"] == 10001
    assert {probe: container[probe]["httpGet"]["path"] for probe in container if probe.endswith("Probe")} == {
        "startupProbe": "/v1/models/infoxlm", "readinessProbe": "/v1/models/infoxlm", "livenessProbe": "/",
    }  # fmt: skip


def test_both_components_run_the_same_server():
    plain, kserve = ({**spec["containers"][0], "name": "any"} for spec in specifications().values())

    assert plain == kserve


def test_the_inference_service_is_a_predictor_of_its_own_container_and_has_fields_that_kserve_knows():
    item = inference_service()

    assert (item["apiVersion"], set(item["spec"])) == ("serving.kserve.io/v1beta1", {"predictor"})
    assert set(item["spec"]["predictor"]) == KSERVE
    [container] = item["spec"]["predictor"]["containers"]
    assert container["name"] == CONTAINER and container["ports"][0]["containerPort"] == 8080
    policies = [item for item in with_components("small", "serving-kserve") if item["kind"] == "NetworkPolicy"]
    [own] = [policy for policy in policies if policy["metadata"]["name"] == "allow-inference"]
    assert own["spec"]["podSelector"] == {"matchLabels": LABEL}
    assert item["metadata"]["name"] == LABEL["serving.kserve.io/inferenceservice"]


def post(url: str, body: object) -> tuple[int, dict]:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    try:
        with urllib.request.urlopen(urllib.request.Request(url, data), timeout=60) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


@pytest.mark.slow
def test_the_deployments_command_serves_the_registered_vectors_to_whoever_may_only_read(on_locked_server, tmp_path):
    model = save_model(tmp_path / "model")
    reference_vectors.write(model)
    run_id = runs.open_run("infoxlm", "serving", {runs.RUN_TAG: "serving"}, tmp_path)
    scores, evaluation = {"retrieval/served": 0.5}, evaluated(tmp_path / "evaluation", 0.5)
    encoder = model_registry.EvaluatedEncoder(model, "sha256:s", scores, run_id, {}, evaluation)
    version = model_registry.register("infoxlm", encoder, {"retrieval/served": 0.0})
    client = connection.connect(tmp_path)
    client.set_registered_model_alias("infoxlm", "champion", str(version.version))  # others share the server
    login = {"MLFLOW_TRACKING_USERNAME": "serving", "MLFLOW_TRACKING_PASSWORD": "password-of-serving"}
    with logged_in(ADMIN):
        user.ensure(on_locked_server.url, *login.values())
        user.allow(on_locked_server.url, "serving", "infoxlm", "infoxlm", "read")

    [container] = deployment()["spec"]["template"]["spec"]["containers"]
    plain = [entry for entry in container["env"] if "configMapKeyRef" not in entry.get("valueFrom", {})]
    environment = environment_of({"env": plain}, {"infoxlm-serving": login})
    assert {entry["name"] for entry in container["env"]} - set(environment) == {
        "MLFLOW_TRACKING_URI", "INFOXLM_VERIFYING_KEY",
    }  # fmt: skip
    port, scratch = free_port(), tmp_path / "pod"  # its only writable folder
    scratch.mkdir()
    environment |= {"PATH": os.environ["PATH"], "HOME": str(scratch), "TMPDIR": str(scratch)}
    environment |= {"MLFLOW_TRACKING_URI": on_locked_server.url, "INFOXLM_PORT": str(port)}
    environment |= {"PYTHONPATH": str(Path(__file__).parents[2])}
    program, *arguments = [word.replace("0.0.0.0", "127.0.0.1") for word in container["command"]]
    command = [str(Path(sys.executable).with_name(program)), *arguments]
    url = f"http://127.0.0.1:{port}/v1/models/infoxlm"

    with serving(command, url, tmp_path / "log.txt", environment) as server:
        reference = reference_vectors.read(model)
        status, said = post(f"{url}:predict", {"instances": list(reference.sentences)})
        alone = post(f"{url}:predict", {"instances": [reference.sentences[3]]})[1]["predictions"]
        os.kill(server.pid, signal.SIGTERM)
        ended = server.wait(60)

    assert (status, ended) == (200, 0), (tmp_path / "log.txt").read_text()
    assert reference_vectors.compare(reference, torch.tensor(said["predictions"]), "served").cosine > 0.999999
    assert torch.allclose(torch.tensor(alone[0]), reference.vectors[3], atol=1e-5)
    assert "10 reference vectors are equal, worst cosine" in (tmp_path / "log.txt").read_text()
