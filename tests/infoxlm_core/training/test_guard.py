"""The guard: which steps are bad, when a training has diverged, and which data a rewind skips."""

import copy
import json
import random

import pytest

from infoxlm_core.training import guard
from infoxlm_core.training.checkpoints import select_outdated
from infoxlm_core.training.guard import MIN_WINDOW, REWIND_DISTANCE, WINDOW, Guard


def judge_losses(watch: Guard, losses: list[float], kind: str = "") -> list[str]:
    """Return the guard's reasons for steps with these losses, and gradient norms of a tenth of them."""
    return [watch.check_step(kind, loss, loss / 10, True) for loss in losses]


def make_healthy_losses(count: int) -> list[float]:
    """Return losses with mean 5.05 and standard deviation 0.05."""
    return [5 + 0.1 * (number % 2) for number in range(count)]


@pytest.mark.item("P14")
def test_a_loss_far_above_the_last_ones_is_bad_and_enters_the_window_as_its_limit():
    watch = Guard(6.0)

    reasons = judge_losses(watch, [*make_healthy_losses(WINDOW + 72), 5.3, 5.4])

    assert reasons == [""] * (WINDOW + 73) + ["loss 5.4 is above 5.379"]
    window = watch.window_by_kind[""]
    assert len(window) == WINDOW
    assert [loss for loss, _ in window[-2:]] == pytest.approx([5.3, 5.379], abs=5e-4)


@pytest.mark.parametrize(
    ("deviations", "steps_before", "loss", "is_bad"),
    [
        (6.0, MIN_WINDOW, 1e9, True),
        (6.0, MIN_WINDOW - 1, 1e9, False),  # too few steps to compare with
        (6.0, MIN_WINDOW, 1e-9, False),  # a low loss is never bad
        (0.0, MIN_WINDOW, 1e9, False),  # the guard is disabled
    ],
)
def test_a_loss_is_bad_only_if_it_is_high_and_follows_enough_steps(deviations, steps_before, loss, is_bad):
    reasons = judge_losses(Guard(deviations), [*make_healthy_losses(steps_before), loss])

    assert [reason != "" for reason in reasons] == [False] * steps_before + [is_bad]


@pytest.mark.parametrize(
    ("rise", "most_bad_steps"),
    [
        (lambda step: 1 + min(step / 40, 1), 20),  # doubles within 40 steps
        (lambda step: 1.1, 10),
        (lambda step: 10.0, 50),
        (lambda step: 3.0 if step % 60 == 59 else 1.0, 7),  # single spikes
    ],
)
def test_a_lasting_rise_or_single_spikes_of_the_gradient_norm_do_not_end_a_training(rise, most_bad_steps):
    rng = random.Random(1)
    levels = [1.0] * 200 + [rise(step) for step in range(400)]
    watch = Guard(6.0)
    bad_steps = 0

    for loss, level in zip(make_healthy_losses(600), levels, strict=True):
        bad_steps += watch.check_step("", loss, level * rng.gauss(1, 0.01), True) != ""
        assert watch.consecutive_diverged_steps == 0

    assert 0 < bad_steps <= most_bad_steps


def test_a_lasting_rise_of_the_loss_to_less_than_twice_its_limit_is_accepted():
    watch = Guard(6.0)
    judge_losses(watch, make_healthy_losses(WINDOW))
    bad_steps = 0

    for step in range(200):
        [reason] = judge_losses(watch, [9.0 + 0.1 * (step % 2)])
        bad_steps += reason != ""
        assert watch.consecutive_diverged_steps == 0

    assert 3 < bad_steps < 30


@pytest.mark.item("F22")
def test_a_high_gradient_norm_or_any_number_that_is_not_finite_makes_a_step_bad():
    watch = Guard(6.0)
    judge_losses(watch, make_healthy_losses(MIN_WINDOW))

    assert watch.check_step("", 5.0, 50.0, True) == "gradient norm 50 is above 0.535"
    assert watch.check_step("", 5.0, 0.5, False) == "not all numbers are finite (loss 5, gradient norm 0.5)"
    assert Guard(0.0).check_step("", float("nan"), 0.5, False)


def test_steps_of_different_kinds_are_not_compared():
    watch = Guard(6.0)
    judge_losses(watch, make_healthy_losses(MIN_WINDOW), kind="mlm/en")

    assert judge_losses(watch, [50.0], kind="mlm/sw") == [""]
    assert judge_losses(watch, [50.0], kind="mlm/en") != [""]


@pytest.mark.parametrize(("deviations", "expected_counts"), [(0.0, [1, 0, 1, 0, 1]), (6.0, [1, 2, 3, 0, 1])])
def test_diverged_steps_are_counted_until_the_next_other_step(deviations, expected_counts):
    watch = Guard(deviations)
    judge_losses(watch, make_healthy_losses(MIN_WINDOW))
    counts = []

    for loss, norm, is_finite in [(5, 0.5, False), (11, 0.5, True), (5, 0.5, False), (9, 50, True), (5, 0.5, False)]:
        watch.check_step("", loss, norm, is_finite)
        counts.append(watch.consecutive_diverged_steps)

    assert counts == expected_counts


def test_after_any_number_of_rewinds_only_the_data_before_the_target_is_used_again():
    for seed in range(200):
        rng = random.Random(seed)
        watch = Guard(6.0)
        positions: list[int] = []  # in the data, by step
        for _ in range(rng.randrange(1, 5)):
            for step in range(len(positions), len(positions) + rng.randrange(1, 30)):
                positions.append(step + watch.skipped_positions(step))
            target = rng.randrange(len(positions))
            watch.rewind(copy.deepcopy(watch), target, len(positions))
            assert target + watch.skipped_positions(target) == positions[-1] + 1
            assert [step + watch.skipped_positions(step) for step in range(target)] == positions[:target]
            del positions[target:]


def test_the_state_of_the_guard_is_restored_exactly_from_json():
    watch = Guard(6.0)
    judge_losses(watch, [*(1 / number for number in range(3, 99)), 1e9])
    watch.rewind(copy.deepcopy(watch), 40, 97)
    state = watch.state()

    restored = Guard.from_state(6.0, json.loads(json.dumps(state)))
    judge_losses(watch, [7.0])

    assert restored.state() == state
    assert watch.state() != state  # later steps do not change a state that is being written


@pytest.mark.parametrize("every", [1, 7, 60, 100, 150])
@pytest.mark.parametrize("keep", [1, 3])
def test_the_newest_checkpoints_and_two_distant_rewind_targets_are_kept(every, keep):
    rewind_interval = guard.compute_rewind_interval(every)
    names: list[str] = []
    for step in range(every, 1_200, every):
        names.append(f"step={step:010d}")
        for outdated in select_outdated(names, keep, (), rewind_interval):
            names.remove(outdated)

        distant_targets = range(rewind_interval, step - REWIND_DISTANCE + 1, rewind_interval)
        newest_steps = range(every, step + 1, every)
        assert {f"step={target:010d}" for target in distant_targets[-2:]} <= set(names)
        assert names[-keep:] == [f"step={newest_step:010d}" for newest_step in newest_steps[-keep:]]
        assert len(names) <= keep + 3
