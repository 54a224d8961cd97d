"""The rendered overlays: valid for Kubernetes, restricted, and without excessive rights, unnamed images or keys."""

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
    get_manifest,
    kustomize,
    pod_templates,
    read_cluster_pages,
    render,
    render_text,
    render_with_components,
    select_kind,
)
from tests.k8s.rules import find_excessive_rights, find_own_violations, find_secrets, find_violations

KUBERNETES_VERSIONS = ("1.30", "1.37")
"""The oldest and the newest version that we check."""
IMAGE = f"registry.example/infoxlm@sha256:{'1' * 64}"
SIDECAR_LABEL = "sidecar.istio.io/inject"
KUEUE_FIELDS = {
    "ResourceFlavor": {"nodeLabels", "nodeTaints", "tolerations", "topologyName"},
    "ClusterQueue": {
        "resourceGroups", "cohortName", "queueingStrategy", "namespaceSelector", "flavorFungibility", "preemption",
        "admissionChecksStrategy", "stopPolicy", "fairSharing", "admissionScope",
    },
    "LocalQueue": {"clusterQueue", "stopPolicy", "fairSharing"},
}  # fmt: skip
"""Fields of Kueue's v1beta2. There is no schema to validate with, and the API server silently drops unknown fields."""


def make_valid_pod() -> dict:
    """Return the specification of a pod that violates no rule."""
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


def training_pods(config: ClusterConfig, workers: int = 1) -> list[dict]:
    """Return the pod templates of a training's RayJob: submitter, head and workers."""
    job = manifest.render("j-x-1", "s3://infoxlm/store/work/j.json", config, workers, [], "2.60.0", {})
    cluster = job["spec"]["rayClusterSpec"]
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    return [job["spec"]["submitterPodTemplate"], *(group["template"] for group in groups)]


def flavor_of(queue: dict) -> tuple[set[str], dict[str, str]]:
    """Return the covered resources of a ClusterQueue, and the quota of its only flavor by resource."""
    [group] = queue["spec"]["resourceGroups"]
    [flavor] = group["flavors"]
    quotas = {resource["name"]: resource["nominalQuota"] for resource in flavor["resources"]}
    return set(group["coveredResources"]), quotas


@pytest.mark.parametrize("overlay", [*OVERLAYS, SINGLE_USER])
@pytest.mark.parametrize("version", KUBERNETES_VERSIONS)
def test_every_manifest_is_valid_for_kubernetes(overlay, version):
    for item in render(overlay):
        kubernetes_validate.validate(item, version, strict=True)


@pytest.mark.item("S04")
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_every_pod_is_restricted_and_follows_our_rules(overlay):
    templates = pod_templates(overlay)

    violations_by_pod = {name: find_violations(template["spec"]) for name, template in templates.items()}
    assert violations_by_pod == {name: [] for name in templates}
    assert "Deployment/mlflow" in templates
    labels = get_manifest(overlay, "Namespace", "infoxlm")["metadata"]["labels"]
    assert labels["pod-security.kubernetes.io/enforce"] == "restricted"


@pytest.mark.item("S04")
def test_the_pods_of_a_training_follow_our_rules():
    templates = training_pods(ClusterConfig(image=IMAGE, priority_class="infoxlm-training"))

    assert [find_own_violations(template["spec"]) for template in templates] == [[], [], []]


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_no_pod_gets_an_istio_sidecar(overlay):
    """A Profile injects sidecars, which never become ready, because our policies do not allow their control plane."""
    templates = pod_templates(overlay)
    templates |= {name: {"metadata": {"labels": _make_labels(name)}} for name in ("training", "submitter")}

    assert {name: pod["metadata"]["labels"].get(SIDECAR_LABEL) for name, pod in templates.items()} == dict.fromkeys(
        templates, "false"
    )


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
def test_a_violation_of_each_rule_is_reported(change, rule):
    valid_pod = make_valid_pod()
    invalid_pod = copy.deepcopy(valid_pod)
    change(invalid_pod, invalid_pod["containers"][0])

    assert find_violations(valid_pod) == []
    assert any(rule in violation for violation in find_violations(invalid_pod))


@pytest.mark.item("S05")
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_roles_are_namespaced_and_only_steps_have_one(overlay):
    roles = [item for item in render(overlay) if item["apiVersion"].startswith("rbac.")]

    assert {role["metadata"]["name"] for role in roles} == {"infoxlm-runner", "infoxlm-workflow", "infoxlm-submitter"}
    assert [right for role in roles for right in find_excessive_rights(role)] == []
    subjects = {subject["name"] for role in roles for subject in role.get("subjects", [])}
    assert subjects == {"infoxlm-runner"}


