"""Pre-training is repeatable, continues from other models, and refuses models that do not fit the shards."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from infoxlm_core import manifests
from infoxlm_core.errors import ConfigError, TokenizerMismatch
from infoxlm_core.model.huggingface import pretrained
from infoxlm_core.stages.pretraining import pretrain
from infoxlm_core.training import tracker
from tests.helpers.curves import losses, state_of
from tests.toys.pretraining import tiny_config


@pytest.mark.item("A27", "P1")
def test_same_seed_gives_the_same_losses_bit_by_bit(tiny_shards, tmp_path):
    first, second, other = (tmp_path / name for name in ("first", "second", "other"))
    for seed, run in ((1, first), (1, second), (2, other)):
        pretrain(tiny_config(seed=seed), tiny_shards, tmp_path / "out" / run.name, run)

    assert losses(first) == losses(second) != losses(other)
    assert state_of(first, 6) == state_of(second, 6)


def test_run_continues_from_a_model_and_records_the_text_of_both(tiny_shards, tmp_path):
    def train(name: str, shard_facts: dict, **changes) -> dict:
        manifests.write(shards, "shards", facts | shard_facts)
        return pretrain(tiny_config(**changes), shards, tmp_path / name, tmp_path / f"run {name}")

    shards = shutil.copytree(tiny_shards, tmp_path / "shards")
    facts = manifests.load(shards)["facts"]
    start = tmp_path / "first/encoder"
    # `reserved` lists the test sets whose sentences are not in the text.
    first = train("first", {"reserved": ["ab", "cd"]})
    second = train("second", {"reserved": ["cd", "ef"], "corpus": "sha256:d"}, model={"start": str(start)})

    assert second["loss/mlm"] < first["loss/mlm"]
    assert manifests.load(start)["facts"] == {"steps": 6, "reserved": ["ab", "cd"]}
    facts_of_second = {"steps": 6, "reserved": ["cd"], "other_corpora": [facts["corpus"]]}
    assert manifests.load(tmp_path / "second/encoder")["facts"] == facts_of_second
    for model in ("start", "encoder"):
        assert manifests.load(tmp_path / "second" / model)["inputs"]["model.start"] == pretrained.digest_weights(start)
        assert "model.start" not in manifests.load(tmp_path / "first" / model)["inputs"]
    manifests.write(start, "encoder", {"steps": 0})  # as a model that was not trained here
    train("third", {"reserved": ["cd", "ef"]}, model={"start": str(start)})
    assert manifests.load(tmp_path / "third/encoder")["facts"] == {"steps": 6, "reserved": ["cd", "ef"]}


@pytest.fixture
def start(tiny_shards, tmp_path) -> Path:
    """A model that was pre-trained for one step."""
    config = tiny_config(optimization={"steps": 1, "warmup_steps": 0})
    pretrain(config, tiny_shards, tmp_path / "a", tmp_path / "run a")
    return tmp_path / "a/encoder"


@pytest.mark.item("F16")
def test_start_that_does_not_fit_the_shards_is_refused(tiny_shards, start, tmp_path):
    def refuse(error_class: type[Exception], message: str, **changes) -> None:
        with pytest.raises(error_class, match=message):
            pretrain(tiny_config(**changes), tiny_shards, tmp_path / "b", tmp_path / "run b")

    model = {"start": str(start)}
    refuse(ConfigError, r"sequences of 40 tokens .* exceed the 32 positions", model=model, batches={"block_tokens": 40})
    refuse(ConfigError, r"model.frozen \(2\) leaves none of the 2 layers to train", model=model | {"frozen": 2})
    (start / "sentencepiece.bpe.model").write_bytes(b"another")
    refuse(TokenizerMismatch, r"has tokenizer sha256:\w{8}…, .* sha256:t", model=model)
    settings = json.loads((start / "config.json").read_text()) | {"vocab_size": 63}
    (start / "config.json").write_text(json.dumps(settings))
    weights = load_file(start / "model.safetensors")
    for name in ("roberta.embeddings.word_embeddings.weight", "lm_head.bias"):
        weights[name] = weights[name][:-1].clone()
    save_file(weights, start / "model.safetensors", metadata={"format": "pt"})
    refuse(TokenizerMismatch, r"has 63 embeddings, .* 64 ids", model=model)


@pytest.mark.parametrize(("frozen", "trained_layers"), [("embeddings", (0, 1)), (1, (1,))])
def test_frozen_weights_stay_and_contrast_without_projection_is_at_the_last_layer(
    frozen, trained_layers, tiny_shards, start, tmp_path
):
    config = tiny_config(
        model={"start": str(start), "frozen": frozen},
        objectives={"mlm": 0.0, "tlm": 0.0},
        contrast={"layer": "last", "projection": "none"},
        optimization={"steps": 2, "warmup_steps": 0},
    )

    figures = pretrain(config, tiny_shards, tmp_path / "b", tmp_path / "run b")

    assert figures["gradient_norm"] > 0
    before, after = (load_file(folder / "model.safetensors") for folder in (start, tmp_path / "b/encoder"))
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    exported_prefixes = tuple(f"roberta.encoder.layer.{layer}." for layer in trained_layers)
    assert changed == {name for name in before if name.startswith(exported_prefixes)}
    state = load_file(tmp_path / "run b/step=0000000002/state.safetensors")
    parameters_with_moments = {name.split("/")[1] for name in state if name.startswith("adam/")}
    model_prefixes = tuple(f"model/encoder.layers.{layer}." for layer in trained_layers)
    trained_parameters = {name.split("/")[1] for name in state if name.startswith(model_prefixes)}
    assert parameters_with_moments == trained_parameters
    for name in state:
        if name.startswith("learner/key_encoder/"):
            parameter = name.removeprefix("learner/key_encoder/")
            equals_query_encoder = torch.equal(state[name], state[f"model/{parameter}"])
            assert equals_query_encoder == (parameter not in trained_parameters)
    settings = json.loads((tmp_path / "b/encoder/config.json").read_text())
    assert settings["infoxlm"] == {"layer": 2, "pooling": "cls", "normalise": True}
    assert not (tmp_path / "b/encoder/projection.safetensors").exists()


@pytest.mark.item("A25")
@pytest.mark.slow
def test_contrast_learns_a_toy_language_far_above_chance(tiny_shards, tmp_path, record_property):
    config = tiny_config(
        optimization={"steps": 150, "learning_rate": 0.02, "warmup_steps": 10},
        batches={"global_batch_size": 16, "virtual_shards": 1, "micro_batch_size": 16},
        contrast={"pooling": "mean"}, checkpoints={"every": 1000}, log_every=10,
    )  # fmt: skip

    pretrain(config, tiny_shards, tmp_path / "out", tmp_path / "run")

    curve = [values["xlco/accuracy"] for _, values in tracker.read(tmp_path / "run" / tracker.METRICS)]
    accuracy = sum(curve[-3:]) / 3
    chance = 1 / (1 + 32)
    record_property("figure", f"XLCO accuracy {accuracy:.2f}, chance {chance:.2f}")
    assert accuracy > 10 * chance
