"""How far long work is: a log line now and then where nobody watches."""

import logging

import pytest

from infoxlm_core import progress


@pytest.mark.parametrize(
    ("seconds", "done", "total", "said"),
    [(10, 1, 21, "3:20 left"), (60, 30, 30, "0:00 left"), (1, 1, 7261, "121:00 left")],
)
def test_the_rest_goes_as_fast_as_what_is_done(seconds, done, total, said):
    assert progress.time_left(seconds, done, total) == said


def test_a_log_line_says_how_far_it_is_and_the_next_has_to_wait(monkeypatch, caplog):
    now = iter([0.0, 10.0, 16.0, 20.0])
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(now))
    monkeypatch.setattr(progress.sys.stderr, "isatty", lambda: False, raising=False)

    with caplog.at_level(logging.INFO, progress.logger.name), progress.progress("encoding", 8, "files") as advance:
        for _ in range(3):
            advance(2)

    assert [record.message for record in caplog.records] == ["encoding: 4 of 8 files, 0:16 left"]
