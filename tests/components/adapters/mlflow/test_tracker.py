"""The page of a run, and where its database may be."""

import pytest

from components.adapters.mlflow import tracker
from components.adapters.mlflow.tracker import PAGES, MlflowRun
from infoxlm_core.errors import InputError
from tests.components.conftest import open_run


def test_page_of_a_run_needs_a_server_and_contains_no_password(store, monkeypatch):
    run = MlflowRun(open_run(store))
    path = f"experiments/1/runs/{run.id}?workflowType=machine_learning"
    monkeypatch.setattr(MlflowRun, "_path", path)

    assert run.page == ""
    assert "mlflow ui" in run.describe()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://ada:word@mlflow.infoxlm.svc:5000/")
    assert run.page == f"http://mlflow.infoxlm.svc:5000/#/{path}"
    assert run.page in run.describe()
    monkeypatch.setenv(PAGES, "https://mlflow.example")
    assert run.page == f"https://mlflow.example/#/{path}"


def test_store_of_many_machines_needs_a_server(monkeypatch, tmp_path):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)

    with pytest.raises(InputError, match=r"s3://b/store is shared by many machines.* set MLFLOW_TRACKING_URI"):
        tracker.open_run("toy-1", "toy", "s3://b/store", tmp_path, None)

    assert not (tmp_path / "mlflow.db").exists()
