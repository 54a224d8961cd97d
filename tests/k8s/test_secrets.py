"""The Secrets that a script makes are those that manifests, pipelines and SeaweedFS read, with new values each time."""

import json
import re
import subprocess
import sys

import pytest
import yaml

from components.settings.cluster import ClusterFile
from components.settings.environment import REGISTRY_VARIABLES
from pipelines import steps
from tests.k8s.manifests import K8S, OVERLAYS, ROOT, made, named, pods, rendered


def referred_to(overlay: str) -> set[tuple[str, str]]:
    """Secret and key of everything that a pod of an overlay reads."""
    found = set()
    for pod in pods(overlay).values():
        for container in [*pod["spec"].get("initContainers", []), *pod["spec"]["containers"]]:
            references = [entry.get("valueFrom", {}).get("secretKeyRef") for entry in container.get("env", [])]
            found |= {(reference["name"], reference["key"]) for reference in references if reference}
    return found


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_every_secret_that_a_pod_reads_is_made(overlay):
    secrets = made(overlay)

    assert referred_to(overlay) <= {(name, key) for name, content in secrets.items() for key in content}


def test_steps_read_what_is_made_for_them():
    """Names of variables and of Secrets stand in the pipelines and in the manifests; they are the same."""
    secrets = made("small")
    environment = set(named("small", "ConfigMap", steps.ENVIRONMENT)["data"])
    offered = set(re.findall(r"^#   ([A-Z_]+): ", (K8S / "runs/environment.yaml").read_text(), re.MULTILINE))

    assert set(steps._CONFIG_VARIABLES) == environment | offered
    assert {"HTTPS_PROXY", "INFOXLM_SIGNING_KEY", "INFOXLM_TRACKER"} <= offered - environment
    assert set(secrets[steps.STORE_KEYS]) == {"AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"}
    login, registry = secrets[steps.MLFLOW_LOGIN], secrets[steps.REGISTRY_LOGIN]
    assert set(login) == set(registry) == set(REGISTRY_VARIABLES)
    assert all(login[name] != registry[name] for name in login)
    assert set(secrets["kfp-mlflow-credentials"].values()) == set(login.values())
    plugin = json.loads(named("small", "ConfigMap", "kfp-launcher")["data"]["plugins.mlflow"])["settings"]
    assert set(plugin["credentialSecretRef"].values()) == set(secrets["kfp-mlflow-credentials"])


def test_the_cluster_file_names_what_the_manifests_make():
    cluster = ClusterFile.model_validate(yaml.safe_load((ROOT / "configs/cluster.yaml").read_text()))

    names = {(item["kind"], item["metadata"]["name"]) for item in rendered("production")}
    assert ("ServiceAccount", cluster.service_account) in names
    assert ("ServiceAccount", cluster.ray.service_account) in names
    assert ("PriorityClass", cluster.ray.priority_class) in names
    assert named("production", "ConfigMap", "kfp-launcher")["data"]["defaultPipelineRoot"] == cluster.pipeline_root
    gpus = int(named("production", "ResourceQuota", "infoxlm")["spec"]["hard"]["requests.nvidia.com/gpu"])
    assert gpus % cluster.pool.gpus == 0


def test_two_calls_make_two_passwords_and_none_is_printed_on_a_screen():
    first, second = made("small"), made("small")

    values = [value for secrets in (first, second) for value in secrets["mlflow-server"].values()]
    assert len(set(values)) == 4 and all(len(value) >= 12 for value in values)
    script = (
        f"import pty, sys; sys.exit(pty.spawn([{sys.executable!r}, {str(K8S / 'make_secrets.py')!r}, 'small']) >> 8)"
    )
    shown = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert shown.returncode == 1 and "password" in shown.stdout and "stringData" not in shown.stdout
