"""The last step of a pipeline ends the run in MLflow, however the pipeline run ended."""

from pathlib import Path

import pytest

from components.adapters.kuberay import api
from components.adapters.mlflow import connection
from components.end_run import end_run
from components.platform import runtime, tracking
from infoxlm_core.errors import WorkerLost
from tests.servers.kubernetes_api import NAMESPACE, KubernetesServer, running_kubernetes


@pytest.fixture
def kubernetes(store, monkeypatch):
    """Make this process a step of the run `r-1` in a cluster."""
    monkeypatch.setenv("RUN_ID", "r-1")
    monkeypatch.setenv("KFP_POD_NAME", "step-1")
    monkeypatch.delenv(runtime.DRIVER, raising=False)
    with running_kubernetes() as server:
        monkeypatch.setattr(api, "connect", lambda: api.RayJobs(server.api(), NAMESPACE))
        server.put_step("step-1", "infoxlm-x7k2p", "u-1")
        yield server


def put_workflow(kubernetes: KubernetesServer, is_cancelled: bool) -> None:
    """Put a workflow, which Kubeflow cancels by setting its deadline to 0."""
    spec = {"activeDeadlineSeconds": 0 if is_cancelled else 86_400}
    kubernetes.put_workflow("infoxlm-x7k2p", "u-1", spec=spec, status={"phase": "Running"})


def fail_a_stage(store: Path) -> None:
    with pytest.raises(SystemExit), runtime.report_failure(str(store), "pretrain"):
        raise WorkerLost("a worker ran out of memory")


def read_ending(store: Path, run_id: str) -> tuple[str, str, str]:
    """Return the status, the failed stage and the error of a run in MLflow."""
    run = connection.connect(store).get_run(run_id)
    return run.info.status, run.data.tags.get("infoxlm.failed_stage", ""), run.data.tags.get("infoxlm.error", "")


@pytest.mark.parametrize(
    ("is_cancelled", "has_error", "status", "stage", "message"),
    [
        (False, True, "FAILED", "pretrain", "a worker ran out of memory"),
        (True, True, "KILLED", "", "the run was cancelled"),
        (False, False, "FAILED", "", "out of memory?"),  # the stage was killed and wrote no error
    ],
)
def test_unfinished_run_ends_with_its_cause(store, kubernetes, is_cancelled, has_error, status, stage, message):
    put_workflow(kubernetes, is_cancelled)
    run_id = tracking.open_run(str(store)).id
    if has_error:
        fail_a_stage(store)

    end_run.python_func(store=str(store))

    *status_and_stage, error = read_ending(store, run_id)
    assert status_and_stage == [status, stage]
    assert message in error


def test_step_succeeds_without_mlflow_and_writes_no_outcome(store, kubernetes, monkeypatch):
    put_workflow(kubernetes, is_cancelled=False)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "no-such-scheme")

    end_run.python_func(store=str(store))

    assert not list(store.glob("outcome/*/*"))
