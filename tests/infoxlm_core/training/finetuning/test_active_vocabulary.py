"""Only the words that occur are trained, and what comes out is what training all of them gives."""

import tracemalloc
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
def judged(data, tmp_path):
    """The same text, with a development set in German, which is never trained on."""
    table = pd.read_csv(data, sep="\t")
    table.loc[(table["split"] == "test") & (table["language"] == "de"), "split"] = "dev"
    table.to_csv(tmp_path / "judged.tsv", sep="\t", index=False)
    return config(tmp_path / "judged.tsv", selection={"rule": "joint", "every": 20}, checkpoints={"every": 30})


def test_it_ends_like_a_training_of_all_words_and_leaves_the_others_as_they_were(
    encoder, judged, tmp_path, monkeypatch
):  # fmt: skip
    finetune(judged, encoder, None, tmp_path / "some", tmp_path / "run-some")
    monkeypatch.setattr(active_vocabulary, "limit", lambda module, task, weight_decay: (task, nullcontext))
    finetune(judged, encoder, None, tmp_path / "all", tmp_path / "run-all")

    before, some, every = (load_file(tmp_path / path / "model.safetensors") for path in (encoder, "some", "all"))
    occurs = torch.zeros(len(before[WORDS]), dtype=torch.bool)
    occurs[torch.from_numpy(read_training(judged, encoder, None).examples.ids)] = True
    assert 0 < occurs.sum() < len(occurs)
    assert torch.equal(some[WORDS][~occurs], before[WORDS][~occurs])
    assert not torch.equal(some[WORDS][occurs], before[WORDS][occurs])
    for name, value in every.items():
        torch.testing.assert_close(some[name], value, rtol=0, atol=1e-5)
    looks = [(tmp_path / path / "selection.json").read_text() for path in ("some", "all")]
    assert looks[0] == looks[1]


def test_moments_are_kept_for_words_that_occur_only(encoder, judged, tmp_path):
    finetune(judged, encoder, None, tmp_path / "out", tmp_path / "run")

    (_, newest), *_ = sorted(list_checkpoints(tmp_path / "run"), reverse=True)
    saved = load_file(newest / "state.safetensors")
    occurring_words = len(set(read_training(judged, encoder, None).examples.ids.tolist()))
    assert len(saved["adam/encoder.token_embedding.weight/exp_avg"]) == occurring_words


def test_with_weight_decay_all_words_are_trained_since_all_of_them_shrink(encoder, judged, tmp_path):
    decaying = judged.model_copy(update={"optimization": judged.optimization.model_copy(update={"weight_decay": 0.1})})

    finetune(decaying, encoder, None, tmp_path / "out", tmp_path / "run")

    before, after = (load_file(path / "model.safetensors")[WORDS] for path in (encoder, tmp_path / "out"))
    assert not (after == before).all(dim=1).any()


@pytest.mark.parametrize("kind", [np.int32, np.uint16])
def test_millions_of_tokens_are_renumbered_in_the_type_they_have_without_larger_copies(encoder, kind):
    ids = np.random.default_rng(1).choice(np.array([3, 7, 8, 40, 95], kind), 4_000_000)
    examples = Examples(ids, np.zeros(len(ids), np.int8), np.array([len(ids)]))
    model = task_models.create(encoder, TASKS["question_answering"].head).encoder

    tracemalloc.start()
    words = active_vocabulary.ActiveVocabulary(model, examples)
    found = words.renumber(examples).ids
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()

    assert words.ids.tolist() == [3, 7, 8, 40, 95] and model.token_embedding.weight.shape[0] == 5
    assert found.dtype == kind and np.array_equal(words.ids[found], ids)
    assert most < ids.nbytes + 6_000_000  # 8 bytes of each token would be 32 million
