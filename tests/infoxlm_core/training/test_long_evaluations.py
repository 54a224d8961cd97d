"""Evaluations during training with two workers: they may last, errors reach everybody, a stopped worker is found.

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
PATIENCE, LONG = 5, 7  # seconds
CASES = ["long", "full", "refused"]


@pytest.fixture(scope="module")
def left(encoder, data, tmp_path_factory) -> Path:
    """What two workers left: CASE/out, and what each says of each case in CASE-RANK."""
    base = tmp_path_factory.mktemp("evaluations")
    (base / "verbs.tsv").write_bytes(data.read_bytes())
    start(_worker, 2, encoder, base)
    return base


def _worker(rank: int, size: int, port: int, encoder: Path, base: Path) -> None:
    torch.set_num_threads(1)
    store = torch.distributed.TCPStore("127.0.0.1", port, size, rank == 0)  # they may start at different times
    torch.distributed.init_process_group(
        "gloo", timeout=timedelta(seconds=PATIENCE), rank=rank, world_size=size, store=store
    )
    distributed.on_first(lambda: time.sleep(LONG))  # also the first thing that they do together may last
    for case in CASES:
        said = _said_by(lambda case=case: _finetune(case, encoder, base))  # type: ignore[misc]
        (base / f"{case}-{rank}").write_text(said)
    if rank == 1:  # stops in the middle of a step
        time.sleep(LONG)
    (base / f"stopped-{rank}").write_text(_said_by(lambda: distributed.sum_over_workers(torch.ones(3))))


def _said_by(action: Callable[[], object]) -> str:
    try:
        action()
        return "nothing"
    except InfoXLMError as error:
        return f"{type(error).__name__}: {error}"
    except RuntimeError:
        return "lost"


def _finetune(case: str, encoder: Path, base: Path) -> None:
    settings = config(base / "verbs.tsv", selection={"rule": "joint", "every": 1}, checkpoints={"every": 1},
                      optimization={"steps": 2, "warmup_steps": 1})  # fmt: skip
    read, save = READ, SAVE

    def score(module: nn.Module) -> dict[str, float]:
        time.sleep(LONG if case == "long" and not (base / case / "run/kept").exists() else 0)
        if case == "refused":
            raise InputError("dev.json:3: no answer")
        return {"en": 0.5}

    def full(*given: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    finetuning.read_training = lambda *given: replace(read(*given), score_dev=score, development=("en",))
    best_checkpoints.save_file = full if case == "full" else save  # type: ignore[assignment]
    finetuning.finetune(settings, encoder, None, base / case / "out", base / case / "run")


READ, SAVE = finetuning.read_training, best_checkpoints.save_file


def test_an_evaluation_that_lasts_longer_than_gradients_may_is_no_lost_worker(left):
    assert [(left / f"long-{rank}").read_text() for rank in (0, 1)] == ["nothing"] * 2
    assert selection.read(left / "long/out")["chosen"] == {"*": 1}
    assert [values["dev/en"] for _, values in tracker.read(left / "long/out/metrics.jsonl")] == [0.5, 0.5]


@pytest.mark.parametrize(("case", "expected"), [("full", "StorageFull: "), ("refused", "InputError: dev.json:3")])
def test_an_error_of_an_evaluation_is_raised_on_every_worker_alike(left, case, expected):
    first, second = ((left / f"{case}-{rank}").read_text() for rank in (0, 1))

    assert first == second and first.startswith(expected)
    assert not (left / case / "out").exists()


@pytest.mark.item("F20")
def test_a_worker_that_stops_in_a_step_is_found_before_it_goes_on(left):
    assert (left / "stopped-0").read_text() == "lost"
