"""Runs in Kubeflow's own namespace: our objects affect none of Kubeflow's pods, and runs still reach MLflow and S3."""

import pytest
import yaml

from components.adapters.kuberay.manifest import _make_labels
from tests.k8s.manifests import (
    SINGLE_USER,
    get_manifest,
    make_secrets,
    read_cluster_pages,
    render,
    render_with_components,
    select_kind,
)
from tests.k8s.network import Pod, can_connect, pod_in, selects

KUBEFLOW_POD_LABELS = (
    {"app": "ml-pipeline"},
    {"app": "mysql"},
    {"app": "seaweedfs"},
    {"app": "workflow-controller"},
    {"app": "cache-server"},
    {"component": "metadata-grpc-server"},
    {"workflows.argoproj.io/workflow": "of-somebody-else"},
    {"ray.io/is-ray-node": "yes", "ray.io/cluster": "of-somebody-else"},
)
"""Labels of pods that a standard Kubeflow and its other users have in this namespace."""
RAY_LABELS = {"ray.io/is-ray-node": "yes", **_make_labels("training")}


def items_in(namespace: str) -> list[dict]:
    """Return the manifests of the overlay that belong to a namespace."""
    return [item for item in render(SINGLE_USER) if item["metadata"].get("namespace") == namespace]


def policies_in(namespace: str) -> list[dict]:
    return select_kind(items_in(namespace), "NetworkPolicy")


def test_no_object_affects_the_whole_namespace_of_kubeflow():
    names = {(item["kind"], item["metadata"]["name"]) for item in items_in("kubeflow")}
    kinds = {kind for kind, _ in names}
    namespaces = [item["metadata"]["name"] for item in select_kind(render(SINGLE_USER), "Namespace")]

    assert kinds.isdisjoint({"Namespace", "ResourceQuota", "LimitRange"})
    assert names.isdisjoint({("ConfigMap", "kfp-launcher"), ("ConfigMap", "artifact-repositories")})
    assert namespaces == ["infoxlm"]
    assert {("ServiceAccount", "infoxlm-runner"), ("ServiceAccount", "infoxlm-ray")} <= names


@pytest.mark.parametrize("labels", KUBEFLOW_POD_LABELS, ids=str)
def test_no_policy_selects_a_pod_of_kubeflow_or_of_other_users(labels):
    assert policies_in("kubeflow")
    assert not any(selects(policy["spec"]["podSelector"], labels) for policy in policies_in("kubeflow"))


def test_only_our_runs_reach_mlflow_and_s3():
    policies = policies_in("infoxlm")  # egress from other namespaces is not restricted
    mlflow = Pod({"app.kubernetes.io/name": "mlflow"})
    seaweedfs = Pod({"app.kubernetes.io/name": "seaweedfs"})

    for labels in ({"workflows.argoproj.io/workflow": "infoxlm-x7k2p"}, RAY_LABELS):
        assert can_connect(policies, pod_in("kubeflow", **labels), mlflow, 5000)
        assert can_connect(policies, pod_in("kubeflow", **labels), seaweedfs, 8333)
    assert not can_connect(policies, pod_in("kubeflow", app="mysql"), mlflow, 5000)
    assert not can_connect(policies, pod_in("elsewhere", **{"ray.io/is-ray-node": "yes"}), mlflow, 5000)


def test_only_submitter_and_operator_reach_the_dashboard_of_a_training():
    [policy] = policies_in("kubeflow")

    assert selects(policy["spec"]["podSelector"], RAY_LABELS)
    [between_ray_pods, to_dashboard] = policy["spec"]["ingress"]
    [ray_peer] = between_ray_pods["from"]
    assert selects(ray_peer["podSelector"], RAY_LABELS)
    assert [port["port"] for port in to_dashboard["ports"]] == [8265]
    submitter, operator = to_dashboard["from"]
    assert selects(submitter["podSelector"], _make_labels("submitter"))
    assert not selects(submitter["podSelector"], RAY_LABELS)
    # The component operator-elsewhere applies only to infoxlm, so the operator may be in any namespace here.
    for namespace in ("kuberay-system", "kubeflow", "default"):
        assert selects(operator["namespaceSelector"], {"kubernetes.io/metadata.name": namespace})
    assert selects(operator["podSelector"], {"app.kubernetes.io/component": "kuberay-operator"})
    assert not any(selects(operator["podSelector"], labels) for labels in KUBEFLOW_POD_LABELS)


def test_kueue_accepts_jobs_from_every_namespace_with_runs():
    [queue] = select_kind(render_with_components(SINGLE_USER, "kueue"), "ClusterQueue")
    accounts = select_kind(render(SINGLE_USER), "ServiceAccount")
    namespaces = {item["metadata"]["namespace"] for item in accounts if item["metadata"]["name"] == "infoxlm-ray"}

    assert namespaces == {"infoxlm", "kubeflow"}
    for namespace in namespaces:
        assert selects(queue["spec"]["namespaceSelector"], {"kubernetes.io/metadata.name": namespace})
    assert not selects(queue["spec"]["namespaceSelector"], {"kubernetes.io/metadata.name": "default"})


def test_secrets_of_runs_are_equal_in_both_namespaces():
    data_by_namespace = {"infoxlm": {}, "kubeflow": {}}
    for secret in make_secrets("small", "--runs-in", "kubeflow"):
        metadata = secret["metadata"]
        data_by_namespace[metadata["namespace"]][metadata["name"]] = secret["stringData"]

    copies = data_by_namespace["kubeflow"]
    assert set(copies) == {"infoxlm-store", "infoxlm-mlflow", "infoxlm-registry", "kfp-mlflow-credentials"}
    assert copies.items() <= data_by_namespace["infoxlm"].items()


def test_roles_in_kubeflows_namespace_are_bound_to_accounts_of_this_namespace():
    subjects = [subject for item in items_in("kubeflow") for subject in item.get("subjects", [])]

    assert {subject.get("namespace") for subject in subjects} == {"kubeflow"}


def test_the_documented_patch_gives_kubeflows_launcher_the_s3_address_of_the_overlay():
    """Users patch Kubeflow's own ConfigMap by hand. kubectl reads the patch as YAML."""
    command = "patch configmap kfp-launcher --type merge --patch '"
    patch = yaml.safe_load(read_cluster_pages().partition(command)[2].partition("'\n")[0])

    launcher = get_manifest("small", "ConfigMap", "kfp-launcher")
    assert yaml.safe_load(patch["data"]["providers"]) == yaml.safe_load(launcher["data"]["providers"])
