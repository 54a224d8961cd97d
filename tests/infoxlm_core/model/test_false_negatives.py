"""What is no negative: a key that shares a sentence with the query (acceptance item A12)."""

import pytest
import torch

from infoxlm_core.model.false_negatives import have_equal_sentences, share_a_sentence


@pytest.mark.item("A12")
def test_overlap_finds_every_shared_meaning_and_equality_only_the_same_two():
    mine = torch.tensor([[2, 9], [9, 3], [8, 9], [2, 1]])
    theirs = torch.tensor([[1, 2], [3, 4], [5, 5]])

    overlaps, equal = share_a_sentence(mine, theirs), have_equal_sentences(mine, theirs)

    assert overlaps.tolist() == [[True, False, False], [False, True, False], [False] * 3, [True, False, False]]
    assert equal.tolist() == [[False] * 3, [False] * 3, [False] * 3, [True, False, False]]
