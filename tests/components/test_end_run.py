"""The last step of a pipeline ends its MLflow run, whatever ended the pipeline run."""

from pathlib import Path

import pytest

from components.adapters.kuberay import api
from components.adapters.mlflow import connection
from components.adapters.mlflow.tracker import MlflowRun
from components.end_run import end_run
from components.platform import runtime, tracking
from infoxlm_core.errors import WorkerLost
from tests.servers.kubernetes_api import NAMESPACE, KubernetesServer, running_kubernetes


@pytest.fixture
def kubernetes(store, monkeypatch):
    """A cluster in which this process is a step of the run `r-1`."""
    monkeypatch.setenv("RUN_ID", "r-1")
    monkeypatch.setenv("KFP_POD_NAME", "step-1")
    monkeypatch.delenv(runtime.DRIVER, raising=False)
    with running_kubernetes() as server:
        monkeypatch.setattr(api, "connect", lambda: api.RayJobs(server.api(), NAMESPACE))
        server.put_step("step-1", "infoxlm-x7k2p", "u-1")
        yield server


def put_workflow(kubernetes: KubernetesServer, cancelled: bool) -> None:
    """Kubeflow terminates a run by setting the deadline of its workflow to 0."""
    spec = {"activeDeadlineSeconds": 0 if cancelled else 86_400}
    kubernetes.put_workflow("infoxlm-x7k2p", "u-1", spec=spec, status={"phase": "Running"})


def fail_a_stage(store: Path) -> None:
    with pytest.raises(SystemExit), runtime.report_failure(str(store), "pretrain"):
        raise WorkerLost("a worker ran out of memory")


def status_and_tags(store: Path, run_id: str) -> tuple[str, str, str]:
    run = connection.connect(store).get_run(run_id)
    return run.info.status, run.data.tags.get("infoxlm.failed_stage", ""), run.data.tags.get("infoxlm.error", "")


@pytest.mark.parametrize(
    ("cancelled", "stage_failed", "status", "stage", "message"),
    [
        (False, True, "FAILED", "pretrain", "a worker ran out of memory"),
        (True, True, "KILLED", "", "the run was cancelled"),
        (False, False, "FAILED", "", "out of memory?"),  # the stage was killed and wrote no error
    ],
)
def test_an_unfinished_pipeline_run_ends_with_its_reason(
    store, kubernetes, cancelled, stage_failed, status, stage, message
):
    put_workflow(kubernetes, cancelled)
    run_id = tracking.open_run(str(store)).id
    if stage_failed:
        fail_a_stage(store)

    end_run.python_func(store=str(store))

    *status_and_stage, description = status_and_tags(store, run_id)
    assert status_and_stage == [status, stage] and message in description


def test_a_pipeline_run_that_its_last_step_has_ended_stays_as_it_is(store, kubernetes):
    put_workflow(kubernetes, cancelled=False)
    run_id = tracking.open_run(str(store)).id
    fail_a_stage(store)  # an attempt that Argo has repeated
    MlflowRun(run_id).end()

    end_run.python_func(store=str(store))

    assert status_and_tags(store, run_id) == ("FINISHED", "", "")


def test_without_mlflow_the_step_succeeds_and_writes_no_outcome_of_its_own(store, kubernetes, monkeypatch):
    put_workflow(kubernetes, cancelled=False)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "no-such-scheme")

    end_run.python_func(store=str(store))

    assert not list(store.glob("outcome/*/*"))
