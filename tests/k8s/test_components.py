"""Components for clusters that differ: each renders with each overlay, is valid, and opens what it says and no more."""

import re

import kubernetes_validate
import pytest

from tests.k8s.manifests import K8S, OVERLAYS, read_cluster_pages, rendered, with_components
from tests.k8s.network import INFERENCE, MLFLOW, RAY, SERVING, STEP, STRAY, SUBMITTER, Pod, may, policies, selects
from tests.k8s.rules import static_keys, too_much

BUILT_IN = {"own-namespace", "priority"}
"""Those that the overlays have."""
VARIANTS = sorted(path.name for path in (K8S / "components").iterdir() if path.name not in BUILT_IN)
OF_OTHERS = {"CiliumNetworkPolicy", "ResourceFlavor", "ClusterQueue", "LocalQueue", "InferenceService"}
"""Kinds whose schema is not Kubernetes' own."""


def of(namespace: str, **labels: str) -> Pod:
    return Pod(labels, {"kubernetes.io/metadata.name": namespace})


CLIENT = Pod({"app": "search"}, {"kubernetes.io/metadata.name": "search", "infoxlm.serving/client": "yes"})
OPERATOR = {"app.kubernetes.io/component": "kuberay-operator"}
OPENED = [  # component, source, target, port, protocol, and whether the component lets it through
    ("openshift", STRAY, of("openshift-dns", **{"k8s-app": "dns"}), 5353, "UDP", True),
    ("openshift", STRAY, of("openshift-monitoring", app="prometheus"), 5353, "UDP", False),
    ("nodelocal-dns", RAY, "169.254.20.10", 53, "UDP", True),
    ("nodelocal-dns", RAY, "10.96.0.10", 53, "TCP", True),
    ("nodelocal-dns", RAY, "169.254.169.254", 53, "UDP", False),
    ("private-s3", RAY, "10.20.30.40", 443, "TCP", True),
    ("private-s3", STEP, "192.168.7.7", 9000, "TCP", True),
    ("private-s3", SUBMITTER, "10.20.30.40", 443, "TCP", False),
    ("private-s3", RAY, "169.254.169.254", 443, "TCP", False),
    ("private-s3", SERVING, "10.20.30.40", 443, "TCP", False),
    ("private-s3", INFERENCE, "10.20.30.40", 443, "TCP", False),
    ("operator-elsewhere", Pod(OPERATOR, {"kubernetes.io/metadata.name": "kubeflow"}), RAY, 8265, "TCP", True),
    ("operator-elsewhere", Pod(OPERATOR, {"kubernetes.io/metadata.name": "default"}), RAY, 8265, "TCP", True),
    ("operator-elsewhere", of("kubeflow", app="ml-pipeline"), RAY, 8265, "TCP", False),
    ("operator-elsewhere", Pod(OPERATOR, {"kubernetes.io/metadata.name": "kubeflow"}), RAY, 6379, "TCP", False),
    ("downloads", STEP, "93.184.215.14", 443, "TCP", True),
    ("downloads", RAY, "93.184.215.14", 443, "TCP", False),
    ("serving", STRAY, SERVING, 8080, "TCP", False),
    ("serving", CLIENT, SERVING, 8080, "TCP", True),
    ("serving", of("elsewhere"), SERVING, 8080, "TCP", False),
    ("serving", SERVING, MLFLOW, 5000, "TCP", True),
    ("serving", SERVING, "93.184.215.14", 443, "TCP", False),
    ("serving", STRAY, MLFLOW, 5000, "TCP", False),
    ("serving-kserve", STRAY, INFERENCE, 8080, "TCP", False),
    ("serving-kserve", CLIENT, INFERENCE, 8080, "TCP", True),
    ("serving-kserve", of("elsewhere"), INFERENCE, 8080, "TCP", False),
    ("serving-kserve", INFERENCE, MLFLOW, 5000, "TCP", True),
]  # fmt: skip


@pytest.mark.parametrize("component", VARIANTS)
def test_a_component_adds_to_an_overlay_and_changes_nothing_of_it(component):
    for overlay in OVERLAYS:
        before, after = rendered(overlay), with_components(overlay, component)
        added = [item for item in after if item not in before]

        assert added and all(item in after for item in before)
        for item in added:
            assert item["metadata"].get("namespace", "infoxlm") == "infoxlm"
            if item["kind"] not in OF_OTHERS:
                kubernetes_validate.validate(item, "1.37", strict=True)
            assert too_much(item) == [] or item["kind"] not in ("Role", "RoleBinding")
        assert static_keys(str(added)) == []


@pytest.mark.parametrize("row", OPENED, ids=lambda row: f"{row[0]}-{row[3]}-{row[5]}")
def test_a_component_opens_what_it_says_and_nothing_beside_it(row):
    component, source, target, port, protocol, through = row
    without, added = policies(rendered("small")), policies(with_components("small", component))

    assert not may(without, source, target, port, protocol)
    assert may(added, source, target, port, protocol) is through


def test_all_components_fit_together():
    kinds = [(item["kind"], item["metadata"]["name"]) for item in with_components("production", *VARIANTS)]

    assert len(kinds) == len(set(kinds))


def test_with_cilium_steps_reach_the_api_server_wherever_it_runs():
    """To Cilium a node is an entity and no address (its docs: CIDR rules are for what is outside of the cluster)."""
    [policy] = [item for item in with_components("small", "cilium") if item["kind"] == "CiliumNetworkPolicy"]

    assert (policy["apiVersion"], set(policy["spec"])) == ("cilium.io/v2", {"endpointSelector", "egress"})
    assert selects(policy["spec"]["endpointSelector"], STEP.labels)
    assert not any(selects(policy["spec"]["endpointSelector"], pod.labels) for pod in (RAY, SUBMITTER, STRAY))
    [rule] = policy["spec"]["egress"]
    assert (set(rule), rule["toEntities"]) == ({"toEntities", "toPorts"}, ["kube-apiserver"])
    assert rule["toPorts"] == [{"ports": [{"port": port, "protocol": "TCP"} for port in ("443", "6443")]}]


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_on_openshift_every_account_of_a_pod_may_have_the_user_that_its_pod_names(overlay):
    items = with_components(overlay, "openshift")

    [binding] = [item for item in items if item["metadata"]["name"] == "infoxlm-nonroot"]
    allowed = {subject["name"] for subject in binding["subjects"]}
    templates = [item["spec"]["template"]["spec"] for item in items if "template" in item.get("spec", {})]
    used = {spec.get("serviceAccountName", "default") for spec in templates} | {"infoxlm-runner", "infoxlm-ray"}
    assert allowed == used
    assert binding["roleRef"]["name"] == "system:openshift:scc:nonroot-v2"


def test_the_document_names_every_component_and_overlay_and_no_other():
    document = read_cluster_pages()
    rows = {
        head: set(re.findall(r"^\| `([\w-]+)` \|", document.partition(head)[2].partition("\n\n")[0], re.MULTILINE))
        for head in ("| component | for a cluster where", "| overlay | purpose")
    }

    components, overlays = rows.values()
    assert components == set(VARIANTS)
    assert overlays == {path.name for path in (K8S / "overlays").iterdir()}
