"""A run's directory: lock, checkpoints and curves."""

import contextlib
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from infoxlm_core.config import CheckpointsConfig
from infoxlm_core.training import distributed, tracker
from infoxlm_core.training.checkpoints import Checkpoints, RemoteCheckpoints
from infoxlm_core.training.fingerprint import Fingerprint
from infoxlm_core.training.pace import MACHINE_METRICS
from infoxlm_core.training.tracker import METRICS, FileTracker, Tracker


@contextlib.contextmanager
def run_directory(
    directory: Path,
    fingerprint: Fingerprint,
    config: CheckpointsConfig,
    track: Callable[[Path], Tracker],
    remote: RemoteCheckpoints | None = None,
    background: bool = False,
    may_rewind: bool = False,
    accept_changes: bool = False,
) -> Iterator[tuple[Checkpoints, Tracker]]:
    """Open a run's checkpoints and tracker. Inside this context, the first worker holds the run's lock.

    Arguments: see `Checkpoints`. `track` is a factory for the tracker, given the path of the curves.

    Raises:
        LeaseHeld: another process trains this run.
        DataCorrupt: the curves of the run are damaged.
    """
    checkpoints = Checkpoints(
        directory, fingerprint, config.every, config.keep, remote, accept_changes, background, may_rewind
    )
    with contextlib.ExitStack() as stack:
        distributed.on_first(lambda: stack.enter_context(checkpoints.locked()))
        run_tracker = distributed.on_first(lambda: track(directory / METRICS)) or FileTracker(os.devnull)
        stack.callback(run_tracker.close)
        yield checkpoints, run_tracker


def export_curves(run: Path, output: Path) -> None:
    """Copy a run's curves to a model directory without machine metrics, so that equal runs give equal files."""
    lines = []
    for step, metrics in tracker.read(run / METRICS):
        training_metrics = {name: value for name, value in metrics.items() if name not in MACHINE_METRICS}
        lines.append(json.dumps({"step": step} | training_metrics) + "\n")
    (output / METRICS).write_text("".join(lines))
