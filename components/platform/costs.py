"""GPU hours and process hours: each attempt to build an artifact records its own, and the step reports the sum.

    STORE/cost/RUN/pretrained/3f2a…/ID.json    {"seconds", "devices", "device"} of one attempt

An attempt is recorded when it succeeds or fails, but not when it is killed. No artifact and no digest depends on these
records.
"""

import contextlib
import json
import os
import re
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping

from typing_extensions import TypedDict

from components.adapters import storage
from components.platform import artifacts
from infoxlm_core import outside
from infoxlm_core.errors import DataCorrupt, InfoXLMError

GPU = "gpu"
CPU = "cpu"
_ALL = "all"


class Attempt(TypedDict):
    """A record of `measured`."""

    seconds: float
    devices: int
    device: str


@contextlib.contextmanager
def measured(
    store: str, kind: str, name: str, devices: int, device: str, clock: Callable[[], float] = time.monotonic
) -> Iterator[None]:
    """Record how long the block takes to build the artifact `kind/name`.

    Args:
        store: directory, or s3://bucket/prefix.
        kind: kind of the artifact.
        name: name of the artifact.
        devices: number of GPUs or processes that work on it.
        device: GPU or CPU.
        clock: monotonic clock, in seconds.
    """
    start = clock()
    try:
        yield
    finally:
        attempt = Attempt(seconds=clock() - start, devices=devices, device=device)
        with contextlib.suppress(InfoXLMError, OSError):  # a cost that cannot be recorded must not fail the work
            artifacts.write(store, f"{_attempts_folder(kind, name)}/{uuid.uuid4().hex}.json", json.dumps(attempt))


def measured_alone(store: str, kind: str, name: str) -> contextlib.AbstractContextManager[None]:
    """Record how long the block takes in this process, on a GPU if this machine has one. Arguments: see `measured`."""
    from infoxlm_core.model import devices

    return measured(store, kind, name, devices=1, device=GPU if devices.count_gpus() else CPU)


def hours_of(store: str, kind: str, name: str, step: str) -> dict[str, float]:
    """Return the hours that this pipeline run spent on an artifact, as metrics of a step.

    Returns:
        metrics such as {"cost/gpu_hours/pretrain": 12.5}; empty if the run reused an existing artifact.
    """
    folder = f"{store}/{_attempts_folder(kind, name)}"
    hours: defaultdict[str, float] = defaultdict(float)
    for file in storage.open(folder).entries(deep=False):
        content = artifacts.read(folder, file.name) or b""
        with contextlib.suppress(DataCorrupt):  # a damaged record does not count
            attempt = outside.parse_json(content, Attempt, file.name, "delete it", DataCorrupt)
            hours[f"cost/{attempt['device']}_hours/{step}"] += attempt["seconds"] * attempt["devices"] / 3600
    return dict(hours)


def sum_up(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the total hours over all steps of a run's metrics, such as {"cost/gpu_hours/all": 13.0}."""
    hours: defaultdict[str, float] = defaultdict(float)
    for name, value in metrics.items():
        device, _, step = name.removeprefix("cost/").partition("/")
        if name.startswith("cost/") and step != _ALL:
            hours[f"cost/{device}/{_ALL}"] += value
    return dict(hours)


def _attempts_folder(kind: str, name: str) -> str:
    """Return the folder of this pipeline run's attempts. A worker without RUN_ID uses `by-hand`."""
    run = re.sub(r"[^\w.-]+", "-", os.environ.get("RUN_ID") or "by-hand")
    return f"cost/{run}/{kind}/{name}"
