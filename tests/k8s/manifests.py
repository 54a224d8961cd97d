"""The manifests as `kubectl apply` would get them, rendered without a cluster."""

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
CLUSTER_PAGES = tuple(f"cluster/{page}.md" for page in ("install", "run", "operate", "reference", "troubleshooting"))
SINGLE_USER = "single-user"
"""Small, and runs in Kubeflow's namespace."""


def read_cluster_pages() -> str:
    """Return the text of all pages in docs/cluster, in the order of their reading."""
    return "\n".join((ROOT / "docs" / page).read_text() for page in CLUSTER_PAGES)


def kustomize(folder: Path) -> str:
    return subprocess.run([KUBECTL, "kustomize", str(folder)], check=True, capture_output=True, text=True).stdout


@functools.cache
def text(overlay: str) -> str:
    return kustomize(K8S / "overlays" / overlay)


def rendered(overlay: str) -> list[dict]:
    return list(yaml.safe_load_all(text(overlay)))


@functools.cache
def _put_together(parts: str) -> str:
    with tempfile.TemporaryDirectory(prefix=".test-", dir=K8S) as folder:  # kustomize wants relative paths
        Path(folder, "kustomization.yaml").write_text(parts)
        return kustomize(Path(folder))


def with_components(overlay: str, *components: str, **more: list) -> list[dict]:
    """An overlay with components beside its own, and what else a kustomization may have."""
    named = [f"../components/{component}" for component in components]
    parts = {"resources": [f"../overlays/{overlay}"], "components": named, **more}
    return list(yaml.safe_load_all(_put_together(yaml.safe_dump(parts))))


def named(overlay: str, kind: str, name: str) -> dict:
    [found] = [item for item in rendered(overlay) if (item["kind"], item["metadata"]["name"]) == (kind, name)]
    return found


def pods(overlay: str) -> dict[str, dict]:
    """Kind/name -> template of its pods."""
    return {
        f"{item['kind']}/{item['metadata']['name']}": item["spec"]["template"]
        for item in rendered(overlay)
        if "template" in item.get("spec", {})
    }


def environment_of(container: dict, secrets: dict[str, dict[str, str]]) -> dict[str, str]:
    """The environment that a container gets, with the values of its Secrets."""

    def value(entry: dict) -> str:
        if "value" in entry:
            return entry["value"]
        reference = entry["valueFrom"]["secretKeyRef"]
        return secrets[reference["name"]][reference["key"]]

    return {entry["name"]: value(entry) for entry in container["env"]}


def made(overlay: str) -> dict[str, dict[str, str]]:
    """Name -> content of the Secrets of an overlay."""
    items = secrets(overlay)
    assert {item["metadata"]["namespace"] for item in items} == {"infoxlm"}
    return {item["metadata"]["name"]: item["stringData"] for item in items}


def secrets(overlay: str, *options: str) -> list[dict]:
    """What the script prints."""
    command = [sys.executable, str(K8S / "make_secrets.py"), overlay, *options]
    if overlay == "production":  # it asks for the password on the terminal
        ask = "import getpass, runpy, sys; getpass.getpass = lambda _: 'given'; sys.argv = sys.argv[1:]"
        command[1:2] = ["-c", f"{ask}; runpy.run_path(sys.argv[0], run_name='__main__')", command[1]]
        command += ["--database-user", "db"]
    printed = subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT).stdout
    return json.loads(printed)["items"]
