"""The documented settings of the first run are valid, fit the quota of `small`, and name existing objects."""

import re

import yaml

from components.adapters.kuberay.manifest import _SUBMITTER_RESOURCES
from components.settings.cluster import ClusterFile
from infoxlm_core import run_file
from pipelines.cli.cluster import prepare_parameters
from tests.k8s.manifests import (
    CLUSTER_PAGES,
    K8S,
    OVERLAYS,
    ROOT,
    SINGLE_USER,
    get_manifest,
    pod_templates,
    read_cluster_pages,
    render,
    render_with_components,
    secret_data,
)

PAGES = read_cluster_pages()
_UNITS = {"m": 1e-3, "Mi": 2**20, "Gi": 2**30}


def read_documented_cluster() -> ClusterFile:
    """Return configs/cluster.yaml with the changes that the page about the first run shows."""
    block = PAGES.partition("## 1. Describe the cluster")[2].partition("```yaml\n")[2].partition("```")[0]
    settings = yaml.safe_load((ROOT / "configs/cluster.yaml").read_text())
    for name, value in yaml.safe_load(block).items():
        settings[name] = settings[name] | value if isinstance(value, dict) else value
    settings["image"] = f"registry.example/infoxlm@sha256:{'1' * 64}"
    return ClusterFile.model_validate(settings)


def parse_quantity(quantity: str) -> float:
    """Return the number of cores or bytes of a Kubernetes quantity, such as 500m or 16Gi."""
    number, unit = re.fullmatch(r"(\d+)(\w*)", quantity).groups()
    return int(number) * _UNITS.get(unit, 1)


def test_the_demo_can_run_with_one_worker():
    overrides = ["num_workers=1"]

    parameters = prepare_parameters("infoxlm", ROOT / "configs/demo.yaml", read_documented_cluster(), overrides)

    assert parameters["num_workers"] == 1
    assert run_file.load(ROOT / "configs/demo.yaml", overrides).num_workers == 1


def test_the_demo_requests_the_documented_resources_and_fits_the_quota_of_small():
    """At its peak, the demo has one training worker, two RayJob heads, two steps with submitters, and the services."""
    cluster = read_documented_cluster()
    step_requests = get_manifest("small", "LimitRange", "infoxlm")["spec"]["limits"][0]["defaultRequest"]
    quota = get_manifest("small", "ResourceQuota", "infoxlm")["spec"]["hard"]
    documented_requests = re.search(r"request at most (?P<cpu>\d+)\s+cores and (?P<memory>\d+) GiB", PAGES)
    head_requests = {"cpu": cluster.ray.head_cpu, "memory": cluster.ray.head_memory}
    worker_requests = {"cpu": cluster.pool.cpu, "memory": cluster.pool.memory}

    for resource, unit in (("cpu", 1), ("memory", 2**30)):
        heads = 2 * parse_quantity(head_requests[resource])
        steps = 2 * (
            parse_quantity(step_requests[resource]) + parse_quantity(_SUBMITTER_RESOURCES["requests"][resource])
        )
        services = 0.0
        for name, template in pod_templates("small").items():
            if not name.startswith("Job/"):
                containers = template["spec"]["containers"]
                services += max(
                    parse_quantity(container["resources"]["requests"][resource]) for container in containers
                )
        requested = parse_quantity(worker_requests[resource]) + heads + steps + services

        documented = int(documented_requests[resource]) * unit
        assert requested <= documented < requested + 2 * unit
        assert requested <= parse_quantity(quota[f"requests.{resource}"])
    assert cluster.pool.gpus <= int(quota["requests.nvidia.com/gpu"])


def read_commands(*pages: str) -> list[str]:
    """Return the commands of documentation pages: the lines of bash blocks, and kubectl commands in sentences."""
    text = "\n".join((ROOT / "docs" / page).read_text() for page in pages)
    blocks = "\n".join(re.findall(r"```bash\n(.*?)```", text, re.DOTALL)).replace("\\\n", " ")
    commands = [re.sub(r"(^|\s)# .*", "", line).strip() for line in blocks.splitlines()]
    commands += [" ".join(command.split()) for command in re.findall(r"`(kubectl [^`]*)`", text)]
    return commands


KUBEFLOW_OBJECTS = {
    *("deployment/ml-pipeline", "service/ml-pipeline", "service/ml-pipeline-ui", "configmap/kfp-launcher"),
    "configmap/workflow-controller-configmap",
}
"""Objects of Kubeflow 2.17 that the pages mention."""
CREATING_COMMAND = r"create (?:configmap|secret \S+|rolebinding) [\w-]+"
KIND_BY_ABBREVIATION = {"svc": "service", "deploy": "deployment"}
OBJECT_NAMES = re.compile(
    r"\b(?P<kind>svc|service|deploy|deployment|secret|configmap|job|serviceaccount)s?"
    r"[ /](?P<names>[a-z][\w-]*(?: [a-z][\w-]*)*)"
)


def test_documented_commands_name_objects_that_exist():
    """An object exists if an overlay, a component, the script for Secrets or Kubeflow creates it."""
    runbook = [f"runbook/{page}.md" for page in ("README", "training", "cluster", "image")]
    components = sorted(path.name for path in (K8S / "components").iterdir())
    optional_components = [name for name in components if name not in ("own-namespace", "priority")]
    items = [*render("production"), *render(SINGLE_USER), *render_with_components("small", *optional_components)]
    existing_objects = {f"{item['kind'].lower()}/{item['metadata']['name']}" for item in items} | KUBEFLOW_OBJECTS
    for overlay in OVERLAYS:
        existing_objects |= {f"secret/{name}" for name in secret_data(overlay)}

    named_objects = set()
    for command in read_commands(*CLUSTER_PAGES, *runbook, "security.md"):
        if not re.search(r"\bkubectl |^k ", command):
            continue
        named_objects |= {f"role/{name}" for name in re.findall(r"--role=([\w-]+)", command)}
        if re.search(CREATING_COMMAND, command):
            continue
        for match in OBJECT_NAMES.finditer(command):
            kind = KIND_BY_ABBREVIATION.get(match["kind"], match["kind"])
            named_objects |= {f"{kind}/{name}" for name in match["names"].split()}

    assert {
        *("service/seaweedfs", "secret/infoxlm-store", "deployment/mlflow", "role/infoxlm-submitter")
    } <= named_objects
    assert named_objects - existing_objects == set()


def test_the_profile_is_created_before_anything_in_its_namespace():
    """The Profile controller refuses a namespace that exists."""
    commands = PAGES.partition("**Multi-user Kubeflow.**")[2].partition("```bash\n")[2].partition("```")[0]

    positions = [
        commands.index(text)
        for text in ("kind: Profile", "get configmap kfp-launcher", "make_secrets.py", "make deploy OVERLAY")
    ]
    assert positions == sorted(positions)
    assert "namespace.yaml" not in commands
