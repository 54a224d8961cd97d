"""Registration of encoders: one version per content, with its evaluation, and loading it again."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from components.adapters.mlflow import connection, model_registry, promotion, runs
from components.adapters.mlflow.model_registry import Registration
from components.platform import artifacts
from infoxlm_core.errors import DataCorrupt, InputError
from infoxlm_core.tasks.embedding import embed_sentences
from tests.components.conftest import two_processes
from tests.toys.evaluation import evaluated

METRIC = "retrieval/served"


def register(store: Path, encoder: Path, digest: str, score: float, name: str = "tiny") -> Registration:
    run_id = runs.open_run("tests", "demo", {"infoxlm.run": name}, store)
    scores = {METRIC: score, "perplexity/de": float("inf")}
    tags = {"corpus": "sha256:c", "test_set": "sha256:t"}
    evaluation = evaluated(store / "evaluation", score)
    candidate = model_registry.EvaluatedEncoder(encoder, digest, scores, run_id, tags, evaluation)
    return model_registry.register(name, candidate, {METRIC: 0.0})


def read_champion(store: Path, name: str = "tiny") -> int:
    return int(connection.connect(store).get_registered_model(name).aliases["champion"])


def list_versions(store: Path, name: str = "tiny") -> list[int]:
    versions = connection.connect(store).search_model_versions(f"name = '{name}'")
    return sorted(int(version.version) for version in versions)


def test_champion_is_the_first_model_and_then_only_a_significantly_better_one(store, tiny_encoders):
    first = register(store, tiny_encoders["first"], "sha256:1", 0.5)
    version = connection.connect(store).get_model_version_by_alias("tiny", "champion")
    assert first == Registration(1, ("candidate", "champion"), True, version.tags["gate"])
    assert version.tags["digest"] == "sha256:1"
    assert version.tags["corpus"] == "sha256:c"
    assert version.tags[METRIC] == "0.5"

    slightly_better = register(store, tiny_encoders["second"], "sha256:2", 0.5025)
    assert slightly_better.version == 2
    assert slightly_better.aliases == ("candidate",)
    assert read_champion(store) == 1

    better = register(store, tiny_encoders["second"], "sha256:3", 0.6)
    assert better.version == 3
    assert better.aliases == ("candidate", "champion")
    assert better.role == "candidate and champion"
    assert read_champion(store) == 3

    replaced = register(store, tiny_encoders["first"], "sha256:1", 0.5)
    assert replaced == Registration(1, (), False, first.reason)
    assert replaced.role == "no longer candidate or champion"


@pytest.mark.item("F12")
def test_registering_the_same_content_again_changes_nothing(store, tiny_encoders):
    first = register(store, tiny_encoders["first"], "sha256:1", 0.5)
    client = connection.connect(store)
    client.delete_registered_model_alias("tiny", "champion")  # by a person

    second = register(store, tiny_encoders["first"], "sha256:1", 0.9)

    assert list_versions(store) == [1]
    assert second == Registration(1, ("candidate",), False, first.reason)
    assert client.get_model_version("tiny", "1").tags[METRIC] == "0.5"


@pytest.mark.item("F12")
@pytest.mark.parametrize("call", ["create_model_version", "set_registered_model_alias", "set_model_version_tag"])
def test_registration_that_died_after_a_call_is_completed_by_the_next(store, tiny_encoders, monkeypatch, call):
    from mlflow import MlflowClient

    class ProcessDied(Exception):
        pass

    original = getattr(MlflowClient, call)

    def call_and_die(self, *args, **kwargs):
        original(self, *args, **kwargs)
        raise ProcessDied

    with monkeypatch.context() as patch:
        patch.setattr(MlflowClient, call, call_and_die)
        with pytest.raises(ProcessDied):
            register(store, tiny_encoders["first"], "sha256:1", 0.5)

    registration = register(store, tiny_encoders["first"], "sha256:1", 0.5)

    assert registration.version == 1
    assert registration.aliases == ("candidate", "champion")
    assert list_versions(store) == [1]


@pytest.mark.item("F12")
def test_lost_answer_creates_no_second_version(store, tiny_encoders, monkeypatch):
    from mlflow import MlflowClient
    from mlflow.exceptions import MlflowException

    original = MlflowClient.create_model_version

    def send_twice_and_lose_answer(self, *args, **kwargs):
        original(self, *args, **kwargs)
        original(self, *args, **kwargs)
        raise MlflowException("connection reset by peer")

    monkeypatch.setattr(MlflowClient, "create_model_version", send_twice_and_lose_answer)

    assert register(store, tiny_encoders["first"], "sha256:1", 0.5).version == 1
    assert list_versions(store) == [1]


@pytest.mark.parametrize("metrics", [{"retrieval/de": 0.5}, {METRIC: float("nan")}])
def test_encoder_without_a_finite_score_is_not_registered(store, tiny_encoders, metrics):
    run_id = runs.open_run("tests", "demo", {"infoxlm.run": "r1"}, store)
    candidate = model_registry.EvaluatedEncoder(tiny_encoders["first"], "sha256:1", metrics, run_id, {}, store)

    with pytest.raises(
        InputError,
        match=r"retrieval/served, but it is (None|nan)\. .* a metric of the evaluation: retrieval/(de|served)\.$",
    ):
        model_registry.register("tiny", candidate, {METRIC: 0.0})

    assert connection.connect(store).search_registered_models() == []


def test_unknown_model_is_refused(store):
    with pytest.raises(InputError, match=r"models:/tiny@champion: MLflow refuses \(.*not found"):
        model_registry.load_encoder("models:/tiny@champion", store)
    with pytest.raises(InputError, match=r"has no config\.json"):
        model_registry.load_encoder(f"models:/tiny/{10**22}", store)  # a version number that no database can store


EMBED = """
import sys
from pathlib import Path
import numpy
from transformers import AutoModel, AutoTokenizer
from components.adapters.mlflow.model_registry import load_encoder
from components.adapters.mlflow import connection

