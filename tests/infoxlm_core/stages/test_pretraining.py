"""The stage of pre-training: what it makes, and what it starts from."""

import json
import shutil

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
def test_the_same_seed_gives_the_same_losses_bit_by_bit(tiny_shards, tmp_path):
    first, second, other = (tmp_path / name for name in ("first", "second", "other"))
    for seed, run in ((1, first), (1, second), (2, other)):
        pretrain(tiny_config(seed=seed), tiny_shards, tmp_path / "out" / run.name, run)

    assert losses(first) == losses(second) != losses(other)
    assert state_of(first, 6) == state_of(second, 6)


@pytest.mark.item("F16")
def test_a_run_continues_from_a_given_model_and_refuses_one_of_another_tokenizer(tiny_shards, tmp_path):
    shards, start = shutil.copytree(tiny_shards, tmp_path / "shards"), tmp_path / "a/encoder"
    facts = manifests.load(shards)["facts"]
    manifests.write(shards, "shards", facts | {"reserved": ["ab", "cd"]})  # files of test sets that are not in the text
    first = pretrain(tiny_config(), shards, tmp_path / "a", tmp_path / "run a")
    manifests.write(shards, "shards", facts | {"reserved": ["cd", "ef"], "corpus": "sha256:d"})

    again = pretrain(tiny_config(model={"start": str(start)}), shards, tmp_path / "b", tmp_path / "run b")

    assert again["loss/mlm"] < first["loss/mlm"]
    assert manifests.load(start)["facts"] == {"steps": 6, "reserved": ["ab", "cd"]}
    in_neither = {"steps": 6, "reserved": ["cd"], "other_corpora": [facts["corpus"]]}
    assert manifests.load(tmp_path / "b/encoder")["facts"] == in_neither
    for name in ("start", "encoder"):  # by which an evaluation knows that the start existed before
        assert manifests.load(tmp_path / "b" / name)["inputs"]["model.start"] == pretrained.digest_of(start)
        assert "model.start" not in manifests.load(tmp_path / "a" / name)["inputs"]
    manifests.write(start, "encoder", {"steps": 0})  # as one that nobody has trained
    pretrain(tiny_config(model={"start": str(start)}), shards, tmp_path / "c", tmp_path / "run c")
    assert manifests.load(tmp_path / "c/encoder")["facts"] == {"steps": 6, "reserved": ["cd", "ef"]}
    longer = tiny_config(model={"start": str(start)}, batches={"block_tokens": 40})
    with pytest.raises(ConfigError, match=r"sequences of 40 tokens .* exceed the 32 positions"):
        pretrain(longer, tiny_shards, tmp_path / "d", tmp_path / "run d")
    (start / "sentencepiece.bpe.model").write_bytes(b"another")
    with pytest.raises(TokenizerMismatch, match=r"has tokenizer sha256:\w{8}…, .* sha256:t"):
        pretrain(tiny_config(model={"start": str(start)}), tiny_shards, tmp_path / "d", tmp_path / "run d")
    size = json.loads((start / "config.json").read_text()) | {"vocab_size": 63}
    (start / "config.json").write_text(json.dumps(size))
    weights = load_file(start / "model.safetensors")
    for name in ("roberta.embeddings.word_embeddings.weight", "lm_head.bias"):
        weights[name] = weights[name][:-1].clone()
    save_file(weights, start / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(TokenizerMismatch, match=r"has 63 embeddings, .* 64 ids"):
        pretrain(tiny_config(model={"start": str(start)}), tiny_shards, tmp_path / "d", tmp_path / "run d")


@pytest.mark.parametrize(("frozen", "trained_layers"), [("embeddings", (0, 1)), (1, (1,))])
def test_frozen_weights_stay_bit_by_bit_and_contrast_without_projection_is_at_the_last_layer(
    frozen, trained_layers, tiny_shards, tmp_path
):
    start, run = tmp_path / "a/encoder", tmp_path / "run"
    pretrain(tiny_config(optimization={"steps": 1, "warmup_steps": 0}), tiny_shards, tmp_path / "a", tmp_path / "run a")
    config = tiny_config(
        model={"start": str(start), "frozen": frozen},
        objectives={"mlm": 0.0, "tlm": 0.0},
        contrast={"layer": "last", "projection": "none"},
        optimization={"steps": 2, "warmup_steps": 0},
    )

    figures = pretrain(config, tiny_shards, tmp_path / "b", run)

    assert figures["gradient_norm"] > 0
    before, after = (load_file(folder / "model.safetensors") for folder in (start, tmp_path / "b/encoder"))
    trained = {name for name in before if not torch.equal(before[name], after[name])}
    encoder_layers = tuple(f"roberta.encoder.layer.{layer}." for layer in trained_layers)
    assert trained == {name for name in before if name.startswith(encoder_layers)}
    state = load_file(run / "step=0000000002/state.safetensors")
    with_moments = {name.removeprefix("adam/").rpartition("/")[0] for name in state if name.startswith("adam/")}
    assert with_moments == {
        name.removeprefix("model/")
        for name in state
        if name.startswith(tuple(f"model/encoder.layers.{layer}." for layer in trained_layers))
    }
    for name, key in state.items():
        if name.startswith("learner/key_encoder/"):
            query = state[name.replace("learner/key_encoder", "model")]
            assert torch.equal(key, query) == (name.replace("learner/key_encoder/", "") not in with_moments)
    assert json.loads((tmp_path / "b/encoder/config.json").read_text())["infoxlm"] == {
        "layer": 2, "pooling": "cls", "normalise": True,
    }  # fmt: skip
    assert not (tmp_path / "b/encoder/projection.safetensors").exists()
    with pytest.raises(ConfigError, match=r"model.frozen \(2\) leaves none of the 2 layers to train"):
        pretrain(tiny_config(model={"start": str(start), "frozen": 2}), tiny_shards, tmp_path / "c", tmp_path / "run c")


@pytest.mark.item("A25")
@pytest.mark.slow
def test_contrast_learns_a_toy_language_far_above_chance(tiny_shards, tmp_path, record_property):
    config = tiny_config(
        optimization={"steps": 150, "learning_rate": 0.02, "warmup_steps": 10},
        batches={"global_batch_size": 16, "virtual_shards": 1, "micro_batch_size": 16},
        contrast={"pooling": "mean"}, checkpoints={"every": 1000}, log_every=10,
    )  # fmt: skip

    pretrain(config, tiny_shards, tmp_path / "out", tmp_path / "run")

    accuracy = [values["xlco/accuracy"] for _, values in tracker.read(tmp_path / "run" / tracker.METRICS)]
    record_property("figure", f"XLCO accuracy {sum(accuracy[-3:]) / 3:.2f}, chance {1 / 33:.2f}")
    assert sum(accuracy[-3:]) / 3 > 10 / (1 + 32)
