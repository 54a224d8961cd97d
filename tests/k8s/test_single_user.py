"""Runs in Kubeflow's own namespace: what we put there rules no pod of Kubeflow's, and still finds MLflow and S3."""

import pytest
import yaml

from components.adapters.kuberay.manifest import _make_labels
from tests.k8s.manifests import SINGLE_USER, named, read_cluster_pages, rendered, secrets, with_components
from tests.k8s.network import Pod, may, selects

THEIRS = {"kubernetes.io/metadata.name": "kubeflow"}
KUBEFLOWS_PODS = (
    {"app": "ml-pipeline"},
    {"app": "mysql"},
    {"app": "seaweedfs"},
    {"app": "workflow-controller"},
    {"app": "cache-server"},
    {"component": "metadata-grpc-server"},
    {"workflows.argoproj.io/workflow": "of-somebody-else"},
    {"ray.io/is-ray-node": "yes", "ray.io/cluster": "of-somebody-else"},
)
"""Labels of pods that a stock Kubeflow, and other users of it, have in this namespace."""
NAMESPACE_WIDE = {"Namespace", "ResourceQuota", "LimitRange"}


def in_kubeflow() -> list[dict]:
    return [item for item in rendered(SINGLE_USER) if item["metadata"].get("namespace") == "kubeflow"]


def of_namespace(namespace: str) -> list[dict]:
    return [
        item
        for item in rendered(SINGLE_USER)
        if item["kind"] == "NetworkPolicy" and item["metadata"]["namespace"] == namespace
    ]


def test_nothing_that_rules_a_whole_namespace_gets_into_kubeflows():
    found = {(item["kind"], item["metadata"]["name"]) for item in in_kubeflow()}

    assert not {kind for kind, _ in found} & NAMESPACE_WIDE
    assert not {name for kind, name in found if kind == "ConfigMap"} & {"kfp-launcher", "artifact-repositories"}
    assert [item["metadata"]["name"] for item in rendered(SINGLE_USER) if item["kind"] == "Namespace"] == ["infoxlm"]
    assert {("ServiceAccount", "infoxlm-runner"), ("ServiceAccount", "infoxlm-ray")} <= found


@pytest.mark.parametrize("labels", KUBEFLOWS_PODS, ids=str)
def test_no_policy_of_ours_selects_a_pod_that_is_not_ours(labels):
    policies = of_namespace("kubeflow")

    assert policies
    assert not [p["metadata"]["name"] for p in policies if selects(p["spec"]["podSelector"], labels)]


def test_runs_reach_mlflow_and_s3_and_others_do_not():
    known = of_namespace("infoxlm")  # egress of pods elsewhere is not ours to rule
    mlflow, seaweedfs = (Pod({"app.kubernetes.io/name": name}) for name in ("mlflow", "seaweedfs"))
    step = Pod({"workflows.argoproj.io/workflow": "infoxlm-x7k2p"}, THEIRS)
    ray = Pod({"ray.io/is-ray-node": "yes", **_make_labels("training")}, THEIRS)
    mysql = Pod({"app": "mysql"}, THEIRS)
    elsewhere = Pod({"ray.io/is-ray-node": "yes"}, {"kubernetes.io/metadata.name": "elsewhere"})

    assert all(may(known, run, mlflow, 5000) and may(known, run, seaweedfs, 8333) for run in (step, ray))
    assert not may(known, mysql, mlflow, 5000)
    assert not may(known, elsewhere, mlflow, 5000)


def test_the_dashboard_of_a_training_answers_the_submitter_and_the_operator_only():
    [policy] = of_namespace("kubeflow")
    ours = {"ray.io/is-ray-node": "yes", **_make_labels("training")}

    assert selects(policy["spec"]["podSelector"], ours)
    [among, dashboard] = policy["spec"]["ingress"]
    assert [selects(peer["podSelector"], ours) for peer in among["from"]] == [True]
    submitter, operator = dashboard["from"]
    assert selects(submitter["podSelector"], _make_labels("submitter")) and not selects(submitter["podSelector"], ours)
    assert [port["port"] for port in dashboard["ports"]] == [8265]
    for namespace in ("kuberay-system", "kubeflow", "default"):  # the component operator-elsewhere opens infoxlm only
        assert selects(operator["namespaceSelector"], {"kubernetes.io/metadata.name": namespace})
    assert selects(operator["podSelector"], {"app.kubernetes.io/component": "kuberay-operator"})
    assert not any(selects(operator["podSelector"], labels) for labels in KUBEFLOWS_PODS)


def test_kueues_queue_takes_jobs_from_every_namespace_that_an_overlay_has_runs_in():
    [queue] = [item for item in with_components(SINGLE_USER, "kueue") if item["kind"] == "ClusterQueue"]
    namespaces = {
        item["metadata"]["namespace"]
        for item in rendered(SINGLE_USER)
        if (item["kind"], item["metadata"]["name"]) == ("ServiceAccount", "infoxlm-ray")
    }

    assert namespaces == {"infoxlm", "kubeflow"}
    for namespace in namespaces:
        assert selects(queue["spec"]["namespaceSelector"], {"kubernetes.io/metadata.name": namespace})
    assert not selects(queue["spec"]["namespaceSelector"], {"kubernetes.io/metadata.name": "default"})


def test_secrets_of_runs_are_the_same_in_both_namespaces():
    made = secrets("small", "--runs-in", "kubeflow")

    content = {(item["metadata"]["namespace"], item["metadata"]["name"]): item["stringData"] for item in made}
    theirs = {name: data for (namespace, name), data in content.items() if namespace == "kubeflow"}
    assert set(theirs) == {"infoxlm-store", "infoxlm-mlflow", "infoxlm-registry", "kfp-mlflow-credentials"}
    assert all(content["infoxlm", name] == data for name, data in theirs.items())
    bound = {subject.get("namespace") for item in in_kubeflow() for subject in item.get("subjects", [])}
    assert bound == {"kubeflow"}


def test_the_document_gives_kubeflows_launcher_the_same_address_of_s3_as_the_overlay():
    """Kubeflow's own ConfigMap is patched by hand: kubectl reads the patch as YAML."""
    document = read_cluster_pages()
    patch = document.partition("patch configmap kfp-launcher --type merge --patch '")[2].partition("'\n")[0]

    providers = yaml.safe_load(yaml.safe_load(patch)["data"]["providers"])
    assert providers == yaml.safe_load(named("small", "ConfigMap", "kfp-launcher")["data"]["providers"])