directory = load_encoder(sys.argv[1], Path(sys.argv[2]))
model, tokenizer = AutoModel.from_pretrained(directory), AutoTokenizer.from_pretrained(directory)
inputs = tokenizer(["a b c", "x y"], padding=True, return_tensors="pt", return_token_type_ids=False)
numpy.save(sys.argv[3], model.eval()(**inputs).last_hidden_state[:, 0].detach().numpy())
"""


def embed(source: str | Path, store: Path, target: Path) -> np.ndarray:
    """Embed two sentences with a model in a new process."""
    subprocess.run([sys.executable, "-c", EMBED, source, store, target], check=True)
    return np.load(target)


@pytest.mark.slow
def test_new_process_loads_the_champion_from_a_server_unchanged(on_server, tiny_encoders, tmp_path):
    encoder = shutil.copytree(tiny_encoders["first"], tmp_path / "encoder")
    (encoder / "projection.safetensors").write_bytes(b"\x02\0\0\0\0\0\0\0{}")
    register(tmp_path, encoder, "sha256:complete", 0.5, "fetched")  # other tests use the same server
    assert read_champion(tmp_path, "fetched") == 1

    loaded_vectors = embed("models:/fetched@champion", tmp_path, tmp_path / "loaded.npy")
    original_vectors = embed(encoder, tmp_path, tmp_path / "original.npy")

    assert original_vectors.shape == (2, 32)
    np.testing.assert_allclose(loaded_vectors, original_vectors, atol=1e-5)
    assert np.abs(original_vectors[0] - original_vectors[1]).max() > 1e-3
    copy = model_registry.load_encoder("models:/fetched/1", tmp_path)
    assert not (copy.parent / "sentence-transformers").exists()  # it would double the download
    assert {path.name: path.read_bytes() for path in copy.iterdir()} == {
        path.name: path.read_bytes() for path in encoder.iterdir()
    }


def test_version_has_a_pipeline_a_model_card_and_a_form_for_sentence_transformers(store, tiny_encoders):
    import mlflow

    register(store, tiny_encoders["first"], "sha256:1", 0.5)

    (answer,) = mlflow.pyfunc.load_model("models:/tiny@champion").predict(["a <mask> c"])
    assert isinstance(answer, str)
    model_info = mlflow.models.get_model_info("models:/tiny@champion")
    assert model_info.signature.inputs.input_types() == [mlflow.types.DataType.string]
    [card] = (store / "mlartifacts").rglob("model_card.md")
    assert "It knows 26 words." in card.read_text()

    model = model_registry.load_encoder("models:/tiny@champion", store)
    export = model.parent / "sentence-transformers"
    sentences = ["save the file", "close it"]
    torch.testing.assert_close(embed_sentences(export, sentences), embed_sentences(model, sentences))
    assert len(json.loads((export / "modules.json").read_bytes())) == 2
    assert "<s>" in (export / "tokenizer.json").read_text()
    (export / "1_Pooling/config.json").write_text("{}")
    with pytest.raises(DataCorrupt, match=r"1_Pooling/config.json"):
        model_registry.load_encoder("models:/tiny@champion", store)


def test_encoder_without_head_and_export_is_registered_with_its_token_vectors(store, tiny_encoders, tmp_path, caplog):
    import mlflow
    import transformers

    encoder = shutil.copytree(tiny_encoders["first"], tmp_path / "encoder")
    model = transformers.XLMRobertaModel.from_pretrained(encoder, add_pooling_layer=False)
    model.save_pretrained(encoder)
    config = json.loads((encoder / "config.json").read_bytes())
    config["infoxlm"] = {"layer": 1, "pooling": "median"}  # sentence-transformers has no such pooling
    (encoder / "config.json").write_text(json.dumps(config))

    register(store, encoder, "sha256:1", 0.5)

    assert "the version has no directory sentence-transformers: " in caplog.text
    assert "pooling median" in caplog.text
    assert not (model_registry.load_encoder("models:/tiny/1", store).parent / "sentence-transformers").exists()
    pipeline = mlflow.transformers.load_model("models:/tiny@champion")
    (token_vectors,) = pipeline("Save")
    assert type(pipeline.model).__name__ == "XLMRobertaModel"
    assert len(token_vectors[0]) == model.config.hidden_size


def register_at(uri: str, store: Path, encoder: Path) -> Registration:
    os.environ["MLFLOW_TRACKING_URI"] = uri
    with artifacts.exclusive(str(store), *promotion.LOCK):  # as the step `register` does
        return register(store, encoder, "sha256:1", 0.5, "parallel")


@pytest.mark.item("F12")
@pytest.mark.slow
def test_two_simultaneous_registrations_share_a_run_and_create_one_version(
    on_server, tiny_encoders, tmp_path, monkeypatch
):
    with two_processes() as processes:
        for uri in (on_server, f"sqlite:///{tmp_path}/mlflow.db"):  # both processes want to create the file
            futures = [processes.submit(register_at, uri, tmp_path, tiny_encoders["first"]) for _ in range(2)]
            first, second = (future.result() for future in futures)

            monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
            client = connection.connect(tmp_path)
            experiment = client.get_experiment_by_name("tests").experiment_id
            assert len(client.search_runs([experiment], "tags.`infoxlm.run` = 'parallel'")) == 1
            assert first == second
            assert first.aliases == ("candidate", "champion")
            assert list_versions(tmp_path, "parallel") == [first.version]
