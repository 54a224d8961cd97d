"""The life of a RayJob, against a Kubernetes API server in memory: the tests do what KubeRay's operator would."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

import pytest

from components.adapters.kuberay import api, job, obstacles
from components.adapters.kuberay.manifest import job_name
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

NAME = job_name("pretrain", "run-1", "pretrained-77b0")
CLUSTER = ClusterConfig(image=f"registry.example/infoxlm@sha256:{'1' * 64}")
RUNNING = {"jobDeploymentStatus": "Running", "jobStatus": "RUNNING"}
SUCCEEDED = {"jobDeploymentStatus": "Complete", "jobStatus": "SUCCEEDED"}
FAILED = {"jobDeploymentStatus": "Failed", "jobStatus": "FAILED", "reason": "AppFailed", "message": "exit\ncode 1"}
OWNER = {"apiVersion": "argoproj.io/v1alpha1", "kind": "Workflow", "name": "infoxlm-x7k2p", "uid": "u-2"}
OWNER |= {"controller": False, "blockOwnerDeletion": False}
ANOTHER = OWNER | {"uid": "u-1", "name": "infoxlm-a1b2c"}


@pytest.fixture
def launch(kubernetes, monkeypatch) -> Callable[..., None]:
    """`job.run` in a pod of a workflow on that server."""
    monkeypatch.setattr(api, "connect", lambda: api.RayJobs(kubernetes.api(), NAMESPACE))
    monkeypatch.setenv("KFP_POD_NAME", "step-2")
    kubernetes.put_step("step-2", OWNER["name"], OWNER["uid"])

    def run(ask_to_stop=lambda: None, read_outcome=lambda: None, **settings) -> None:
        limits = {"start_seconds": 20, "run_seconds": 20}  # a test that waits in vain ends
        cluster = ClusterConfig.parse({**CLUSTER.model_dump(), **limits, **settings}, "cluster")
        job.run(NAME, "s3://infoxlm/store/work/j.json", cluster, 8, [], ask_to_stop, read_outcome)

    return run


class Clock:
    """The launcher's clock, which a test moves. Pauses last as long as ever."""

    def __init__(self) -> None:
        self.now, self.reads = 0.0, 0

    def monotonic(self) -> float:
        self.reads += 1
        return self.now

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def move(self, seconds: float) -> None:
        """Move the clock, and return when the launcher has noticed."""
        self.now += seconds
        reads = self.reads
        until(lambda: self.reads > reads + 4)


@pytest.fixture
def clock(monkeypatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(job, "time", clock)
    monkeypatch.setattr(obstacles, "time", clock)
    return clock


@contextmanager
def operator(act: Callable[[], object]) -> Iterator[None]:
    """Let somebody else act while the launcher runs; an error of theirs fails the test."""
    failures: list[BaseException] = []

    def body() -> None:
        try:
            act()
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=body, daemon=True)
    thread.start()
    try:
        yield
    finally:
        thread.join(20)
    assert not failures, failures


def end_with(kubernetes: KubernetesServer, status: dict):
    """Let the operator end the job as soon as it is created."""
    return operator(lambda: kubernetes.wait_for(NAME) and kubernetes.status(NAME, **status))


def end_when_found(kubernetes: KubernetesServer):
    """Let a job that exists succeed after the launcher has found it."""
    return operator(lambda: until(lambda: "get" in verbs(kubernetes)) or kubernetes.status(NAME, **SUCCEEDED))


def verbs(server: KubernetesServer) -> list[str]:
    return [verb for verb, _, resource in server.calls if resource == "rayjobs"]


# ---------------------------------------------------------------- begin


def test_a_job_is_owned_by_the_workflow_of_its_step_and_deleted_with_all_its_pods_when_it_has_succeeded(
    kubernetes, launch
):
    def act():
        kubernetes.wait_for(NAME)
        for status in ({"jobDeploymentStatus": "Initializing"}, RUNNING, SUCCEEDED):
            kubernetes.status(NAME, **status)

    with operator(act):
        launch()

    [created] = kubernetes.jobs_ever()
    assert created["metadata"]["name"] == NAME
    assert created["metadata"]["ownerReferences"] == [OWNER]
    assert kubernetes.job(NAME) is None
    assert kubernetes.bodies[-1][::2] == ("delete", {"propagationPolicy": "Foreground"})


