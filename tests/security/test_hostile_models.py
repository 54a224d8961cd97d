"""A model that would execute code when it is loaded cannot, although MLflow's default settings allow it."""

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


class FileCreator:
    """Creates a file when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self):
        return open, (str(self.marker), "w")


@pytest.mark.item("B17", "S01")
@pytest.mark.parametrize("is_allowed", [True, False])
def test_our_settings_stop_a_pickled_model(clean_environment, tmp_path, monkeypatch, is_allowed):
    (tmp_path / "model").mkdir()
    (tmp_path / "model/model.pkl").write_bytes(pickle.dumps(FileCreator(tmp_path / "marker")))
    (tmp_path / "model/MLmodel").write_text(json.dumps(MLMODEL))
    connection.connect(tmp_path)
    if is_allowed:  # MLflow's default: proves that the pickle executes code if nothing stops it
        monkeypatch.setenv("MLFLOW_ALLOW_PICKLE_DESERIALIZATION", "true")
    import mlflow

    try:
        mlflow.sklearn.load_model(str(tmp_path / "model"))
    except Exception as error:
        message = str(error)

    assert (tmp_path / "marker").exists() == is_allowed
    if not is_allowed:
        assert "PICKLE" in message
