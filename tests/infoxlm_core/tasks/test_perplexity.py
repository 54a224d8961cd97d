"""Perplexity depends on the model, the sentences and the seed, and not on the batches."""

import pytest
import torch
from numpy.random import default_rng

from infoxlm_core.model.huggingface.any_encoder import load_encoder
from infoxlm_core.tasks import perplexity
from tests.toys.models import TEXTS, save_model


def test_perplexity_of_uniform_predictions_is_the_vocabulary_size(tmp_path):
    model, tokenizer = load_encoder(save_model(tmp_path))
    for parameter in model.parameters():
        torch.nn.init.zeros_(parameter)

    value = perplexity.compute_perplexity(model, tokenizer, TEXTS, batch_size=2, max_tokens=32, seed=1)

    assert value == pytest.approx(len(tokenizer), rel=1e-5)


def test_perplexity_depends_on_the_seed_but_not_on_the_batch_size(tmp_path):
    model, tokenizer = load_encoder(save_model(tmp_path))

    value = perplexity.compute_perplexity(model, tokenizer, TEXTS, batch_size=1, max_tokens=32, seed=1)
    value_of_large_batch = perplexity.compute_perplexity(model, tokenizer, TEXTS, batch_size=4, max_tokens=32, seed=1)
    value_of_other_seed = perplexity.compute_perplexity(model, tokenizer, TEXTS, batch_size=4, max_tokens=32, seed=2)

    assert value == pytest.approx(value_of_large_batch, rel=1e-5)
    assert value != pytest.approx(value_of_other_seed, rel=1e-3)


def test_masked_tokens_are_15_percent_of_the_tokens_and_at_least_one():
    rng = default_rng(0)
    counts = [len(perplexity.choose_masked_positions(30, rng)) for _ in range(4000)]

    assert set(counts) == {4, 5}
    assert sum(counts) / 4000 == pytest.approx(4.5, abs=3 * 0.5 / 4000**0.5)
    assert len(perplexity.choose_masked_positions(1, rng)) == 1
