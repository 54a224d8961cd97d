"""The Role of the steps: exactly what launching a training calls, nothing more."""

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

RBAC = K8S / "runs/rbac.yaml"
SUBMITTER = "infoxlm-submitter"
NAME = "j-pretrain-3f2a9c01de"


def launch(start_seconds: int) -> None:
    cluster = ClusterConfig(image=f"registry.example/infoxlm@sha256:{'1' * 64}", start_seconds=start_seconds)
    job.run(NAME, "s3://infoxlm/store/work/x.json", cluster, 1, [], lambda: None, lambda: None)


def calls_of_a_launch(kubernetes: KubernetesServer) -> set[tuple[str, str, str]]:
    """All there is to launching: find a job, follow it and its log; create one, wait, give up, stop."""
    kubernetes.put_job(NAME, status={"jobDeploymentStatus": "Complete", "jobStatus": "SUCCEEDED"})
    kubernetes.put_submitter("s1", NAME, lambda: iter(["a line"]))
    launch(start_seconds=60)
    with pytest.raises(ResourcesUnavailable):
        launch(start_seconds=1)

    def stop() -> None:
        kubernetes.wait_for(NAME, creations=2)
        os.kill(os.getpid(), signal.SIGTERM)

    stopping = threading.Thread(target=stop)
    stopping.start()
    with pytest.raises(Preempted):
        launch(start_seconds=60)
    stopping.join()
    return set(kubernetes.calls)


@pytest.mark.item("S05")
def test_the_role_of_the_steps_allows_exactly_what_the_launcher_calls(monkeypatch):
    monkeypatch.setenv("KFP_POD_NAME", "step-1")
    monkeypatch.setattr(job, "_POLL_SECONDS", 0.05)
    monkeypatch.setattr(job, "_LAST_LINES_SECONDS", 0.5)
    monkeypatch.setattr(log, "_PAUSE", 0.05)
    with running_kubernetes() as kubernetes:
        monkeypatch.setattr(api, "connect", lambda: api.RayJobs(kubernetes.api(), NAMESPACE))
        kubernetes.put_step("step-1", "infoxlm-x7k2p", "u-1")
        called = calls_of_a_launch(kubernetes)

    [role] = [
        one
        for one in yaml.safe_load_all(RBAC.read_text())
        if one["kind"] == "Role" and one["metadata"]["name"] == api.ROLE
    ]
    allowed = {
        (verb, group, resource)
        for rule in role["rules"]
        for verb in rule["verbs"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
    }
    assert allowed == called


def test_whoever_submits_may_use_the_account_of_the_steps_and_nothing_else():
    """What Kubeflow 2.18 asks Kubernetes about the caller: verb use, on the account that the run names."""
    [role] = [one for one in yaml.safe_load_all(RBAC.read_text()) if one["metadata"]["name"] == SUBMITTER]
    account = ClusterFile.model_validate(yaml.safe_load((ROOT / "configs/cluster.yaml").read_text())).service_account

    assert role["rules"] == [
        {"apiGroups": [""], "resources": ["serviceaccounts"], "resourceNames": [account], "verbs": ["use"]}
    ]
