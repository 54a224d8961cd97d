"""What Argo holds of a run: the model of its size, and how a suite is cut so that it fits."""

import pytest

from components.platform import workflow
from infoxlm_core.errors import ConfigError


def test_a_task_for_every_point_breaks_where_it_was_calculated_to():
    held = max(tasks for tasks in range(1000) if workflow.status_bytes(tasks) <= workflow.HELD)

    assert 185 <= held <= 190
    assert workflow.status_bytes(242) >> 10 == pytest.approx(1300, rel=0.02)  # the paper's suite, two models


@pytest.mark.parametrize(("points", "size"), [(1, 1), (149, 1), (150, 8), (242, 8), (1192, 8), (1193, 9), (2384, 16)])
def test_a_suite_has_a_task_for_every_point_until_they_are_too_many_and_then_8_to_16(points, size):
    assert workflow.points_per_task(points) == size
    assert workflow.status_bytes(-(-points // size)) < workflow.HELD


def test_a_suite_that_no_size_of_batch_helps_is_one_clear_line():
    with pytest.raises(ConfigError, match="150 tasks of 16, 821 KiB of status, and Argo holds 1024"):
        workflow.points_per_task(2400)


@pytest.mark.parametrize(("points", "size"), [(1, 8), (9, 8), (242, 8), (7, 1)])
def test_batches_have_every_point_once_and_are_even(points, size):
    batches = workflow.share_out(range(points), size)

    sizes = {len(batch) for batch in batches}
    assert sorted(point for batch in batches for point in batch) == list(range(points))
    assert max(sizes) <= size and max(sizes) - min(sizes) <= 1
