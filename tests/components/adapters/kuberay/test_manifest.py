"""The manifest of a RayJob is valid and restricted, and has each setting on the right pods."""

import re

import kubernetes_validate
import pytest
from hypothesis import given
from hypothesis import strategies as st

from components.adapters.kuberay.manifest import make_job_name, render
from components.settings.cluster import ClusterConfig
from infoxlm_core.errors import InputError
from tests.k8s.rules import find_restricted_violations

IMAGE = f"registry.example/infoxlm@sha256:{'1' * 64}"
WORK = "s3://infoxlm/store/work/j-pretrain-3f2a9c01de.json"
TOLERATION = {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}
SECRET = {"name": "kfp-mlflow-credentials", "key": "token"}
POOL = {
    "gpus": 8,
    "cpu": "64",
    "memory": "512Gi",
    "tolerations": [TOLERATION],
    "node_selector": {"node.kubernetes.io/instance-type": "p5.48xlarge"},
}
STEP_ENVIRONMENT = [
    {"name": "RUN_ID", "valueFrom": {"fieldRef": {"fieldPath": "metadata.labels['pipeline/runid']"}}},
    {"name": "POD_UID", "valueFrom": {"fieldRef": {"fieldPath": "metadata.uid"}}},
    {"name": "MLFLOW_TRACKING_TOKEN", "valueFrom": {"secretKeyRef": SECRET}},
    {"name": "RUN_NAME", "value": "nightly"},
    {"name": "KFP_POD_NAME", "value": "step-1"},
]
PROCESS_ENVIRONMENT = {
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
ALL_SETTINGS = {
    "queue": "gpu",
    "priority_class": "infoxlm-training",
    "environment": {"HF_HUB_OFFLINE": "1"},
    "environment_from": ["infoxlm-store"],
    "head_node_selector": {"pool": "cpu"},
    "devices": {"vpc.amazonaws.com/efa": 32, "rdma/hca": 1},
    "disk": "200Gi",
}
"""All optional settings."""


class RenderedJob:
    """A rendered job, and its parts by name."""

    def __init__(self, num_workers: int = 32, work: str = WORK, for_text: bool = False, **settings) -> None:
        cluster = ClusterConfig.parse({"image": IMAGE, "pool": POOL, **settings}, "cluster")
        if for_text:
            cluster = cluster.for_text()
        self.body = render(
            "j-pretrain-3f2a9c01de", work, cluster, num_workers, STEP_ENVIRONMENT, "2.60.0", PROCESS_ENVIRONMENT
        )
        self.spec = self.body["spec"]
        self.cluster = self.spec["rayClusterSpec"]
        [self.workers] = self.cluster["workerGroupSpecs"]
        self.head = self.cluster["headGroupSpec"]
        self.pods = {
            "head": self.head["template"],
            "worker": self.workers["template"],
            "submitter": self.spec["submitterPodTemplate"],
        }

    def container(self, pod: str) -> dict:
        [container] = self.pods[pod]["spec"]["containers"]
        return container

    def environment(self, pod: str) -> dict:
        return {entry["name"]: entry.get("value", entry.get("valueFrom")) for entry in self.container(pod)["env"]}

    def limits(self, pod: str) -> dict:
        """Return the limits of a Ray pod, which are equal to its requests."""
        resources = self.container(pod)["resources"]
        assert resources["limits"] == resources["requests"]
        return resources["limits"]


@pytest.mark.item("S04")
@pytest.mark.parametrize("settings", [{}, ALL_SETTINGS])
@pytest.mark.parametrize("name", ["head", "worker", "submitter"])
def test_every_pod_is_valid_and_restricted(settings, name):
    job = RenderedJob(**settings)
    template, container = job.pods[name], job.container(name)
    spec = template["spec"]
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x", **template["metadata"]}, "spec": spec}

    kubernetes_validate.validate(pod, "1.34", strict=True)
    assert find_restricted_violations(spec) == []
    assert spec["automountServiceAccountToken"] is False
    assert spec["serviceAccountName"] == "infoxlm-ray"
    assert spec["securityContext"]["runAsUser"] >= 10_000
    assert container["image"] == IMAGE
    assert container["securityContext"]["readOnlyRootFilesystem"] is True
    assert all({"cpu", "memory"} <= set(amounts) for amounts in container["resources"].values())
    writable_folders = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
    assert {"/tmp", job.environment(name)["HOME"]} <= set(writable_folders)
    assert ("/dev/shm" in writable_folders) == (name != "submitter")
    assert set(writable_folders.values()) == {volume["name"] for volume in spec["volumes"] if "emptyDir" in volume}
    # KubeRay sets this label on Ray pods itself, to select the head.
    assert ("app.kubernetes.io/name" in template["metadata"]["labels"]) == (name == "submitter")


@pytest.mark.parametrize(
    ("settings", "num_workers", "pods", "devices"),
    [
        ({"gpus": 0}, 2, 2, {}),
        ({"gpus": 8}, 16, 2, {"nvidia.com/gpu": "8"}),
        ({"gpus": 8}, 4, 1, {"nvidia.com/gpu": "4"}),
        ({"gpus": 2, "accelerator": "nvidia.com/mig-1g.10gb"}, 4, 2, {"nvidia.com/mig-1g.10gb": "2"}),
    ],
)
def test_worker_pods_have_the_resources_and_place_of_the_pool(settings, num_workers, pods, devices):
    job = RenderedJob(num_workers, pool={**POOL, "cpu": "7500m", "memory": "60Gi", **settings})

    assert {job.workers[name] for name in ("replicas", "minReplicas", "maxReplicas")} == {pods}
    assert job.limits("worker") == {"cpu": "7500m", "memory": "60Gi", **devices}
    assert job.pods["worker"]["spec"]["nodeSelector"] == POOL["node_selector"]
    assert job.pods["worker"]["spec"]["tolerations"] == [TOLERATION]
    assert set(job.limits("head")) == {"cpu", "memory"}
    assert job.head["rayStartParams"]["num-cpus"] == "0"
    for other in ("head", "submitter"):
        assert not job.pods[other]["spec"].get("nodeSelector")
        assert "tolerations" not in job.pods[other]["spec"]


def test_submitter_requests_so_little_that_it_fits_beside_the_workers():
    assert RenderedJob().container("submitter")["resources"] == {
        "requests": {"cpu": "50m", "memory": "256Mi"},
        "limits": {"cpu": "1", "memory": "1Gi"},  # `ray job submit` computes for two seconds
    }


def test_optional_settings_are_on_the_right_pods():
    job = RenderedJob(**ALL_SETTINGS)

    devices = {"nvidia.com/gpu": "8", "vpc.amazonaws.com/efa": "32", "rdma/hca": "1"}
    assert devices.items() <= job.limits("worker").items()
    assert set(job.limits("head")) == {"cpu", "memory", "ephemeral-storage"}
    assert job.pods["head"]["spec"]["nodeSelector"] == {"pool": "cpu"}
    for name in ("head", "worker"):
        assert job.pods[name]["spec"]["priorityClassName"] == "infoxlm-training"
        assert job.container(name)["envFrom"] == [{"secretRef": {"name": "infoxlm-store"}}]
        assert job.limits(name)["ephemeral-storage"] == "200Gi"
    # Kueue admits a suspended job of its queue.
    assert job.spec["suspend"] is True
    assert job.body["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "gpu"
    assert "suspend" not in RenderedJob().spec
    assert "kueue.x-k8s.io/queue-name" not in RenderedJob().body["metadata"]["labels"]


def test_pods_for_text_have_no_gpus_and_one_worker_each():
    job = RenderedJob(3, for_text=True, **ALL_SETTINGS, steps={"cpu": "4", "memory": "8Gi"})

    assert job.workers["replicas"] == 3
    assert not job.pods["worker"]["spec"]["nodeSelector"]
    assert job.limits("worker") == {"cpu": "4", "memory": "8Gi", "ephemeral-storage": "200Gi"}


def test_ray_pods_have_the_variables_of_the_run_but_no_secret():
    job = RenderedJob(**ALL_SETTINGS)

    inherited = ("MLFLOW_TRACKING_URI", "MLFLOW_RUN_ID", "INFOXLM_TRACKER", "AWS_ENDPOINT_URL_S3")
    expected_variables = {name: PROCESS_ENVIRONMENT[name] for name in inherited} | {
        "RUN_ID": "2f4c",  # the label would be empty in another pod
        "RUN_NAME": "nightly",
        "HF_HUB_OFFLINE": "1",
        "MLFLOW_TRACKING_TOKEN": {"secretKeyRef": SECRET},
        "MLFLOW_ALLOW_PICKLE_DESERIALIZATION": "false",
        "RAY_COLOR_PREFIX": "0",
    }
    for name in ("head", "worker"):
        variables = job.environment(name)
        assert expected_variables.items() <= variables.items()
        assert not {"POD_UID", "KFP_POD_NAME", "KUBERNETES_SERVICE_HOST"} & set(variables)
    assert "canary" not in str(job.body)
    assert set(job.environment("submitter")) == {"HOME", "RAY_AUTH_MODE", "RAY_USAGE_STATS_ENABLED"}


@pytest.mark.item("S02")
def test_no_setting_disables_the_token_of_ray():
    job = RenderedJob(environment={"RAY_AUTH_MODE": "disabled"})

    assert {job.environment(name)["RAY_AUTH_MODE"] for name in job.pods} == {"token"}
    assert job.cluster["authOptions"] == {"mode": "token"}


def test_time_limits_and_grace_period_are_those_of_the_config():
    job = RenderedJob(start_seconds=60, run_seconds=600, grace_seconds=120)

    assert job.spec["preRunningDeadlineSeconds"] == 60
    assert job.spec["activeDeadlineSeconds"] == 660
    assert job.spec["shutdownAfterJobFinishes"] is True
    assert job.spec["backoffLimit"] == 0
    assert job.spec["submitterConfig"] == {"backoffLimit": 10}
    for name in ("head", "worker"):  # a stopped pod saves first, and leaves Ray a part of the grace period
        command = job.container(name)["lifecycle"]["preStop"]["exec"]["command"]
        assert command == ["python", "-m", "components.platform.job", "--leave", WORK, "105"]
        assert job.pods[name]["spec"]["terminationGracePeriodSeconds"] == 120
    assert job.environment("head")["RAY_JOB_STOP_WAIT_TIME_S"] == "105"


@pytest.mark.parametrize(("min_workers", "saves"), [(0, True), (16, False), (32, True)])
def test_stopped_worker_does_not_stop_a_job_of_32_that_may_continue_with_fewer(min_workers, saves):
    job = RenderedJob(min_workers=min_workers)

    assert "--leave" in str(job.container("head")["lifecycle"])
    assert ("lifecycle" in job.container("worker")) is saves


@pytest.mark.parametrize("work", ["s3://b/a b", "s3://b/$(id)", "s3://b/a;id", "s3://b/'", "", "s3://b/a\nid"])
def test_store_name_that_a_shell_would_change_is_refused(work):
    with pytest.raises(InputError, match="choose another"):
        RenderedJob(work=work)


def test_name_of_a_job_depends_on_work_and_store():
    names = {make_job_name("pretrain", store, key) for store in ("s3://a/s", "s3://b/s") for key in ("k1", "k2")}

    assert len(names) == 4
    assert make_job_name("pretrain", "s3://a/s", "k1") in names


@given(stem=st.text(max_size=80), store=st.text(max_size=40), key=st.text(max_size=40))
def test_every_job_name_is_valid_for_kubernetes_and_kuberay(stem, store, key):
    name = make_job_name(stem, store, key)

    assert re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", name)
    assert len(name) <= 47
