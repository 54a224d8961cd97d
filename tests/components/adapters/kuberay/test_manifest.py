"""The manifest of a RayJob: valid for Kubernetes and KubeRay, restricted, with each setting on the right pods."""

import re
import subprocess

import kubernetes_validate
import pytest
from hypothesis import given
from hypothesis import strategies as st

from components.adapters.kuberay.manifest import job_name, render
from components.settings.cluster import ClusterConfig
from infoxlm_core.errors import InputError
from tests.k8s.rules import find_restricted_violations

IMAGE = f"registry.example/infoxlm@sha256:{'1' * 64}"
WORK = "s3://infoxlm/store/work/j-pretrain-3f2a9c01de.json"
TOLERATION = {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}
SECRET = {"name": "kfp-mlflow-credentials", "key": "token"}
POOL = {
    **{"gpus": 8, "cpu": "64", "memory": "512Gi", "tolerations": [TOLERATION]},
    "node_selector": {"node.kubernetes.io/instance-type": "p5.48xlarge"},
}
STEP = [
    {"name": "RUN_ID", "valueFrom": {"fieldRef": {"fieldPath": "metadata.labels['pipeline/runid']"}}},
    {"name": "LOST", "valueFrom": {"fieldRef": {"fieldPath": "metadata.uid"}}},
    {"name": "MLFLOW_TRACKING_TOKEN", "valueFrom": {"secretKeyRef": SECRET}},
    {"name": "RUN_NAME", "value": "nightly"},
    {"name": "KFP_POD_NAME", "value": "step-1"},
]
HERE = {
    "RUN_ID": "2f4c",
    "MLFLOW_TRACKING_URI": "http://mlflow.infoxlm.svc:5000",
    "MLFLOW_RUN_ID": "r1",
    "INFOXLM_TRACKER": "none",
    "MLFLOW_TRACKING_TOKEN": "canary-1",
    "MLFLOW_TRACKING_PASSWORD": "canary-2",
    "AWS_ENDPOINT_URL_S3": "http://seaweedfs.infoxlm.svc:8333",
    "AWS_SECRET_ACCESS_KEY": "canary-3",
    "AWS_ACCESS_KEY_ID": "canary-4",
    "KUBERNETES_SERVICE_HOST": "10.0.0.1",
    "HOME": "/root",
}
FIELDS = {
    "job": {
        *("entrypoint", "submissionMode", "submitterConfig", "submitterPodTemplate", "backoffLimit", "rayClusterSpec"),
        *("activeDeadlineSeconds", "preRunningDeadlineSeconds", "shutdownAfterJobFinishes", "ttlSecondsAfterFinished"),
        "suspend",
    },
    "cluster": {"rayVersion", "authOptions", "headGroupSpec", "workerGroupSpecs"},
    "head": {"rayStartParams", "template"},
    "workers": {"rayStartParams", "template", "groupName", "replicas", "minReplicas", "maxReplicas"},
}
"""Fields that KubeRay knows."""
FULL = {
    "queue": "gpu",
    "priority_class": "infoxlm-training",
    "environment": {"HF_HUB_OFFLINE": "1"},
    "environment_from": ["infoxlm-store"],
    "head_node_selector": {"pool": "cpu"},
    "devices": {"vpc.amazonaws.com/efa": 32, "rdma/hca": 1},
    "disk": "200Gi",
}
"""Every setting that is optional."""


class RenderedJob:
    """A rendered job, and its parts by name."""

    def __init__(self, num_workers: int = 32, work: str = WORK, for_text: bool = False, **settings) -> None:
        cluster = ClusterConfig.parse({"image": IMAGE, "pool": POOL, **settings}, "cluster")
        cluster = cluster.for_text() if for_text else cluster
        self.body = render("j-pretrain-3f2a9c01de", work, cluster, num_workers, STEP, "2.60.0", HERE)
        self.spec = self.body["spec"]
        self.cluster = self.spec["rayClusterSpec"]
        [self.workers] = self.cluster["workerGroupSpecs"]
        self.head = self.cluster["headGroupSpec"]
        self.pods = {"head": self.head["template"], "worker": self.workers["template"]}
        self.pods["submitter"] = self.spec["submitterPodTemplate"]

    def container(self, pod: str) -> dict:
        [container] = self.pods[pod]["spec"]["containers"]
        return container

    def environment(self, pod: str) -> dict:
        return {entry["name"]: entry.get("value", entry.get("valueFrom")) for entry in self.container(pod)["env"]}

    def resources(self, pod: str) -> list[dict]:
        return [self.container(pod)["resources"][kind] for kind in ("limits", "requests")]


