"""Launching and following a RayJob, against a Kubernetes API server in memory. The tests act as KubeRay's operator."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

import pytest

from components.adapters.kuberay import api, job, obstacles
from components.adapters.kuberay.manifest import make_job_name
from components.settings.cluster import ClusterConfig
from infoxlm_core.errors import (
    DataCorrupt,
    InfoXLMError,
    InputError,
    LeaseHeld,
    OutOfMemory,
    Preempted,
    ResourcesUnavailable,
    TrainingDiverged,
    WorkerLost,
)
from tests.servers.kubernetes_api import NAMESPACE, KubernetesServer
from tests.servers.processes import until

NAME = make_job_name("pretrain", "run-1", "pretrained-77b0")
WORKER = f"{NAME}-x2x4v-workers-worker"
CLUSTER = ClusterConfig(image=f"registry.example/infoxlm@sha256:{'1' * 64}")
SUSPENDED = {"jobDeploymentStatus": "Suspended", "jobStatus": ""}
INITIALIZING = {"jobDeploymentStatus": "Initializing"}
RUNNING = {"jobDeploymentStatus": "Running", "jobStatus": "RUNNING"}
SUCCEEDED = {"jobDeploymentStatus": "Complete", "jobStatus": "SUCCEEDED"}
FAILED = {"jobDeploymentStatus": "Failed", "jobStatus": "FAILED", "reason": "AppFailed", "message": "exit\ncode 1"}
OWNER = {
    "apiVersion": "argoproj.io/v1alpha1",
    "kind": "Workflow",
    "name": "infoxlm-x7k2p",
    "uid": "u-2",
    "controller": False,
    "blockOwnerDeletion": False,
}
OTHER_OWNER = OWNER | {"uid": "u-1", "name": "infoxlm-a1b2c"}


@pytest.fixture
def launch(kubernetes, monkeypatch) -> Callable[..., None]:
    """Return a function that calls `job.run` as a step of the workflow `OWNER`."""
    monkeypatch.setattr(api, "connect", lambda: api.RayJobs(kubernetes.api(), NAMESPACE))
    monkeypatch.setenv("KFP_POD_NAME", "step-2")
    kubernetes.put_step("step-2", OWNER["name"], OWNER["uid"])

    def run(ask_to_stop=lambda: None, read_outcome=lambda: None, **settings) -> None:
        limits = {"start_seconds": 20, "run_seconds": 20}  # end a test that would wait forever
        cluster = ClusterConfig.parse({**CLUSTER.model_dump(), **limits, **settings}, "cluster")
        job.run(NAME, "s3://infoxlm/store/work/j.json", cluster, 8, [], ask_to_stop, read_outcome)

    return run


class Clock:
    """A clock of the launcher that the test moves. Pauses keep their real length."""

    def __init__(self) -> None:
        self.now = 0.0
        self.read_count = 0

    def monotonic(self) -> float:
        self.read_count += 1
        return self.now

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def move(self, seconds: float) -> None:
        """Move the clock, and return when the launcher has noticed."""
        self.now += seconds
        read_count = self.read_count
        until(lambda: self.read_count > read_count + 4)


@pytest.fixture
def clock(monkeypatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(job, "time", clock)
    monkeypatch.setattr(obstacles, "time", clock)
    return clock


@pytest.fixture
def log(caplog):
    with caplog.at_level("INFO"):
        yield caplog


@contextmanager
def operator(act: Callable[[], object]) -> Iterator[None]:
    """Run `act` in a thread beside the launcher. Its error fails the test."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            act()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield
    finally:
        thread.join(20)
    assert not errors, errors


def end_with(kubernetes: KubernetesServer, *statuses: dict):
    """Give each job that the launcher creates the next of these statuses."""

    def act() -> None:
        for number, status in enumerate(statuses, start=1):
            kubernetes.wait_for(NAME, number)
            kubernetes.status(NAME, **status)

    return operator(act)


def list_calls(kubernetes: KubernetesServer, *verbs: str) -> list[str]:
    """Return the calls for RayJobs with one of these verbs, in order."""
    return [verb for verb, _, resource in kubernetes.calls if resource == "rayjobs" and verb in verbs]


def wait_for_reads(kubernetes: KubernetesServer, count: int) -> None:
    """Wait until the launcher has read the job so many times."""
    until(lambda: len(list_calls(kubernetes, "get")) >= count)


