"""The life of a RayJob, against a Kubernetes API server in memory: the tests do what KubeRay's operator would."""

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from components.adapters.kuberay import api as kubernetes_api
from components.adapters.kuberay import job as ray_job
from components.adapters.kuberay import states as ray_job_states
from components.settings.cluster import ClusterConfig
from infoxlm_core.errors import (
    ConfigError,
    DataCorrupt,
    InfoXLMError,
    InputError,
    LeaseHeld,
    Preempted,
    ResourcesUnavailable,
    TrainingDiverged,
    WorkerLost,
)
from tests.servers.kubernetes_api import NAMESPACE, KubernetesServer, running_kubernetes, until

NAME = ray_job.job_name("pretrain", "run-1", "pretrained-77b0")
CLUSTER = ClusterConfig(image=f"registry.example/infoxlm@sha256:{'1' * 64}")
RUNNING = {"jobDeploymentStatus": "Running", "jobStatus": "RUNNING"}
SUCCEEDED = {"jobDeploymentStatus": "Complete", "jobStatus": "SUCCEEDED"}
FAILED = {"jobDeploymentStatus": "Failed", "jobStatus": "FAILED", "reason": "AppFailed", "message": "exit\ncode 1"}
OWNER = {"apiVersion": "argoproj.io/v1alpha1", "kind": "Workflow", "name": "infoxlm-x7k2p", "uid": "u-2"}
OWNER |= {"controller": False, "blockOwnerDeletion": False}


@pytest.fixture
def kubernetes() -> Iterator[KubernetesServer]:
    with running_kubernetes() as server:
        yield server


@pytest.fixture
def launch(kubernetes, monkeypatch) -> Callable[..., None]:
    """`ray_job.run` in a pod of its own on that server, without long pauses."""
    monkeypatch.setattr(kubernetes_api, "connect", lambda: kubernetes_api.RayJobs(kubernetes.api(), NAMESPACE))
    monkeypatch.setenv("KFP_POD_NAME", "step-2")
    kubernetes.put_step("step-2", OWNER["name"], OWNER["uid"])
    for name, value in {"_PAUSE": 0.05, "_BETWEEN_TRIES": 0.05, "_LOG_REST": 0.2, "_SLACK": 0}.items():
        monkeypatch.setattr(ray_job, name, value)
    monkeypatch.setattr(ray_job_states, "_PAUSE", 0.05)

    def run(ask_to_stop=lambda: None, ended=lambda: None, **settings) -> None:
        limits = {"start_seconds": 20, "run_seconds": 20}  # a test that waits in vain ends
        cluster = ClusterConfig.parse({**CLUSTER.model_dump(), **limits, **settings}, "cluster")
        ray_job.run(NAME, "s3://infoxlm/store/work/j.json", cluster, 8, [], ask_to_stop, ended)

    return run


class Clock:
    """The launcher's time: it passes when a test says so. Pauses last as long as ever."""

    def __init__(self) -> None:
        self.now, self.read = 0.0, 0

    def monotonic(self) -> float:
        self.read += 1
        return self.now

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def pass_by(self, seconds: float) -> None:
        """Return when the launcher has noticed."""
        self.now += seconds
        read = self.read
        until(lambda: self.read > read + 2)


