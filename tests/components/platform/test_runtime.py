"""A failed stage reports one line, an exit code and an outcome in the store."""

import errno
import json

import pytest

from components.platform import runtime
from infoxlm_core.errors import CorpusTooSmall, DataCorrupt, StorageFull, TrainingDiverged, WorkerLost


@pytest.mark.item("P21")
@pytest.mark.parametrize(
    ("error", "code", "name"),
    [
        (CorpusTooSmall("have=0 need=1"), 2, "CorpusTooSmall"),
        (DataCorrupt("a is missing"), 3, "DataCorrupt"),
        (OSError(errno.ENOSPC, "No space left on device"), 75, "StorageFull"),
        (RuntimeError("I/O error: No space left on device (os error 28)"), 75, "StorageFull"),
        (PermissionError(errno.EACCES, "Permission denied", "x.po"), 2, "InputError"),
        (OSError(errno.EROFS, "Read-only file system", "store/corpus"), 2, "InputError"),
        (OSError(errno.EIO, "Input/output error"), 75, "StorageUnavailable"),
        (type("PanicException", (BaseException,), {})("a regex that backtracks"), 2, "InputError"),
        (RuntimeError("surprise"), 70, "InfoXLMError"),
    ],
)
def test_every_error_has_a_line_an_exit_code_and_an_outcome(tmp_path, capsys, monkeypatch, error, code, name):
    monkeypatch.setenv("RUN_ID", "run-1")
    with pytest.raises(SystemExit) as exit_info, runtime.report_failure(str(tmp_path), "prepare_corpus"):
        raise error

    assert exit_info.value.code == code
    outcome = json.loads((tmp_path / "outcome/run-1/prepare_corpus.json").read_text())
    assert (outcome["stage"], outcome["code"], outcome["class"]) == ("prepare_corpus", code, name)
    assert capsys.readouterr().err.strip().splitlines()[-1].startswith(f"prepare_corpus: {name}: ")


def test_kubeflow_without_run_ids_is_refused_as_too_old(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("KFP_POD_NAME", "step-1")
    monkeypatch.delenv("RUN_ID", raising=False)

    with pytest.raises(SystemExit) as exit_info, runtime.report_failure(str(tmp_path), "prepare_corpus"):
        pytest.fail("the body ran")

    assert exit_info.value.code == 2
    assert "RUN_ID is not set: Kubeflow Pipelines is too old" in capsys.readouterr().err


def test_store_with_a_slash_at_its_end_is_refused(capsys):
    with pytest.raises(SystemExit), runtime.report_failure("s3://models/store/", "pretrain"):
        pytest.fail("the body ran")

    assert "store s3://models/store/: remove the slash at its end" in capsys.readouterr().err


def test_failure_of_a_run_is_that_of_its_last_failed_stage(anywhere, monkeypatch):
    for run, stage, error in (
        ("r-1", "finetune", StorageFull), ("r-2", "evaluate", ValueError), ("r-1", "pretrain", TrainingDiverged),
    ):  # fmt: skip
        monkeypatch.setenv("RUN_ID", run)
        with pytest.raises(SystemExit), runtime.report_failure(anywhere, stage):
            raise error(f"{stage} failed")

    failure = runtime.read_failure(anywhere, "r-1")

    assert (type(failure), str(failure)) == (TrainingDiverged, "pretrain: pretrain failed")
    runtime.delete_outcomes(anywhere, "r-1")
    assert isinstance(runtime.read_failure(anywhere, "r-1"), WorkerLost)
    assert "evaluate failed" in str(runtime.read_failure(anywhere, "r-2"))
