"""A classifier on the test set that lies beside it: every defect of the set is one line."""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from infoxlm_core.errors import InputError
from infoxlm_core.tasks.classification import fine_tuned


@pytest.mark.parametrize(
    ("columns", "said"),
    [
        (None, r"test\.parquet is missing: give the output of finetune"),
        ({"text": ["a"], "label": ["x"]}, r"test\.parquet has no column language"),
        (dict.fromkeys(("text", "label", "language"), pa.array([], pa.string())), r"test\.parquet has no rows"),
    ],
    ids=["missing", "column", "rows"],
)
def test_a_test_set_that_finetune_did_not_write_is_refused_in_one_line(tmp_path, columns, said):
    if columns:
        pq.write_table(pa.table(columns), tmp_path / "test.parquet")

    with pytest.raises(InputError, match=said):
        fine_tuned.read_test_set(tmp_path)
