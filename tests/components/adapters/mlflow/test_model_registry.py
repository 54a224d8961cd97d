import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

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


def champion(store: Path, name: str = "tiny") -> int:
    return int(connection.connect(store).get_registered_model(name).aliases["champion"])


def versions(store: Path, name: str = "tiny") -> list[int]:
    found = connection.connect(store).search_model_versions(f"name = '{name}'")
    return sorted(int(version.version) for version in found)


def test_the_first_model_becomes_candidate_and_champion(store, tiny_encoders):
    registration = register(store, tiny_encoders["first"], "sha256:1", 0.5)

    version = connection.connect(store).get_model_version_by_alias("tiny", "champion")
    assert registration == Registration(1, ("candidate", "champion"), True, version.tags["gate"])
    assert {key: version.tags[key] for key in ("digest", "corpus", METRIC)} == {
        "digest": "sha256:1",
        "corpus": "sha256:c",
        METRIC: "0.5",
    }


@pytest.mark.parametrize(("score", "expected"), [(0.6, 2), (0.5025, 1)], ids=["better", "by chance"])
def test_the_champion_changes_only_for_a_candidate_that_is_better_for_sure(store, tiny_encoders, score, expected):
    register(store, tiny_encoders["first"], "sha256:1", 0.5)

    registration = register(store, tiny_encoders["second"], "sha256:2", score)

    assert (registration.version, registration.champion) == (2, expected == 2)
    assert "candidate" in registration.aliases
    assert champion(store) == expected


@pytest.mark.item("F12")
def test_registering_the_same_content_again_changes_nothing(store, tiny_encoders):
    first = register(store, tiny_encoders["first"], "sha256:1", 0.5)
    second = register(store, tiny_encoders["second"], "sha256:2", 0.6)
    client = connection.connect(store)
    client.set_registered_model_alias("tiny", "champion", "1")  # somebody went back by hand

    again = register(store, tiny_encoders["second"], "sha256:2", 0.9)

    assert (first.version, again.version, versions(store)) == (1, second.version, [1, 2])
    assert (again.reason, again.champion, champion(store)) == (second.reason, False, 1)
    assert client.get_model_version("tiny", "2").tags[METRIC] == "0.6"


@pytest.mark.item("F12")
@pytest.mark.parametrize("call", ["create_model_version", "set_registered_model_alias", "set_model_version_tag"])
def test_a_registration_that_died_half_way_is_completed_by_the_next(store, tiny_encoders, monkeypatch, call):
    from mlflow import MlflowClient

    class PowerCut(Exception):
        pass

    real = getattr(MlflowClient, call)

    def done_but_not_told(self, *args, **kwargs):
        real(self, *args, **kwargs)
        raise PowerCut

    with monkeypatch.context() as patch:
        patch.setattr(MlflowClient, call, done_but_not_told)
        with pytest.raises(PowerCut):
            register(store, tiny_encoders["first"], "sha256:1", 0.5)

    registration = register(store, tiny_encoders["first"], "sha256:1", 0.5)

    assert (registration.version, registration.aliases) == (1, ("candidate", "champion"))
    assert versions(store) == [1]


@pytest.mark.item("F12")
def test_a_lost_answer_makes_no_second_version(store, tiny_encoders, monkeypatch):
    from mlflow import MlflowClient
    from mlflow.exceptions import MlflowException

    real = MlflowClient.create_model_version

    def sent_twice_and_lost(self, *args, **kwargs):
        real(self, *args, **kwargs)
        real(self, *args, **kwargs)
        raise MlflowException("connection reset by peer")

    monkeypatch.setattr(MlflowClient, "create_model_version", sent_twice_and_lost)

    assert register(store, tiny_encoders["first"], "sha256:1", 0.5).version == 1
    assert versions(store) == [1]


@pytest.mark.parametrize("metrics", [{"retrieval/de": 0.5}, {METRIC: float("nan")}])
def test_without_a_finite_score_nothing_is_registered(store, tiny_encoders, metrics):
    run_id = runs.open_run("tests", "demo", {"infoxlm.run": "r1"}, store)
    encoder = tiny_encoders["first"]
    candidate = model_registry.EvaluatedEncoder(encoder, "sha256:1", metrics, run_id, {}, store)

    with pytest.raises(
        InputError,
        match=r"retrieval/served, but it is (None|nan)\. .* a metric of the evaluation: retrieval/(de|served)\.$",
    ):
        model_registry.register("tiny", candidate, {METRIC: 0.0})

    assert connection.connect(store).search_registered_models() == []


def test_an_unknown_model_is_one_clear_line(store):
    with pytest.raises(InputError, match=r"models:/tiny@champion: MLflow refuses \(.*not found"):
        model_registry.load_encoder("models:/tiny@champion", store)
    with pytest.raises(InputError, match=r"has no config\.json"):
        model_registry.load_encoder(f"models:/tiny/{10**22}", store)  # no database has such numbers


