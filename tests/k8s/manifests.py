"""Render the manifests as `kubectl apply` would receive them. No cluster is needed."""

import functools
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[2]
K8S = ROOT / "k8s"
KUBECTL = str(Path(sys.executable).with_name("kubectl"))
OVERLAYS = ("small", "production")
SINGLE_USER = "single-user"
"""The overlay for a single-user Kubeflow: as `small`, but runs are in Kubeflow's namespace."""
CLUSTER_PAGES = tuple(f"cluster/{page}.md" for page in ("install", "run", "operate", "reference", "troubleshooting"))


def read_cluster_pages() -> str:
    """Return the text of all pages in docs/cluster, in reading order."""
    return "\n".join((ROOT / "docs" / page).read_text() for page in CLUSTER_PAGES)


def kustomize(folder: Path) -> str:
    """Return the manifests that kustomize builds from a folder, as YAML."""
    return subprocess.run([KUBECTL, "kustomize", str(folder)], check=True, capture_output=True, text=True).stdout


@functools.cache
def render_text(overlay: str) -> str:
    """Return the manifests of an overlay as YAML."""
    return kustomize(K8S / "overlays" / overlay)


def render(overlay: str) -> list[dict]:
    """Return the manifests of an overlay."""
    return list(yaml.safe_load_all(render_text(overlay)))


@functools.cache
def _render_kustomization(content: str) -> str:
    with tempfile.TemporaryDirectory(prefix=".test-", dir=K8S) as folder:  # kustomize requires relative paths
        Path(folder, "kustomization.yaml").write_text(content)
        return kustomize(Path(folder))


def render_with_components(overlay: str, *components: str, **fields: list) -> list[dict]:
    """Return the manifests of an overlay with further components, and with other fields of a kustomization."""
    paths = [f"../components/{component}" for component in components]
    kustomization = {"resources": [f"../overlays/{overlay}"], "components": paths, **fields}
    return list(yaml.safe_load_all(_render_kustomization(yaml.safe_dump(kustomization))))


def get_manifest(overlay: str, kind: str, name: str) -> dict:
    """Return the only manifest of an overlay with this kind and name."""
    [manifest] = [item for item in render(overlay) if (item["kind"], item["metadata"]["name"]) == (kind, name)]
    return manifest


def select_kind(items: list[dict], kind: str) -> list[dict]:
    """Return the manifests of one kind."""
    return [item for item in items if item["kind"] == kind]


def pod_templates(overlay: str) -> dict[str, dict]:
    """Return the pod template of each workload of an overlay by KIND/NAME."""
    templates = {}
    for item in render(overlay):
        if "template" in item.get("spec", {}):
            templates[f"{item['kind']}/{item['metadata']['name']}"] = item["spec"]["template"]
    return templates


def containers_of(pod_spec: dict) -> list[dict]:
    """Return the init containers and containers of a pod."""
    return [*(pod_spec.get("initContainers") or []), *pod_spec["containers"]]


def environment_of(container: dict, secrets: dict[str, dict[str, str]]) -> dict[str, str]:
    """Return the environment of a container. Values that refer to a Secret are taken from `secrets`."""
    environment = {}
    for variable in container["env"]:
        if "value" in variable:
            environment[variable["name"]] = variable["value"]
        else:
            reference = variable["valueFrom"]["secretKeyRef"]
            environment[variable["name"]] = secrets[reference["name"]][reference["key"]]
    return environment


def make_secrets(overlay: str, *options: str) -> list[dict]:
    """Return the Secrets that the script k8s/make_secrets.py prints."""
    command = [sys.executable, str(K8S / "make_secrets.py"), overlay, *options]
    if overlay == "production":  # the script asks for the password on the terminal
        answer = "import getpass, runpy, sys; getpass.getpass = lambda _: 'typed'; sys.argv = sys.argv[1:]"
        command[1:2] = ["-c", f"{answer}; runpy.run_path(sys.argv[0], run_name='__main__')", command[1]]
        command += ["--database-user", "db"]
    output = subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT).stdout
    return json.loads(output)["items"]


def secret_data(overlay: str) -> dict[str, dict[str, str]]:
    """Return the content of the Secrets of an overlay by name."""
    secrets = make_secrets(overlay)
    assert {secret["metadata"]["namespace"] for secret in secrets} == {"infoxlm"}
    return {secret["metadata"]["name"]: secret["stringData"] for secret in secrets}
