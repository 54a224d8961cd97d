"""The guard: which steps are bad, how far a training goes back, and which data it then leaves out (F23)."""

import copy
import json
import math
import random

import pytest

from infoxlm_core.training import guard
from infoxlm_core.training.checkpoints import select_outdated
from infoxlm_core.training.guard import DISTANCE, MIN_WINDOW, WINDOW, Guard


def judge_losses(watch: Guard, losses: list[float], kind: str = "") -> list[str]:
    """Return what the guard says of steps with these losses, and gradient norms a tenth of them."""
    return [watch.judge(kind, loss, loss / 10, True) for loss in losses]


def judge_norms(watch: Guard, norms: list[float]) -> tuple[int, int]:
    """Return how many of the steps with these norms, and losses of a healthy run, are bad; and the most in a row that
    would take a training back."""
    bad_steps, most_in_a_row = 0, 0
    for loss, norm in zip(healthy(len(norms)), norms, strict=True):
        bad_steps += watch.judge("", loss, norm, True) != ""
        most_in_a_row = max(most_in_a_row, watch.bad_in_a_row)
    return bad_steps, most_in_a_row


def healthy(count: int) -> list[float]:
    return [5 + 0.1 * (number % 2) for number in range(count)]  # mean 5.05, deviation 0.05


@pytest.mark.item("P14")
def test_a_step_far_above_those_before_it_is_bad_and_enters_the_window_as_its_limit():
    watch = Guard(6.0)

    reasons = judge_losses(watch, [*healthy(WINDOW + 72), 5.3, 5.4])

    assert reasons == [""] * (WINDOW + 73) + ["loss 5.4 is above 5.379"]
    window = watch.recent[""]
    assert len(window) == WINDOW and [loss for loss, _ in window[-2:]] == pytest.approx([5.3, 5.379], abs=5e-4)


def test_what_falls_is_good_however_fast_and_so_is_everything_among_the_first_steps():
    assert judge_losses(Guard(6.0), [*healthy(MIN_WINDOW - 1), 1e9]) == [""] * MIN_WINDOW
    assert judge_losses(Guard(6.0), [*healthy(MIN_WINDOW), 1e-9])[-1] == ""
    assert judge_losses(Guard(6.0), [*healthy(MIN_WINDOW), 1e9])[-1] != ""
    assert judge_losses(Guard(0.0), [*healthy(MIN_WINDOW), 1e9])[-1] == ""  # switched off


@pytest.mark.parametrize(
    ("rise", "most_bad_steps"),
    [
        (lambda step: 1 + min(step / 40, 1), 20),  # doubles within 40 steps
        (lambda step: 1.1, 10),
        (lambda step: 10.0, 50),
    ],
)
def test_a_lasting_rise_of_the_gradient_norm_is_accepted_and_takes_no_training_back(rise, most_bad_steps):
    rng = random.Random(1)
    levels = [1.0] * 200 + [rise(step) for step in range(400)]
    norms = [level * rng.gauss(1, 0.01) for level in levels]

    bad_steps, most_in_a_row = judge_norms(Guard(6.0), norms)

    assert 0 < bad_steps <= most_bad_steps
    assert most_in_a_row == 0


def test_a_lasting_jump_of_the_loss_is_accepted_if_the_loss_does_not_double():
    watch, jump = Guard(6.0), [9.0 + 0.1 * (step % 2) for step in range(200)]
    judge_losses(watch, healthy(WINDOW))

    reasons = judge_losses(watch, jump[:1])
    taken_back = watch.bad_in_a_row > 0
    for loss in jump[1:]:
        reasons += judge_losses(watch, [loss])
        taken_back = taken_back or watch.bad_in_a_row > 0

    assert 3 < sum(reason != "" for reason in reasons) < 30
    assert not taken_back


