"""Only the embeddings of words that occur are trained, with the same result as if all were trained."""

from contextlib import nullcontext

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.torch import load_file

from infoxlm_core.data.examples import Examples
from infoxlm_core.model import task_models
from infoxlm_core.stages.finetuning import finetune, read_training
from infoxlm_core.tasks import TASKS
from infoxlm_core.training.checkpoints import list_checkpoints
from infoxlm_core.training.finetuning import active_vocabulary
from tests.toys.finetuning import config

WORDS = "roberta.embeddings.word_embeddings.weight"


@pytest.fixture
def settings(data, tmp_path):
    """Return settings with a development set in German, which contains words that no training example contains."""
    table = pd.read_csv(data, sep="\t")
    table.loc[(table["split"] == "test") & (table["language"] == "de"), "split"] = "dev"
    table.to_csv(tmp_path / "verbs.tsv", sep="\t", index=False)
    return config(tmp_path / "verbs.tsv", selection={"rule": "joint", "every": 20}, checkpoints={"every": 30})


def test_the_result_is_that_of_training_all_words_and_other_words_do_not_change(
    encoder, settings, tmp_path, monkeypatch
):
    finetune(settings, encoder, None, tmp_path / "active", tmp_path / "run-active")
    monkeypatch.setattr(active_vocabulary, "limit_words", lambda module, task, weight_decay: (task, nullcontext))
    finetune(settings, encoder, None, tmp_path / "all", tmp_path / "run-all")

    before = load_file(encoder / "model.safetensors")
    active = load_file(tmp_path / "active/model.safetensors")
    occurs = torch.zeros(len(before[WORDS]), dtype=torch.bool)
    occurs[torch.from_numpy(read_training(settings, encoder, None).examples.ids)] = True
    assert 0 < occurs.sum() < len(occurs)
    assert torch.equal(active[WORDS][~occurs], before[WORDS][~occurs])
    assert not torch.equal(active[WORDS][occurs], before[WORDS][occurs])
    for name, expected in load_file(tmp_path / "all/model.safetensors").items():
        torch.testing.assert_close(active[name], expected, rtol=0, atol=1e-5)
    expected_selection = (tmp_path / "all/selection.json").read_text()
    assert (tmp_path / "active/selection.json").read_text() == expected_selection
    _, newest_checkpoint = list_checkpoints(tmp_path / "run-active")[0]
    state = load_file(newest_checkpoint / "state.safetensors")
    assert len(state["adam/encoder.token_embedding.weight/exp_avg"]) == occurs.sum()


def test_all_words_are_trained_if_weight_decay_shrinks_them(encoder, settings, tmp_path):
    optimization = settings.optimization.model_copy(update={"weight_decay": 0.1})
    with_decay = settings.model_copy(update={"optimization": optimization})

    finetune(with_decay, encoder, None, tmp_path / "out", tmp_path / "run")

    before = load_file(encoder / "model.safetensors")[WORDS]
    after = load_file(tmp_path / "out/model.safetensors")[WORDS]
    assert not (after == before).all(dim=1).any()


def test_tokens_are_renumbered_in_their_type(encoder):
    ids = np.array([95, 3, 7, 8, 40, 95, 8], np.int32)
    examples = Examples(ids, np.zeros(7, np.int8), np.array([7]))
    model = task_models.create(encoder, TASKS["question_answering"].head).encoder

    vocabulary = active_vocabulary.ActiveVocabulary(model, examples)
    renumbered = vocabulary.renumber(examples).ids

    assert vocabulary.ids.tolist() == [3, 7, 8, 40, 95]
    assert renumbered.tolist() == [4, 0, 1, 2, 3, 4, 2]
    assert renumbered.dtype == np.int32
    assert len(model.token_embedding.weight) == 5
