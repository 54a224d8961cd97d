"""Perplexity depends on the model, the sentences and the seed, and not on the batches."""

import pytest
import torch
from numpy.random import default_rng

from infoxlm_core.model.huggingface.any_encoder import load_encoder
from infoxlm_core.tasks import perplexity
from tests.toys.models import TEXTS, save_model


def test_a_model_that_knows_nothing_is_as_perplexed_as_there_are_tokens(tmp_path):
    directory = save_model(tmp_path)
    model, tokenizer = load_encoder(directory)
    for parameter in model.parameters():
        torch.nn.init.zeros_(parameter)

    found = perplexity.measure(model, tokenizer, TEXTS, batch_size=2, max_tokens=32, seed=1)

    assert found == pytest.approx(len(tokenizer), rel=1e-5)


def test_perplexity_is_that_of_all_gaps_together_whatever_the_batches(tmp_path):
    model, tokenizer = load_encoder(save_model(tmp_path))

    one, four = (perplexity.measure(model, tokenizer, TEXTS, size, 32, seed=1) for size in (1, 4))

    assert one == pytest.approx(four, rel=1e-5)
    assert one != pytest.approx(perplexity.measure(model, tokenizer, TEXTS, 4, 32, seed=2), rel=1e-3)


def test_gaps_are_15_percent_of_the_tokens_and_at_least_one():
    rng = default_rng(0)
    counts = [len(perplexity.choose_gaps(30, rng)) for _ in range(4000)]

    assert set(counts) == {4, 5}
    assert sum(counts) / 4000 == pytest.approx(4.5, abs=3 * 0.5 / 4000**0.5)
    assert len(perplexity.choose_gaps(1, rng)) == 1
