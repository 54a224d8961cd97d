"""Examples lie end to end, and any of them can be taken out, in any order."""

import numpy as np

from infoxlm_core.data.examples import from_lists, join

ROWS = [[5, 6, 7], [], [8], [9, 10]]


def test_examples_are_taken_in_the_order_asked_for_and_may_come_again():
    examples = from_lists(ROWS, [[0, 0, 1], [], [1], [0, 1]])

    taken = examples.take([3, 0, 1, 3])

    assert taken.lengths.tolist() == [2, 3, 0, 2]
    assert taken.ids.tolist() == [9, 10, 5, 6, 7, 9, 10]
    assert taken.types.tolist() == [0, 1, 0, 0, 1, 0, 1]
    assert taken.ids.dtype == taken.types.dtype == np.int64


def test_parts_one_after_the_other_are_the_whole():
    whole = from_lists(ROWS)

    joined = join([from_lists(ROWS[:1]), from_lists(ROWS[1:])])

    assert len(joined) == 4 and len(join([])) == 0
    assert joined.take(range(4)).ids.tolist() == whole.take(range(4)).ids.tolist()
    assert joined.starts.tolist() == [0, 3, 3, 4]
