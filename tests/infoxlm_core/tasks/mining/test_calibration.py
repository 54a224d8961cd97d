"""Planted pairs choose a margin with the required precision, where the correct pairs are known."""

import numpy as np
import pytest

from infoxlm_core.errors import InputError
from infoxlm_core.tasks.mining.calibration import bound_wrong_pairs, choose_margin, estimate
from infoxlm_core.tasks.mining.matching import Search, match_lines
from infoxlm_core.tasks.mining.neighbours import find_neighbours

NUM_TRANSLATED = 300
NUM_PLANTED = 1000


def normalise(vectors: np.ndarray) -> np.ndarray:
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def build_search(num_untranslated: int) -> Search:
    """Return two files whose first 300 lines translate each other; translations have cosines from 0.5 to 1."""
    random = np.random.default_rng(0)
    count = NUM_TRANSLATED + num_untranslated + NUM_PLANTED
    sources = normalise(random.normal(size=(count, 24)))
    noise = normalise(random.normal(size=(count, 24)))
    targets = normalise(sources + random.uniform(0.2, 1.6, size=(count, 1)) * noise)
    targets[NUM_TRANSLATED:-NUM_PLANTED] = normalise(random.normal(size=(num_untranslated, 24)))
    forward, backward = find_neighbours([sources.astype(np.float16)], [targets.astype(np.float16)])
    return Search(forward, backward, np.full(count, -1), np.full(count, -1), NUM_PLANTED)


@pytest.mark.parametrize("num_untranslated", [300, 3000])
def test_the_chosen_margin_has_the_required_precision(num_untranslated):
    search = build_search(num_untranslated)
    matches = match_lines(search)
    is_correct = (matches.sources == matches.targets) & (matches.sources < NUM_TRANSLATED)
    assert is_correct.mean() < 0.7  # of all matches, so a margin is needed

    curves = estimate(search, matches)

    for required_precision in (0.8, 0.9):
        margin = choose_margin(curves, required_precision)
        is_mined = matches.margins >= margin
        estimated_recall = curves.look_up(margin)["recall"]
        assert is_correct[is_mined].mean() > required_precision - 0.04
        assert is_correct[is_mined].sum() / NUM_TRANSLATED == pytest.approx(estimated_recall, abs=0.06)
        assert estimated_recall > 0.2
    # At every margin, the estimate is at most a little above the truth.
    true_precision = np.array([is_correct[matches.margins >= margin].mean() for margin in curves.margins])
    assert (curves.precision - true_precision)[curves.num_pairs >= 100].max() < 0.08


def test_the_bound_of_wrong_pairs_lies_above_the_truth():
    num_lines, num_translated = 1000, 400
    recall = np.array([0.95, 0.9, 0.6])
    mismatched_shares = np.array([0.03, 0.01, 0.0])
    false_shares = np.array([0.4, 0.1, 0.01])
    num_wrong = (num_lines - num_translated) * false_shares + num_translated * mismatched_shares
    num_wrong_without_translations = num_lines * false_shares

    bound = bound_wrong_pairs(
        num_translated * recall + num_wrong, num_lines, false_shares, mismatched_shares, NUM_PLANTED
    )
    bound_without_translations = bound_wrong_pairs(
        num_wrong_without_translations, num_lines, false_shares, mismatched_shares, NUM_PLANTED
    )

    assert (bound >= num_wrong).all()
    assert (bound < 0.75 * num_wrong_without_translations).all()
    assert bound_without_translations == pytest.approx(num_wrong_without_translations)


def test_lines_that_nearly_all_have_a_false_match_do_not_count_as_translated():
    """In a file that is much smaller than the other, almost every line is matched with some line."""
    num_pairs = np.array([500.0, 480.0])
    false_shares = np.array([0.97, 0.94])

    bound = bound_wrong_pairs(num_pairs, 500, false_shares, np.array([0.0, 0.0]), num_planted=100)

    assert bound == pytest.approx(500 * false_shares)


def test_a_precision_that_no_margin_reaches_is_refused():
    search = build_search(num_untranslated=300)
    unrelated = search._replace(forward=search.forward._replace(rows=np.roll(search.forward.rows, 7, axis=0)))
    curves = estimate(unrelated, match_lines(unrelated))

    with pytest.raises(InputError, match=r"no margin has precision 1\.1: the highest is .* at margin .*: lower"):
        choose_margin(curves, 1.1)
