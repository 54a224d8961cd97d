"""The RayJob that is asked for: valid, restricted, and with what the step was told on the right pods."""

import copy
import re
import subprocess

import kubernetes_validate
import pytest
from hypothesis import given
from hypothesis import strategies as st

from components.adapters.kuberay.manifest import job_name, render
from components.settings.cluster import ClusterConfig
from infoxlm_core.errors import InputError
from tests.k8s.rules import restricted

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
JOB = {
    *("entrypoint", "submissionMode", "submitterConfig", "submitterPodTemplate", "backoffLimit", "rayClusterSpec"),
    *("activeDeadlineSeconds", "preRunningDeadlineSeconds", "shutdownAfterJobFinishes", "ttlSecondsAfterFinished"),
    "suspend",
}
CLUSTER = {"rayVersion", "authOptions", "headGroupSpec", "workerGroupSpecs"}
HEAD = {"rayStartParams", "template"}
WORKER = HEAD | {"groupName", "replicas", "minReplicas", "maxReplicas"}


def job(work: str = WORK, num_workers: int = 32, **settings) -> dict:
    cluster = ClusterConfig.parse({"image": IMAGE, "pool": POOL, **settings}, "cluster")
    return render("j-pretrain-3f2a9c01de", work, cluster, num_workers, STEP, "2.60.0", HERE)


def pods(job: dict) -> dict[str, dict]:
    """Pod templates by what they are for."""
    cluster = job["spec"]["rayClusterSpec"]
    [workers] = cluster["workerGroupSpecs"]
    return {
        "head": cluster["headGroupSpec"]["template"],
        "worker": workers["template"],
        "submitter": job["spec"]["submitterPodTemplate"],
    }


def container(template: dict) -> dict:
    [one] = template["spec"]["containers"]
    return one


def environment(template: dict) -> dict:
    return {entry["name"]: entry.get("value", entry.get("valueFrom")) for entry in container(template)["env"]}


FULL = {
    "queue": "gpu",
    "priority_class": "infoxlm-training",
    "environment": {"HF_HUB_OFFLINE": "1"},
    "environment_from": ["infoxlm-store"],
    "head_node_selector": {"pool": "cpu"},
    "devices": {"vpc.amazonaws.com/efa": 32, "rdma/hca": 1},
}


@pytest.mark.item("S04")
@pytest.mark.parametrize("settings", [{}, FULL])
@pytest.mark.parametrize("which", ["head", "worker", "submitter"])
def test_every_pod_is_valid_for_kubernetes_and_restricted(settings, which):
    template = pods(job(**settings))[which]
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "x", **template["metadata"]},
        "spec": template["spec"],
    }

    kubernetes_validate.validate(pod, "1.34", strict=True)
    assert restricted(template["spec"]) == []
    assert template["spec"]["automountServiceAccountToken"] is False
    assert template["spec"]["serviceAccountName"] == "infoxlm-ray"
    assert template["spec"]["securityContext"]["runAsUser"] >= 10_000
    one = container(template)
    assert one["image"] == IMAGE
    assert one["securityContext"]["readOnlyRootFilesystem"] is True
    assert {"cpu", "memory"} <= set(one["resources"]["limits"]) & set(one["resources"]["requests"])
    assert environment(template)["RAY_AUTH_MODE"] == "token"
    writable = {mount["mountPath"]: mount["name"] for mount in one["volumeMounts"]}
    assert {"/tmp", environment(template)["HOME"]} <= set(writable)
    assert ("/dev/shm" in writable) == (which != "submitter")
    assert set(writable.values()) == {volume["name"] for volume in template["spec"]["volumes"] if "emptyDir" in volume}


def test_the_schema_check_finds_a_misspelt_field():
    template = pods(job())["worker"]
    spec = {**template["spec"], "nodeselector": {}}

    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(
            {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}, "spec": spec}, "1.34", strict=True
        )


@pytest.mark.parametrize(
    "break_it",
    [
        lambda pod: pod["containers"][0]["securityContext"].update(allowPrivilegeEscalation=True),
        lambda pod: pod["containers"][0]["securityContext"].update(capabilities={"drop": ["NET_RAW"]}),
        lambda pod: pod["securityContext"].pop("seccompProfile"),
        lambda pod: pod["securityContext"].update(runAsUser=0),
        lambda pod: pod["securityContext"].update(runAsNonRoot=False),
        lambda pod: pod.update(hostNetwork=True),
        lambda pod: pod["volumes"].append({"name": "host", "hostPath": {"path": "/"}}),
    ],
)
def test_the_rule_check_finds_what_restricted_forbids(break_it):
    pod = copy.deepcopy(pods(job())["worker"]["spec"])

    break_it(pod)

    assert len(restricted(pod)) == 1