@pytest.mark.parametrize(
    ("may_read_pods", "message"),
    [(True, "so the job has no owner that is deleted with it"), (False, "the job will not be deleted with it")],
)
def test_without_a_workflow_or_the_right_to_find_it_a_job_has_no_owner_and_the_log_says_so(
    kubernetes, launch, monkeypatch, caplog, may_read_pods, message
):
    if may_read_pods:
        monkeypatch.delenv("KFP_POD_NAME")
    else:
        kubernetes.fail("get", 403, resource="pods")

    with caplog.at_level("INFO"), end_with(kubernetes, SUCCEEDED):
        launch()

    assert "ownerReferences" not in kubernetes.jobs_ever()[0]["metadata"]
    assert message in caplog.text
    assert may_read_pods or "Role infoxlm-runner" in caplog.text


@pytest.mark.parametrize("owner", [OWNER, ANOTHER])
@pytest.mark.parametrize("status", [RUNNING, SUCCEEDED])
def test_a_job_of_an_earlier_attempt_or_of_another_run_is_followed_and_not_run_again(kubernetes, launch, status, owner):
    kubernetes.put_job(NAME, metadata={"ownerReferences": [owner]}, status=status)

    with end_when_found(kubernetes) if status is RUNNING else nullcontext():
        launch()

    assert not kubernetes.jobs_ever()


def test_a_job_that_failed_in_an_earlier_attempt_is_deleted_and_created_anew(kubernetes, launch):
    kubernetes.put_job(NAME, status=FAILED)

    with end_with(kubernetes, SUCCEEDED):
        launch()

    assert [verb for verb in verbs(kubernetes) if verb in ("delete", "create")] == ["delete", "create", "delete"]


def test_a_job_that_is_being_deleted_is_waited_for(kubernetes, launch):
    kubernetes.put_job(NAME, metadata={"finalizers": ["ray.io/rayjob-finalizer"]}, status=RUNNING)
    kubernetes.delete(NAME)

    def act():
        until(lambda: verbs(kubernetes).count("get") > 2)
        assert not kubernetes.jobs_ever()
        kubernetes.patch(NAME, {"metadata": {"finalizers": []}})
        kubernetes.wait_for(NAME)
        kubernetes.status(NAME, **SUCCEEDED)

    with operator(act):
        launch()

    assert len(kubernetes.jobs_ever()) == 1


def test_pods_that_stay_on_a_dead_node_do_not_keep_their_job_from_being_started_anew(kubernetes, launch, clock, caplog):
    kubernetes.put_job(NAME, metadata={"finalizers": ["foregroundDeletion"]}, status=FAILED)
    kubernetes.delete(NAME)

    def act():
        until(lambda: verbs(kubernetes).count("get") > 3)
        clock.move(120)
        assert "delete" not in verbs(kubernetes)  # within the grace its pods may still save
        clock.now += 2
        until(lambda: "delete" in verbs(kubernetes))
        assert kubernetes.bodies[-1][::2] == ("delete", {"propagationPolicy": "Background"})
        kubernetes.patch(NAME, {"metadata": {"finalizers": []}})  # what the API server does then
        kubernetes.wait_for(NAME)
        kubernetes.status(NAME, **SUCCEEDED)

    with operator(act):
        launch(grace_seconds=1, start_seconds=900)

    assert "perhaps on a lost node" in caplog.text


def test_a_job_whose_creation_was_not_confirmed_is_found(kubernetes, launch):
    kubernetes.fail("create", "lost")

    with end_with(kubernetes, SUCCEEDED):
        launch()

    assert len(kubernetes.jobs_ever()) == 1


# ---------------------------------------------------------------- an API server in trouble


def test_server_errors_and_cut_connections_do_not_touch_the_job(kubernetes, launch):
    def act():
        kubernetes.wait_for(NAME)
        kubernetes.fail("get", 503, "cut", 410, 429)
        until(lambda: not kubernetes.pending_faults())
        assert "delete" not in verbs(kubernetes)
        kubernetes.status(NAME, **SUCCEEDED)

    with operator(act):
        launch()

    assert len(kubernetes.jobs_ever()) == 1


