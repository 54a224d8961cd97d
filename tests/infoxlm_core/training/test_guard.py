"""The guard: which steps are bad, how far a training goes back, and which data it then leaves out (F23)."""

import copy
import json
import random

import pytest

from infoxlm_core.training import guard
from infoxlm_core.training.checkpoints import select_outdated
from infoxlm_core.training.guard import DISTANCE, MIN_WINDOW, WINDOW, Guard


def seen(watch: Guard, *values: float, kind: str = "") -> list[str]:
    """What the guard says of steps with these losses, and gradient norms a tenth of them."""
    return [watch.judge(number, kind, value, value / 10, True) for number, value in enumerate(values, 1)]


def healthy(count: int) -> list[float]:
    return [5 + 0.1 * (number % 2) for number in range(count)]  # mean 5.05, deviation 0.05


@pytest.mark.item("P14")
def test_a_step_far_above_the_good_ones_before_it_is_bad_and_is_not_remembered_among_them():
    watch = Guard(6.0)

    said = seen(watch, *healthy(WINDOW + 72), 5.3, 5.4, 5.4)

    assert said[:-2] == [""] * (WINDOW + 73)
    assert said[-2] == said[-1] == "loss 5.4 is above 5.379"  # 5.3 was the last that came into the window
    assert watch.bad == [WINDOW + 74, WINDOW + 75] and len(watch.good[""]) == WINDOW


def test_what_falls_is_good_however_fast_and_so_is_everything_among_the_first_steps():
    assert seen(Guard(6.0), *healthy(MIN_WINDOW - 1), 1e9) == [""] * MIN_WINDOW
    assert seen(Guard(6.0), *healthy(MIN_WINDOW), 1e-9)[-1] == ""
    assert seen(Guard(6.0), *healthy(MIN_WINDOW), 1e9)[-1] != ""
    assert seen(Guard(0.0), *healthy(MIN_WINDOW), 1e9)[-1] == ""  # switched off


@pytest.mark.item("F22")
def test_the_gradient_alone_makes_a_step_bad_and_so_does_any_number_that_is_not_finite():
    watch = Guard(6.0)
    seen(watch, *healthy(MIN_WINDOW))

    assert watch.judge(99, "", 5.0, 50.0, True) == "gradient norm 50 is above 0.535"
    assert watch.judge(99, "", 5.0, 0.5, False) == "not all numbers are finite (loss 5, gradient norm 0.5)"
    assert Guard(0.0).judge(1, "", float("nan"), 0.5, False)


def test_steps_of_different_kinds_are_not_compared():
    watch = Guard(6.0)
    seen(watch, *healthy(MIN_WINDOW), kind="mlm/en")

    assert seen(watch, 50.0, kind="mlm/sw") == [""] and seen(watch, 50.0, kind="mlm/en") != [""]


def test_bad_steps_in_a_row_are_trouble_and_so_are_more_than_one_in_a_hundred():
    watch = Guard(6.0, bad=[100 * number for number in range(1, 12)])

    assert watch.trouble(1_099, 0, 3) == "11 of the last 1,000 steps up to step 1099"
    assert watch.trouble(1_100, 0, 3) == ""
    assert watch.trouble(1_100, 3, 3) == "3 steps in a row up to step 1100"
    assert Guard(0.0, bad=watch.bad).trouble(1_099, 0, 3) == ""  # without a guard, as in fine-tuning


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
    seen(watch, *(1 / number for number in range(3, 99)), 1e9)
    watch.rewind(copy.deepcopy(watch), 40, 97)
    saved = watch.state()

    again = Guard.from_state(6.0, json.loads(json.dumps(saved)))
    seen(watch, 7.0)

    assert again.state() == saved != watch.state()  # which goes on, while what was saved is written
    assert Guard.from_state(6.0, None) == Guard(6.0)


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
