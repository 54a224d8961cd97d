"""Evaluations during training with two workers: they may take long, errors reach all workers, a stop is detected.

The workers wait 5 seconds for each other's gradients.
"""

import errno
import os
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from torch import nn

from infoxlm_core.errors import InfoXLMError, InputError
from infoxlm_core.stages import finetuning
from infoxlm_core.training import distributed, tracker
from infoxlm_core.training.finetuning import best_checkpoints, selection
from tests.helpers.workers import start
from tests.toys.finetuning import config

pytestmark = pytest.mark.slow
GRADIENT_TIMEOUT = 5  # seconds
LONG_TIME = 7
read_training = finetuning.read_training
save_file = best_checkpoints.save_file


@pytest.fixture(scope="module")
def results(encoder, data, tmp_path_factory) -> Path:
    """Return a folder with the output of each case in CASE/out, and the error of each worker in CASE-RANK."""
    base = tmp_path_factory.mktemp("evaluations")
    (base / "verbs.tsv").write_bytes(data.read_bytes())
    start(run_worker, 2, encoder, base)
    return base


def run_worker(rank: int, size: int, port: int, encoder: Path, base: Path) -> None:
    torch.set_num_threads(1)
    store = torch.distributed.TCPStore("127.0.0.1", port, size, rank == 0)  # waits until both workers have started
    torch.distributed.init_process_group(
        "gloo", timeout=timedelta(seconds=GRADIENT_TIMEOUT), rank=rank, world_size=size, store=store
    )
    distributed.on_first(lambda: time.sleep(LONG_TIME))  # the first common action may take long, too
    for case in ("long", "full disk", "refused"):
        error = describe_error(lambda case=case: finetune(case, encoder, base))  # type: ignore[misc]
        (base / f"{case}-{rank}").write_text(error)
    if rank == 1:  # stops in the middle of a step
        time.sleep(LONG_TIME)
    error = describe_error(lambda: distributed.sum_over_workers(torch.ones(3)))
    (base / f"stopped worker-{rank}").write_text(error)


def describe_error(action: Callable[[], object]) -> str:
    """Run an action. Return its error, or "lost" for an error of torch, or "no error"."""
    try:
        action()
    except InfoXLMError as error:
        return f"{type(error).__name__}: {error}"
    except RuntimeError:
        return "lost"
    return "no error"


def finetune(case: str, encoder: Path, base: Path) -> None:
    """Fine-tune for two steps, with an evaluation and a checkpoint after each."""
    settings = config(base / "verbs.tsv", selection={"rule": "joint", "every": 1}, checkpoints={"every": 1},
                      optimization={"steps": 2, "warmup_steps": 1})  # fmt: skip

    def score(module: nn.Module) -> dict[str, float]:
        assert distributed.rank() == 0
        is_first_evaluation = not (base / case / "run/kept").exists()
        if case == "long" and is_first_evaluation:
            time.sleep(LONG_TIME)
        if case == "refused":
            raise InputError("dev.json:3: no answer")
        return {"en": 0.5}

    def save(tensors: dict[str, torch.Tensor], path: Path) -> None:
        if case == "full disk":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        save_file(tensors, path)

    finetuning.read_training = lambda *args: replace(read_training(*args), score_dev=score, dev_languages=("en",))
    best_checkpoints.save_file = save  # type: ignore[assignment]
    finetuning.finetune(settings, encoder, None, base / case / "out", base / case / "run")


def test_an_evaluation_may_take_longer_than_workers_wait_for_gradients(results):
    for rank in range(2):
        assert (results / f"long-{rank}").read_text() == "no error"
    assert selection.read(results / "long/out")["chosen"] == {"*": 1}
    assert [values["dev/en"] for _, values in tracker.read(results / "long/out/metrics.jsonl")] == [0.5, 0.5]


@pytest.mark.parametrize(("case", "expected"), [("full disk", "StorageFull: "), ("refused", "InputError: dev.json:3")])
def test_an_error_of_an_evaluation_is_raised_on_all_workers(results, case, expected):
    first_error = (results / f"{case}-0").read_text()

    assert first_error.startswith(expected)
    assert (results / f"{case}-1").read_text() == first_error
    assert not (results / case / "out").exists()


@pytest.mark.item("F20")
def test_a_worker_that_stops_in_a_step_is_detected_by_the_others(results):
    assert (results / "stopped worker-0").read_text() == "lost"
