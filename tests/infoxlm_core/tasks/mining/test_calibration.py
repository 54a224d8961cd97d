"""The margin that planted pairs choose has the precision that was required, where the right pairs are known."""

import numpy as np
import pytest

from infoxlm_core.errors import InputError
from infoxlm_core.tasks.mining.calibration import bound_wrong_pairs, choose_margin, estimate
from infoxlm_core.tasks.mining.matching import Search, match_lines
from infoxlm_core.tasks.mining.neighbours import find_neighbours

TRANSLATED, PLANTED = 300, 1000


def normalise(vectors: np.ndarray) -> np.ndarray:
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def search(untranslated: int, seed: int = 0) -> Search:
    """Two files whose first 300 lines translate each other; translations have cosines from 0.5 to 1."""
    random = np.random.default_rng(seed)
    count = TRANSLATED + untranslated + PLANTED
    sources, others = normalise(random.normal(size=(count, 24))), normalise(random.normal(size=(count, 24)))
    noise = random.uniform(0.2, 1.6, size=(count, 1))
    targets = normalise(sources + noise * others)
    targets[TRANSLATED:-PLANTED] = normalise(random.normal(size=(untranslated, 24)))
    forward, backward = find_neighbours([sources.astype(np.float16)], [targets.astype(np.float16)])
    return Search(forward, backward, np.full(count, -1), np.full(count, -1), PLANTED)


@pytest.mark.parametrize("untranslated", [300, 3000])
def test_the_chosen_margin_has_the_precision_among_pairs_that_are_known(untranslated):
    lines = search(untranslated)
    matches = match_lines(lines)
    curves = estimate(lines, matches)
    is_right = (matches.sources == matches.targets) & (matches.sources < TRANSLATED)

    for required in (0.8, 0.9):
        is_mined = matches.margins >= choose_margin(curves, required)
        assert required - 0.04 < is_right[is_mined].mean()
        estimated_recall = curves.at(matches.margins[is_mined].min())["recall"]
        assert (
            is_right[is_mined].sum() / TRANSLATED == pytest.approx(estimated_recall, abs=0.06)
            and estimated_recall > 0.2
        )
    assert is_right.mean() < 0.7  # of all matches: a margin is needed
    # At every margin, the estimate is at most a little above the truth.
    true_precision = np.array([is_right[matches.margins >= margin].mean() for margin in curves.margins])
    assert (curves.precision - true_precision)[curves.num_pairs >= 100].max() < 0.08


def test_the_bound_of_wrong_pairs_is_above_the_truth_and_below_that_of_files_without_translations():
    num_lines, num_translated = 1000, 400
    recall, mismatches = np.array([0.95, 0.9, 0.6]), np.array([0.03, 0.01, 0.0])
    false_matches = np.array([0.4, 0.1, 0.01])
    wrong = (num_lines - num_translated) * false_matches + num_translated * mismatches
    num_pairs = num_translated * recall + wrong

    bound = bound_wrong_pairs(num_pairs, num_lines, false_matches, mismatches, PLANTED)

    assert (wrong <= bound).all() and (bound < 0.75 * num_lines * false_matches).all()
    unrelated = bound_wrong_pairs(num_lines * false_matches, num_lines, false_matches, mismatches, PLANTED)
    assert unrelated == pytest.approx(num_lines * false_matches)


def test_lines_that_nearly_all_have_a_false_match_are_not_taken_for_translated():
    """In a file that is much smaller than the other, almost every line is matched with some line."""
    num_lines, num_pairs = 500, np.array([500.0, 480.0])
    false_matches = np.array([0.97, 0.94])

    bound = bound_wrong_pairs(num_pairs, num_lines, false_matches, np.array([0.0, 0.0]), num_planted=100)

    assert bound == pytest.approx(num_lines * false_matches)


def test_pairs_of_planted_lines_alone_would_promise_too_much():
    """Every planted line has a translation, most lines of the files have none."""
    lines = search(untranslated=3000)
    planted = match_lines(lines._replace(num_planted=0))
    has_planted_line = (planted.sources >= lines.num_sources) | (planted.targets >= lines.num_targets)
    is_right = planted.sources == planted.targets

    matches = match_lines(lines)

    assert is_right[has_planted_line].mean() > 0.5
    assert ((matches.sources == matches.targets) & (matches.sources < TRANSLATED)).mean() < 0.2


def test_a_precision_that_no_margin_has_is_refused_with_the_highest():
    lines = search(untranslated=300)
    unrelated = lines._replace(forward=lines.forward._replace(rows=np.roll(lines.forward.rows, 7, axis=0)))
    curves = estimate(unrelated, match_lines(unrelated))

    with pytest.raises(InputError, match=r"no margin has precision 1\.1: the highest is .* at margin .*: lower"):
        choose_margin(curves, 1.1)
