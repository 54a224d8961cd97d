"""Who may talk to whom, worked out from the policies. That a cluster enforces them, the runbook's RB07 shows."""

import pytest

from tests.k8s.manifests import OVERLAYS, named, rendered
from tests.k8s.network import INFERENCE, MLFLOW, RAY, SERVING, STEP, STRAY, SUBMITTER, Pod, may, policies, selects

POSTGRES, SEAWEEDFS = (Pod({"app.kubernetes.io/name": name}) for name in ("postgres", "seaweedfs"))
MAKE_BUCKET, MAKE_USER = (Pod({"app.kubernetes.io/name": name}) for name in ("make-bucket", "make-user"))
FOREIGN = Pod({"app": "notebook"}, {"kubernetes.io/metadata.name": "elsewhere"})
OPERATOR = Pod({"app.kubernetes.io/component": "kuberay-operator"}, {"kubernetes.io/metadata.name": "kuberay-system"})
KUBEFLOW = Pod({"app": "ml-pipeline"}, {"kubernetes.io/metadata.name": "kubeflow"})
KUBEFLOWS_S3 = Pod({"app": "seaweedfs"}, {"kubernetes.io/metadata.name": "kubeflow"})
DNS = Pod({"k8s-app": "kube-dns"}, {"kubernetes.io/metadata.name": "kube-system"})
METADATA, INTERNET, KUBERNETES = "169.254.169.254", "93.184.215.14", "10.96.0.1"

SAME = [  # source, target, port, let through: in both overlays
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
    (STEP, KUBERNETES, 443, True),
    (STEP, KUBEFLOW, 8887, True),
    (STEP, KUBEFLOWS_S3, 8333, True),  # its Service's 9000 is the pod's 8333, and a policy sees the pod's
    (STEP, KUBEFLOWS_S3, 9000, True),  # the same of MinIO is 9000
    (RAY, KUBEFLOWS_S3, 8333, False),
    (RAY, KUBERNETES, 443, False),
    (MLFLOW, KUBERNETES, 443, False),
    (SUBMITTER, KUBERNETES, 443, False),
    (SUBMITTER, INTERNET, 443, False),
    (RAY, INTERNET, 80, False),
    (FOREIGN, STEP, 8080, False),
]
SMALL = [
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
PRODUCTION = [
    (STEP, INTERNET, 443, True),  # S3 is a public address
    (RAY, INTERNET, 443, True),
    (MLFLOW, INTERNET, 443, True),
    (SERVING, INTERNET, 443, False),  # clients send it their text
    (INFERENCE, INTERNET, 443, False),
    (MLFLOW, "10.1.2.3", 5432, True),
    (STEP, "10.1.2.3", 5432, False),
    (RAY, "10.1.2.3", 443, False),
]


@pytest.mark.item("S06")
@pytest.mark.parametrize(("overlay", "rows"), [("small", SAME + SMALL), ("production", SAME + PRODUCTION)])
def test_connections_are_let_through_as_the_table_says(overlay, rows):
    known = policies(rendered(overlay))

    wrong = [row for row in rows if may(known, *row[:3]) is not row[3]]

    assert wrong == []


@pytest.mark.item("S06")
@pytest.mark.parametrize("overlay", OVERLAYS)
@pytest.mark.parametrize(
    "pod", [STEP, RAY, SUBMITTER, MLFLOW, MAKE_USER, MAKE_BUCKET, STRAY], ids=lambda pod: str(pod.labels)
)
def test_no_pod_reaches_the_metadata_of_the_cloud_and_every_pod_looks_up_names(overlay, pod):
    known = policies(rendered(overlay))

    assert not any(may(known, pod, METADATA, port) for port in (80, 443, 5000, 8080))
    assert may(known, pod, DNS, 53, "UDP")


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_all_is_denied_and_every_exception_has_a_name(overlay):
    [deny] = [policy for policy in policies(rendered(overlay)) if policy["metadata"]["name"] == "deny-all"]

    assert deny["spec"] == {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]}
    names = [policy["metadata"]["name"] for policy in policies(rendered(overlay)) if policy != deny]
    assert all(name.startswith("allow-") for name in names)
    assert len(set(names)) == len(names)


@pytest.mark.item("S06")
def test_without_the_denial_or_with_one_open_policy_the_table_does_not_hold():
    known = policies(rendered("small"))
    without = [policy for policy in known if policy["metadata"]["name"] != "deny-all"]
    rule = {"podSelector": {}, "policyTypes": ["Egress"], "egress": [{"to": [{"ipBlock": {"cidr": "0.0.0.0/0"}}]}]}

    assert may(without, FOREIGN, STRAY, 8080) and not may(known, FOREIGN, STRAY, 8080)
    assert may([*known, {"spec": rule}], RAY, METADATA, 80)


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_kubeflow_admits_our_namespace(overlay):
    """Its policies of the API server, of metadata and of the store let in namespaces by this selector."""
    admitted = {
        "matchExpressions": [{"key": "app.kubernetes.io/part-of", "operator": "In", "values": ["kubeflow-profile"]}]
    }

    labels = named(overlay, "Namespace", "infoxlm")["metadata"]["labels"]

    assert selects(admitted, labels)
    assert not selects(admitted, labels | {"app.kubernetes.io/part-of": "infoxlm"})


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_a_mesh_without_sidecars_leaves_our_namespace_out(overlay):
    """Its traffic would come and go by 15008, whatever port was asked for; policies look at it outside of the pod."""
    assert named(overlay, "Namespace", "infoxlm")["metadata"]["labels"]["istio.io/dataplane-mode"] == "none"
    assert not may(policies(rendered(overlay)), STEP, MLFLOW, 15008)
