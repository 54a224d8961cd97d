"""A classifier on the test set beside it: every defect of the set is one line, and each row is a question."""

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from infoxlm_core.errors import InputError
from infoxlm_core.tasks.classification.held_out import read_test_set, tabulate


@pytest.mark.parametrize(
    ("columns", "said"),
    [
        (None, r"test\.parquet is missing. Give the output of finetune"),
        ({"text": ["a"], "label": ["x"]}, r"test\.parquet has no column language"),
        (dict.fromkeys(("text", "label", "language"), pa.array([], pa.string())), r"test\.parquet has no rows"),
    ],
    ids=["missing", "column", "rows"],
)
def test_a_test_set_that_finetune_did_not_write_is_refused_in_one_line(tmp_path, columns, said):
    if columns:
        pq.write_table(pa.table(columns), tmp_path / "test.parquet")

    with pytest.raises(InputError, match=said):
        read_test_set(tmp_path)


def test_the_same_labelled_row_twice_is_two_questions():
    rows = pd.DataFrame({"text": ["a", "a"], "label": ["x", "x"], "language": ["en", "en"], "predicted": ["x", "y"]})

    table = tabulate(rows)

    assert table["question"].nunique() == 2
    assert table["right"].tolist() == [True, False]
