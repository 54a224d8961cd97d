"""Both overlays, rendered: valid, confined, with no right, image or key that must not be there. Each rule can fail."""

import copy
import shutil

import kubernetes_validate
import pytest
import yaml

from components.adapters.kuberay import manifest
from components.adapters.kuberay.manifest import _make_labels
from components.settings.cluster import ClusterConfig, ClusterFile
from tests.k8s.manifests import (
    K8S,
    OVERLAYS,
    ROOT,
    SINGLE_USER,
    kustomize,
    named,
    pods,
    read_cluster_pages,
    rendered,
    text,
    with_components,
)
from tests.k8s.rules import confined, restricted, static_keys, too_much

KUBERNETES = ("1.30", "1.37")
"""The oldest and the newest we look at."""

INJECT = "sidecar.istio.io/inject"

KUEUE = {
    "ResourceFlavor": {"nodeLabels", "nodeTaints", "tolerations", "topologyName"},
    "ClusterQueue": {
        "resourceGroups", "cohortName", "queueingStrategy", "namespaceSelector", "flavorFungibility", "preemption",
        "admissionChecksStrategy", "stopPolicy", "fairSharing", "admissionScope",
    },
    "LocalQueue": {"clusterQueue", "stopPolicy", "fairSharing"},
}  # fmt: skip
"""Fields of v1beta2: these kinds have no schema here, and the API server would drop a misspelt one silently."""


def a_pod() -> dict:
    """One that breaks no rule."""
    return {
        "automountServiceAccountToken": False,
        "securityContext": {"runAsNonRoot": True, "runAsUser": 10001, "seccompProfile": {"type": "RuntimeDefault"}},
        "containers": [
            {
                "name": "c",
                "image": f"registry.example:5000/infoxlm@sha256:{'0' * 64}",
                "securityContext": {
                    "allowPrivilegeEscalation": False,
                    "readOnlyRootFilesystem": True,
                    "capabilities": {"drop": ["ALL"]},
                },
                "resources": {kind: {"cpu": "1", "memory": "1Gi"} for kind in ("requests", "limits")},
                "volumeMounts": [{"name": "tmp", "mountPath": "/tmp"}],
            }
        ],
    }


@pytest.mark.parametrize("overlay", [*OVERLAYS, SINGLE_USER])
@pytest.mark.parametrize("version", KUBERNETES)
def test_every_object_has_the_fields_that_kubernetes_knows_and_no_others(overlay, version):
    for item in rendered(overlay):
        kubernetes_validate.validate(item, version, strict=True)


@pytest.mark.item("S04")
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_every_pod_is_admitted_by_a_restricted_namespace_and_keeps_our_rules(overlay):
    found = pods(overlay)

    broken = {name: rules for name, pod in found.items() if (rules := restricted(pod["spec"]) + confined(pod["spec"]))}
    assert broken == {}
    assert "Deployment/mlflow" in found
    assert named(overlay, "Namespace", "infoxlm")["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] == (
        "restricted"
    )


@pytest.mark.item("S04")
def test_the_pods_of_a_training_keep_our_rules_too():
    config = ClusterConfig(image=f"registry.example/infoxlm@sha256:{'1' * 64}", priority_class="infoxlm-training")

    job = manifest.render("j-x-1", "s3://infoxlm/store/work/j.json", config, 1, [], "2.60.0", {})

    cluster = job["spec"]["rayClusterSpec"]
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    templates = [job["spec"]["submitterPodTemplate"], *(group["template"] for group in groups)]
    assert [confined(template["spec"]) for template in templates] == [[], [], []]


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_no_pod_of_ours_gets_a_sidecar_of_istio_which_a_profile_injects(overlay):
    """Without its control plane, which our policies do not name, a sidecar never gets ready, nor does its pod."""
    found = pods(overlay) | {name: {"metadata": {"labels": _make_labels(name)}} for name in ("training", "submitter")}

    injected = [name for name, pod in found.items() if pod["metadata"]["labels"].get(INJECT) != "false"]
    assert injected == [] and len(found) >= 4


