"""Without a terminal, the progress of long work is logged from time to time with the remaining time."""

import logging

import pytest

from infoxlm_core import progress


@pytest.mark.parametrize(
    ("seconds", "done", "total", "remaining"),
    [(10, 1, 21, "3:20 left"), (60, 30, 30, "0:00 left"), (1, 1, 7261, "121:00 left")],
)
def test_remaining_time_assumes_constant_speed(seconds, done, total, remaining):
    assert progress.format_remaining_time(seconds, done, total) == remaining


def test_log_lines_are_at_least_15_seconds_apart(monkeypatch, caplog):
    clock = iter([0.0, 10.0, 16.0, 20.0])
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(clock))
    monkeypatch.setattr(progress.sys.stderr, "isatty", lambda: False, raising=False)

    with caplog.at_level(logging.INFO, progress.logger.name), progress.show_progress("encoding", 8, "files") as advance:
        for _ in range(3):
            advance(2)

    assert [record.message for record in caplog.records] == ["encoding: 4 of 8 files, 0:16 left"]