def assert_last_deletion(kubernetes: KubernetesServer, policy: str) -> None:
    verb, _, body = kubernetes.bodies[-1]
    assert verb == "delete"
    assert body == {"propagationPolicy": policy}


# ---------------------------------------------------------------- create or find


def test_job_is_owned_by_its_workflow_and_deleted_when_it_has_succeeded(kubernetes, launch):
    kubernetes.fail("delete", 503)

    def act():
        kubernetes.wait_for(NAME)
        for status in (INITIALIZING, RUNNING, SUCCEEDED):
            kubernetes.status(NAME, **status)

    with operator(act):
        launch()

    [created] = kubernetes.jobs_ever()
    assert created["metadata"]["name"] == NAME
    assert created["metadata"]["ownerReferences"] == [OWNER]
    assert kubernetes.job(NAME) is None
    assert_last_deletion(kubernetes, "Foreground")


@pytest.mark.parametrize("owner", [OWNER, OTHER_OWNER])
@pytest.mark.parametrize("status", [RUNNING, SUCCEEDED])
def test_existing_job_of_this_or_another_run_is_followed(kubernetes, launch, status, owner):
    kubernetes.put_job(NAME, metadata={"ownerReferences": [owner]}, status=status)

    def succeed():
        wait_for_reads(kubernetes, 1)
        kubernetes.status(NAME, **SUCCEEDED)

    with operator(succeed) if status is RUNNING else nullcontext():
        launch()

    assert not kubernetes.jobs_ever()


def test_failed_job_of_an_earlier_attempt_is_replaced(kubernetes, launch):
    kubernetes.put_job(NAME, status=FAILED)

    with end_with(kubernetes, SUCCEEDED):
        launch()

    assert list_calls(kubernetes, "create", "delete") == ["delete", "create", "delete"]


def test_deletion_of_an_earlier_job_is_awaited_unless_its_pods_are_on_a_dead_node(kubernetes, launch, clock, log):
    kubernetes.put_job(NAME, metadata={"finalizers": ["foregroundDeletion"]}, status=FAILED)
    kubernetes.delete(NAME)

    def act():
        wait_for_reads(kubernetes, 4)
        clock.move(120)
        assert not list_calls(kubernetes, "create", "delete")  # the pods may still save
        clock.now += 2
        until(lambda: list_calls(kubernetes, "delete"))
        assert_last_deletion(kubernetes, "Background")
        kubernetes.patch(NAME, {"metadata": {"finalizers": []}})  # as the API server does now
        kubernetes.wait_for(NAME)
        kubernetes.status(NAME, **SUCCEEDED)

    with operator(act):
        launch(grace_seconds=1, start_seconds=900)

    assert "perhaps because a node is lost" in log.text


def test_job_is_found_if_the_response_to_its_creation_was_lost(kubernetes, launch, log):
    kubernetes.fail("create", "lost")

    with end_with(kubernetes, SUCCEEDED):
        launch()

    assert f"following the existing rayjob/{NAME}" in log.text


# ---------------------------------------------------------------- an API server that fails


def test_temporary_errors_of_kubernetes_do_not_affect_the_job(kubernetes, launch):
    def act():
        kubernetes.wait_for(NAME)
        kubernetes.fail("get", 503, "cut", 410, 429)
        until(lambda: not kubernetes.pending_faults())
        assert not list_calls(kubernetes, "delete")
        kubernetes.status(NAME, **SUCCEEDED)

    with operator(act):
        launch()

    assert len(kubernetes.jobs_ever()) == 1


def test_job_is_not_deleted_if_kubernetes_stops_answering(kubernetes, launch, monkeypatch):
    monkeypatch.setattr(job, "_MAX_ATTEMPTS", 4)
    kubernetes.put_job(NAME, status=RUNNING)

    def act():
        wait_for_reads(kubernetes, 2)
        kubernetes.fail("get", *[500] * 9)

    with (
        operator(act),
        pytest.raises(WorkerLost, match=r"failed to get rayjobs .*500 .*: the job was not deleted"),
    ):
        launch()

    assert kubernetes.job(NAME)
    assert not list_calls(kubernetes, "delete")