@pytest.mark.item("S04")
@pytest.mark.parametrize(
    ("change", "rule"),
    [
        (lambda pod, c: pod["securityContext"].update(runAsUser=999), "10000"),
        (lambda pod, c: pod["securityContext"].update(runAsUser=0), "runAsUser must not be 0"),
        (lambda pod, c: pod["securityContext"].pop("runAsNonRoot"), "runAsNonRoot"),
        (lambda pod, c: pod["securityContext"].pop("seccompProfile"), "seccompProfile"),
        (lambda pod, c: c["securityContext"].pop("allowPrivilegeEscalation"), "allowPrivilegeEscalation"),
        (lambda pod, c: c["securityContext"].update(capabilities={"drop": ["NET_RAW"]}), "drop ALL"),
        (lambda pod, c: c["securityContext"].pop("readOnlyRootFilesystem"), "readOnlyRootFilesystem"),
        (lambda pod, c: c.update(volumeMounts=[]), "writable /tmp"),
        (lambda pod, c: c["resources"]["limits"].pop("memory"), "requests and limits"),
        (lambda pod, c: c.update(image="registry.example/infoxlm:latest"), "digest"),
        (lambda pod, c: pod.pop("automountServiceAccountToken"), "automountServiceAccountToken"),
    ],
)
def test_a_pod_that_breaks_one_rule_is_named_for_it(change, rule):
    good = a_pod()
    bad = copy.deepcopy(good)
    change(bad, bad["containers"][0])

    assert restricted(good) + confined(good) == []
    assert any(rule in line for line in restricted(bad) + confined(bad))


@pytest.mark.item("S05")
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_no_role_gives_more_than_a_namespace_and_what_is_named(overlay):
    roles = [item for item in rendered(overlay) if item["apiVersion"].startswith("rbac.")]

    assert {role["metadata"]["name"]: too_much(role) for role in roles} == {
        "infoxlm-runner": [],
        "infoxlm-workflow": [],
        "infoxlm-submitter": [],
    }
    subjects = {subject["name"] for role in roles for subject in role.get("subjects", [])}
    assert subjects == {"infoxlm-runner"}  # Ray pods and MLflow may do nothing


@pytest.mark.item("S05")
@pytest.mark.parametrize(
    "rule",
    [
        {"apiGroups": ["ray.io"], "resources": ["rayjobs"], "verbs": ["*"]},
        {"apiGroups": [""], "resources": ["secrets"], "verbs": ["get"]},
        {"apiGroups": [""], "resources": ["pods/exec"], "verbs": ["create"]},
    ],
)
def test_a_role_that_gives_too_much_is_found(rule):
    assert too_much({"kind": "Role", "rules": [rule]})
    assert too_much({"kind": "ClusterRole", "rules": []})


@pytest.mark.item("S07")
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_manifests_hold_no_secret_and_no_value_that_should_be_one(overlay):
    assert static_keys(text(overlay)) == []
    assert "Secret" not in {item["kind"] for item in rendered(overlay)}


@pytest.mark.parametrize(
    "line",
    [
        "key: AKIA" + "ABCDEFGHIJKLMNOP",
        "AWS_SECRET_ACCESS_KEY=wJalrXUtnFEMIK7MDENG",
        "{name: PGPASSWORD, value: hunter2hunter2}",
        "- name: MLFLOW_AUTH_ADMIN_PASSWORD\n  value: password1234",
        "--backend-store-uri=postgresql+psycopg2://mlflow:secret@postgres/mlflow",
        "-----BEGIN RSA PRIVATE KEY-----",
    ],
)
def test_a_key_in_a_manifest_is_found(line):
    assert static_keys(line)


@pytest.mark.item("S05")
def test_only_the_steps_get_a_token_of_kubernetes():
    accounts = [item for item in rendered("production") if item["kind"] == "ServiceAccount"]

    assert {account["metadata"]["name"]: account["automountServiceAccountToken"] for account in accounts} == {
        "infoxlm-runner": True,
        "infoxlm-ray": False,
        "mlflow": False,
    }