def test_a_job_is_left_alone_when_kubernetes_does_not_answer_any_more(kubernetes, launch, monkeypatch):
    monkeypatch.setattr(job, "_MAX_FAILURES", 3)
    kubernetes.put_job(NAME, status=RUNNING)

    def act():
        until(lambda: verbs(kubernetes).count("get") > 1)
        kubernetes.fail("get", *[500] * 9)

    with (
        operator(act),
        pytest.raises(WorkerLost, match=r"failed to get rayjobs .*500 .*: the job was not deleted"),
    ):
        launch()

    assert kubernetes.job(NAME)
    assert "delete" not in verbs(kubernetes)


@pytest.mark.parametrize(
    ("verb", "status", "message"),
    [
        ("get", 401, r"refuses to get rayjobs in namespace infoxlm \(401 .*Role infoxlm-runner"),
        ("create", 403, r"refuses to create rayjobs in namespace infoxlm \(403 .*Role infoxlm-runner"),
        ("create", 404, "check KubeRay's version"),
    ],
)
def test_a_refusal_is_final_and_names_the_remedy(kubernetes, launch, verb, status, message):
    kubernetes.fail(verb, status)

    with pytest.raises(InputError, match=message):
        launch()

    assert "delete" not in verbs(kubernetes)


def test_gpus_are_released_although_the_first_deletion_fails(kubernetes, launch):
    kubernetes.fail("delete", 503)

    with end_with(kubernetes, SUCCEEDED):
        launch()

    assert kubernetes.job(NAME) is None


def test_a_step_outside_of_a_cluster_says_what_it_needs():
    with pytest.raises(InputError, match="runs in a pod, as infoxlm-runner"):
        job.run(NAME, "w", CLUSTER, 8, [], lambda: None, lambda: None)


# ---------------------------------------------------------------- how a job ends


def because(reason: str) -> dict:
    return {"jobDeploymentStatus": "Failed", "jobStatus": "RUNNING", "reason": reason}


DIVERGED = {"stage": "pretrain", "code": 5, "class": "TrainingDiverged", "message": "3 steps in a row\nare not finite"}


@pytest.mark.parametrize(
    ("status", "outcome", "kind", "code", "words"),
    [
        (FAILED, None, WorkerLost, 75, "ended as Failed, FAILED AppFailed: exit code 1: run again"),
        (FAILED, DIVERGED, TrainingDiverged, 5, "3 steps in a row are not finite"),
        (FAILED, {"code": 3, "class": "DataCorrupt", "message": "x"}, DataCorrupt, 3, "x"),
        (FAILED, {"code": 70, "class": "MemoryError", "message": "x"}, InfoXLMError, 70, "x"),
        ({"jobDeploymentStatus": "Running", "jobStatus": "FAILED"}, DIVERGED, TrainingDiverged, 5, "not finite"),
        ({"jobDeploymentStatus": "Complete", "jobStatus": "STOPPED"}, None, WorkerLost, 75, "STOPPED"),
        (because("SubmissionFailed"), None, WorkerLost, 75, "SubmissionFailed"),
        (because("PreRunningDeadlineExceeded"), None, ResourcesUnavailable, 75, "GPUs were not available in time"),
        (because("DeadlineExceeded"), None, ResourcesUnavailable, 75, "reached its time limit"),
        ({"jobDeploymentStatus": "ValidationFailed"}, None, InputError, 2, "refused by KubeRay"),
    ],
)  # fmt: skip
def test_the_end_of_a_job_is_an_error_of_ours_in_one_line(kubernetes, launch, status, outcome, kind, code, words):
    outcomes = iter([None, outcome])

    with end_with(kubernetes, status), pytest.raises(InfoXLMError) as raised:
        launch(read_outcome=lambda: next(outcomes), retries=0)

    assert type(raised.value) is kind
    assert raised.value.exit_code == code
    assert words in str(raised.value)
    assert "\n" not in str(raised.value)
    assert kubernetes.job(NAME) is None


def test_the_final_error_of_an_earlier_attempt_ends_this_one_without_asking_for_gpus(kubernetes, launch):
    with pytest.raises(TrainingDiverged, match="3 steps in a row"):
        launch(read_outcome=lambda: DIVERGED)

    assert not kubernetes.calls


def end_each(kubernetes: KubernetesServer, *ends: dict):
    """Let the operator end each job that the launcher creates."""

    def act():
        for number, end in enumerate(ends, start=1):
            kubernetes.wait_for(NAME, number)
            kubernetes.status(NAME, **end)

    return operator(act)


HELD = {"code": 75, "class": "LeaseHeld", "message": "somebody trains this run"}