@pytest.mark.parametrize(
    ("verb", "status", "message"),
    [
        ("get", 401, r"refuses to get rayjobs in namespace infoxlm \(401 .*Role infoxlm-runner"),
        ("create", 403, r"refuses to create rayjobs in namespace infoxlm \(403 .*Role infoxlm-runner"),
        ("create", 404, "check KubeRay's version"),
    ],
)
def test_refusal_of_kubernetes_is_final_and_names_the_remedy(kubernetes, launch, verb, status, message):
    kubernetes.fail(verb, status)

    with pytest.raises(InputError, match=message):
        launch()

    assert not list_calls(kubernetes, "delete")


def test_step_outside_of_a_cluster_is_refused():
    with pytest.raises(InputError, match="needs a pod with service account infoxlm-runner"):
        job.run(NAME, "w", CLUSTER, 8, [], lambda: None, lambda: None)


def test_attempts_to_delete_the_job_are_a_second_apart(kubernetes, launch, clock, monkeypatch):
    pauses = []
    monkeypatch.setattr(clock, "sleep", pauses.append)
    kubernetes.fail("delete", 503, 503)

    with end_with(kubernetes, SUCCEEDED):
        launch()

    assert pauses[-2:] == [1.0, 1.0]
    assert kubernetes.job(NAME) is None


# ---------------------------------------------------------------- the end of a job


def failed_because(reason: str) -> dict:
    return {"jobDeploymentStatus": "Failed", "jobStatus": "RUNNING", "reason": reason}


DIVERGED = {"stage": "pretrain", "code": 5, "class": "TrainingDiverged", "message": "3 steps in a row\nare not finite"}
CORRUPT = {"code": 3, "class": "DataCorrupt", "message": "x"}
UNEXPECTED = {"code": 70, "class": "MemoryError", "message": "x"}
LEASE_HELD = {"code": 75, "class": "LeaseHeld", "message": "another process trains this run"}
STOPPED = {"jobDeploymentStatus": "Complete", "jobStatus": "STOPPED"}


@pytest.mark.parametrize(
    ("status", "outcome", "error_class", "exit_code", "message"),
    [
        (FAILED, None, WorkerLost, 75, "ended as Failed, FAILED AppFailed: exit code 1: run again"),
        (FAILED, DIVERGED, TrainingDiverged, 5, "3 steps in a row are not finite"),
        (FAILED, CORRUPT, DataCorrupt, 3, "x"),
        (FAILED, UNEXPECTED, InfoXLMError, 70, "x"),
        ({"jobDeploymentStatus": "Running", "jobStatus": "FAILED"}, DIVERGED, TrainingDiverged, 5, "not finite"),
        (STOPPED, None, WorkerLost, 75, "STOPPED"),
        (failed_because("PreRunningDeadlineExceeded"), None, ResourcesUnavailable, 75, "GPUs were not available"),
        (failed_because("DeadlineExceeded"), None, ResourcesUnavailable, 75, "reached its time limit"),
        ({"jobDeploymentStatus": "ValidationFailed"}, None, InputError, 2, "refused by KubeRay"),
    ],
)
def test_failed_job_becomes_a_one_line_error(kubernetes, launch, status, outcome, error_class, exit_code, message):
    outcomes = iter([None, outcome])  # before and after the job

    with end_with(kubernetes, status), pytest.raises(InfoXLMError) as raised:
        launch(read_outcome=lambda: next(outcomes), retries=0)

    assert type(raised.value) is error_class
    assert raised.value.exit_code == exit_code
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)
    assert kubernetes.job(NAME) is None


def test_permanent_error_of_an_earlier_attempt_is_raised_without_a_job(kubernetes, launch):
    with pytest.raises(TrainingDiverged, match="3 steps in a row"):
        launch(read_outcome=lambda: DIVERGED)

    assert not kubernetes.calls


@pytest.mark.item("F24")
@pytest.mark.parametrize(("last_status", "error"), [(SUCCEEDED, None), (FAILED, LeaseHeld)])
def test_job_with_a_temporary_error_is_started_again_as_often_as_configured(kubernetes, launch, last_status, error):
    with end_with(kubernetes, FAILED, last_status), pytest.raises(error) if error else nullcontext():
        launch(read_outcome=lambda: LEASE_HELD, retries=1)

    assert len(kubernetes.jobs_ever()) == 2
    assert kubernetes.job(NAME) is None


def test_job_deleted_by_another_process_is_not_created_again(kubernetes, launch):
    def act():
        kubernetes.wait_for(NAME)
        wait_for_reads(kubernetes, 2)
        kubernetes.delete(NAME)

    with operator(act), pytest.raises(WorkerLost, match="deleted by another process"):
        launch()

    assert len(kubernetes.jobs_ever()) == 1


