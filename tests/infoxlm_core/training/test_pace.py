"""The speed of a training: counted since the last log line, with a line every ten seconds."""

import logging

import pytest

from infoxlm_core.training import pace


@pytest.fixture
def clock(monkeypatch) -> list[float]:
    """Return a list whose only item is the time in seconds."""
    clock = [0.0]
    monkeypatch.setattr(pace.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(pace.torch.cuda, "is_available", lambda: False)
    return clock


def test_a_line_is_logged_every_ten_seconds_and_at_the_end_with_the_speed_since_the_last_line(clock, caplog):
    speeds = []
    metrics = {"tokens": 100.0, "loss/mlm": 2.5, "xlco/accuracy": 0.25, "gradient_norm": 9.0}
    with caplog.at_level(logging.INFO, pace.logger.name):
        training = pace.Pace(steps=8)
        for step, seconds in enumerate((4.0, 10.0, 12.0, 14.0), start=5):
            clock[0] = seconds
            speeds.append(training.record(step, metrics, seconds_waited=1.0))

    assert [speed["tokens_per_second"] for speed in speeds] == [25, 20, 50, 50]
    assert [speed["data_wait"] for speed in speeds] == [0.25, 0.2, 0.5, 0.5]
    assert caplog.messages == [
        "step 6/8 loss/mlm 2.500 xlco/accuracy 0.250, 20 tokens/s, 0:10 left",
        "step 8/8 loss/mlm 2.500 xlco/accuracy 0.250, 50 tokens/s, 0:00 left",
    ]


def test_the_remaining_time_of_a_run_that_resumes_at_step_6_and_rewinds_to_4_counts_repeated_steps(clock, caplog):
    with caplog.at_level(logging.INFO, pace.logger.name):
        training = pace.Pace(steps=10)
        for step, seconds in ((7, 1.0), (8, 2.0), (5, 3.0), (6, 20.0)):
            clock[0] = seconds
            training.record(step, {"tokens": 1.0}, seconds_waited=0.0)

    assert caplog.messages == ["step 6/10 , 0 tokens/s, 0:20 left"]
