"""The file of a run's curves: every point is in it once and exactly, also after a crash."""

import json
import math

import pytest

from infoxlm_core.errors import DataCorrupt
from infoxlm_core.training.tracker import FileTracker, read


def test_a_point_is_in_the_file_as_soon_as_it_is_logged(tmp_path):
    path = tmp_path / "run/metrics.jsonl"
    tracker = FileTracker(path)

    tracker.log(10, {"loss/mlm": 2.5, "rate": 1e-4})

    assert path.read_text() == '{"step": 10, "loss/mlm": 2.5, "rate": 0.0001}\n'


def test_resume_deletes_the_points_after_its_step(tmp_path):
    tracker = FileTracker(tmp_path / "metrics.jsonl")
    for step in (1, 2, 3, 4):
        tracker.log(step, {"loss": float(step)})

    tracker.resume(2)
    tracker.log(3, {"loss": 30.0})
    tracker.close()

    assert read(tmp_path / "metrics.jsonl") == [(1, {"loss": 1.0}), (2, {"loss": 2.0}), (3, {"loss": 30.0})]
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


@pytest.mark.parametrize("length", range(1, len('{"step": 2, "loss": 0.1}\n')))
def test_a_partly_written_last_line_is_ignored_and_replaced(tmp_path, length):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "loss": 0.2}\n' + '{"step": 2, "loss": 0.1}\n'[:length])
    assert read(path) == [(1, {"loss": 0.2})]

    FileTracker(path).log(2, {"loss": 0.3})

    assert read(path) == [(1, {"loss": 0.2}), (2, {"loss": 0.3})]


def test_numbers_are_read_exactly_even_if_they_are_not_finite(tmp_path):
    tracker = FileTracker(tmp_path / "metrics.jsonl")
    tracker.log(1, {"third": 1 / 3, "huge": 1e308, "nan": float("nan"), "inf": float("-inf")})
    tracker.resume(1)

    [(_, values)] = read(tmp_path / "metrics.jsonl")

    assert math.isnan(values.pop("nan"))
    assert values == {"third": 1 / 3, "huge": 1e308, "inf": float("-inf")}


@pytest.mark.parametrize("line", ["{", "[1]", '{"loss": 1.0}', '{"step": 1} {"step": 2}', "1", "\xff"])
def test_a_damaged_line_is_named(tmp_path, line):
    path = tmp_path / "metrics.jsonl"
    path.write_text(f"{json.dumps({'step': 1})}\n{line}\n{json.dumps({'step': 3})}\n", encoding="latin-1")

    with pytest.raises(DataCorrupt, match=r"metrics\.jsonl:2: .* remove this line"):
        read(path)