def test_a_job_that_asks_to_be_tried_again_is_started_anew_until_it_succeeds(kubernetes, launch, caplog):
    with end_each(kubernetes, FAILED, SUCCEEDED):
        launch(read_outcome=lambda: HELD)

    assert len(kubernetes.jobs_ever()) == 2
    assert "somebody trains this run; starting it again (1 of 3)" in caplog.text


@pytest.mark.item("F24")
def test_a_job_is_not_started_anew_more_often_than_the_config_says(kubernetes, launch):
    with end_each(kubernetes, FAILED, FAILED), pytest.raises(LeaseHeld):
        launch(read_outcome=lambda: HELD, retries=1)

    assert len(kubernetes.jobs_ever()) == 2
    assert kubernetes.job(NAME) is None


def test_a_job_that_somebody_deletes_stays_deleted(kubernetes, launch):
    def act():
        kubernetes.wait_for(NAME)
        until(lambda: verbs(kubernetes).count("get") > 1)
        kubernetes.delete(NAME)

    with operator(act), pytest.raises(WorkerLost, match="deleted by another process"):
        launch()

    assert len(kubernetes.jobs_ever()) == 1


# ---------------------------------------------------------------- time limits


@pytest.mark.item("F24")
def test_gpus_that_never_come_end_the_step_in_time_with_the_reason_of_the_scheduler(kubernetes, launch, clock):
    def act():
        kubernetes.wait_for(NAME)
        kubernetes.status(NAME, jobDeploymentStatus="Suspended")  # as in a queue
        kubernetes.put_event("other-pod", "of no interest")
        kubernetes.put_event(
            f"{NAME}-x2x4v-workers-worker-1", "0/3 nodes are available:\n3 Insufficient nvidia.com/gpu."
        )
        clock.move(899)
        assert kubernetes.job(NAME) is not None
        clock.now += 2

    with operator(act), pytest.raises(ResourcesUnavailable) as raised:
        launch(start_seconds=900)

    reason = "no GPUs after 900 s (Suspended): 0/3 nodes are available: 3 Insufficient nvidia.com/gpu."
    assert reason in str(raised.value)
    assert len(kubernetes.jobs_ever()) == 1
    assert kubernetes.job(NAME) is None


POLICY = 'pods "x" is forbidden: violates PodSecurity "restricted:latest": runAsNonRoot != true'


@pytest.mark.item("F24")
@pytest.mark.parametrize(
    ("worker", "event", "reason"),
    [
        (
            ("ImagePullBackOff", "Back-off pulling image"),
            'Failed to pull image "x": 403 denied',
            "ImagePullBackOff in pod .*: Back-off pulling image",
        ),
        (("ErrImagePull", "manifest unknown"), "", "ErrImagePull in pod .*: manifest unknown"),
        (("InvalidImageName", "invalid reference format"), "", "InvalidImageName"),
        (None, POLICY, "violates PodSecurity"),
    ],
)  # fmt: skip
def test_an_obstacle_that_waiting_does_not_remove_ends_the_step_after_a_minute(
    kubernetes, launch, clock, worker, event, reason
):
    def act():
        kubernetes.wait_for(NAME)
        kubernetes.status(NAME, jobDeploymentStatus="Initializing")
        if worker:
            kubernetes.put_worker(f"{NAME}-x2x4v-workers-worker-1", *worker)
        if event:
            kubernetes.put_event(f"{NAME}-x2x4v", event)
        clock.move(31)
        assert kubernetes.job(NAME) is not None  # once may be a hiccup of the registry
        clock.now += 31

    with operator(act), pytest.raises(InputError, match=rf"cannot start: .*{reason}.*; fix this, then run again"):
        launch(start_seconds=3600)

    assert kubernetes.job(NAME) is None


AWAY = ("ImagePullBackOff", "Back-off pulling image"), 'Failed to pull image "x": 503 Service Unavailable'
QUOTA = "exceeded quota: infoxlm, requested: requests.nvidia.com/gpu=8, used: requests.nvidia.com/gpu=8"
FULL = (), f'Failed to create worker Pod: pods "x" is forbidden: {QUOTA}'


