"""Which keys of the queue are no negatives of a query: those with a sentence of its own mixup pair in them."""

from torch import Tensor


def share_a_sentence(mine: Tensor, theirs: Tensor) -> Tensor:
    """(B, 2) sentence ids of queries, (K, 2) of keys -> (B, K), true where they have one in common: no negative."""
    shared = mine[:, :1] == theirs[None, :, 0]
    for left, right in ((0, 1), (1, 0), (1, 1)):
        shared |= mine[:, left, None] == theirs[None, :, right]
    return shared


def have_equal_sentences(mine: Tensor, theirs: Tensor) -> Tensor:
    """(B, 2) sentence ids of queries, (K, 2) of keys -> (B, K), true where both are the same set."""
    mine, theirs = mine.sort(dim=1).values, theirs.sort(dim=1).values
    return (mine[:, :1] == theirs[None, :, 0]) & (mine[:, 1:] == theirs[None, :, 1])
