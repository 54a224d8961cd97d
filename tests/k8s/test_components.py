"""Components for special clusters: each renders with each overlay, is valid, and opens only its own connections."""

import re

import kubernetes_validate
import pytest

from tests.k8s.manifests import (
    K8S,
    OVERLAYS,
    pod_templates,
    read_cluster_pages,
    render,
    render_with_components,
    select_kind,
)
from tests.k8s.network import (
    INFERENCE,
    MLFLOW,
    RAY,
    SERVING,
    STEP,
    STRAY,
    SUBMITTER,
    Pod,
    can_connect,
    pod_in,
    policies,
    selects,
)
from tests.k8s.rules import find_excessive_rights, find_secrets

IN_OVERLAYS = {"own-namespace", "priority"}
"""Components that the overlays use."""
OPTIONAL = sorted(path.name for path in (K8S / "components").iterdir() if path.name not in IN_OVERLAYS)
CUSTOM_KINDS = {"CiliumNetworkPolicy", "ResourceFlavor", "ClusterQueue", "LocalQueue", "InferenceService"}
"""Kinds whose schema is not part of Kubernetes."""
CLIENT = Pod({"app": "search"}, {"kubernetes.io/metadata.name": "search", "infoxlm.serving/client": "yes"})
OPERATOR = {"app.kubernetes.io/component": "kuberay-operator"}
CONNECTIONS = [  # component, source, target, port, protocol, and whether the component allows the connection
    ("openshift", STRAY, pod_in("openshift-dns", **{"k8s-app": "dns"}), 5353, "UDP", True),
    ("openshift", STRAY, pod_in("openshift-monitoring", app="prometheus"), 5353, "UDP", False),
    ("nodelocal-dns", RAY, "169.254.20.10", 53, "UDP", True),
    ("nodelocal-dns", RAY, "10.96.0.10", 53, "TCP", True),
    ("nodelocal-dns", RAY, "169.254.169.254", 53, "UDP", False),
    ("private-s3", RAY, "10.20.30.40", 443, "TCP", True),
    ("private-s3", STEP, "192.168.7.7", 9000, "TCP", True),
    ("private-s3", SUBMITTER, "10.20.30.40", 443, "TCP", False),
    ("private-s3", RAY, "169.254.169.254", 443, "TCP", False),
    ("private-s3", SERVING, "10.20.30.40", 443, "TCP", False),
    ("private-s3", INFERENCE, "10.20.30.40", 443, "TCP", False),
    ("operator-elsewhere", pod_in("kubeflow", **OPERATOR), RAY, 8265, "TCP", True),
    ("operator-elsewhere", pod_in("default", **OPERATOR), RAY, 8265, "TCP", True),
    ("operator-elsewhere", pod_in("kubeflow", app="ml-pipeline"), RAY, 8265, "TCP", False),
    ("operator-elsewhere", pod_in("kubeflow", **OPERATOR), RAY, 6379, "TCP", False),
    ("downloads", STEP, "93.184.215.14", 443, "TCP", True),
    ("downloads", RAY, "93.184.215.14", 443, "TCP", False),
    ("serving", STRAY, SERVING, 8080, "TCP", False),
    ("serving", CLIENT, SERVING, 8080, "TCP", True),
    ("serving", pod_in("elsewhere"), SERVING, 8080, "TCP", False),
    ("serving", SERVING, MLFLOW, 5000, "TCP", True),
    ("serving", SERVING, "93.184.215.14", 443, "TCP", False),
    ("serving", STRAY, MLFLOW, 5000, "TCP", False),
    ("serving-kserve", STRAY, INFERENCE, 8080, "TCP", False),
    ("serving-kserve", CLIENT, INFERENCE, 8080, "TCP", True),
    ("serving-kserve", pod_in("elsewhere"), INFERENCE, 8080, "TCP", False),
    ("serving-kserve", INFERENCE, MLFLOW, 5000, "TCP", True),
]  # fmt: skip


@pytest.mark.parametrize("overlay", OVERLAYS)
@pytest.mark.parametrize("component", OPTIONAL)
def test_component_adds_valid_objects_and_changes_no_others(component, overlay):
    items_before = render(overlay)
    items_after = render_with_components(overlay, component)

    added = [item for item in items_after if item not in items_before]
    assert added
    assert all(item in items_after for item in items_before)
    for item in added:
        assert item["metadata"].get("namespace", "infoxlm") == "infoxlm"
        if item["kind"] not in CUSTOM_KINDS:
            kubernetes_validate.validate(item, "1.37", strict=True)
        if item["kind"] in ("Role", "RoleBinding"):
            assert find_excessive_rights(item) == []
    assert find_secrets(str(added)) == []


@pytest.mark.parametrize("connection", CONNECTIONS, ids=lambda row: f"{row[0]}-{row[3]}-{row[5]}")
def test_component_opens_only_the_connections_it_names(connection):
    component, source, target, port, protocol, is_allowed = connection

    assert not can_connect(policies(render("small")), source, target, port, protocol)
    with_component = policies(render_with_components("small", component))
    assert can_connect(with_component, source, target, port, protocol) is is_allowed


def test_all_components_can_be_used_together():
    items = render_with_components("production", *OPTIONAL)

    names = [(item["kind"], item["metadata"]["name"]) for item in items]
    assert len(names) == len(set(names))


def test_cilium_component_lets_only_steps_call_the_api_server():
    """Cilium treats a node as an entity. Its CIDR rules apply only to addresses outside the cluster."""
    [policy] = select_kind(render_with_components("small", "cilium"), "CiliumNetworkPolicy")

    assert policy["apiVersion"] == "cilium.io/v2"
    assert set(policy["spec"]) == {"endpointSelector", "egress"}
    selector = policy["spec"]["endpointSelector"]
    assert selects(selector, STEP.labels)
    assert not any(selects(selector, pod.labels) for pod in (RAY, SUBMITTER, STRAY))
    ports = [{"port": port, "protocol": "TCP"} for port in ("443", "6443")]
    assert policy["spec"]["egress"] == [{"toEntities": ["kube-apiserver"], "toPorts": [{"ports": ports}]}]


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_openshift_lets_every_service_account_of_a_pod_use_the_user_of_that_pod(overlay):
    items = render_with_components(overlay, "openshift")

    [binding] = [item for item in items if item["metadata"]["name"] == "infoxlm-nonroot"]
    bound_accounts = {subject["name"] for subject in binding["subjects"]}
    used_accounts = {"infoxlm-runner", "infoxlm-ray"}
    for template in pod_templates(overlay).values():
        used_accounts.add(template["spec"].get("serviceAccountName", "default"))
    assert bound_accounts == used_accounts
    assert binding["roleRef"]["name"] == "system:openshift:scc:nonroot-v2"


def test_documentation_lists_all_components_and_overlays():
    page = read_cluster_pages()

    def names_below(header: str) -> set[str]:
        table = page.partition(header)[2].partition("\n\n")[0]
        return set(re.findall(r"^\| `([\w-]+)` \|", table, re.MULTILINE))

    assert names_below("| component | for a cluster where") == set(OPTIONAL)
    assert names_below("| overlay | purpose") == {path.name for path in (K8S / "overlays").iterdir()}