def test_worker_killed_for_its_memory_is_named_with_its_limit(kubernetes, launch):
    def act():
        kubernetes.wait_for(NAME)
        kubernetes.put_pod(f"{WORKER}-a", "worker", node="n1", memory="600Mi", killed=("OOMKilled", 137))
        kubernetes.status(NAME, **FAILED)

    with operator(act), pytest.raises(OutOfMemory) as raised:
        launch()

    assert raised.value.exit_code == 2
    assert str(raised.value) == (
        f"rayjob/{NAME}: worker {WORKER}-a needed more than its 600Mi of memory (OOMKilled, exit code 137): "
        "raise pool.memory (for text processing, steps.memory), then run again"
    )
    assert len(kubernetes.jobs_ever()) == 1


# ---------------------------------------------------------------- a job that does not start, and time limits


@pytest.mark.item("F24")
def test_step_without_gpus_ends_in_time_with_the_reason_of_the_scheduler(kubernetes, launch, clock):
    def act():
        kubernetes.wait_for(NAME)
        kubernetes.status(NAME, **SUSPENDED)
        kubernetes.put_event("other-pod", "of no interest")
        kubernetes.put_event(f"{WORKER}-1", "0/3 nodes are available:\n3 Insufficient nvidia.com/gpu.")
        clock.move(899)
        assert kubernetes.job(NAME) is not None
        clock.now += 2

    with operator(act), pytest.raises(ResourcesUnavailable) as raised:
        launch(start_seconds=900)

    reason = "no GPUs after 900 s (Suspended): 0/3 nodes are available: 3 Insufficient nvidia.com/gpu."
    assert reason in str(raised.value)
    assert len(kubernetes.jobs_ever()) == 1
    assert kubernetes.job(NAME) is None


POD_SECURITY = 'pods "x" is forbidden: violates PodSecurity "restricted:latest": runAsNonRoot != true'


@pytest.mark.item("F24")
@pytest.mark.parametrize(
    ("waiting", "event", "reason"),
    [
        (
            ("ImagePullBackOff", "Back-off pulling image"),
            'Failed to pull image "x": 403 denied',
            "ImagePullBackOff in pod .*: Back-off pulling image",
        ),
        (("ErrImagePull", "manifest unknown"), "", "ErrImagePull in pod .*: manifest unknown"),
        (("InvalidImageName", "invalid reference format"), "", "InvalidImageName"),
        (None, POD_SECURITY, "violates PodSecurity"),
    ],
)
def test_permanent_obstacle_ends_the_step_after_a_minute(kubernetes, launch, clock, waiting, event, reason):
    def act():
        kubernetes.wait_for(NAME)
        kubernetes.status(NAME, **INITIALIZING)
        if waiting:
            kubernetes.put_worker(f"{WORKER}-1", *waiting)
        if event:
            kubernetes.put_event(f"{NAME}-x2x4v", event)
        clock.move(31)
        assert kubernetes.job(NAME) is not None  # the registry may have failed only once
        clock.now += 31

    with operator(act), pytest.raises(InputError, match=rf"cannot start: .*{reason}.*; fix this, then run again"):
        launch(start_seconds=3600)

    assert kubernetes.job(NAME) is None


REGISTRY_FAILS = 'Failed to pull image "x": 503 Service Unavailable'
QUOTA_USED = 'Failed to create worker Pod: pods "x" is forbidden: exceeded quota: infoxlm, requested: nvidia.com/gpu=8'


@pytest.mark.parametrize(
    ("waiting", "event", "message"),
    [
        (("ImagePullBackOff", "Back-off pulling image"), REGISTRY_FAILS, "ImagePullBackOff in pod"),
        (None, QUOTA_USED, "Failed to create worker Pod"),
    ],
)
def test_temporary_obstacle_is_logged_once(kubernetes, launch, clock, log, waiting, event, message):
    def act():
        kubernetes.wait_for(NAME)
        kubernetes.patch(NAME, {"metadata": {"creationTimestamp": "2026-01-01T00:00:00Z"}})
        kubernetes.status(NAME, **INITIALIZING)
        kubernetes.put_worker("of-another-job", "InvalidImageName", "must be ignored")
        kubernetes.put_event(f"{NAME}-old00", POD_SECURITY, "2025-12-31T23:59:00Z")  # of an earlier job of this name
        if waiting:
            kubernetes.put_worker(f"{WORKER}-1", *waiting)
        kubernetes.put_event(f"{NAME}-x2x4v", event, "2026-01-01T00:00:09Z")
        for _ in range(3):
            clock.move(31)
        kubernetes.status(NAME, **SUCCEEDED)

    with operator(act):
        launch(start_seconds=3600)

    assert log.text.count(f"rayjob/{NAME} waits: {message}") == 1


