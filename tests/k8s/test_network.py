"""Which connections the network policies allow. RB07 of the runbook checks that a cluster enforces the policies."""

import pytest

from tests.k8s.manifests import OVERLAYS, get_manifest, render
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

POSTGRES = Pod({"app.kubernetes.io/name": "postgres"})
SEAWEEDFS = Pod({"app.kubernetes.io/name": "seaweedfs"})
MAKE_BUCKET = Pod({"app.kubernetes.io/name": "make-bucket"})
MAKE_USER = Pod({"app.kubernetes.io/name": "make-user"})
FOREIGN = pod_in("elsewhere", app="notebook")
OPERATOR = pod_in("kuberay-system", **{"app.kubernetes.io/component": "kuberay-operator"})
KUBEFLOW = pod_in("kubeflow", app="ml-pipeline")
KUBEFLOW_S3 = pod_in("kubeflow", app="seaweedfs")
DNS = pod_in("kube-system", **{"k8s-app": "kube-dns"})
CLOUD_METADATA = "169.254.169.254"
INTERNET = "93.184.215.14"
API_SERVER = "10.96.0.1"
DATABASE = "10.1.2.3"

IN_BOTH_OVERLAYS = [  # source, target, port, and whether the connection is allowed
    (STEP, MLFLOW, 5000, True),
    (RAY, MLFLOW, 5000, True),
    (KUBEFLOW, MLFLOW, 5000, True),
    (MAKE_USER, MLFLOW, 5000, True),
    (FOREIGN, MLFLOW, 5000, False),
    (STRAY, MLFLOW, 5000, False),
    (SUBMITTER, MLFLOW, 5000, False),
    (RAY, RAY, 6379, True),
    (RAY, RAY, 34567, True),
    (SUBMITTER, RAY, 8265, True),
    (OPERATOR, RAY, 8265, True),
    (SUBMITTER, RAY, 6379, False),
    (OPERATOR, RAY, 6379, False),
    (FOREIGN, RAY, 8265, False),
    (STEP, RAY, 8265, False),
    (STEP, API_SERVER, 443, True),
    (STEP, KUBEFLOW, 8887, True),
    (STEP, KUBEFLOW_S3, 8333, True),  # a policy sees the port of the pod, 8333 for SeaweedFS, not that of its Service
    (STEP, KUBEFLOW_S3, 9000, True),  # the port of a MinIO pod
    (RAY, KUBEFLOW_S3, 8333, False),
    (RAY, API_SERVER, 443, False),
    (MLFLOW, API_SERVER, 443, False),
    (SUBMITTER, API_SERVER, 443, False),
    (SUBMITTER, INTERNET, 443, False),
    (RAY, INTERNET, 80, False),
    (FOREIGN, STEP, 8080, False),
]
IN_SMALL = [
    (STEP, SEAWEEDFS, 8333, True),
    (RAY, SEAWEEDFS, 8333, True),
    (MLFLOW, SEAWEEDFS, 8333, True),
    (MAKE_BUCKET, SEAWEEDFS, 8333, True),
    (KUBEFLOW, SEAWEEDFS, 8333, True),
    (STRAY, SEAWEEDFS, 8333, False),
    (RAY, SEAWEEDFS, 9333, False),
    (MLFLOW, POSTGRES, 5432, True),
    (STEP, POSTGRES, 5432, False),
    (RAY, POSTGRES, 5432, False),
    (STEP, INTERNET, 443, False),
    (RAY, INTERNET, 443, False),
    (MLFLOW, INTERNET, 443, False),
    (SEAWEEDFS, INTERNET, 443, False),
]
IN_PRODUCTION = [
    (STEP, INTERNET, 443, True),  # S3 has a public address
    (RAY, INTERNET, 443, True),
    (MLFLOW, INTERNET, 443, True),
    (SERVING, INTERNET, 443, False),  # it receives text of clients, which must not leave the cluster
    (INFERENCE, INTERNET, 443, False),
    (MLFLOW, DATABASE, 5432, True),
    (STEP, DATABASE, 5432, False),
    (RAY, DATABASE, 443, False),
]


@pytest.mark.item("S06")
@pytest.mark.parametrize(
    ("overlay", "connections"),
    [("small", IN_BOTH_OVERLAYS + IN_SMALL), ("production", IN_BOTH_OVERLAYS + IN_PRODUCTION)],
)
def test_policies_allow_exactly_the_connections_of_the_table(overlay, connections):
    all_policies = policies(render(overlay))

    wrong_rows = [row for row in connections if can_connect(all_policies, *row[:3]) is not row[3]]

    assert wrong_rows == []


@pytest.mark.item("S06")
@pytest.mark.parametrize("overlay", OVERLAYS)
@pytest.mark.parametrize(
    "pod", [STEP, RAY, SUBMITTER, MLFLOW, MAKE_USER, MAKE_BUCKET, STRAY], ids=lambda pod: str(pod.labels)
)
def test_every_pod_can_resolve_names_and_none_can_reach_the_cloud_metadata_service(overlay, pod):
    all_policies = policies(render(overlay))

    assert can_connect(all_policies, pod, DNS, 53, "UDP")
    assert not any(can_connect(all_policies, pod, CLOUD_METADATA, port) for port in (80, 443, 5000, 8080))


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_all_traffic_is_denied_except_by_policies_named_allow(overlay):
    spec_by_name = {policy["metadata"]["name"]: policy["spec"] for policy in policies(render(overlay))}

    assert len(spec_by_name) == len(policies(render(overlay)))
    assert spec_by_name.pop("deny-all") == {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]}
    assert all(name.startswith("allow-") for name in spec_by_name)


@pytest.mark.item("S06")
def test_a_missing_denial_or_an_open_policy_is_noticed():
    all_policies = policies(render("small"))
    without_denial = [policy for policy in all_policies if policy["metadata"]["name"] != "deny-all"]
    to_everywhere = {"to": [{"ipBlock": {"cidr": "0.0.0.0/0"}}]}
    open_policy = {"spec": {"podSelector": {}, "policyTypes": ["Egress"], "egress": [to_everywhere]}}

    assert not can_connect(all_policies, FOREIGN, STRAY, 8080)
    assert can_connect(without_denial, FOREIGN, STRAY, 8080)
    assert can_connect([*all_policies, open_policy], RAY, CLOUD_METADATA, 80)


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_kubeflow_accepts_calls_from_our_namespace(overlay):
    """Kubeflow's policies admit namespaces by this selector."""
    profiles = {
        "matchExpressions": [{"key": "app.kubernetes.io/part-of", "operator": "In", "values": ["kubeflow-profile"]}]
    }

    assert selects(profiles, get_manifest(overlay, "Namespace", "infoxlm")["metadata"]["labels"])


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_istios_ambient_mode_is_disabled_in_our_namespace(overlay):
    """Ambient mode carries all traffic over port 15008, which no policy of ours allows."""
    labels = get_manifest(overlay, "Namespace", "infoxlm")["metadata"]["labels"]

    assert labels["istio.io/dataplane-mode"] == "none"
    assert not can_connect(policies(render(overlay)), STEP, MLFLOW, 15008)