def test_production_keeps_nothing_in_the_cluster_and_needs_no_key():
    kinds = {item["kind"] for item in rendered("production")}
    [container] = pods("production")["Deployment/mlflow"]["spec"]["containers"]

    assert "StatefulSet" not in kinds
    assert not [entry["name"] for entry in container["env"] if entry["name"].startswith("AWS_ACCESS")]
    assert all(
        "role-arn" in str(named("production", "ServiceAccount", name)["metadata"]["annotations"])
        for name in ("infoxlm-runner", "infoxlm-ray", "mlflow")
    )


def test_bucket_and_region_of_production_are_filled_in_at_one_place(tmp_path):
    copied = shutil.copytree(K8S, tmp_path / "k8s")
    place = copied / "overlays/production/where-s3-is.yaml"
    theirs = {"s3://infoxlm/": "s3://other/team/", "us-east-1": "eu-central-1"}
    for ours, value in theirs.items():
        place.write_text(place.read_text().replace(ours, value))

    printed = kustomize(copied / "overlays/production")

    for ours, value in theirs.items():
        assert ours in text("production") and ours not in printed
        assert text("production").count(ours) == printed.count(value)


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_argo_uploads_no_log_so_that_no_pod_needs_keys_of_kubeflows_store(overlay):
    """Argo takes the ConfigMap of this name in a run's namespace before its default, and in it the annotated key."""
    repositories = named(overlay, "ConfigMap", "artifact-repositories")

    key = repositories["metadata"]["annotations"]["workflows.argoproj.io/default-artifact-repository"]
    assert yaml.safe_load(repositories["data"][key]) == {"archiveLogs": False}


def test_the_queues_have_only_fields_that_kueue_knows():
    queues = list(yaml.safe_load_all((K8S / "components/kueue/queue.yaml").read_text()))

    assert {queue["kind"] for queue in queues} == set(KUEUE)
    for queue in queues:
        assert queue["apiVersion"] == "kueue.x-k8s.io/v1beta2"
        assert set(queue.get("spec", {})) <= KUEUE[queue["kind"]]
    quota = named("production", "ResourceQuota", "infoxlm")["spec"]["hard"]
    [group] = queues[1]["spec"]["resourceGroups"]
    [flavor] = group["flavors"]
    amounts = {resource["name"]: resource["nominalQuota"] for resource in flavor["resources"]}
    assert set(amounts) == set(group["coveredResources"])
    assert amounts["nvidia.com/gpu"] == quota["requests.nvidia.com/gpu"]
    assert int(amounts["cpu"]) <= int(quota["requests.cpu"])


def test_the_queue_covers_all_that_a_training_asks_for():
    """Kueue admits no workload with a resource that its ClusterQueue does not have."""
    [queue] = [item for item in with_components("production", "kueue") if item["kind"] == "ClusterQueue"]
    pool = ClusterFile.model_validate(yaml.safe_load((ROOT / "configs/cluster.yaml").read_text())).pool
    config = ClusterConfig(image=f"registry.example/infoxlm@sha256:{'1' * 64}", queue="gpu", pool=pool, disk="200Gi")

    job = manifest.render("j-x-1", "s3://infoxlm/store/work/j.json", config, pool.gpus, [], "2.60.0", {})

    cluster = job["spec"]["rayClusterSpec"]
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    templates = [job["spec"]["submitterPodTemplate"], *(group["template"] for group in groups)]
    asked = {name for pod in templates for c in pod["spec"]["containers"] for name in c["resources"]["requests"]}
    [group] = queue["spec"]["resourceGroups"]
    assert "ephemeral-storage" in asked
    assert asked <= set(group["coveredResources"])


def test_other_gpus_are_put_into_the_queue_by_the_patch_of_the_document():
    patch = read_cluster_pages().partition("```yaml\n# a MIG slice")[2].partition("```")[0]
    patches = yaml.safe_load("# a MIG slice" + patch)

    [queue] = [item for item in with_components("production", "kueue", **patches) if item["kind"] == "ClusterQueue"]

    [group] = queue["spec"]["resourceGroups"]
    [flavor] = group["flavors"]
    assert "nvidia.com/mig-3g.40gb" in group["coveredResources"]
    assert {resource["name"] for resource in flavor["resources"]} == set(group["coveredResources"])
