"""The clock of a training: speed since the last line, and a line every ten seconds."""

import logging

import pytest

from infoxlm_core.training import pace


@pytest.fixture
def clock(monkeypatch) -> list[float]:
    now = [0.0]
    monkeypatch.setattr(pace.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(pace.torch.cuda, "is_available", lambda: False)
    return now


def test_speed_counts_from_the_last_line_and_a_line_comes_every_ten_seconds_and_at_the_end(clock, caplog):
    speeds = []
    with caplog.at_level(logging.INFO, pace.logger.name):
        training = pace.Pace(steps=8)
        for step, seconds in enumerate((4.0, 10.0, 12.0, 14.0), start=5):
            clock[0] = seconds
            figures = {"tokens": 100.0, "loss/mlm": 2.5, "xlco/accuracy": 0.25, "gradient_norm": 9.0}
            speeds.append(training.record(step, figures, waited=1.0))

    assert [speed["tokens_per_second"] for speed in speeds] == [25, 20, 50, 50]
    assert [speed["data_wait"] for speed in speeds] == [0.25, 0.2, 0.5, 0.5]
    assert [record.message for record in caplog.records] == [
        "step 6/8 loss/mlm 2.500 xlco/accuracy 0.250, 20 tokens/s, 0:10 left",
        "step 8/8 loss/mlm 2.500 xlco/accuracy 0.250, 50 tokens/s, 0:00 left",
    ]


def test_a_run_that_was_begun_at_step_6_and_goes_back_to_4_says_how_long_the_rest_takes(clock, caplog):
    with caplog.at_level(logging.INFO, pace.logger.name):
        training = pace.Pace(steps=10)
        for step, seconds in ((7, 1.0), (8, 2.0), (5, 3.0), (6, 20.0)):
            clock[0] = seconds
            training.record(step, {"tokens": 1.0}, waited=0.0)

    assert [record.message for record in caplog.records] == ["step 6/10 , 0 tokens/s, 0:20 left"]