@pytest.mark.item("S04")
@pytest.mark.parametrize("settings", [{}, FULL])
@pytest.mark.parametrize("which", ["head", "worker", "submitter"])
def test_every_pod_is_valid_for_kubernetes_and_restricted(settings, which):
    job = RenderedJob(**settings)
    template, container = job.pods[which], job.container(which)
    metadata, spec = {"name": "x", **template["metadata"]}, template["spec"]

    kubernetes_validate.validate(
        {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}, "1.34", strict=True
    )
    assert find_restricted_violations(spec) == []
    assert spec["automountServiceAccountToken"] is False
    assert spec["serviceAccountName"] == "infoxlm-ray"
    assert spec["securityContext"]["runAsUser"] >= 10_000
    assert container["image"] == IMAGE
    assert container["securityContext"]["readOnlyRootFilesystem"] is True
    assert all({"cpu", "memory"} <= set(amounts) for amounts in job.resources(which))
    writable = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
    assert {"/tmp", job.environment(which)["HOME"]} <= set(writable)
    assert ("/dev/shm" in writable) == (which != "submitter")
    assert set(writable.values()) == {volume["name"] for volume in spec["volumes"] if "emptyDir" in volume}
    # KubeRay sets this label itself: its service finds the head by it
    assert ("app.kubernetes.io/name" in metadata["labels"]) == (which == "submitter")


@pytest.mark.parametrize("settings", [{}, FULL])
def test_a_job_has_only_fields_that_kuberay_knows(settings):
    job = RenderedJob(**settings)

    assert set(job.body) == {"apiVersion", "kind", "metadata", "spec"}
    parts = {"job": job.spec, "cluster": job.cluster, "head": job.head, "workers": job.workers}
    assert {name: set(part) - FIELDS[name] for name, part in parts.items()} == {name: set() for name in parts}
    assert job.cluster["authOptions"] == {"mode": "token"}
    assert all(isinstance(value, str) for value in job.head["rayStartParams"].values())


def test_only_workers_have_gpus_fill_whole_pods_and_go_where_the_pool_says():
    job = RenderedJob()

    assert [job.workers[name] for name in ("replicas", "minReplicas", "maxReplicas")] == [4, 4, 4]
    assert job.resources("worker") == [{"cpu": "64", "memory": "512Gi", "nvidia.com/gpu": "8"}] * 2
    assert job.pods["worker"]["spec"]["nodeSelector"] == POOL["node_selector"]
    assert job.pods["worker"]["spec"]["tolerations"] == [TOLERATION]
    for other in ("head", "submitter"):
        assert "nvidia.com/gpu" not in job.resources(other)[0]
        assert not job.pods[other]["spec"].get("nodeSelector") and "tolerations" not in job.pods[other]["spec"]
    assert job.head["rayStartParams"]["num-cpus"] == "0"
    assert "ephemeral-storage" not in str(job.body)


@pytest.mark.parametrize(
    ("pool", "num_workers", "pods", "devices"),
    [
        ({"gpus": 0}, 2, 2, {}),
        ({"gpus": 1}, 2, 2, {"nvidia.com/gpu": "1"}),
        ({"gpus": 8}, 16, 2, {"nvidia.com/gpu": "8"}),
        ({"gpus": 8}, 4, 1, {"nvidia.com/gpu": "4"}),
        ({"gpus": 8, "accelerator": "amd.com/gpu"}, 8, 1, {"amd.com/gpu": "8"}),
        ({"gpus": 2, "accelerator": "nvidia.com/mig-1g.10gb"}, 4, 2, {"nvidia.com/mig-1g.10gb": "2"}),
    ],
)
def test_worker_pods_request_and_are_limited_to_what_the_pool_says(pool, num_workers, pods, devices):
    job = RenderedJob(num_workers, pool={"cpu": "7500m", "memory": "60Gi", **pool})

    assert job.workers["replicas"] == pods
    assert job.resources("worker") == [{"cpu": "7500m", "memory": "60Gi", **devices}] * 2


def test_the_submitter_requests_so_little_that_it_fits_beside_the_workers():
    limits, requests = RenderedJob().resources("submitter")

    assert requests == {"cpu": "50m", "memory": "256Mi"}
    assert limits == {"cpu": "1", "memory": "1Gi"}  # `ray job submit` computes for two seconds