@pytest.mark.parametrize(
    ("worker", "event", "message"),
    [(*AWAY, "ImagePullBackOff in pod"), (*FULL, "Failed to create worker Pod")],
    ids=["the registry is away", "the quota is used up"],
)
def test_an_obstacle_that_may_pass_is_logged_once_and_waited_for(
    kubernetes, launch, clock, caplog, worker, event, message
):
    def act():
        kubernetes.wait_for(NAME)
        kubernetes.patch(NAME, {"metadata": {"creationTimestamp": "2026-01-01T00:00:00Z"}})
        kubernetes.status(NAME, jobDeploymentStatus="Initializing")
        kubernetes.put_worker("of-another-job", "InvalidImageName", "no concern of ours")
        kubernetes.put_event(f"{NAME}-old00", POLICY, "2025-12-31T23:59:00Z")  # of an earlier job of this name
        if worker:
            kubernetes.put_worker(f"{NAME}-x2x4v-workers-worker-1", *worker)
        kubernetes.put_event(f"{NAME}-x2x4v", event, "2026-01-01T00:00:09Z")
        for _ in range(3):
            clock.move(31)
        kubernetes.status(NAME, **SUCCEEDED)

    with caplog.at_level("INFO"), operator(act):
        launch(start_seconds=3600)

    assert caplog.text.count(f"rayjob/{NAME} waits: {message}") == 1


UNSCHEDULABLE = "0/2 nodes are available: 2 Insufficient cpu. preemption: 0/2 nodes are available."
WORKER = f"{NAME}-x2x4v-workers-worker"


def put_partly_scheduled(kubernetes: KubernetesServer, node_for_workers: bool = False) -> None:
    """Let the scheduler find a node for the head and one worker, and none for the submitter or the other worker."""
    kubernetes.put_pod(f"{NAME}-x2x4v-head", "head", node="n1")
    kubernetes.put_pod(f"{WORKER}-a", "worker", node="n1")
    if node_for_workers:
        kubernetes.put_pod(f"{WORKER}-b", "worker", node="n2")
        kubernetes.put_pod(f"{NAME}-9xk2f", "", unschedulable=UNSCHEDULABLE)
        kubernetes.status(NAME, jobDeploymentStatus="Running", rayClusterStatus={"desiredWorkerReplicas": 2})
    else:
        kubernetes.put_pod(f"{WORKER}-b", "worker", unschedulable=UNSCHEDULABLE)
        kubernetes.status(NAME, jobDeploymentStatus="Initializing", rayClusterStatus={"desiredWorkerReplicas": 2})


@pytest.mark.parametrize(
    ("node_for_workers", "waits"),
    [
        (False, f"1 of 2 workers cannot be scheduled: pod {WORKER}-b: 0/2 nodes are available: 2 Insufficient cpu."),
        (True, f"the submitter cannot be scheduled: pod {NAME}-9xk2f: 0/2 nodes are available: 2 Insufficient cpu."),
    ],
)
def test_a_job_that_holds_only_some_of_its_pods_gives_them_back_and_is_created_again_later(
    kubernetes, launch, clock, caplog, node_for_workers, waits
):
    def act():
        kubernetes.wait_for(NAME)
        put_partly_scheduled(kubernetes, node_for_workers)
        clock.move(31)
        clock.move(299)
        assert kubernetes.job(NAME) is not None
        clock.now += 31
        kubernetes.wait_for(NAME, creations=2)
        kubernetes.delete_pods()
        kubernetes.status(NAME, **SUCCEEDED)

    with caplog.at_level("INFO"), operator(act):
        launch(start_seconds=900, partial_seconds=300)

    assert f"rayjob/{NAME} waits: {waits}" in caplog.text
    assert f"rayjob/{NAME} was deleted to free its nodes ({waits}); creating it again in " in caplog.text
    assert [verb for verb in verbs(kubernetes) if verb in ("create", "delete")] == ["create", "delete"] * 2


def test_a_job_that_is_never_scheduled_whole_ends_in_the_time_to_start_however_often_it_is_created(
    kubernetes, launch, clock
):
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


def test_a_job_of_a_queue_keeps_its_pods(kubernetes, launch, clock):
    def act():
        kubernetes.wait_for(NAME)
        put_partly_scheduled(kubernetes)
        clock.move(31)
        clock.move(331)
        kubernetes.status(NAME, **SUCCEEDED)

    with operator(act):
        launch(start_seconds=900, partial_seconds=300, queue="gpu")

    assert len(kubernetes.jobs_ever()) == 1


