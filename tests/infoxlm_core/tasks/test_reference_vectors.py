"""Models as they are exported, and what a process that knows transformers alone makes of them."""

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

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def shards(tmp_path_factory) -> Path:
    base, pairs = tmp_path_factory.mktemp("text"), messages(0)
    text = {"en": [english for english, _ in pairs], "de": [german for _, german in pairs]}
    corpus = write_corpus(base / "corpus", text, {"en-de": pairs})
    return tokenized(TokenizationConfig(vocabulary_size=96, processes=1), corpus, base / "shards")


@pytest.fixture(scope="module")
def exported(shards, tmp_path_factory) -> Path:
    """An InfoXLM whose contrast is at layer 1 of 2, as the stage leaves it."""
    base = tmp_path_factory.mktemp("model")
    config = config_of("InfoXLM", contrast={"pooling": "mean"}, optimization={"steps": 3, "warmup_steps": 1})
    pretrain(config, shards, base / "output", base / "run")
    return base / "output/encoder"


@pytest.fixture
def model(exported, tmp_path) -> Path:
    return shutil.copytree(exported, tmp_path / "model")


def rewrite(directory: Path, **changes) -> None:
    path = directory / reference_vectors.FILE
    path.write_text(json.dumps(json.loads(path.read_bytes()) | changes))


def compare(directory: Path, name: str = "models:/m/1") -> reference_vectors.Difference:
    """What `check` does, in this process."""
    reference = reference_vectors.read(directory)
    vectors = plain_transformers.embed(str(directory), reference.layer, reference.pooling, list(reference.sentences))
    return reference_vectors.compare(reference, torch.tensor(vectors), name)


def test_an_exported_model_has_ten_vectors_of_its_own_space_which_its_manifest_covers(exported):
    said = json.loads((exported / reference_vectors.FILE).read_bytes())

    assert (said["layer"], said["pooling"], len(set(said["sentences"]))) == (1, "mean", 10)
    found = embed_sentences(exported, said["sentences"])
    assert torch.allclose(torch.tensor(said["vectors"]), found, atol=1e-6)
    assert reference_vectors.FILE in json.loads((exported / "manifest.json").read_bytes())["files"]
    assert not (exported.parent / "start" / reference_vectors.FILE).exists()


def test_the_prefix_of_the_training_precedes_the_sentences_of_every_later_use(tmp_path):
    pairs = messages(0)
    text = {"en": [english for english, _ in pairs], "de": [german for _, german in pairs]}
    corpus = write_corpus(tmp_path / "corpus", text, {"en-de": pairs})
    tokenization = TokenizationConfig(vocabulary_size=96, processes=1, prefix="query: ")
    shards = tokenized(tokenization, corpus, tmp_path / "shards")
    pretrain(config_of("InfoXLM", optimization={"steps": 2, "warmup_steps": 1}), shards, tmp_path / "out", tmp_path)
    model, start = tmp_path / "out/encoder", tmp_path / "out/start"

    reference = reference_vectors.read(model)
    given = embed_sentences(model, [f"query: {text}" for text in reference.sentences], prefix="")

    assert reference.prefix == "query: "
    assert given.equal(embed_sentences(model, reference.sentences))
    assert torch.allclose(given, reference.vectors, atol=1e-6)
    assert reference_vectors.check(model, "mine").startswith("mine is served as it was registered: 10 vectors")
    texts = [tuple(f"query: {text}" for text in pair) for pair in pairs[:40]]
    own, written_out = (
        Questions("en", {}, {"de": questions}, {}, {"de": torch.ones(40, dtype=torch.bool)})
        for questions in (pairs[:40], texts)
    )
    scores = held_out.measure(own, start, EvaluationConfig()).details
    assert scores["encoder"]["prefix"] == "query: "
    settings = json.loads((start / "config.json").read_text())
    del settings["infoxlm"]["prefix"]
    (start / "config.json").write_text(json.dumps(settings))
    assert held_out.measure(written_out, start, EvaluationConfig()).details["by_layer"] == scores["by_layer"]


def test_a_fresh_process_with_transformers_alone_gives_the_vectors_of_the_export(exported):
    said = reference_vectors.check(exported, "models:/tiny@champion")

    assert said.startswith("models:/tiny@champion is served as it was registered: 10 vectors, mean of layer 1, worst")
    assert "worst cosine 1.0000000" in said and said.endswith("without this project") and "\n" not in said


@pytest.mark.parametrize("row", ["XLM-MLM", "mBERT"])
def test_a_model_that_names_no_layer_is_compared_at_its_last_one(shards, tmp_path, row):
    export(learner_of(config_of(row, model={"max_tokens": 64}), open_shards(shards)), open_shards(shards), tmp_path)
    reference_vectors.write(tmp_path)

    reference = reference_vectors.read(tmp_path)
    assert (reference.layer, reference.pooling) == (2, "mean")
    assert compare(tmp_path).share < reference.tolerance


def test_other_weights_another_layer_and_another_pooling_are_seen(model):
    path = model / "model.safetensors"
    weights = load_file(path)
    save_file({name: tensor.half().float() for name, tensor in weights.items()}, path, {"format": "pt"})
    with pytest.raises(DataCorrupt, match=r"^models:/m/1 gives other vectors than were registered: worst cosine"):
        compare(model)
    save_file(weights, path, {"format": "pt"})
    assert compare(model).cosine > 0.999999

    for change in ({"layer": 2}, {"pooling": "cls"}):
        rewrite(model, **{"layer": 1, "pooling": "mean"} | change)
        with pytest.raises(DataCorrupt, match="gives other vectors"):
            compare(model)


def test_the_tolerance_is_far_above_the_rounding_of_fp32_and_below_half_precision(exported):
    reference = reference_vectors.read(exported)
    least = reference.vectors * (1 + 2**-22)  # the last two of its 24 bits
    half = reference.vectors.half().float()

    assert reference_vectors.compare(reference, least, "m").share < reference.tolerance / 20
    with pytest.raises(DataCorrupt):
        reference_vectors.compare(reference, half, "m")
    with pytest.raises(DataCorrupt, match="nan"):
        reference_vectors.compare(reference, reference.vectors * float("nan"), "m")
    with pytest.raises(DataCorrupt, match=r"\(10, 3\), expected \(10, 16\)"):
        reference_vectors.compare(reference, reference.vectors[:, :3], "m")


def test_a_model_from_before_is_answered_in_one_line_with_the_remedy(model):
    (model / reference_vectors.FILE).unlink()

    with pytest.raises(InputError, match=r"has no reference_vectors.json: .* run the pipeline again") as refused:
        reference_vectors.check(model, "models:/m/1")
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "content", ["{", "[]", '{"layer": 1, "pooling": "mean", "sentences": ["a"], "vectors": [[0]]}']
)
def test_a_damaged_file_is_refused(model, content):
    (model / reference_vectors.FILE).write_text(content)

    with pytest.raises(DataCorrupt, match=r"reference_vectors.json cannot be read"):
        reference_vectors.check(model, "models:/m/1")


def test_another_python_without_transformers_is_named(exported, tmp_path):
    with pytest.raises(InputError, match=r"/nowhere/python cannot be run"):
        reference_vectors.check(exported, "m", "/nowhere/python")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "empty"], check=True)
    with pytest.raises(InputError, match=r"m cannot be loaded by .*empty/bin/python \(ModuleNotFoundError: No module"):
        reference_vectors.check(exported, "m", str(tmp_path / "empty/bin/python"))
