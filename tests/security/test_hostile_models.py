"""A model that would run code while it is loaded does not, whatever MLflow's own defaults are."""

import json
import pickle
from pathlib import Path

import pytest

from components.adapters.mlflow import connection

pytestmark = pytest.mark.slow

MLMODEL = {
    "flavors": {
        "python_function": {"loader_module": "mlflow.sklearn", "model_path": "model.pkl", "env": {}},
        "sklearn": {"pickled_model": "model.pkl", "serialization_format": "pickle"},
    }
}


class Evil:
    """Leaves a marker behind when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self):
        return open, (str(self.marker), "w")


@pytest.mark.item("B17", "S01")
@pytest.mark.parametrize(("allowed", "ran"), [("true", True), (None, False)])
def test_a_pickled_model_runs_nothing_where_our_settings_are(clean_environment, tmp_path, monkeypatch, allowed, ran):
    (tmp_path / "model").mkdir()
    (tmp_path / "model/model.pkl").write_bytes(pickle.dumps(Evil(tmp_path / "marker")))
    (tmp_path / "model/MLmodel").write_text(json.dumps(MLMODEL))
    connection.connect(tmp_path)
    if allowed:  # as MLflow comes: this shows that the model is as bad as it should be
        monkeypatch.setenv("MLFLOW_ALLOW_PICKLE_DESERIALIZATION", allowed)
    import mlflow

    try:
        mlflow.sklearn.load_model(str(tmp_path / "model"))
    except Exception as error:
        said = str(error)

    assert (tmp_path / "marker").exists() == ran
    assert ran or "PICKLE" in said