def test_single_spikes_of_the_norm_take_no_long_training_back_however_many():
    """A toy run of 3,000 steps, whose norms grew from 3 to 14 with rare large ones, was ended for 18 in 1,000 steps."""
    rng = random.Random(1)
    norms = [math.exp(step / 2_000) * rng.lognormvariate(0, 0.25) for step in range(3_000)]
    for step in range(59, 3_000, 60):
        norms[step] *= 3

    bad_steps, most_in_a_row = judge_norms(Guard(6.0), norms)

    assert bad_steps > 20
    assert most_in_a_row == 0


@pytest.mark.item("F22")
def test_the_gradient_alone_makes_a_step_bad_and_so_does_any_number_that_is_not_finite():
    watch = Guard(6.0)
    judge_losses(watch, healthy(MIN_WINDOW))

    assert watch.judge("", 5.0, 50.0, True) == "gradient norm 50 is above 0.535"
    assert watch.judge("", 5.0, 0.5, False) == "not all numbers are finite (loss 5, gradient norm 0.5)"
    assert Guard(0.0).judge("", float("nan"), 0.5, False)


def test_steps_of_different_kinds_are_not_compared():
    watch = Guard(6.0)
    judge_losses(watch, healthy(MIN_WINDOW), kind="mlm/en")

    assert judge_losses(watch, [50.0], kind="mlm/sw") == [""]
    assert judge_losses(watch, [50.0], kind="mlm/en") != [""]


@pytest.mark.parametrize("deviations", [0.0, 6.0])
def test_steps_of_a_diverged_training_are_counted_until_another_step_comes(deviations):
    watch, counts = Guard(deviations), []
    judge_losses(watch, healthy(MIN_WINDOW))

    for loss, norm, finite in [(5, 0.5, False), (11, 0.5, True), (5, 0.5, False), (9, 50, True), (5, 0.5, False)]:
        watch.judge("", loss, norm, finite)
        counts.append(watch.bad_in_a_row)

    assert counts == ([1, 2, 3, 0, 1] if deviations else [1, 0, 1, 0, 1])


def test_after_any_number_of_rewinds_no_position_is_seen_twice_but_those_before_the_checkpoint():
    for seed in range(200):
        rng, watch, used = random.Random(seed), Guard(6.0), []
        for _ in range(rng.randrange(1, 5)):
            for step in range(len(used), len(used) + rng.randrange(1, 30)):
                used.append(step + watch.skipped_positions(step))
            past, to, last = copy.deepcopy(watch), rng.randrange(len(used)), used[-1]
            watch.rewind(past, to, len(used))
            assert to + watch.skipped_positions(to) == last + 1  # on with what comes next
            assert [step + watch.skipped_positions(step) for step in range(to)] == used[:to]
            del used[to:]


def test_a_guard_comes_back_from_a_checkpoint_with_every_bit():
    watch = Guard(6.0)
    judge_losses(watch, [*(1 / number for number in range(3, 99)), 1e9])
    watch.rewind(copy.deepcopy(watch), 40, 97)
    saved = watch.state()

    again = Guard.from_state(6.0, json.loads(json.dumps(saved)))
    judge_losses(watch, [7.0])

    assert again.state() == saved != watch.state()  # the guard judges the next steps while the copy is written


@pytest.mark.parametrize("every", [1, 7, 60, 100, 150])
@pytest.mark.parametrize("keep", [1, 3])
def test_two_checkpoints_from_before_any_trouble_are_always_kept(every, keep):
    spacing, left = guard.target_spacing(every), list[str]()
    for step in range(every, 1_200, every):
        left.append(f"step={step:010d}")
        for old in select_outdated(left, keep, (), spacing):
            left.remove(old)
        behind = [number for number in range(spacing, step - DISTANCE + 1, spacing)]

        assert {f"step={number:010d}" for number in behind[-2:]} <= set(left)
        assert len(left) <= keep + 3
        assert left[-keep:] == [f"step={number:010d}" for number in range(every, step + 1, every)][-keep:]
