"""The settings that the document gives for the first run: valid, and within the quota of `small`."""

import re

import yaml

from components.adapters.kuberay.manifest import _SUBMITTER
from components.settings.cluster import ClusterFile
from infoxlm_core import run_file
from pipelines.cli.cluster import prepare
from tests.k8s.manifests import (
    CLUSTER_PAGES,
    K8S,
    OVERLAYS,
    ROOT,
    SINGLE_USER,
    made,
    named,
    pods,
    read_cluster_pages,
    rendered,
    with_components,
)

DOCUMENT = read_cluster_pages()
_UNITS = {"m": 1e-3, "Mi": 2**20, "Gi": 2**30}


def first_run() -> ClusterFile:
    """configs/cluster.yaml with the lines of the document."""
    block = DOCUMENT.partition("## 1. Describe the cluster")[2].partition("```yaml\n")[2].partition("```")[0]
    known, changed = yaml.safe_load((ROOT / "configs/cluster.yaml").read_text()), yaml.safe_load(block)
    for name, value in changed.items():
        known[name] = known[name] | value if isinstance(value, dict) else value
    return ClusterFile.model_validate(known | {"image": f"registry.example/infoxlm@sha256:{'1' * 64}"})


def amount(quantity: str) -> float:
    number, unit = re.fullmatch(r"(\d+)(\w*)", quantity).groups()
    return int(number) * _UNITS.get(unit, 1)


def test_the_demo_is_taken_with_one_worker():
    changes = ["num_workers=1"]

    prepared = prepare("infoxlm", ROOT / "configs/demo.yaml", first_run(), changes)

    assert prepared["num_workers"] == run_file.load(ROOT / "configs/demo.yaml", changes).num_workers == 1


def test_the_demo_requests_what_the_document_says_and_fits_the_quota_of_the_overlay_small():
    """At its peak, the demo has one training worker, two RayJob heads, two steps with submitters, and the services."""
    cluster = first_run()
    step_requests = named("small", "LimitRange", "infoxlm")["spec"]["limits"][0]["defaultRequest"]
    quota = named("small", "ResourceQuota", "infoxlm")["spec"]["hard"]
    sentence = re.search(r"request at most (?P<cpu>\d+)\s+cores and (?P<memory>\d+) GiB", DOCUMENT)
    head_requests = {"cpu": cluster.ray.head_cpu, "memory": cluster.ray.head_memory}
    worker_requests = {"cpu": cluster.pool.cpu, "memory": cluster.pool.memory}

    for resource, unit in (("cpu", 1), ("memory", 2**30)):
        heads = 2 * amount(head_requests[resource])
        steps = 2 * (amount(step_requests[resource]) + amount(_SUBMITTER["requests"][resource]))
        services = 0.0
        for name, template in pods("small").items():
            if not name.startswith("Job/"):
                containers = template["spec"]["containers"]
                services += max(amount(container["resources"]["requests"][resource]) for container in containers)
        requested = amount(worker_requests[resource]) + heads + steps + services

        documented = int(sentence[resource]) * unit
        assert requested <= documented < requested + 2 * unit
        assert requested <= amount(quota[f"requests.{resource}"])
    assert cluster.pool.gpus <= int(quota["requests.nvidia.com/gpu"])


def typed(*pages: str) -> list[str]:
    """Commands of the pages, those inside of sentences, too; a line that ends in a backslash goes on in the next."""
    text = "\n".join((ROOT / "docs" / page).read_text() for page in pages)
    blocks = "\n".join(re.findall(r"```bash\n(.*?)```", text, re.DOTALL)).replace("\\\n", " ")
    inside = [" ".join(one.split()) for one in re.findall(r"`(kubectl [^`]*)`", text)]
    return [re.sub(r"(^|\s)# .*", "", line).strip() for line in blocks.splitlines()] + inside


KUBEFLOWS = {
    *("deployment/ml-pipeline", "service/ml-pipeline", "service/ml-pipeline-ui", "configmap/kfp-launcher"),
    "configmap/workflow-controller-configmap",
}
"""What Kubeflow 2.17 brings."""
MADE = r"create (?:configmap|secret \S+|rolebinding) (?P<name>[\w-]+)"
SHORT = {"svc": "service", "deploy": "deployment"}
KINDS = r"(?P<kind>svc|service|deploy|deployment|secret|configmap|job|serviceaccount)s?"


def test_what_the_documents_ask_kubernetes_for_is_what_the_manifests_make():
    """A name that is typed is that of an object of an overlay, of a Secret of the script, or of Kubeflow's own."""
    runbook = [*(f"runbook/{page}.md" for page in ("README", "training", "cluster", "image"))]
    commands = [one for one in typed(*CLUSTER_PAGES, *runbook, "security.md") if re.search(r"\bkubectl |^k ", one)]
    extras = sorted(
        path.name for path in (K8S / "components").iterdir() if path.name not in ("own-namespace", "priority")
    )
    items = [*rendered("production"), *rendered(SINGLE_USER), *with_components("small", *extras)]
    there = {f"{item['kind'].lower()}/{item['metadata']['name']}" for item in items}
    there |= KUBEFLOWS | {f"secret/{name}" for overlay in OVERLAYS for name in made(overlay)}
    asked = set()
    for command in commands:
        for found in re.finditer(rf"\b{KINDS}[ /](?P<names>[a-z][\w-]*(?: [a-z][\w-]*)*)", command):
            kind = SHORT.get(found["kind"], found["kind"])
            if not re.search(MADE, command):
                asked |= {f"{kind}/{name}" for name in found["names"].split()}
        asked |= {f"role/{name}" for name in re.findall(r"--role=([\w-]+)", command)}

    assert {"service/seaweedfs", "secret/infoxlm-store", "deployment/mlflow", "role/infoxlm-submitter"} <= asked
    assert asked - there == set()


def test_a_profile_is_there_before_anything_is_put_into_its_namespace():
    """Its controller refuses a namespace that exists."""
    many = DOCUMENT.partition("**Multi-user Kubeflow.**")[2].partition("```bash\n")[2].partition("```")[0]

    steps = ("kind: Profile", "get configmap kfp-launcher", "make_secrets.py", "make deploy OVERLAY")
    order = [many.index(one) for one in steps]
    assert order == sorted(order)
    assert "namespace.yaml" not in many
