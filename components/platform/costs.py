"""What steps cost, by what was measured where the work was done. It lies beside the artifacts, never in one.

    STORE/cost/pretrained/3f2a…/RUN.ATTEMPT.json    {"run", "seconds", "devices", "device"}: an attempt to make it
    STORE/cost/runs/RUN/pretrain.json               a step of a run, all its attempts; of a trial one folder down

An attempt is written down every minute and when it ends, however it ends: one that is killed loses less than a minute.
"""

import contextlib
import json
import logging
import os
import re
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from typing import Any

from typing_extensions import TypedDict

from components.adapters import storage
from components.platform import artifacts
from infoxlm_core import outside
from infoxlm_core.errors import DataCorrupt, InfoXLMError
from infoxlm_core.results.cost import StepCost
from infoxlm_core.results.trials import Trial

logger = logging.getLogger(__name__)

GPU, CPU = "GPU", "CPU"
_NOTE_SECONDS = 60.0
_STEPS = ("prepare_corpus", "tokenize_corpus", "pretrain", "finetune", "finetune_of_start", "evaluate")  # in a table


class Attempt(TypedDict):
    """A note of `measured`."""

    run: str
    seconds: float
    devices: int
    device: str


@contextlib.contextmanager
def measured(
    store: str, kind: str, name: str, devices: int, device: str, clock: Callable[[], float] = time.monotonic
) -> Iterator[None]:
    """Write down how long the block takes that makes the artifact `kind/name`.

    Args:
        store: directory, or s3://bucket/prefix.
        kind: of the artifact.
        name: of the artifact.
        devices: how many work on it.
        device: GPU; or CPU, whose number is that of the processes.
        clock: seconds of a clock that is never set.
    """
    run, over, began = _run(), threading.Event(), clock()
    place = f"cost/{kind}/{name}/{run}.{uuid.uuid4().hex}.json"

    def note() -> None:
        found = {"run": run, "seconds": clock() - began, "devices": devices, "device": device}
        with contextlib.suppress(InfoXLMError, OSError):  # work goes on, whatever becomes of its price
            artifacts.write(store, place, json.dumps(found))

    def keep_noting() -> None:
        note()  # that there was one
        while not over.wait(_NOTE_SECONDS):
            note()

    thread = threading.Thread(target=keep_noting, name="cost", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        note()


def report(store: str, trial: Mapping[str, Any] | None, step: str, kind: str, name: str) -> StepCost:
    """What a step of this pipeline run has cost that has made, or found, `kind/name`; it is kept for `of_run`."""
    run = _run()
    attempts = _read_all(f"{store}/cost/{kind}/{name}", Attempt)
    device = GPU if any(one["device"] == GPU for one in attempts) else CPU if attempts else ""
    hours = [one["seconds"] * one["devices"] / 3600 for one in attempts if one["device"] == device]
    own = [one["run"] == run for one in attempts if one["device"] == device]
    cost = StepCost(
        step=step,
        device=device,
        hours=sum((spent for spent, ours in zip(hours, own, strict=True) if ours), 0.0),
        attempts=sum(own),
        others=sum((spent for spent, ours in zip(hours, own, strict=True) if not ours), 0.0),
    )
    artifacts.write(store, f"{_folder(trial)}/{step}.json", json.dumps(asdict(cost)))
    logger.info("cost of %s: %s", step, cost)
    return cost


def of_run(store: str, trial: Mapping[str, Any] | None = None) -> list[StepCost]:
    """What the steps of this pipeline run, or of a trial, have cost so far, in the order of the pipeline."""
    found = _read_all(f"{store}/{_folder(trial)}", StepCost)
    return sorted(found, key=lambda one: _STEPS.index(one.step))


def metrics(*costs: StepCost) -> dict[str, float]:
    """Names and hours for a tracker, such as `cost/gpu_hours/pretrain`."""
    return {f"cost/{one.device.lower()}_hours/{one.step}": one.hours for one in costs if one.device}


def _folder(trial: Mapping[str, Any] | None) -> str:
    return f"cost/runs/{_run()}" + (f"/{_safe(Trial.parse(trial).name)}" if trial else "")


def _run() -> str:
    """What tells this pipeline run from others; a worker that does not know must not stop for it."""
    return _safe(os.environ.get("RUN_ID") or "by-hand")


def _safe(name: str) -> str:
    return re.sub(r"[^\w.-]+", "-", name)


def _read_all(folder: str, shape: Any) -> list[Any]:
    """The notes of a folder; what can no longer be read is no longer known."""
    at, found = storage.open(folder), []
    for name in (entry.name for entry in at.entries(deep=False) if entry.name.endswith(".json")):
        if content := at.get(name):
            with contextlib.suppress(DataCorrupt):
                found.append(outside.parse_json(content[0], shape, f"{folder}/{name}", "delete it", DataCorrupt))
    return found