@pytest.fixture
def clock(monkeypatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(ray_job, "time", clock)
    return clock


@contextmanager
def operator(act: Callable[[], object]) -> Iterator[None]:
    """Let somebody else act while the launcher runs; what they stumble over fails the test."""
    wrong: list[BaseException] = []

    def body() -> None:
        try:
            act()
        except BaseException as error:
            wrong.append(error)

    thread = threading.Thread(target=body, daemon=True)
    thread.start()
    try:
        yield
    finally:
        thread.join(20)
    assert not wrong, wrong


def verbs(server: KubernetesServer) -> list[str]:
    return [verb for verb, _, resource in server.calls if resource == "rayjobs"]


def test_a_job_is_owned_by_the_workflow_of_its_step_and_deleted_with_all_its_pods_when_it_has_succeeded(
    kubernetes, launch
):
    def act():
        kubernetes.wait_for(NAME)
        kubernetes.status(NAME, jobDeploymentStatus="Initializing")
        kubernetes.status(NAME, **RUNNING)
        kubernetes.status(NAME, **SUCCEEDED)

    with operator(act):
        launch()

    [job] = kubernetes.jobs_ever()
    assert job["metadata"]["name"] == NAME
    assert job["metadata"]["ownerReferences"] == [OWNER]
    assert kubernetes.job(NAME) is None
    assert kubernetes.bodies[-1][::2] == ("delete", {"propagationPolicy": "Foreground"})


def test_outside_of_a_workflow_a_job_has_no_owner_and_the_log_says_so(kubernetes, launch, monkeypatch, caplog):
    monkeypatch.delenv("KFP_POD_NAME")

    with caplog.at_level("INFO"), operator(lambda: kubernetes.wait_for(NAME) and kubernetes.status(NAME, **SUCCEEDED)):
        launch()

    assert "ownerReferences" not in kubernetes.jobs_ever()[0]["metadata"]
    assert "the job will not go with one" in caplog.text


def test_a_role_that_may_not_look_at_pods_costs_the_owner_and_not_the_training(kubernetes, launch, caplog):
    kubernetes.fail("get", 403, resource="pods")

    with operator(lambda: kubernetes.wait_for(NAME) and kubernetes.status(NAME, **SUCCEEDED)):
        launch()

    assert "ownerReferences" not in kubernetes.jobs_ever()[0]["metadata"]
    assert "the job will not go with it" in caplog.text and "Role infoxlm-runner" in caplog.text


def test_a_running_job_of_another_run_is_found_and_goes_with_the_last_run_that_follows_it(kubernetes, launch):
    first = OWNER | {"uid": "u-1", "name": "infoxlm-a1b2c"}
    kubernetes.put_job(NAME, metadata={"ownerReferences": [first]}, status=RUNNING)
    seen = []

    def act():
        until(lambda: "patch" in verbs(kubernetes))
        seen.append(kubernetes.job(NAME)["metadata"]["ownerReferences"])
        kubernetes.status(NAME, **SUCCEEDED)

    with operator(act):
        launch()

    assert seen == [[first, OWNER]]
    assert not kubernetes.jobs_ever()
    [kind] = [kind for verb, kind, _ in kubernetes.bodies if verb == "patch"]
    assert kind == "application/merge-patch+json"  # custom objects refuse the client's own, a strategic one


def test_a_job_that_another_run_adopts_at_the_same_time_is_looked_at_again_and_has_all_owners(
    kubernetes, launch, monkeypatch
):
    first, second = (OWNER | {"uid": f"u-{name}", "name": f"infoxlm-{name}"} for name in "ab")
    kubernetes.put_job(NAME, metadata={"ownerReferences": [first], "resourceVersion": "7"}, status=RUNNING)
    kubernetes.fail("patch", 409)  # what the API server says to a version that is not the latest
    adopt = kubernetes_api.RayJobs.adopt

    def adopt_after_the_other(jobs, job, owners) -> None:
        if "patch" not in verbs(kubernetes):
            kubernetes.patch(NAME, {"metadata": {"ownerReferences": [first, second]}})
        adopt(jobs, job, owners)

    monkeypatch.setattr(kubernetes_api.RayJobs, "adopt", adopt_after_the_other)

    with operator(lambda: until(lambda: "watch" in verbs(kubernetes)) or kubernetes.status(NAME, **SUCCEEDED)):
        launch()

    lost, kept = [body["metadata"] for verb, _, body in kubernetes.bodies if verb == "patch"]
    assert lost == {"ownerReferences": [first, OWNER], "resourceVersion": "7"}
    assert kept["ownerReferences"] == [first, second, OWNER]


def test_a_job_that_an_earlier_attempt_of_the_same_run_has_made_stays_as_it_is(kubernetes, launch):
    kubernetes.put_job(NAME, metadata={"ownerReferences": [OWNER]}, status=RUNNING)

    def act():
        until(lambda: "watch" in verbs(kubernetes))
        kubernetes.status(NAME, **SUCCEEDED)

    with operator(act):
        launch()

    assert "patch" not in verbs(kubernetes) and not kubernetes.jobs_ever()


def test_a_job_that_succeeded_while_nobody_looked_is_not_run_again(kubernetes, launch):
    kubernetes.put_job(NAME, status=SUCCEEDED)

    launch()

    assert not kubernetes.jobs_ever()


def test_a_job_that_failed_in_an_earlier_attempt_is_deleted_and_created_anew(kubernetes, launch):
    kubernetes.put_job(NAME, status=FAILED)

    with operator(lambda: kubernetes.wait_for(NAME) and kubernetes.status(NAME, **SUCCEEDED)):
        launch()

    assert [verb for verb in verbs(kubernetes) if verb in ("delete", "create")] == ["delete", "create", "delete"]


def test_a_job_that_is_being_deleted_is_waited_for_and_not_adopted(kubernetes, launch):
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
    assert "patch" not in verbs(kubernetes)


def test_pods_that_stay_on_a_dead_node_do_not_keep_their_job_from_being_started_anew(
    kubernetes, launch, monkeypatch, caplog
):
    monkeypatch.setattr(ray_job, "_PODS_GO", 5)  # long enough for four looks on a busy machine
    kubernetes.put_job(NAME, metadata={"finalizers": ["foregroundDeletion"]}, status=FAILED)
    kubernetes.delete(NAME)

    def act():
        until(lambda: verbs(kubernetes).count("get") > 3)
        assert "delete" not in verbs(kubernetes)  # in the grace its pods may still save
        until(lambda: "delete" in verbs(kubernetes))
        assert kubernetes.bodies[-1][::2] == ("delete", {"propagationPolicy": "Background"})
        kubernetes.patch(NAME, {"metadata": {"finalizers": []}})  # what the API server does then
        kubernetes.wait_for(NAME)
        kubernetes.status(NAME, **SUCCEEDED)

    with operator(act):
        launch(grace_seconds=1)

    assert "on a dead node?" in caplog.text


def test_a_job_whose_creation_was_not_confirmed_is_found(kubernetes, launch):
    kubernetes.fail("create", "lost")

    with operator(lambda: kubernetes.wait_for(NAME) and kubernetes.status(NAME, **SUCCEEDED)):
        launch()

    assert len(kubernetes.jobs_ever()) == 1


def test_a_name_that_somebody_took_in_the_same_moment_is_adopted(kubernetes, launch):
    kubernetes.fail("get", 404)  # we looked before the other created it
    kubernetes.put_job(NAME, status=RUNNING)

    with operator(lambda: until(lambda: "patch" in verbs(kubernetes)) or kubernetes.status(NAME, **SUCCEEDED)):
        launch()

    assert verbs(kubernetes)[:4] == ["get", "create", "get", "patch"]


def test_a_watch_heals_expired_versions_server_errors_and_cut_connections_without_touching_the_job(kubernetes, launch):
    kubernetes.fail("watch", "410", 500, "cut", 410, 429)
    kubernetes.fail("get", 503, resource="rayjobs")

    def act():
        kubernetes.wait_for(NAME)
        until(lambda: not kubernetes.pending_faults())
        assert "delete" not in verbs(kubernetes)
        kubernetes.status(NAME, **SUCCEEDED)

    with operator(act):
        launch()

    assert len(kubernetes.jobs_ever()) == 1


def test_a_job_is_left_alone_when_kubernetes_does_not_answer_any_more(kubernetes, launch, monkeypatch):
    monkeypatch.setattr(ray_job_states, "_FAILURES", 3)
    kubernetes.put_job(NAME, status=RUNNING)
    kubernetes.fail("watch", *[500] * 9)

    def act():
        until(lambda: "watch" in verbs(kubernetes))
        kubernetes.fail("get", *[500] * 9)

    with operator(act), pytest.raises(WorkerLost, match=r"does not answer .*: the job was left alone; run again"):
        launch()

    assert kubernetes.job(NAME)
    assert "delete" not in verbs(kubernetes)


@pytest.mark.parametrize("verb", ["get", "create", "watch"])
@pytest.mark.parametrize("status", [401, 403])
def test_a_refusal_is_final_and_names_the_role(kubernetes, launch, verb, status):
    kubernetes.fail(verb, status)

    with pytest.raises(
        InputError, match=rf"refuses to {verb} rayjobs in namespace infoxlm \({status} .*Role infoxlm-runner"
    ):
        launch()

    assert "delete" not in verbs(kubernetes)


def test_an_object_that_kubernetes_does_not_know_is_an_input_error(kubernetes, launch):
    kubernetes.fail("create", 404)

    with pytest.raises(InputError, match="KubeRay's version"):
        launch()


def because(reason: str) -> dict:
    return {"jobDeploymentStatus": "Failed", "jobStatus": "RUNNING", "reason": reason}


SAID = {"stage": "pretrain", "code": 5, "class": "TrainingDiverged", "message": "3 steps in a row\nare not finite"}


@pytest.mark.parametrize(
    ("status", "said", "kind", "code", "words"),
    [
        (FAILED, None, WorkerLost, 75, "ended as Failed, FAILED AppFailed: exit code 1: run again"),
        (FAILED, SAID, TrainingDiverged, 5, "3 steps in a row are not finite"),
        (FAILED, {"code": 3, "class": "DataCorrupt", "message": "x"}, DataCorrupt, 3, "x"),
        (FAILED, {"code": 70, "class": "MemoryError", "message": "x"}, InfoXLMError, 70, "x"),
        ({"jobDeploymentStatus": "Running", "jobStatus": "FAILED"}, SAID, TrainingDiverged, 5, "not finite"),
        ({"jobDeploymentStatus": "Complete", "jobStatus": "STOPPED"}, None, WorkerLost, 75, "STOPPED"),
        (because("SubmissionFailed"), None, WorkerLost, 75, "SubmissionFailed"),
        (because("JobStatusCheckTimeoutExceeded"), None, WorkerLost, 75, "TimeoutExceeded"),
        (because("JobDeploymentStatusTransitionGracePeriodExceeded"), None, WorkerLost, 75, "GracePeriodExceeded"),
        (because("PreRunningDeadlineExceeded"), None, ResourcesUnavailable, 75, "no GPUs in time"),
        (because("DeadlineExceeded"), None, ResourcesUnavailable, 75, "its time is over"),
        ({"jobDeploymentStatus": "ValidationFailed"}, None, InputError, 2, "refused by KubeRay"),
    ],
)  # fmt: skip
def test_the_end_of_a_job_is_an_error_of_ours_in_one_line(kubernetes, launch, status, said, kind, code, words):
    outcomes = iter([None, said])

    with (
        operator(lambda: kubernetes.wait_for(NAME) and kubernetes.status(NAME, **status)),
        pytest.raises(InfoXLMError) as raised,
    ):
        launch(ended=lambda: next(outcomes), retries=0)

    assert type(raised.value) is kind
    assert raised.value.exit_code == code
    assert words in str(raised.value)
    assert "\n" not in str(raised.value)
    assert kubernetes.job(NAME) is None


@pytest.mark.parametrize("kind", [ConfigError, DataCorrupt, TrainingDiverged])
def test_what_an_earlier_attempt_ended_with_for_good_ends_this_one_without_asking_for_gpus(kubernetes, launch, kind):
    said = {"code": kind.exit_code, "class": kind.__name__, "message": "as before"}

    with pytest.raises(kind, match="as before"):
        launch(ended=lambda: said)

    assert not kubernetes.calls


def test_a_job_that_asks_to_be_tried_again_is_started_anew_until_it_succeeds(kubernetes, launch, caplog):
    said = {"code": 75, "class": "LeaseHeld", "message": "somebody trains this run"}
    ends = [FAILED, FAILED, SUCCEEDED]

    def act():
        for number, end in enumerate(ends, start=1):
            kubernetes.wait_for(NAME, number)
            kubernetes.status(NAME, **end)

    with operator(act):
        launch(ended=lambda: said)

    assert len(kubernetes.jobs_ever()) == 3
    assert "somebody trains this run; starting it again (2 of 3)" in caplog.text


@pytest.mark.item("F24")
def test_a_job_is_not_started_anew_more_often_than_the_config_says(kubernetes, launch):
    def act():
        for number in (1, 2):
            kubernetes.wait_for(NAME, number)
            kubernetes.status(NAME, **FAILED)

    with operator(act), pytest.raises(LeaseHeld):
        launch(ended=lambda: {"code": 75, "class": "LeaseHeld", "message": "x"}, retries=1)

    assert len(kubernetes.jobs_ever()) == 2
    assert kubernetes.job(NAME) is None


def test_a_job_that_somebody_deletes_stays_deleted(kubernetes, launch):
    with (
        operator(lambda: until(lambda: "watch" in verbs(kubernetes)) or kubernetes.delete(NAME)),
        pytest.raises(WorkerLost, match="deleted by somebody else"),
    ):
        launch()

    assert len(kubernetes.jobs_ever()) == 1


@pytest.mark.item("F24")
def test_gpus_that_never_come_end_the_step_in_time_with_the_reason_of_the_scheduler(kubernetes, launch, clock):
    def act():
        kubernetes.wait_for(NAME)
        kubernetes.status(NAME, jobDeploymentStatus="Suspended")  # as in a queue
        kubernetes.put_event("other-pod", "of no interest")
        kubernetes.put_event(
            f"{NAME}-x2x4v-workers-worker-1", "0/3 nodes are available:\n3 Insufficient nvidia.com/gpu."
        )
        clock.pass_by(899)
        assert kubernetes.job(NAME) is not None
        clock.now += 2

    with operator(act), pytest.raises(ResourcesUnavailable) as raised:
        launch(start_seconds=900)

    assert "no GPUs after 900 s (Suspended): 0/3 nodes are available: 3 Insufficient nvidia.com/gpu." in str(
        raised.value
    )
    assert len(kubernetes.jobs_ever()) == 1
    assert kubernetes.job(NAME) is None


GPU = "requests.nvidia.com/gpu"
QUOTA = (
    'Failed to create worker Pod: pods "x" is forbidden: exceeded quota: infoxlm, requested: {}, used: {}, limited: {}'
)
POLICY = 'pods "x" is forbidden: violates PodSecurity "restricted:latest": runAsNonRoot != true'


@pytest.mark.item("F24")
@pytest.mark.parametrize(
    ("worker", "event", "said"),
    [
        (
            ("ImagePullBackOff", "Back-off pulling image"),
            'Failed to pull image "x": 403 denied',
            "ImagePullBackOff in pod .*: Back-off pulling image",
        ),
        (("ErrImagePull", "manifest unknown"), "", "ErrImagePull in pod .*: manifest unknown"),
        (("InvalidImageName", "invalid reference format"), "", "InvalidImageName"),
        (None, QUOTA.format(f"{GPU}=8", f"{GPU}=0", f"{GPU}=4"), "exceeded quota"),
        (None, QUOTA.format("cpu=500m,memory=512Gi", "cpu=0,memory=0", "cpu=1,memory=64Gi"), "exceeded quota"),
        (None, POLICY, "violates PodSecurity"),
    ],
)  # fmt: skip
def test_what_no_waiting_mends_ends_the_step_after_a_minute_and_not_after_an_hour(
    kubernetes, launch, clock, worker, event, said
):
    def act():
        kubernetes.wait_for(NAME)
        kubernetes.status(NAME, jobDeploymentStatus="Initializing")
        if worker:
            kubernetes.put_worker(f"{NAME}-x2x4v-workers-worker-1", *worker)
        if event:
            kubernetes.put_event(f"{NAME}-x2x4v", event)
        clock.pass_by(31)
        assert kubernetes.job(NAME) is not None  # once may be a hiccup of the registry
        clock.now += 31

    with operator(act), pytest.raises(InputError, match=rf"cannot start: .*{said}.*; mend that, run again"):
        launch(start_seconds=3600)

    assert kubernetes.job(NAME) is None


def test_a_registry_that_is_away_for_a_while_is_waited_for(kubernetes, launch, clock, caplog):
    def act():
        kubernetes.wait_for(NAME)
        kubernetes.status(NAME, jobDeploymentStatus="Initializing")
        kubernetes.put_worker(f"{NAME}-x2x4v-workers-worker-1", "ImagePullBackOff", "Back-off pulling image")
        kubernetes.put_event(f"{NAME}-x2x4v", 'Failed to pull image "x": 503 Service Unavailable')
        for _ in range(3):
            clock.pass_by(31)
        kubernetes.status(NAME, **RUNNING)
        kubernetes.status(NAME, **SUCCEEDED)

    with caplog.at_level("INFO"), operator(act):
        launch(start_seconds=3600)

    assert f"rayjob/{NAME} waits: ImagePullBackOff in pod" in caplog.text


def test_what_time_mends_is_told_at_once_and_waited_for(kubernetes, launch, clock, caplog):
    full = QUOTA.format(f"{GPU}=8", f"{GPU}=8", f"{GPU}=8")

    def act():
        kubernetes.wait_for(NAME)
        kubernetes.patch(NAME, {"metadata": {"creationTimestamp": "2026-01-01T00:00:00Z"}})
        kubernetes.status(NAME, jobDeploymentStatus="Initializing")
        kubernetes.put_worker("of-another-job", "ImagePullBackOff", "no concern of ours")
        kubernetes.put_event(f"{NAME}-old00", POLICY, "2025-12-31T23:59:00Z")  # of an earlier job of this name
        kubernetes.put_event(f"{NAME}-x2x4v", full, "2026-01-01T00:00:09Z")
        for _ in range(3):
            clock.pass_by(31)
        kubernetes.status(NAME, **RUNNING)
        kubernetes.status(NAME, **SUCCEEDED)

    with caplog.at_level("INFO"), operator(act):
        launch(start_seconds=3600)

    assert caplog.text.count(f"rayjob/{NAME} waits: Failed to create worker Pod") == 1


def test_a_job_that_its_queue_takes_back_waits_again_with_a_time_of_its_own(kubernetes, launch, clock, caplog):
    def act():
        kubernetes.wait_for(NAME)
        for times in (1, 2):
            kubernetes.status(NAME, jobDeploymentStatus="Suspended", jobStatus="")
            until(lambda: caplog.text.count(f"rayjob/{NAME} is Suspended") == times - 1)  # noqa: B023
            clock.pass_by(600)
            kubernetes.status(NAME, **RUNNING)
            until(lambda: caplog.text.count(f"rayjob/{NAME} is Running") == times)  # noqa: B023
        kubernetes.status(NAME, **SUCCEEDED)

    with caplog.at_level("INFO"), operator(act):
        launch(start_seconds=900)


def test_the_time_in_a_queue_is_not_time_that_gpus_have_failed_to_come(kubernetes, launch, clock):
    def act():
        kubernetes.wait_for(NAME)
        kubernetes.status(NAME, jobDeploymentStatus="Suspended")
        time.sleep(1)
        for _ in range(3):
            clock.pass_by(3000)
        kubernetes.status(NAME, jobDeploymentStatus="Initializing")  # admitted: from now on
        time.sleep(1)
        clock.now += 901

    with operator(act), pytest.raises(ResourcesUnavailable, match="no GPUs after 900 s"):
        launch(start_seconds=900, queue="gpu")


@pytest.mark.item("P9")
def test_a_job_that_holds_its_gpus_too_long_is_deleted_even_without_an_operator(kubernetes, launch):
    with (
        operator(lambda: kubernetes.wait_for(NAME) and kubernetes.status(NAME, **RUNNING)),
        pytest.raises(ResourcesUnavailable, match="still not ended after 1 s"),
    ):
        launch(run_seconds=1)

    assert kubernetes.job(NAME) is None


def test_gpus_are_given_back_although_the_first_deletion_fails(kubernetes, launch):
    kubernetes.fail("delete", 503)

    with operator(lambda: kubernetes.wait_for(NAME) and kubernetes.status(NAME, **SUCCEEDED)):
        launch()

    assert kubernetes.job(NAME) is None


def test_a_quiet_job_is_spoken_of_now_and_then(kubernetes, launch, monkeypatch, caplog):
    monkeypatch.setattr(ray_job, "_HEARTBEAT", 0.2)

    def act():
        kubernetes.wait_for(NAME)
        pods = {"desiredWorkerReplicas": 2, "readyWorkerReplicas": 1}
        kubernetes.status(NAME, jobDeploymentStatus="Initializing", rayClusterStatus=pods)
        until(lambda: "s after the start" in caplog.text)
        kubernetes.status(NAME, **SUCCEEDED)

    with caplog.at_level("INFO"), operator(act):
        launch()

    assert f"rayjob/{NAME} is Initializing, 1 of 2 worker pods ready, " in caplog.text


def test_sigterm_asks_the_training_to_save_and_deletes_the_job_at_once_without_waiting_for_the_save(
    kubernetes, launch, caplog, monkeypatch
):
    monkeypatch.setattr(ray_job, "_STOPPED", 60)  # longer than this test waits for the deletion
    asked, saved = threading.Event(), threading.Event()

    def save() -> None:
        asked.set()
        assert saved.wait(20)

    def act():
        kubernetes.wait_for(NAME)
        kubernetes.status(NAME, **RUNNING)
        until(lambda: f"rayjob/{NAME} is Running" in caplog.text)
        os.kill(os.getpid(), signal.SIGTERM)
        until(lambda: kubernetes.job(NAME) is None and asked.is_set())  # while the training saves
        saved.set()

    before = signal.getsignal(signal.SIGTERM)
    with caplog.at_level("INFO"), operator(act), pytest.raises(Preempted, match="run again"):
        launch(ask_to_stop=save)

    assert len(kubernetes.jobs_ever()) == 1
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.slow
def test_sigterm_ends_a_job_at_once_although_the_loop_waits_for_something_else(kubernetes, launch, monkeypatch):
    monkeypatch.setattr(ray_job_states, "_PAUSE", 12)  # between two looks at what becomes of the job
    took = []

    def act():
        kubernetes.wait_for(NAME)
        began = time.monotonic()
        for _ in range(2):  # Kubernetes and Argo both send it
            os.kill(os.getpid(), signal.SIGTERM)
        until(lambda: kubernetes.job(NAME) is None)
        took.append(time.monotonic() - began)

    with operator(act), pytest.raises(Preempted):
        launch()

    assert took[0] < 10  # not after the pause: a busy machine has its time


def test_a_training_that_cannot_be_asked_to_save_is_ended_all_the_same(kubernetes, launch, caplog):
    def act():
        kubernetes.wait_for(NAME)
        kubernetes.status(NAME, **RUNNING)
        until(lambda: f"rayjob/{NAME} is Running" in caplog.text)
        os.kill(os.getpid(), signal.SIGTERM)

    with caplog.at_level("INFO"), operator(act), pytest.raises(Preempted):
        launch(ask_to_stop=lambda: 1 / 0)

    assert kubernetes.job(NAME) is None and "cannot be asked to save: division by zero" in caplog.text


def test_sigterm_before_the_gpus_have_come_deletes_the_job_at_once(kubernetes, launch):
    def act():
        kubernetes.wait_for(NAME)
        kubernetes.status(NAME, jobDeploymentStatus="Suspended")
        until(lambda: "watch" in verbs(kubernetes))
        os.kill(os.getpid(), signal.SIGTERM)

    with operator(act), pytest.raises(Preempted):
        launch()

    assert kubernetes.job(NAME) is None


ANOTHER = OWNER | {"uid": "u-1", "name": "infoxlm-a1b2c"}
RUNS = {  # what a run is by Argo, and whether it is under way
    "running": ({"spec": {"activeDeadlineSeconds": 60}, "status": {"phase": "Running"}}, True),
    "new": ({"spec": {}}, True),
    "terminated by Kubeflow": ({"spec": {"activeDeadlineSeconds": 0}, "status": {"phase": "Running"}}, False),
    "stopped by Argo": ({"spec": {"shutdown": "Terminate"}, "status": {"phase": "Running"}}, False),
    "failed": ({"spec": {}, "status": {"phase": "Failed"}}, False),
    "gone": (None, False),
}


def stop_while_it_runs(kubernetes, caplog) -> None:
    kubernetes.status(NAME, **RUNNING)
    until(lambda: f"rayjob/{NAME} is Running" in caplog.text)
    os.kill(os.getpid(), signal.SIGTERM)


def owners_of_what_is_left(kubernetes) -> list[dict] | None:
    """Those of the job, if it is there; then it goes, so that the server need not wait for who watches it."""
    if job := kubernetes.job(NAME):
        kubernetes.delete(NAME)
    return job and job["metadata"]["ownerReferences"]


@pytest.mark.parametrize("other", RUNS)
def test_a_run_that_is_terminated_ends_the_job_unless_another_run_that_is_under_way_wants_it(
    kubernetes, launch, caplog, other
):
    body, wanted = RUNS[other]
    kubernetes.put_workflow(OWNER["name"], OWNER["uid"], **RUNS["terminated by Kubeflow"][0])
    if body:
        kubernetes.put_workflow(ANOTHER["name"], ANOTHER["uid"], **body)
    kubernetes.put_job(NAME, metadata={"ownerReferences": [ANOTHER]}, status=RUNNING)
    asked = []

    def act():
        until(lambda: "patch" in verbs(kubernetes))
        stop_while_it_runs(kubernetes, caplog)

    with caplog.at_level("INFO"), operator(act), pytest.raises(Preempted, match="run again"):
        launch(ask_to_stop=lambda: asked.append("to save"))

    owners = owners_of_what_is_left(kubernetes)
    assert (owners, bool(asked)) == (([ANOTHER], False) if wanted else (None, True))


@pytest.mark.parametrize("ours", RUNS)
def test_a_step_whose_node_is_drained_leaves_the_job_to_its_next_attempt(kubernetes, launch, caplog, ours):
    body, under_way = RUNS[ours]
    if body:
        kubernetes.put_workflow(OWNER["name"], OWNER["uid"], **body)

    def act():
        kubernetes.wait_for(NAME)
        stop_while_it_runs(kubernetes, caplog)

    with caplog.at_level("INFO"), operator(act), pytest.raises(Preempted, match="run again"):
        launch()

    assert owners_of_what_is_left(kubernetes) == ([OWNER] if under_way else None)


def test_a_run_of_the_same_name_that_is_another_one_wants_nothing(kubernetes, launch, caplog):
    kubernetes.put_workflow(OWNER["name"], "of another", **RUNS["running"][0])

    def act():
        kubernetes.wait_for(NAME)
        stop_while_it_runs(kubernetes, caplog)

    with caplog.at_level("INFO"), operator(act), pytest.raises(Preempted):
        launch()

    assert kubernetes.job(NAME) is None


def test_a_step_that_may_not_look_at_runs_ends_its_job(kubernetes, launch, caplog):
    kubernetes.put_workflow(OWNER["name"], OWNER["uid"], **RUNS["running"][0])
    kubernetes.fail("get", 403, resource="workflows")

    def act():
        kubernetes.wait_for(NAME)
        stop_while_it_runs(kubernetes, caplog)

    with caplog.at_level("INFO"), operator(act), pytest.raises(Preempted):
        launch()

    assert kubernetes.job(NAME) is None and "whether a run still wants it is not known" in caplog.text


def test_a_drained_step_leaves_its_job_although_its_run_could_not_be_found_at_the_start(kubernetes, launch, caplog):
    kubernetes.put_workflow(OWNER["name"], OWNER["uid"], **RUNS["running"][0])
    kubernetes.fail("get", 500, resource="pods")

    def act():
        kubernetes.wait_for(NAME)
        stop_while_it_runs(kubernetes, caplog)

    with caplog.at_level("INFO"), operator(act), pytest.raises(Preempted, match="goes on without this step"):
        launch()

    kubernetes.delete(NAME)


def stop_and_see_it_left_alone(kubernetes, launch, caplog) -> None:
    def act():
        kubernetes.wait_for(NAME)
        stop_while_it_runs(kubernetes, caplog)

    with caplog.at_level("INFO"), operator(act), pytest.raises(Preempted, match="left alone"):
        launch()

    assert "delete" not in verbs(kubernetes)


def test_a_job_is_left_alone_when_kubernetes_does_not_say_whether_it_is_wanted(kubernetes, launch, caplog):
    kubernetes.put_workflow(OWNER["name"], OWNER["uid"], **RUNS["running"][0])
    kubernetes.fail("get", *[500] * 3, resource="workflows")

    stop_and_see_it_left_alone(kubernetes, launch, caplog)

    kubernetes.delete(NAME)


def test_a_job_is_left_alone_when_kubernetes_takes_too_long_to_say_whether_it_is_wanted(
    kubernetes, launch, caplog, monkeypatch
):
    said = threading.Event()
    monkeypatch.setattr(ray_job, "_STOPPED", 0.1)
    monkeypatch.setattr(kubernetes_api.RayJobs, "is_under_way", lambda *_: said.wait(20))

    stop_and_see_it_left_alone(kubernetes, launch, caplog)

    said.set()
    kubernetes.delete(NAME)


@pytest.mark.slow
def test_a_step_that_is_killed_by_sigterm_ends_with_code_75_and_leaves_no_job(kubernetes):
    program = textwrap.dedent(
        f"""
        import logging, sys
        from components.adapters.kuberay import api as kubernetes_api
        from components.adapters.kuberay import job as ray_job
        from components.settings.cluster import ClusterConfig
        from infoxlm_core.errors import InfoXLMError
        from tests.servers import kubernetes_api as kubernetes_server
        logging.basicConfig(level=logging.INFO, stream=sys.stdout, force=True)
        server = kubernetes_server.KubernetesServer()
        server.url = {kubernetes.url!r}
        kubernetes_api.connect = lambda: kubernetes_api.RayJobs(server.api(), kubernetes_server.NAMESPACE)
        try:
            ray_job.run({NAME!r}, "w", ClusterConfig(image={CLUSTER.image!r}), 8, [],
                        lambda: print("asked", flush=True), lambda: None)
        except InfoXLMError as error:
            sys.exit(error.exit_code)
        """
    )
    step = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    kubernetes.wait_for(NAME)
    kubernetes.status(NAME, **RUNNING)
    said = iter(step.stdout)
    assert any(f"rayjob/{NAME} is Running" in line for line in said)

    step.terminate()
    assert "asked\n" in said

    assert step.wait(60) == 75
    assert kubernetes.job(NAME) is None


def test_a_step_outside_of_a_cluster_says_what_it_needs():
    with pytest.raises(InputError, match="runs in a pod, as infoxlm-runner"):
        ray_job.run(NAME, "w", CLUSTER, 8, [], lambda: None, lambda: None)
