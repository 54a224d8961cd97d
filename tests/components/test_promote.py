"""The only step of a promotion: the run that MLflow shows of it ends as it does."""

import pytest
from kfp import dsl

from components.adapters.mlflow import connection
from components.platform import tracking
from components.promote import promote


def test_a_promotion_that_fails_leaves_no_run_that_seems_to_go_on(store, tmp_path, monkeypatch):
    monkeypatch.setenv("RUN_ID", "toy-1")
    run = tracking.open_run(str(store)).id

    with pytest.raises(SystemExit):
        promote.python_func(
            model="models:/nothing@candidate",
            gate={},
            store=str(store),
            metrics=dsl.Metrics(name="metrics", uri=str(tmp_path / "metrics")),
        )

    assert connection.connect(store).get_run(run).info.status == "FAILED"
