"""Losses and similarities, compared with their formulas (acceptance items A1, A2, A4, A12)."""

import math

import pytest
import torch

from infoxlm_core.model.objectives import (
    count_xlco_hits,
    cross_entropy,
    find_equal_pairs,
    find_shared_sentences,
    xlco_logits,
    xlco_losses,
)

pytestmark = pytest.mark.usefixtures("in_fp64")


@pytest.mark.item("A1")
def test_xlco_loss_without_knowledge_is_the_log_of_the_number_of_choices(record_property):
    zeros = torch.zeros(4, 8)

    loss = xlco_losses(xlco_logits(zeros, zeros, torch.randn(131_072, 8), temperature=0.25)).sum()

    record_property("figure", f"{loss.item() / 4:.5f} nats")
    assert loss.item() / 4 == pytest.approx(math.log(1 + 131_072), rel=1e-9)


@pytest.mark.item("A1")
def test_xlco_loss_equals_its_formula():
    query, key, queue = torch.randn(3, 8), torch.randn(3, 8), torch.randn(15, 8)

    loss = xlco_losses(xlco_logits(query, key, queue, temperature=0.25)).sum()

    positive = (query * key).sum(1) / 0.25
    expected = -positive + torch.logsumexp(torch.cat([positive[:, None], query @ queue.T / 0.25], 1), 1)
    assert loss.item() == pytest.approx(expected.sum().item(), rel=1e-9)


def test_margin_is_subtracted_from_the_similarity_of_the_translation():
    query, key, queue = torch.tensor([[1.0, 0.0]]), torch.tensor([[0.6, 0.8]]), torch.tensor([[0.0, 1.0]])

    loss = xlco_losses(xlco_logits(query, key, queue, temperature=0.5), margin=0.2 / 0.5)

    translation, negative = (0.6 - 0.2) / 0.5, 0.0 / 0.5
    expected = math.log(math.exp(translation) + math.exp(negative)) - translation
    assert loss.item() == pytest.approx(expected, rel=1e-9)


@pytest.mark.item("A2")
def test_xlco_gradient_is_the_weighted_mean_of_all_keys_minus_the_own_key():
    query = torch.randn(3, 8, requires_grad=True)
    key, queue = torch.randn(3, 8), torch.randn(15, 8)

    logits = xlco_logits(query, key, queue, temperature=0.25)
    xlco_losses(logits).sum().backward()

    weights = logits.detach().softmax(1)
    mean = weights[:, :1] * key + weights[:, 1:] @ queue
    torch.testing.assert_close(query.grad, (mean - key) / 0.25, rtol=1e-9, atol=1e-9)


@pytest.mark.item("A12")
def test_excluded_rows_of_the_queue_are_ignored():
    query = torch.randn(2, 8)
    queue = torch.cat([query, torch.randn(5, 8)])  # rows 0 and 1 are the queries themselves
    excluded = torch.zeros(2, 7, dtype=torch.bool)
    excluded[:, :2] = True

    loss = xlco_losses(xlco_logits(query, query, queue, 0.25, excluded)).sum()

    without = xlco_losses(xlco_logits(query, query, queue[2:], 0.25)).sum()
    assert loss.item() == pytest.approx(without.item(), rel=1e-9)


def test_hits_count_queries_that_are_nearest_to_their_translation():
    query = torch.eye(3)
    key = torch.eye(3)
    key[2] = 0.0  # the third query is nearer to the queue

    assert count_xlco_hits(xlco_logits(query, key, torch.eye(3)[2:] * 0.5, 1.0)).item() == 2


@pytest.mark.item("A4")
def test_mlm_loss_of_equal_logits_is_the_log_of_the_vocabulary_size():
    logits = torch.zeros(5, 250_002)

    assert cross_entropy(logits, torch.arange(5)).item() / 5 == pytest.approx(math.log(250_002), rel=1e-9)
    assert cross_entropy(logits[:0], torch.arange(0)).item() == 0.0


@pytest.mark.item("A12")
def test_shared_and_equal_sentences_are_found():
    query_ids = torch.tensor([[2, 9], [9, 3], [8, 9], [2, 1]])
    key_ids = torch.tensor([[1, 2], [3, 4], [5, 5]])

    shared = find_shared_sentences(query_ids, key_ids)
    equal = find_equal_pairs(query_ids, key_ids)

    assert shared.tolist() == [[True, False, False], [False, True, False], [False] * 3, [True, False, False]]
    assert equal.tolist() == [[False] * 3, [False] * 3, [False] * 3, [True, False, False]]