def test_optional_settings_reach_the_pods_that_they_are_for():
    job = RenderedJob(**FULL)

    devices = {"nvidia.com/gpu": "8", "vpc.amazonaws.com/efa": "32", "rdma/hca": "1"}
    for amounts in job.resources("worker"):
        assert {name: count for name, count in amounts.items() if "/" in name} == devices
    for other in ("head", "submitter"):
        assert not any("/" in name for amounts in job.resources(other) for name in amounts)
    assert job.pods["head"]["spec"]["nodeSelector"] == {"pool": "cpu"}
    for which in ("head", "worker"):
        assert job.pods[which]["spec"]["priorityClassName"] == "infoxlm-training"
        assert job.container(which)["envFrom"] == [{"secretRef": {"name": "infoxlm-store"}}]
        assert {amounts["ephemeral-storage"] for amounts in job.resources(which)} == {"200Gi"}
    # Kueue admits a suspended job of its queue
    assert job.spec["suspend"] is True and "suspend" not in RenderedJob().spec
    assert job.body["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "gpu"
    assert "kueue.x-k8s.io/queue-name" not in RenderedJob().body["metadata"]["labels"]


def test_pods_for_text_have_no_gpus_and_hold_one_worker_each():
    job = RenderedJob(3, for_text=True, **FULL, steps={"cpu": "4", "memory": "8Gi"})

    assert job.workers["replicas"] == 3 and not job.pods["worker"]["spec"]["nodeSelector"]
    assert job.resources("worker")[0] == {"cpu": "4", "memory": "8Gi", "ephemeral-storage": "200Gi"}


def test_ray_pods_know_the_run_its_tracking_server_and_its_store_but_no_secret_stands_in_the_manifest():
    job = RenderedJob(**FULL)

    expected = {name: HERE[name] for name in ("MLFLOW_TRACKING_URI", "MLFLOW_RUN_ID", "INFOXLM_TRACKER")}
    expected |= {"RUN_ID": "2f4c", "RUN_NAME": "nightly"}  # in another pod the label would be empty
    expected |= {"AWS_ENDPOINT_URL_S3": HERE["AWS_ENDPOINT_URL_S3"], "HF_HUB_OFFLINE": "1"}
    expected |= {"MLFLOW_TRACKING_TOKEN": {"secretKeyRef": SECRET}, "MLFLOW_ALLOW_PICKLE_DESERIALIZATION": "false"}
    for which in ("head", "worker"):
        variables = job.environment(which)
        assert {name: variables.get(name) for name in expected} == expected
        assert not {"LOST", "KFP_POD_NAME", "KUBERNETES_SERVICE_HOST"} & set(variables)
    assert "canary" not in str(job.body)
    assert {job.environment(which)["RAY_COLOR_PREFIX"] for which in ("head", "worker")} == {"0"}
    assert set(job.environment("submitter")) == {"HOME", "RAY_AUTH_MODE", "RAY_USAGE_STATS_ENABLED"}


@pytest.mark.item("S02")
def test_no_setting_turns_the_token_off():
    job = RenderedJob(environment={"RAY_AUTH_MODE": "disabled"})

    assert {job.environment(which)["RAY_AUTH_MODE"] for which in job.pods} == {"token"}


def test_limits_and_grace_are_those_of_the_config():
    job = RenderedJob(start_seconds=60, run_seconds=600, grace_seconds=120)

    assert (job.spec["preRunningDeadlineSeconds"], job.spec["activeDeadlineSeconds"]) == (60, 660)
    assert job.spec["shutdownAfterJobFinishes"] is True
    assert (job.spec["backoffLimit"], job.spec["submitterConfig"]) == (0, {"backoffLimit": 10})
    for which in ("head", "worker"):  # a pod that must go saves first, and leaves Ray some of the grace
        command = job.container(which)["lifecycle"]["preStop"]["exec"]["command"]
        assert command == ["python", "-m", "components.platform.job", "--leave", WORK, "105"]
        assert job.pods[which]["spec"]["terminationGracePeriodSeconds"] == 120
    assert job.environment("head")["RAY_JOB_STOP_WAIT_TIME_S"] == "105"
    assert RenderedJob(grace_seconds=10).environment("head")["RAY_JOB_STOP_WAIT_TIME_S"] == "1"


@pytest.mark.parametrize(("min_workers", "saves"), [(0, True), (16, False), (32, True), (64, True)])
def test_a_worker_that_must_go_does_not_end_a_job_of_32_that_goes_on_with_fewer(min_workers, saves):
    job = RenderedJob(min_workers=min_workers)

    assert "--leave" in str(job.container("head")["lifecycle"])
    assert ("lifecycle" in job.container("worker")) is saves


def test_the_entrypoint_survives_two_shells():
    text = RenderedJob().spec["entrypoint"]
    for _ in range(2):
        command = ["/bin/sh", "-c", f"echo {text}"]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    assert text == f"python -m components.platform.job {WORK}"


@pytest.mark.parametrize("work", ["s3://b/a b", "s3://b/$(id)", "s3://b/a;id", "s3://b/'", "", "s3://b/a\nid"])
def test_a_store_whose_name_means_something_to_a_shell_is_refused(work):
    with pytest.raises(InputError, match="choose another"):
        RenderedJob(work=work)


def test_a_job_has_the_same_name_for_the_same_work_and_another_in_another_store():
    assert job_name("pretrain", "s3://a/s", "k1") == job_name("pretrain", "s3://a/s", "k1")
    assert len({job_name("pretrain", store, key) for store in ("s3://a/s", "s3://b/s") for key in ("k1", "k2")}) == 4


@given(stem=st.text(max_size=80), store=st.text(max_size=40), key=st.text(max_size=40))
def test_every_name_is_one_that_kubernetes_and_kuberay_take(stem, store, key):
    name = job_name(stem, store, key)

    assert re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", name)
    assert len(name) <= 47
