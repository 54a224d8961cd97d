"""A classifier is measured on the test set beside it: defects are refused, and each row is a question."""

import pandas as pd
import pytest

from infoxlm_core.errors import InputError
from infoxlm_core.tasks.classification.held_out import read_test_set, tabulate


@pytest.mark.parametrize(
    ("columns", "reason"),
    [
        (None, r"test\.parquet is missing. Give the output of finetune"),
        ({"text": ["a"], "label": ["x"]}, r"test\.parquet has no column language"),
        ({"text": [], "label": [], "language": []}, r"test\.parquet has no rows"),
    ],
    ids=["missing", "column", "rows"],
)
def test_a_test_set_not_written_by_finetune_is_refused(tmp_path, columns, reason):
    if columns:
        pd.DataFrame(columns, dtype="string").to_parquet(tmp_path / "test.parquet")

    with pytest.raises(InputError, match=reason):
        read_test_set(tmp_path)


def test_equal_rows_are_different_questions():
    rows = pd.DataFrame({"text": ["a", "a"], "label": ["x", "x"], "language": ["en", "en"], "predicted": ["x", "y"]})

    table = tabulate(rows)

    assert table["question"].nunique() == 2
    assert table["right"].tolist() == [True, False]
