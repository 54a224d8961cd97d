"""Every exported model has reference vectors, which transformers alone reproduces."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from infoxlm_core.config import EvaluationConfig, TokenizationConfig
from infoxlm_core.data.shards import open_shards
from infoxlm_core.errors import DataCorrupt, InputError
from infoxlm_core.model.huggingface import plain_transformers
from infoxlm_core.stages.pretraining import pretrain
from infoxlm_core.tasks import reference_vectors
from infoxlm_core.tasks.embedding import embed_sentences
from infoxlm_core.tasks.questions import Questions
from infoxlm_core.tasks.retrieval import held_out
from tests.toys.corpus import tokenized, write_corpus
from tests.toys.systems import config_of, export, learner_of
from tests.toys.text import messages

PAIRS = messages(0)
PREFIX = "query: "


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Path:
    text = {"en": [english for english, _ in PAIRS], "de": [german for _, german in PAIRS]}
    return write_corpus(tmp_path_factory.mktemp("text") / "corpus", text, {"en-de": PAIRS})


@pytest.fixture(scope="module")
def shards(corpus, tmp_path_factory) -> Path:
    return tokenized(TokenizationConfig(vocabulary_size=96, processes=1), corpus, tmp_path_factory.mktemp("shards"))


@pytest.fixture(scope="module")
def exported(shards, tmp_path_factory) -> Path:
    """Return an InfoXLM that the stage exported, with contrast at layer 1 of 2."""
    folder = tmp_path_factory.mktemp("model")
    config = config_of("InfoXLM", contrast={"pooling": "mean"}, optimization={"steps": 3, "warmup_steps": 1})
    pretrain(config, shards, folder / "output", folder / "run")
    return folder / "output/encoder"


@pytest.fixture(scope="module")
def exported_with_prefix(corpus, tmp_path_factory) -> Path:
    """Return an InfoXLM whose training text has a prefix before each sentence."""
    folder = tmp_path_factory.mktemp("prefix")
    tokenization = TokenizationConfig(vocabulary_size=96, processes=1, prefix=PREFIX)
    shards = open_shards(tokenized(tokenization, corpus, folder / "shards"))
    export(learner_of(config_of("InfoXLM"), shards), shards, folder / "encoder")
    reference_vectors.write_reference(folder / "encoder")
    return folder / "encoder"


@pytest.fixture
def model(exported, tmp_path) -> Path:
    return shutil.copytree(exported, tmp_path / "model")


def rewrite(directory: Path, **changes) -> None:
    path = directory / reference_vectors.FILE
    path.write_text(json.dumps(json.loads(path.read_bytes()) | changes))


def compare(directory: Path) -> reference_vectors.Difference:
    """Do what `check` does, but in this process."""
    reference = reference_vectors.read_reference(directory)
    vectors = plain_transformers.embed(str(directory), reference.layer, reference.pooling, list(reference.sentences))
    return reference_vectors.compare_vectors(reference, torch.tensor(vectors), "models:/m/1")


def test_an_exported_model_has_ten_vectors_in_a_file_of_its_manifest(exported):
    content = json.loads((exported / reference_vectors.FILE).read_bytes())

    assert (content["layer"], content["pooling"]) == (1, "mean")
    assert len(set(content["sentences"])) == 10
    expected = embed_sentences(exported, content["sentences"])
    assert torch.allclose(torch.tensor(content["vectors"]), expected, atol=1e-6)
    assert reference_vectors.FILE in json.loads((exported / "manifest.json").read_bytes())["files"]
    assert not (exported.parent / "start" / reference_vectors.FILE).exists()


def test_the_prefix_of_training_is_used_for_reference_vectors_and_evaluation(exported_with_prefix, tmp_path):
    model = shutil.copytree(exported_with_prefix, tmp_path / "model")
    reference = reference_vectors.read_reference(model)
    prefixed_sentences = [PREFIX + sentence for sentence in reference.sentences]
    vectors = embed_sentences(model, prefixed_sentences, prefix="")
    prefixed_pairs = [(PREFIX + english, PREFIX + german) for english, german in PAIRS[:40]]
    questions, prefixed_questions = (
        Questions("en", {}, {"de": pairs}, {}, {"de": torch.ones(40, dtype=torch.bool)})
        for pairs in (PAIRS[:40], prefixed_pairs)
    )

    details = held_out.measure(questions, model, EvaluationConfig()).details

    assert reference.prefix == PREFIX
    assert vectors.equal(embed_sentences(model, reference.sentences))
    assert torch.allclose(vectors, reference.vectors, atol=1e-6)
    assert details["encoder"]["prefix"] == PREFIX
    config = json.loads((model / "config.json").read_text())
    del config["infoxlm"]["prefix"]
    (model / "config.json").write_text(json.dumps(config))
    assert held_out.measure(prefixed_questions, model, EvaluationConfig()).details["by_layer"] == details["by_layer"]


def test_transformers_alone_computes_the_vectors_in_a_new_process(exported_with_prefix):
    message = reference_vectors.check_with_transformers(exported_with_prefix, "models:/tiny@champion")

    assert message.startswith("models:/tiny@champion is served as it was registered: 10 vectors, ")
    assert "worst cosine 1.0000000" in message
    assert message.endswith("without this project")
    assert "\n" not in message


@pytest.mark.parametrize("row", ["XLM-MLM", "mBERT"])
def test_a_model_without_contrast_is_compared_at_its_last_layer(shards, tmp_path, row):
    export(learner_of(config_of(row, model={"max_tokens": 64}), open_shards(shards)), open_shards(shards), tmp_path)
    reference_vectors.write_reference(tmp_path)

    reference = reference_vectors.read_reference(tmp_path)

    assert (reference.layer, reference.pooling) == (2, "mean")
    assert compare(tmp_path).relative < reference.tolerance


def test_weights_in_half_precision_are_detected(model):
    path = model / "model.safetensors"
    assert compare(model).cosine > 0.999999
    weights = {name: tensor.half().float() for name, tensor in load_file(path).items()}
    save_file(weights, path, {"format": "pt"})

    with pytest.raises(DataCorrupt, match=r"^models:/m/1 does not reproduce its reference vectors: worst cosine"):
        compare(model)


@pytest.mark.parametrize("change", [{"layer": 2}, {"pooling": "cls"}])
def test_another_layer_or_pooling_is_detected(model, change):
    rewrite(model, **change)

    with pytest.raises(DataCorrupt, match="does not reproduce its reference"):
        compare(model)


def test_the_tolerance_is_above_rounding_in_fp32_and_below_half_precision(exported):
    reference = reference_vectors.read_reference(exported)
    rounded_vectors = reference.vectors * (1 + 2**-22)  # differs in the last two of 24 bits

    assert reference_vectors.compare_vectors(reference, rounded_vectors, "m").relative < reference.tolerance / 20
    for vectors, reason in (
        (reference.vectors.half().float(), "does not reproduce its reference"),
        (reference.vectors * float("nan"), "nan"),
        (reference.vectors[:, :3], r"\(10, 3\), expected \(10, 16\)"),
    ):
        with pytest.raises(DataCorrupt, match=reason):
            reference_vectors.compare_vectors(reference, vectors, "m")


@pytest.mark.parametrize(
    "content", ["{", "[]", '{"layer": 1, "pooling": "mean", "sentences": ["a"], "vectors": [[0]]}']
)
def test_a_damaged_file_is_refused(model, content):
    (model / reference_vectors.FILE).write_text(content)

    with pytest.raises(DataCorrupt, match=r"reference_vectors.json cannot be read"):
        reference_vectors.check_with_transformers(model, "models:/m/1")


def test_a_python_that_is_missing_or_lacks_transformers_is_named(exported, tmp_path):
    with pytest.raises(InputError, match=r"/nowhere/python cannot be run"):
        reference_vectors.check_with_transformers(exported, "m", "/nowhere/python")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "empty"], check=True)
    with pytest.raises(InputError, match=r"m cannot be loaded by .*empty/bin/python \(ModuleNotFoundError: No module"):
        reference_vectors.check_with_transformers(exported, "m", str(tmp_path / "empty/bin/python"))