@pytest.mark.item("S05")
@pytest.mark.parametrize(
    "rule",
    [
        {"apiGroups": ["ray.io"], "resources": ["rayjobs"], "verbs": ["*"]},
        {"apiGroups": [""], "resources": ["secrets"], "verbs": ["get"]},
        {"apiGroups": [""], "resources": ["pods/exec"], "verbs": ["create"]},
    ],
)
def test_excessive_rights_of_a_role_are_reported(rule):
    assert find_excessive_rights({"kind": "Role", "rules": [rule]})
    assert find_excessive_rights({"kind": "ClusterRole", "rules": []})


@pytest.mark.item("S07")
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_manifests_contain_no_secret(overlay):
    assert find_secrets(render_text(overlay)) == []
    assert select_kind(render(overlay), "Secret") == []


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
def test_a_key_in_a_manifest_is_reported(line):
    assert find_secrets(line)


@pytest.mark.item("S05")
def test_only_steps_get_a_token_of_kubernetes():
    accounts = select_kind(render("production"), "ServiceAccount")

    gets_token = {account["metadata"]["name"]: account["automountServiceAccountToken"] for account in accounts}
    assert gets_token == {"infoxlm-runner": True, "infoxlm-ray": False, "mlflow": False}


def test_production_stores_nothing_in_the_cluster_and_uses_roles_instead_of_keys():
    [container] = pod_templates("production")["Deployment/mlflow"]["spec"]["containers"]

    assert select_kind(render("production"), "StatefulSet") == []
    assert not any(variable["name"].startswith("AWS_ACCESS") for variable in container["env"])
    for name in ("infoxlm-runner", "infoxlm-ray", "mlflow"):
        account = get_manifest("production", "ServiceAccount", name)
        assert "role-arn" in str(account["metadata"]["annotations"])


def test_bucket_and_region_of_production_are_set_in_one_file(tmp_path):
    copied_k8s = shutil.copytree(K8S, tmp_path / "k8s")
    settings_file = copied_k8s / "overlays/production/where-s3-is.yaml"
    replacements = {"s3://infoxlm/": "s3://other/team/", "us-east-1": "eu-central-1"}
    for default, replacement in replacements.items():
        settings_file.write_text(settings_file.read_text().replace(default, replacement))

    changed = kustomize(copied_k8s / "overlays/production")

    for default, replacement in replacements.items():
        occurrences = render_text("production").count(default)
        assert occurrences > 0
        assert default not in changed
        assert changed.count(replacement) == occurrences


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_argo_archives_no_logs_so_that_pods_need_no_keys_of_kubeflows_store(overlay):
    """Argo prefers a ConfigMap of this name in the run's namespace, and reads the key that its annotation names."""
    config_map = get_manifest(overlay, "ConfigMap", "artifact-repositories")

    key = config_map["metadata"]["annotations"]["workflows.argoproj.io/default-artifact-repository"]
    assert yaml.safe_load(config_map["data"][key]) == {"archiveLogs": False}


def test_kueue_objects_have_known_fields_and_fit_the_quota_of_production():
    objects = list(yaml.safe_load_all((K8S / "components/kueue/queue.yaml").read_text()))

    assert {item["kind"] for item in objects} == set(KUEUE_FIELDS)
    for item in objects:
        assert item["apiVersion"] == "kueue.x-k8s.io/v1beta2"
        assert set(item.get("spec", {})) <= KUEUE_FIELDS[item["kind"]]
    [queue] = select_kind(objects, "ClusterQueue")
    covered_resources, quotas = flavor_of(queue)
    assert set(quotas) == covered_resources
    namespace_quota = get_manifest("production", "ResourceQuota", "infoxlm")["spec"]["hard"]
    assert quotas["nvidia.com/gpu"] == namespace_quota["requests.nvidia.com/gpu"]
    assert int(quotas["cpu"]) <= int(namespace_quota["requests.cpu"])


def test_kueue_covers_every_resource_that_a_training_requests():
    """Kueue admits no workload with a resource that its ClusterQueue does not cover."""
    pool = ClusterFile.model_validate(yaml.safe_load((ROOT / "configs/cluster.yaml").read_text())).pool
    config = ClusterConfig(image=IMAGE, queue="gpu", pool=pool, disk="200Gi")

    requested = set()
    for template in training_pods(config, workers=pool.gpus):
        for container in template["spec"]["containers"]:
            requested |= set(container["resources"]["requests"])

    [queue] = select_kind(render_with_components("production", "kueue"), "ClusterQueue")
    covered_resources, _ = flavor_of(queue)
    assert "ephemeral-storage" in requested
    assert requested <= covered_resources


def test_the_documented_patch_adds_other_gpus_to_the_queue():
    marker = "# a MIG slice"
    patch = read_cluster_pages().partition(f"```yaml\n{marker}")[2].partition("```")[0]

    items = render_with_components("production", "kueue", **yaml.safe_load(marker + patch))

    [queue] = select_kind(items, "ClusterQueue")
    covered_resources, quotas = flavor_of(queue)
    assert "nvidia.com/mig-3g.40gb" in covered_resources
    assert set(quotas) == covered_resources
