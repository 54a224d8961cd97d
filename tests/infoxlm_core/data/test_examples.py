"""Examples are stored one after another, and can be taken out in any order."""

import numpy as np

from infoxlm_core.data.examples import from_lists, join

IDS = [[5, 6, 7], [], [8], [9, 10]]


def test_examples_are_taken_in_the_requested_order_and_may_repeat():
    examples = from_lists(IDS, [[0, 0, 1], [], [1], [0, 1]])

    taken = examples.take([3, 0, 1, 3])

    assert taken.lengths.tolist() == [2, 3, 0, 2]
    assert taken.ids.tolist() == [9, 10, 5, 6, 7, 9, 10]
    assert taken.types.tolist() == [0, 1, 0, 0, 1, 0, 1]
    assert taken.ids.dtype == taken.types.dtype == np.int64


def test_joined_batches_contain_their_examples_in_order():
    joined = join([from_lists(IDS[:1]), from_lists(IDS[1:])])

    assert joined.take(range(4)).ids.tolist() == [5, 6, 7, 8, 9, 10]
    assert joined.starts.tolist() == [0, 3, 3, 4]
    assert len(join([])) == 0