UNSCHEDULABLE = "0/2 nodes are available: 2 Insufficient cpu. preemption: 0/2 nodes are available."


def put_partly_scheduled(kubernetes: KubernetesServer) -> None:
    """Create the head and two workers of a job, of which the second worker has no node."""
    kubernetes.put_pod(f"{NAME}-x2x4v-head", "head", node="n1")
    kubernetes.put_pod(f"{WORKER}-a", "worker", node="n1")
    kubernetes.put_pod(f"{WORKER}-b", "worker", unschedulable=UNSCHEDULABLE)
    kubernetes.status(NAME, **INITIALIZING, rayClusterStatus={"desiredWorkerReplicas": 2})


def test_partly_scheduled_job_frees_its_nodes_and_is_created_again(kubernetes, launch, clock, log):
    def act():
        kubernetes.wait_for(NAME)
        put_partly_scheduled(kubernetes)
        clock.move(31)
        clock.move(299)
        assert kubernetes.job(NAME) is not None
        clock.now += 31
        kubernetes.wait_for(NAME, creations=2)
        kubernetes.delete_pods()
        kubernetes.status(NAME, **SUCCEEDED)

    with operator(act):
        launch(start_seconds=900, partial_seconds=300)

    reason = f"1 of 2 workers cannot be scheduled: pod {WORKER}-b: 0/2 nodes are available: 2 Insufficient cpu."
    assert f"rayjob/{NAME} waits: {reason}" in log.text
    assert f"rayjob/{NAME} was deleted to free its nodes ({reason})" in log.text
    assert list_calls(kubernetes, "create", "delete") == ["create", "delete"] * 2


@pytest.mark.item("F24")
def test_partly_scheduled_job_is_not_created_again_after_the_time_to_start(kubernetes, launch, clock):
    def act():
        for creations in (1, 2):
            kubernetes.wait_for(NAME, creations)
            kubernetes.delete_pods()
            put_partly_scheduled(kubernetes)
            clock.move(31)
            clock.now += 331
        clock.now += 500

    with operator(act), pytest.raises(ResourcesUnavailable, match=r"no GPUs after 900 s .*1 of 2 workers cannot be"):
        launch(start_seconds=900, partial_seconds=300)

    assert kubernetes.job(NAME) is None


def test_partly_scheduled_job_of_a_queue_keeps_its_nodes(kubernetes, launch, clock):
    def act():
        kubernetes.wait_for(NAME)
        put_partly_scheduled(kubernetes)
        clock.move(31)
        clock.move(331)
        kubernetes.status(NAME, **SUCCEEDED)

    with operator(act):
        launch(start_seconds=900, partial_seconds=300, queue="gpu")

    assert len(kubernetes.jobs_ever()) == 1


def test_time_in_a_queue_is_not_time_without_gpus(kubernetes, launch, clock):
    def act():
        kubernetes.wait_for(NAME)
        kubernetes.status(NAME, **SUSPENDED)
        clock.move(0)
        for _ in range(3):
            clock.move(3000)
        kubernetes.status(NAME, **INITIALIZING)  # Kueue has admitted the job
        clock.move(0)
        clock.now += 901

    with operator(act), pytest.raises(ResourcesUnavailable, match="no GPUs after 900 s"):
        launch(start_seconds=900, queue="gpu")


@pytest.mark.item("P9")
def test_job_that_runs_too_long_is_deleted_even_if_the_operator_does_nothing(kubernetes, launch):
    with (
        end_with(kubernetes, RUNNING),
        pytest.raises(ResourcesUnavailable, match=r"not finished after ray.run_seconds \(1 s\)"),
    ):
        launch(run_seconds=1)

    assert kubernetes.job(NAME) is None


# ---------------------------------------------------------------- a step that is stopped


