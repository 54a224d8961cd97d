"""Held-out questions: what is drawn, and how answers are counted, on vectors that a reader can check by hand."""

import math

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from infoxlm_core.config import EvaluationConfig
from infoxlm_core.errors import InputError
from infoxlm_core.tasks.embedding import Place
from infoxlm_core.tasks.held_out import draw_pairs, draw_sentences, score, sum_up
from infoxlm_core.tasks.retrieval.files import read_held_out
from infoxlm_core.tasks.retrieval.nearest import search
from infoxlm_core.tasks.task import mean_over


def test_drawn_pairs_share_no_side_and_depend_on_the_seed_alone():
    rows = [("Save", "Speichern"), ("save", "Sichern"), ("Keep", "speichern"), ("Open", "Öffnen"), ("Close", "Zu")]

    drawn = draw_pairs(rows, EvaluationConfig(seed=1))

    assert len({a.casefold() for a, _ in drawn}) == len({b.casefold() for _, b in drawn}) == len(drawn) >= 3
    assert drawn == draw_pairs(rows, EvaluationConfig(seed=1))
    assert len(draw_pairs(rows, EvaluationConfig(retrieval_pairs=2))) == 2


def test_perplexity_sentences_are_distinct_and_of_every_language():
    held_out = {code: [(f"s{i}", f"{code}{i % 15}") for i in range(20)] for code in ("de", "zh")}

    drawn = draw_sentences("en", held_out, EvaluationConfig(perplexity_sentences=10))

    assert list(drawn) == ["en", "de", "zh"]
    assert all(len(set(sentences)) == 10 for sentences in drawn.values())


@pytest.mark.item("A23")
def test_the_two_directions_can_differ():
    degrees = {"sources": [0, 20], "targets": [15, 40]}  # source 2 is nearer to target 1; both targets find their own
    place = Place("mean", 0)
    sources, targets = (
        {place: torch.tensor([[math.cos(math.radians(a)), math.sin(math.radians(a))] for a in angles])}
        for angles in degrees.values()
    )

    found = search([("de", sources, targets)])["de"][place]
    shares = score({way: rows == torch.arange(2) for way, rows in found.items()}, subset=torch.tensor([False, True]))

    assert shares == {"from_pivot": {"all": 0.5, "subset": 0.0}, "to_pivot": {"all": 0.5, "subset": 1.0}}


@pytest.mark.item("A21")
def test_every_language_weighs_the_same_and_an_empty_subset_counts_for_nothing():
    def direction(share: float, subset: float | None) -> dict:
        return {"all": share, "subset": subset}

    cells = {
        "de": {"from_pivot": direction(0.8, 0.5), "to_pivot": direction(0.6, 0.3)},
        "zh": {"from_pivot": direction(0.2, None), "to_pivot": direction(0.0, None)},
    }

    rows = {code: sum_up(cell) for code, cell in cells.items()}
    found = mean_over(rows)

    assert found["mean"] == pytest.approx(0.4)
    assert (found["from_pivot"], found["to_pivot"]) == pytest.approx((0.5, 0.3))
    assert found["no_overlap"] == pytest.approx(0.4)
    assert rows["zh"]["no_overlap"] is None
    assert mean_over({"zh": rows["zh"]})["no_overlap"] is None


def test_a_held_out_file_that_is_not_parquet_is_named(tmp_path):
    path = tmp_path / "held_out/en-de/one.parquet"
    path.parent.mkdir(parents=True)
    path.write_text("no table")

    with pytest.raises(InputError, match=r"en-de/one\.parquet cannot be read"):
        read_held_out(tmp_path)


@pytest.mark.parametrize(
    ("folder", "column", "said"),
    [
        ("en-de", [None], "row 1 lacks a side"),
        ("en-de", [7], "column target is int64, not text"),
        (r"en-$\frac{$", ["Hallo"], "does not hold columns source and target of a pair such as en-de"),
        ("en-<script>", ["Hallo"], "does not hold columns source and target of a pair such as en-de"),
    ],
)
def test_a_held_out_file_that_is_not_ours_is_refused(tmp_path, folder, column, said):
    path = tmp_path / "held_out" / folder / "one.parquet"
    path.parent.mkdir(parents=True)
    kind = pa.int64() if column == [7] else pa.string()
    pq.write_table(pa.table({"source": ["Hello"], "target": pa.array(column, kind)}), path)

    with pytest.raises(InputError, match=said):
        read_held_out(tmp_path)
