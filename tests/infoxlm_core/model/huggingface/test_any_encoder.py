"""Which vector of a model represents a sentence when nobody names one."""

import json
import logging
from pathlib import Path

import pytest
import torch

from infoxlm_core.errors import InputError
from infoxlm_core.model.huggingface.any_encoder import load_encoder, served_space
from infoxlm_core.tasks.embedding import embed_sentences
from tests.toys.models import TEXTS, save_model

OLD_MODES = ("cls_token", "mean_tokens", "max_tokens", "mean_sqrt_len_tokens")


def write_modules(directory: Path, pooling: dict, *kinds: str) -> None:
    """Write the files that make a directory one of sentence-transformers."""
    folders = [("", "Transformer"), ("1_Pooling", "Pooling")] + [(f"2_{kind}", kind) for kind in kinds]
    modules = [
        {"idx": number, "name": str(number), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for number, (path, kind) in enumerate(folders)
    ]
    (directory / "modules.json").write_text(json.dumps(modules))
    (directory / "1_Pooling").mkdir(exist_ok=True)
    (directory / "1_Pooling/config.json").write_text(json.dumps(pooling))


def old_settings(active: str) -> dict:
    """Return the settings of pooling as versions before 6 write them."""
    modes = {f"pooling_mode_{mode}": mode == active for mode in OLD_MODES}
    return {"word_embedding_dimension": 32, **modes, "include_prompt": True}


@pytest.mark.parametrize(
    ("settings", "pooling"),
    [
        (old_settings("cls_token"), "cls"),
        (old_settings("mean_tokens"), "mean"),
        ({"embedding_dimension": 32, "pooling_mode": "cls", "include_prompt": True}, "cls"),  # since version 6
    ],
)
def test_a_model_of_sentence_transformers_is_served_with_its_own_pooling(settings, pooling, tmp_path):
    save_model(tmp_path, infoxlm=None)
    write_modules(tmp_path, settings)

    assert served_space(tmp_path) == served_space(load_encoder(tmp_path, "cpu")[0]) == (2, pooling)
    assert torch.equal(embed_sentences(tmp_path, TEXTS), embed_sentences(tmp_path, TEXTS, 2, pooling))


def test_our_models_are_served_at_their_contrast_layer_and_others_with_the_mean_of_the_last(tmp_path):
    ours = save_model(tmp_path / "ours", infoxlm={"layer": 1, "pooling": "cls", "normalise": False})
    write_modules(ours, old_settings("mean_tokens"))  # as an export has them too
    plain = save_model(tmp_path / "plain", infoxlm=None)

    assert served_space(ours) == (1, "cls")
    assert served_space(plain) == (2, "mean")


def test_a_dense_module_is_not_used_and_logged_once(tmp_path, caplog):
    save_model(tmp_path, infoxlm=None)
    write_modules(tmp_path, old_settings("cls_token"), "Dense", "Normalize")

    with caplog.at_level(logging.WARNING):
        assert served_space(tmp_path) == served_space(str(tmp_path)) == (2, "cls")

    assert caplog.text.count("vectors are taken before its module Dense, which is not used") == 1


@pytest.mark.parametrize("settings", [old_settings("max_tokens"), {"pooling_mode": ["cls", "mean"]}])
def test_another_pooling_is_refused_unless_the_user_names_one(settings, tmp_path):
    save_model(tmp_path, infoxlm=None)
    write_modules(tmp_path, settings)

    with pytest.raises(InputError, match=r"1_Pooling/config\.json: its pooling is .*, not cls or mean"):
        embed_sentences(tmp_path, TEXTS)
    assert len(embed_sentences(tmp_path, TEXTS, 2, "mean")) == len(TEXTS)