def stop_running_job(kubernetes: KubernetesServer, log: pytest.LogCaptureFixture):
    """Send SIGTERM to this process when the launcher follows a running job."""

    def act():
        kubernetes.wait_for(NAME)
        wait_for_reads(kubernetes, 2)
        kubernetes.status(NAME, **RUNNING)
        until(lambda: f"rayjob/{NAME} is Running" in log.text)
        os.kill(os.getpid(), signal.SIGTERM)

    return operator(act)


def test_sigterm_deletes_the_job_while_the_training_saves(kubernetes, launch, log, monkeypatch):
    monkeypatch.setattr(job, "_SAVE_REQUEST_SECONDS", 60)  # longer than the deletion takes
    handler = signal.getsignal(signal.SIGTERM)
    was_deleted = threading.Event()

    def save() -> None:
        os.kill(os.getpid(), signal.SIGTERM)  # Kubernetes and Argo may each send a signal
        until(lambda: kubernetes.job(NAME) is None)
        was_deleted.set()

    with stop_running_job(kubernetes, log), pytest.raises(Preempted, match="run again"):
        launch(ask_to_stop=save)

    assert was_deleted.is_set()
    assert len(kubernetes.jobs_ever()) == 1
    assert signal.getsignal(signal.SIGTERM) is handler


def test_sigterm_deletes_the_job_even_if_the_request_to_save_fails(kubernetes, launch, log):
    with stop_running_job(kubernetes, log), pytest.raises(Preempted):
        launch(ask_to_stop=lambda: 1 / 0)

    assert kubernetes.job(NAME) is None
    assert "the request to save cannot be sent: division by zero" in log.text


TERMINATED = {"spec": {"activeDeadlineSeconds": 0}, "status": {"phase": "Running"}}
WORKFLOWS = {
    "running": ({"spec": {"activeDeadlineSeconds": 60}, "status": {"phase": "Running"}}, True),
    "new": ({"spec": {}}, True),
    "terminated by Kubeflow": (TERMINATED, False),
    "stopped by Argo": ({"spec": {"shutdown": "Terminate"}, "status": {"phase": "Running"}}, False),
    "failed": ({"spec": {}, "status": {"phase": "Failed"}}, False),
    "another of this name": ({"uid": "another uid", "spec": {}}, False),
    "deleted": (None, False),
}
"""State -> the workflow of the step, and whether it will retry the step."""


@pytest.mark.parametrize("state", WORKFLOWS)
def test_stopped_step_leaves_the_job_only_to_a_running_workflow(kubernetes, launch, log, state):
    workflow, is_running = WORKFLOWS[state]
    if workflow:
        kubernetes.put_workflow(OWNER["name"], **{"uid": OWNER["uid"], **workflow})

    with stop_running_job(kubernetes, log), pytest.raises(Preempted, match="run again"):
        launch()

    assert bool(kubernetes.job(NAME)) is is_running


def test_stopped_step_leaves_the_job_to_another_workflow_that_owns_it(kubernetes, launch, log):
    kubernetes.put_workflow(OWNER["name"], OWNER["uid"], **TERMINATED)
    kubernetes.put_job(NAME, metadata={"ownerReferences": [OTHER_OWNER]}, status=RUNNING)
    requests = []

    def act():
        until(lambda: f"rayjob/{NAME} is Running" in log.text)
        os.kill(os.getpid(), signal.SIGTERM)

    with operator(act), pytest.raises(Preempted, match="run again"):
        launch(ask_to_stop=lambda: requests.append("save"))

    assert kubernetes.job(NAME)["metadata"]["ownerReferences"] == [OTHER_OWNER]
    assert requests == []


@pytest.mark.parametrize(
    ("resource", "failures", "message", "is_deleted"),
    [
        ("workflows", [403], "was stopped and deleted", True),
        ("workflows", [500] * 3, "was not deleted, because Kubernetes does not answer", False),
        ("pods", [500], "continues without this step", False),  # the workflow was not known at the start
    ],
)
def test_job_is_deleted_only_if_kubernetes_answers_or_refuses_to_tell_whether_it_is_needed(
    kubernetes, launch, log, resource, failures, message, is_deleted
):
    kubernetes.put_workflow(OWNER["name"], OWNER["uid"], **WORKFLOWS["running"][0])
    kubernetes.fail("get", *failures, resource=resource)

    with stop_running_job(kubernetes, log), pytest.raises(Preempted, match=message):
        launch()

    assert (kubernetes.job(NAME) is None) is is_deleted