@pytest.mark.parametrize("settings", [{}, FULL])
def test_a_job_has_only_fields_that_kuberay_knows(settings):
    rendered = job(**settings)

    cluster = rendered["spec"]["rayClusterSpec"]
    [workers] = cluster["workerGroupSpecs"]
    assert not set(rendered) - {"apiVersion", "kind", "metadata", "spec"}
    assert not set(rendered["spec"]) - JOB
    assert not set(cluster) - CLUSTER
    assert not set(cluster["headGroupSpec"]) - HEAD
    assert not set(workers) - WORKER
    assert cluster["authOptions"] == {"mode": "token"}
    assert all(isinstance(value, str) for value in cluster["headGroupSpec"]["rayStartParams"].values())


def test_workers_fill_whole_pods_and_only_they_have_gpus_and_go_where_the_pool_says():
    rendered = job(num_workers=32)

    [workers] = rendered["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    assert [workers[name] for name in ("replicas", "minReplicas", "maxReplicas")] == [4, 4, 4]
    found = pods(rendered)
    assert container(found["worker"])["resources"] == {
        "limits": {"cpu": "64", "memory": "512Gi", "nvidia.com/gpu": "8"},
        "requests": {"cpu": "64", "memory": "512Gi", "nvidia.com/gpu": "8"},
    }
    assert found["worker"]["spec"]["nodeSelector"] == {"node.kubernetes.io/instance-type": "p5.48xlarge"}
    assert found["worker"]["spec"]["tolerations"] == [TOLERATION]
    for other in ("head", "submitter"):
        assert "nvidia.com/gpu" not in container(found[other])["resources"]["limits"]
        assert not found[other]["spec"].get("nodeSelector")
        assert "tolerations" not in found[other]["spec"]
    assert rendered["spec"]["rayClusterSpec"]["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"


def test_devices_beside_gpus_are_asked_for_by_workers_and_are_no_gpus():
    rendered = job(num_workers=32, **FULL)

    [workers] = rendered["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    assert workers["replicas"] == 4
    asked = {"nvidia.com/gpu": "8", "vpc.amazonaws.com/efa": "32", "rdma/hca": "1"}
    found = {name: container(pod)["resources"] for name, pod in pods(rendered).items()}
    for kind in ("limits", "requests"):
        assert {name: n for name, n in found["worker"][kind].items() if "/" in name} == asked
        assert not any("/" in name for other in ("head", "submitter") for name in found[other][kind])


def test_the_head_goes_where_the_config_says():
    assert pods(job(**FULL))["head"]["spec"]["nodeSelector"] == {"pool": "cpu"}


def test_pods_for_text_have_no_gpus_and_hold_one_worker_each():
    cluster = ClusterConfig.parse({"image": IMAGE, "pool": POOL, "steps": {"cpu": "4", "memory": "8Gi"}, **FULL}, "")

    rendered = render("j-x-1", WORK, cluster.for_text(), 3, STEP, "2.60.0", HERE)

    [workers] = rendered["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    assert workers["replicas"] == 3 and not workers["template"]["spec"]["nodeSelector"]
    limits = container(workers["template"])["resources"]["limits"]
    assert {name: limits[name] for name in limits if name != "ephemeral-storage"} == {"cpu": "4", "memory": "8Gi"}


def test_ray_pods_know_the_run_its_tracking_server_and_its_store_but_no_secret_stands_in_the_manifest():
    rendered = job(**FULL)

    for which in ("head", "worker"):
        known = environment(pods(rendered)[which])
        assert known["RUN_ID"] == "2f4c"  # the label of another pod would be empty
        assert known["RUN_NAME"] == "nightly"
        assert known["MLFLOW_TRACKING_URI"] == "http://mlflow.infoxlm.svc:5000"
        assert known["MLFLOW_RUN_ID"] == "r1"
        assert known["INFOXLM_TRACKER"] == "none"
        assert known["AWS_ENDPOINT_URL_S3"] == "http://seaweedfs.infoxlm.svc:8333"
        assert known["HF_HUB_OFFLINE"] == "1"
        assert known["MLFLOW_TRACKING_TOKEN"] == {"secretKeyRef": SECRET}
        assert known["MLFLOW_ALLOW_PICKLE_DESERIALIZATION"] == "false"
        assert not {"LOST", "KFP_POD_NAME", "KUBERNETES_SERVICE_HOST"} & set(known)
        assert container(pods(rendered)[which])["envFrom"] == [{"secretRef": {"name": "infoxlm-store"}}]
    assert "canary" not in str(rendered)
    assert set(environment(pods(rendered)["submitter"])) == {"HOME", "RAY_AUTH_MODE", "RAY_USAGE_STATS_ENABLED"}


@pytest.mark.item("S02")
def test_no_setting_turns_the_token_off():
    assert environment(pods(job(environment={"RAY_AUTH_MODE": "disabled"}))["head"])["RAY_AUTH_MODE"] == "token"


def test_limits_and_grace_are_those_of_the_config():
    spec = job(start_seconds=60, run_seconds=600, grace_seconds=30)["spec"]

    assert (spec["preRunningDeadlineSeconds"], spec["activeDeadlineSeconds"]) == (60, 660)
    assert spec["shutdownAfterJobFinishes"] is True
    assert spec["backoffLimit"] == 0
    assert spec["submitterConfig"] == {"backoffLimit": 10}
    assert spec["rayClusterSpec"]["workerGroupSpecs"][0]["template"]["spec"]["terminationGracePeriodSeconds"] == 30


def test_a_job_of_a_queue_waits_until_it_is_admitted():
    assert job(queue="gpu")["spec"]["suspend"] is True
    assert job(queue="gpu")["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "gpu"
    assert "suspend" not in job()["spec"]
    assert "kueue.x-k8s.io/queue-name" not in job()["metadata"]["labels"]


def test_the_entrypoint_survives_two_shells():
    entrypoint = job()["spec"]["entrypoint"]

    once = subprocess.run(["/bin/sh", "-c", f"echo {entrypoint}"], capture_output=True, text=True, check=True).stdout
    twice = subprocess.run(["/bin/sh", "-c", f"echo {once}"], capture_output=True, text=True, check=True).stdout

    assert twice.strip() == f"python -m components.platform.job {WORK}"


@pytest.mark.parametrize("work", ["s3://b/a b", "s3://b/$(id)", "s3://b/a;id", "s3://b/'", "", "s3://b/a\nid"])
def test_a_store_whose_name_means_something_to_a_shell_is_refused(work):
    with pytest.raises(InputError, match="choose another"):
        job(work=work)


def test_a_job_has_the_same_name_for_the_same_work_and_another_in_another_store():
    assert job_name("pretrain", "s3://a/s", "k1") == job_name("pretrain", "s3://a/s", "k1")
    assert len({job_name("pretrain", store, key) for store in ("s3://a/s", "s3://b/s") for key in ("k1", "k2")}) == 4


@given(stem=st.text(max_size=80), store=st.text(max_size=40), key=st.text(max_size=40))
def test_every_name_is_one_that_kubernetes_and_kuberay_take(stem, store, key):
    name = job_name(stem, store, key)

    assert re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", name)
    assert len(name) <= 47


def test_a_pod_that_must_go_saves_first_and_leaves_ray_some_of_the_grace():
    for which in ("head", "worker"):
        template = pods(job(grace_seconds=120))[which]
        command = container(template)["lifecycle"]["preStop"]["exec"]["command"]
        assert command == ["python", "-m", "components.platform.job", "--leave", WORK, "105"]
        assert template["spec"]["terminationGracePeriodSeconds"] == 120


@pytest.mark.parametrize(("least", "saves"), [(0, True), (16, False), (32, True), (64, True)])
def test_a_worker_that_must_go_does_not_end_a_job_of_32_that_goes_on_with_fewer(least, saves):
    head, worker = (container(pods(job(min_workers=least))[which]) for which in ("head", "worker"))

    assert "--leave" in str(head["lifecycle"])
    assert ("lifecycle" in worker) is saves


def test_a_job_that_is_deleted_has_as_long_to_save_as_a_pod_that_must_go():
    assert environment(pods(job(grace_seconds=120))["head"])["RAY_JOB_STOP_WAIT_TIME_S"] == "105"
    assert environment(pods(job(grace_seconds=10))["head"])["RAY_JOB_STOP_WAIT_TIME_S"] == "1"


def test_pods_of_ray_ask_for_the_disk_that_checkpoints_pass_through():
    asked = {which: container(pods(job(disk="200Gi"))[which])["resources"] for which in ("head", "worker")}

    assert {amounts["ephemeral-storage"] for kinds in asked.values() for amounts in kinds.values()} == {"200Gi"}
    assert "ephemeral-storage" not in str(pods(job()))


def test_the_label_by_which_kuberay_s_service_finds_the_head_is_left_to_kuberay():
    for which in ("head", "worker"):
        assert "app.kubernetes.io/name" not in pods(job())[which]["metadata"]["labels"]