def test_a_worker_that_was_killed_for_its_memory_is_named_with_its_limit_and_not_tried_again(kubernetes, launch):
    def act():
        kubernetes.wait_for(NAME)
        kubernetes.put_pod(f"{WORKER}-a", "worker", node="n1", memory="600Mi", killed=("OOMKilled", 137))
        kubernetes.status(NAME, **FAILED)

    with operator(act), pytest.raises(OutOfMemory) as raised:
        launch()

    assert raised.value.exit_code == 2
    assert str(raised.value) == (
        f"rayjob/{NAME}: worker {WORKER}-a needed more than its 600Mi of memory (OOMKilled, exit code 137): "
        "raise pool.memory (steps.memory for text), then run again"
    )
    assert len(kubernetes.jobs_ever()) == 1


def test_a_job_that_its_queue_takes_back_waits_again_with_a_time_limit_of_its_own(kubernetes, launch, clock, caplog):
    def logs(state: str, times: int) -> None:
        until(lambda: caplog.text.count(f"rayjob/{NAME} is {state}") == times)

    def act():
        kubernetes.wait_for(NAME)
        for times in (1, 2):
            kubernetes.status(NAME, jobDeploymentStatus="Suspended", jobStatus="")
            logs("Suspended", times - 1)
            clock.move(600)
            kubernetes.status(NAME, **RUNNING)
            logs("Running", times)
        kubernetes.status(NAME, **SUCCEEDED)

    with caplog.at_level("INFO"), operator(act):
        launch(start_seconds=900)


def test_the_time_in_a_queue_does_not_count_as_time_without_gpus(kubernetes, launch, clock):
    def act():
        kubernetes.wait_for(NAME)
        kubernetes.status(NAME, jobDeploymentStatus="Suspended")
        clock.move(0)
        for _ in range(3):
            clock.move(3000)
        kubernetes.status(NAME, jobDeploymentStatus="Initializing")  # admitted: the time counts from now on
        clock.move(0)
        clock.now += 901

    with operator(act), pytest.raises(ResourcesUnavailable, match="no GPUs after 900 s"):
        launch(start_seconds=900, queue="gpu")


@pytest.mark.item("P9")
def test_a_job_that_holds_its_gpus_too_long_is_deleted_even_without_an_operator(kubernetes, launch):
    with (
        end_with(kubernetes, RUNNING),
        pytest.raises(ResourcesUnavailable, match=r"not finished after ray.run_seconds \(1 s\)"),
    ):
        launch(run_seconds=1)

    assert kubernetes.job(NAME) is None


def test_the_state_of_a_quiet_job_is_logged_now_and_then(kubernetes, launch, monkeypatch, caplog):
    monkeypatch.setattr(job, "_REPORT_SECONDS", 0.2)

    def act():
        kubernetes.wait_for(NAME)
        pods = {"desiredWorkerReplicas": 2, "readyWorkerReplicas": 1}
        kubernetes.status(NAME, jobDeploymentStatus="Initializing", rayClusterStatus=pods)
        until(lambda: f"rayjob/{NAME} is Initializing, 1 of 2 worker pods ready, " in caplog.text)
        until(lambda: "s after the start" in caplog.text)
        kubernetes.status(NAME, **SUCCEEDED)

    with caplog.at_level("INFO"), operator(act):
        launch()


# ---------------------------------------------------------------- a step that is told to stop


def stop_while_it_runs(kubernetes, caplog):
    """Let the job run, then send SIGTERM to this process."""

    def act():
        kubernetes.wait_for(NAME)
        until(lambda: verbs(kubernetes).count("get") > 1)  # found or created, and followed
        kubernetes.status(NAME, **RUNNING)
        until(lambda: f"rayjob/{NAME} is Running" in caplog.text)
        os.kill(os.getpid(), signal.SIGTERM)

    return operator(act)


@pytest.fixture
def info(caplog):
    with caplog.at_level("INFO"):
        yield caplog


def test_sigterm_asks_the_training_to_save_and_deletes_the_job_at_once_without_waiting_for_the_save(
    kubernetes, launch, info, monkeypatch
):
    monkeypatch.setattr(job, "_REQUEST_SECONDS", 60)  # longer than this test waits for the deletion
    deleted: list[bool] = []

    def save() -> None:
        os.kill(os.getpid(), signal.SIGTERM)  # Kubernetes and Argo both send one
        until(lambda: kubernetes.job(NAME) is None)  # while the training saves
        deleted.append(True)

    handler = signal.getsignal(signal.SIGTERM)
    with stop_while_it_runs(kubernetes, info), pytest.raises(Preempted, match="run again"):
        launch(ask_to_stop=save)

    assert deleted
    assert len(kubernetes.jobs_ever()) == 1
    assert signal.getsignal(signal.SIGTERM) is handler


