"""Record the GPU hours and CPU hours of each attempt to build an artifact, and sum them for a run's metrics.

    STORE/cost/RUN/pretrained/3f2a…/ID.json    {"seconds", "devices", "device"} of one attempt

An attempt is recorded when it succeeds or fails, but not when it is killed. No artifact or digest depends on these
records.
"""

import contextlib
import json
import os
import re
import time
import uuid
from collections import defaultdict
from collections.abc import Iterator, Mapping

from typing_extensions import TypedDict

from components.adapters import storage
from components.platform import artifacts
from infoxlm_core import user_files
from infoxlm_core.errors import DataCorrupt, InfoXLMError

GPU = "gpu"
CPU = "cpu"
_ALL_STEPS = "all"


class Attempt(TypedDict):
    """The cost of one attempt to build an artifact."""

    seconds: float
    devices: int
    device: str


@contextlib.contextmanager
def record_duration(store: str, kind: str, name: str, device_count: int, device: str) -> Iterator[None]:
    """Record the duration of the block, which builds the artifact `kind/name`.

    Args:
        store: directory, or s3://bucket/prefix.
        kind: artifact kind.
        name: artifact name.
        device_count: number of GPUs or processes that build the artifact.
        device: GPU or CPU.
    """
    start_time = time.monotonic()
    try:
        yield
    finally:  # a failed attempt has also occupied the devices
        attempt = Attempt(seconds=time.monotonic() - start_time, devices=device_count, device=device)
        path = f"{_attempts_directory(kind, name)}/{uuid.uuid4().hex}.json"
        with contextlib.suppress(InfoXLMError, OSError):  # a cost that cannot be recorded must not fail the build
            artifacts.write(store, path, json.dumps(attempt))


def record_process_duration(store: str, kind: str, name: str) -> contextlib.AbstractContextManager[None]:
    """Record the duration of the block in this process as hours of one GPU, or of one CPU core without GPUs."""
    from infoxlm_core.model import devices

    device = GPU if devices.count_gpus() else CPU
    return record_duration(store, kind, name, device_count=1, device=device)


def read_hours(store: str, kind: str, name: str, step: str) -> dict[str, float]:
    """Return the GPU hours and CPU hours that this pipeline run spent on the artifact `kind/name`.

    Args:
        store: directory, or s3://bucket/prefix.
        kind: artifact kind.
        name: artifact name.
        step: last part of the metric names, such as `pretrain`.

    Returns:
        metrics such as {"cost/gpu_hours/pretrain": 12.5}; empty if the run reused an existing artifact.
    """
    directory = f"{store}/{_attempts_directory(kind, name)}"
    hours_by_metric: defaultdict[str, float] = defaultdict(float)
    for file in storage.open(directory).entries(deep=False):  # one file per attempt
        content = artifacts.read(directory, file.name) or b""
        try:
            attempt = user_files.parse_json(content, Attempt, file.name, "delete it", DataCorrupt)
        except DataCorrupt:  # the other attempts still give a lower bound
            continue
        hours = attempt["seconds"] * attempt["devices"] / 3600
        hours_by_metric[f"cost/{attempt['device']}_hours/{step}"] += hours
    return dict(hours_by_metric)


def add_up(metrics: Mapping[str, float]) -> dict[str, float]:
    """Sum the hours of all steps in a run's metrics. Return totals such as {"cost/gpu_hours/all": 13.0}."""
    total_hours: defaultdict[str, float] = defaultdict(float)
    for name, value in metrics.items():
        prefix, _, step = name.rpartition("/")
        is_total = step == _ALL_STEPS  # an earlier attempt may have logged a total
        if name.startswith("cost/") and not is_total:
            total_hours[f"{prefix}/{_ALL_STEPS}"] += value
    return dict(total_hours)


def _attempts_directory(kind: str, name: str) -> str:
    """Return the store directory for this pipeline run's attempts to build the artifact `kind/name`."""
    # Unlike `runtime.read_run_id`, this never raises an error, because a cost must not fail a build.
    run = re.sub(r"[^\w.-]+", "-", os.environ.get("RUN_ID") or "by-hand")
    return f"cost/{run}/{kind}/{name}"
