"""Why a stage failed, as a machine that only knows the store reads it."""

import pytest

from components.platform import outcomes, runtime
from infoxlm_core.errors import InputError, StorageFull


@pytest.mark.slow
def test_outcomes_of_a_pipeline_run_are_read_from_the_store_the_last_one_last(bucket, monkeypatch):
    for run, stage, code in (("r-1", "pretrain", 75), ("r-2", "evaluate", 70), ("r-1", "job-x", 5)):
        monkeypatch.setenv("RUN_ID", run)
        with pytest.raises(SystemExit), runtime.ending_clearly("s3://models/store", stage):
            raise {75: StorageFull, 70: ValueError, 5: InputError}[code](f"{stage} failed")

    found = outcomes.read("s3://models/store", "r-1")

    assert {said["stage"]: said["message"] for said in found} == {
        "pretrain": "pretrain failed",
        "job-x": "job-x failed",
    }
    assert outcomes.read("s3://models/store", "r-3") == []