_EMBED = """
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


def embed(source: str | Path, store: Path, target: Path):
    """Embed two sentences in a process that knows nothing of this one."""
    import numpy

    subprocess.run([sys.executable, "-c", _EMBED, source, store, target], check=True)
    return numpy.load(target)


@pytest.mark.slow
def test_a_fresh_process_gets_the_champion_from_the_server_with_the_vectors_of_the_original(
    on_server, tiny_encoders, tmp_path
):
    import numpy

    encoder = shutil.copytree(tiny_encoders["first"], tmp_path / "encoder")
    (encoder / "projection.safetensors").write_bytes(b"\x02\0\0\0\0\0\0\0{}")
    register(tmp_path, encoder, "sha256:whole", 0.5, "fetched")  # the server is shared: no other test has this name
    assert champion(tmp_path, "fetched") == 1

    loaded = embed("models:/fetched@champion", tmp_path, tmp_path / "loaded.npy")
    original = embed(encoder, tmp_path, tmp_path / "original.npy")

    assert original.shape == (2, 32)
    numpy.testing.assert_allclose(loaded, original, atol=1e-5)
    assert numpy.abs(original[0] - original[1]).max() > 1e-3
    copy = model_registry.load_encoder("models:/fetched/1", tmp_path)
    assert not (copy.parent / "sentence-transformers").exists()  # it would double the download
    assert {path.name: path.read_bytes() for path in copy.iterdir()} == {
        path.name: path.read_bytes() for path in encoder.iterdir()
    }


def test_the_model_answers_as_an_mlflow_pipeline_too_and_brings_its_card(store, tiny_encoders):
    import mlflow

    register(store, tiny_encoders["first"], "sha256:1", 0.5)

    answer = mlflow.pyfunc.load_model("models:/tiny@champion").predict(["a <mask> c"])

    assert len(answer) == 1 and isinstance(answer[0], str)
    model = mlflow.models.get_model_info("models:/tiny@champion")
    assert model.signature.inputs.input_types() == [mlflow.types.DataType.string]
    [card] = (store / "mlartifacts").rglob("model_card.md")
    assert "It knows 26 words." in card.read_text()


def test_an_encoder_without_a_language_model_head_is_registered_with_its_token_vectors(store, tiny_encoders, tmp_path):
    import mlflow
    import transformers

    encoder = tmp_path / "encoder"
    shutil.copytree(tiny_encoders["first"], encoder)
    model = transformers.XLMRobertaModel.from_pretrained(encoder, add_pooling_layer=False)
    model.save_pretrained(encoder)

    register(store, encoder, "sha256:1", 0.5)

    connection.connect(store)
    pipeline = mlflow.transformers.load_model("models:/tiny@champion")
    (token_vectors,) = pipeline("Save")
    assert type(pipeline.model).__name__ == "XLMRobertaModel"
    assert len(token_vectors[0]) == model.config.hidden_size


def test_a_version_brings_its_form_for_sentence_transformers_and_a_change_of_it_is_seen(store, tiny_encoders):
    register(store, tiny_encoders["first"], "sha256:1", 0.5)

    model = model_registry.load_encoder("models:/tiny@champion", store)
    exported = model.parent / "sentence-transformers"
    texts = ["save the file", "close it"]
    vectors = embed_sentences(exported, texts)
    torch.testing.assert_close(vectors, embed_sentences(model, texts))
    assert len(json.loads((exported / "modules.json").read_bytes())) == 2
    assert "<s>" in (exported / "tokenizer.json").read_text()
    (exported / "1_Pooling/config.json").write_text("{}")
    with pytest.raises(DataCorrupt, match=r"1_Pooling/config.json"):
        model_registry.load_encoder("models:/tiny@champion", store)


def test_an_encoder_that_has_no_such_form_is_registered_without_it(store, tiny_encoders, tmp_path, caplog):
    encoder = shutil.copytree(tiny_encoders["first"], tmp_path / "encoder")
    config = json.loads((encoder / "config.json").read_bytes())
    config["infoxlm"] = {"layer": 1, "pooling": "median"}
    (encoder / "config.json").write_text(json.dumps(config))

    assert register(store, encoder, "sha256:1", 0.5).version == 1

    assert "the version has no folder sentence-transformers: " in caplog.text and "is median" in caplog.text
    assert not (model_registry.load_encoder("models:/tiny/1", store).parent / "sentence-transformers").exists()


def _register_at(uri: str, store: Path, encoder: Path) -> Registration:
    os.environ["MLFLOW_TRACKING_URI"] = uri
    with artifacts.exclusive(str(store), *promotion.LOCK):  # as the step `register` does
        return register(store, encoder, "sha256:1", 0.5, "parallel")


@pytest.mark.item("F12")
@pytest.mark.slow
def test_two_processes_that_register_the_same_content_share_a_run_and_make_one_version(
    on_server, tiny_encoders, tmp_path, monkeypatch
):
    with two_processes() as pool:
        for uri in (on_server, f"sqlite:///{tmp_path}/mlflow.db"):  # the file does not exist: both want to create it
            both = [pool.submit(_register_at, uri, tmp_path, tiny_encoders["first"]) for _ in range(2)]
            first, second = (future.result() for future in both)

            monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
            client = connection.connect(tmp_path)
            experiment = client.get_experiment_by_name("tests").experiment_id
            assert len(client.search_runs([experiment], "tags.`infoxlm.run` = 'parallel'")) == 1
            assert first.version == second.version == champion(tmp_path, "parallel")
            assert first.aliases == second.aliases == ("candidate", "champion")
            assert versions(tmp_path, "parallel") == [first.version]