def test_a_training_that_cannot_be_asked_to_save_is_ended_all_the_same(kubernetes, launch, info):
    with stop_while_it_runs(kubernetes, info), pytest.raises(Preempted):
        launch(ask_to_stop=lambda: 1 / 0)

    assert kubernetes.job(NAME) is None and "the request to save cannot be sent: division by zero" in info.text


def test_sigterm_interrupts_any_wait_and_deletes_a_job_whose_gpus_have_not_come(kubernetes, launch, monkeypatch):
    monkeypatch.setattr(job, "_POLL_SECONDS", 1000)

    def act():
        kubernetes.wait_for(NAME)
        until(lambda: verbs(kubernetes).count("get") > 1)
        os.kill(os.getpid(), signal.SIGTERM)

    with operator(act), pytest.raises(Preempted):
        launch()

    assert kubernetes.job(NAME) is None


RUNS = {  # the state of a workflow, and whether it is under way
    "running": ({"spec": {"activeDeadlineSeconds": 60}, "status": {"phase": "Running"}}, True),
    "new": ({"spec": {}}, True),
    "terminated by Kubeflow": ({"spec": {"activeDeadlineSeconds": 0}, "status": {"phase": "Running"}}, False),
    "stopped by Argo": ({"spec": {"shutdown": "Terminate"}, "status": {"phase": "Running"}}, False),
    "failed": ({"spec": {}, "status": {"phase": "Failed"}}, False),
    "another of this name": ({"uid": "of another", "spec": {}}, False),
    "gone": (None, False),
}


def owners_of_the_job(kubernetes) -> list[dict] | None:
    rayjob = kubernetes.job(NAME)
    return rayjob and rayjob["metadata"]["ownerReferences"]


@pytest.mark.parametrize("owner", [OWNER, ANOTHER])
def test_a_run_that_is_terminated_ends_its_job_and_leaves_that_of_another_run(kubernetes, launch, info, owner):
    kubernetes.put_workflow(OWNER["name"], OWNER["uid"], **RUNS["terminated by Kubeflow"][0])
    kubernetes.put_job(NAME, metadata={"ownerReferences": [owner]}, status=RUNNING)
    requests = []

    def act():
        until(lambda: f"rayjob/{NAME} is Running" in info.text)
        os.kill(os.getpid(), signal.SIGTERM)

    with operator(act), pytest.raises(Preempted, match="run again"):
        launch(ask_to_stop=lambda: requests.append("to save"))

    assert owners_of_the_job(kubernetes) == (None if owner is OWNER else [ANOTHER])
    assert requests == (["to save"] if owner is OWNER else [])


@pytest.mark.parametrize("state", RUNS)
def test_a_step_whose_node_is_drained_leaves_the_job_to_its_next_attempt(kubernetes, launch, info, state):
    body, is_under_way = RUNS[state]
    if body:
        kubernetes.put_workflow(OWNER["name"], **{"uid": OWNER["uid"], **body})

    with stop_while_it_runs(kubernetes, info), pytest.raises(Preempted, match="run again"):
        launch()

    assert owners_of_the_job(kubernetes) == ([OWNER] if is_under_way else None)


@pytest.mark.parametrize(
    ("resource", "failures", "words", "job_stays"),
    [
        ("workflows", [403], "was stopped and deleted", False),
        ("workflows", [500] * 3, "was not deleted, because Kubernetes does not answer", True),
        ("pods", [500], "continues without this step", True),  # its run was not found at the start
    ],
)
def test_a_job_is_deleted_only_if_kubernetes_says_or_may_not_say_whether_a_run_needs_it(
    kubernetes, launch, info, resource, failures, words, job_stays
):
    kubernetes.put_workflow(OWNER["name"], OWNER["uid"], **RUNS["running"][0])
    kubernetes.fail("get", *failures, resource=resource)

    with stop_while_it_runs(kubernetes, info), pytest.raises(Preempted, match=words):
        launch()

    assert bool(kubernetes.job(NAME)) is job_stays
    assert resource == "pods" or "cannot find out whether a run needs rayjob/" in info.text
