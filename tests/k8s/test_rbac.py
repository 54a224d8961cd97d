"""The roles of steps and of users who submit runs contain exactly the rights that they need."""

import os
import signal
import threading

import pytest
import yaml

from components.adapters.kuberay import api, job, log
from components.settings.cluster import ClusterConfig, ClusterFile
from infoxlm_core.errors import Preempted, ResourcesUnavailable
from tests.k8s.manifests import K8S, ROOT
from tests.servers.kubernetes_api import NAMESPACE, KubernetesServer, running_kubernetes

JOB = "j-pretrain-3f2a9c01de"


def read_role(name: str) -> dict:
    """Return a Role of k8s/runs/rbac.yaml."""
    objects = yaml.safe_load_all((K8S / "runs/rbac.yaml").read_text())
    [role] = [item for item in objects if item["kind"] == "Role" and item["metadata"]["name"] == name]
    return role


def launch(start_seconds: int) -> None:
    cluster = ClusterConfig(image=f"registry.example/infoxlm@sha256:{'1' * 64}", start_seconds=start_seconds)
    job.run(JOB, "s3://infoxlm/store/work/x.json", cluster, 1, [], lambda: None, lambda: None)


def launch_with_every_outcome(kubernetes: KubernetesServer) -> None:
    """Follow a finished job and its log, wait for GPUs in vain, and stop a job after SIGTERM."""
    kubernetes.put_job(JOB, status={"jobDeploymentStatus": "Complete", "jobStatus": "SUCCEEDED"})
    kubernetes.put_submitter("s1", JOB, lambda: iter(["a line"]))
    launch(start_seconds=60)
    with pytest.raises(ResourcesUnavailable):
        launch(start_seconds=1)

    def send_sigterm() -> None:
        kubernetes.wait_for(JOB, creations=2)
        os.kill(os.getpid(), signal.SIGTERM)

    sender = threading.Thread(target=send_sigterm)
    sender.start()
    with pytest.raises(Preempted):
        launch(start_seconds=60)
    sender.join()


@pytest.mark.item("S05")
def test_the_role_of_the_steps_allows_exactly_the_calls_of_the_launcher(monkeypatch):
    monkeypatch.setenv("KFP_POD_NAME", "step-1")
    monkeypatch.setattr(job, "_POLL_SECONDS", 0.05)
    monkeypatch.setattr(job, "_LAST_LINES_SECONDS", 0.5)
    monkeypatch.setattr(log, "_RECONNECT_SECONDS", 0.05)
    monkeypatch.setattr(log, "_LAST_RECONNECT_SECONDS", 0.0125)
    with running_kubernetes() as kubernetes:
        monkeypatch.setattr(api, "connect", lambda: api.RayJobs(kubernetes.api(), NAMESPACE))
        kubernetes.put_step("step-1", "infoxlm-x7k2p", "u-1")
        launch_with_every_outcome(kubernetes)
        calls = set(kubernetes.calls)

    allowed_calls = set()
    for rule in read_role(api.ROLE)["rules"]:
        for verb in rule["verbs"]:
            for group in rule["apiGroups"]:
                allowed_calls |= {(verb, group, resource) for resource in rule["resources"]}
    assert allowed_calls == calls


def test_submitter_role_allows_only_the_use_of_the_service_account_of_steps():
    """Kubeflow 2.18 checks whether a user may `use` the service account of a run."""
    cluster = ClusterFile.model_validate(yaml.safe_load((ROOT / "configs/cluster.yaml").read_text()))

    assert read_role("infoxlm-submitter")["rules"] == [
        {
            "apiGroups": [""],
            "resources": ["serviceaccounts"],
            "resourceNames": [cluster.service_account],
            "verbs": ["use"],
        }
    ]
