"""`k8s/make_secrets.py` makes the Secrets that manifests and pipelines read, with new values at each call."""

import json
import re
import subprocess
import sys

import pytest
import yaml

from components.settings.cluster import ClusterFile
from components.settings.environment import REGISTRY_VARIABLES
from pipelines import steps
from tests.k8s.manifests import K8S, OVERLAYS, ROOT, containers_of, get_manifest, pod_templates, render, secret_data


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_every_secret_that_a_pod_reads_is_made(overlay):
    made_keys = set()
    for name, data in secret_data(overlay).items():
        made_keys |= {(name, key) for key in data}

    read_keys = set()
    for template in pod_templates(overlay).values():
        for container in containers_of(template["spec"]):
            for variable in container.get("env", []):
                reference = variable.get("valueFrom", {}).get("secretKeyRef")
                if reference:
                    read_keys.add((reference["name"], reference["key"]))
    assert read_keys <= made_keys


def test_pipelines_read_the_config_map_and_secrets_of_the_manifests():
    secrets = secret_data("small")
    set_variables = set(get_manifest("small", "ConfigMap", steps.ENVIRONMENT)["data"])
    environment_file = (K8S / "runs/environment.yaml").read_text()
    optional_variables = set(re.findall(r"^#   ([A-Z_]+): ", environment_file, re.MULTILINE))
    login = secrets[steps.MLFLOW_LOGIN]
    registry_login = secrets[steps.REGISTRY_LOGIN]
    plugin_login = secrets["kfp-mlflow-credentials"]
    plugin = json.loads(get_manifest("small", "ConfigMap", "kfp-launcher")["data"]["plugins.mlflow"])["settings"]

    assert set(steps._CONFIG_VARIABLES) == set_variables | optional_variables
    assert {"HTTPS_PROXY", "INFOXLM_SIGNING_KEY", "INFOXLM_TRACKER"} <= optional_variables - set_variables
    assert set(secrets[steps.STORE_KEYS]) == {"AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"}
    assert set(login) == set(registry_login) == set(REGISTRY_VARIABLES)
    assert all(login[name] != registry_login[name] for name in login)
    assert set(plugin_login.values()) == set(login.values())
    assert set(plugin["credentialSecretRef"].values()) == set(plugin_login)


def test_the_cluster_file_names_objects_of_the_manifests():
    cluster = ClusterFile.model_validate(yaml.safe_load((ROOT / "configs/cluster.yaml").read_text()))

    names = {(item["kind"], item["metadata"]["name"]) for item in render("production")}
    assert ("ServiceAccount", cluster.service_account) in names
    assert ("ServiceAccount", cluster.ray.service_account) in names
    assert ("PriorityClass", cluster.ray.priority_class) in names
    launcher = get_manifest("production", "ConfigMap", "kfp-launcher")
    assert launcher["data"]["defaultPipelineRoot"] == cluster.pipeline_root
    quota = get_manifest("production", "ResourceQuota", "infoxlm")["spec"]["hard"]
    assert int(quota["requests.nvidia.com/gpu"]) % cluster.pool.gpus == 0


def test_each_call_makes_new_passwords():
    values = []
    for _ in range(2):
        values += secret_data("small")["mlflow-server"].values()

    assert len(set(values)) == 4
    assert all(len(value) >= 12 for value in values)


def test_secrets_are_not_printed_on_a_terminal():
    command = [sys.executable, str(K8S / "make_secrets.py"), "small"]
    on_terminal = f"import pty, sys; sys.exit(pty.spawn({command!r}) >> 8)"

    result = subprocess.run(
        [sys.executable, "-c", on_terminal], capture_output=True, text=True, stdin=subprocess.DEVNULL
    )

    assert result.returncode == 1
    assert "password" in result.stdout
    assert "stringData" not in result.stdout
