"""The directory of a run: its lock, checkpoints and curves."""

import contextlib
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from infoxlm_core.config import CheckpointsConfig
from infoxlm_core.training import distributed
from infoxlm_core.training.checkpoints import Checkpoints, RemoteCheckpoints
from infoxlm_core.training.fingerprint import Fingerprint
from infoxlm_core.training.pace import CLOCKED
from infoxlm_core.training.tracker import METRICS, FileTracker, Tracker, read


@contextlib.contextmanager
def run_directory(
    directory: Path,
    fingerprint: Fingerprint,
    config: CheckpointsConfig,
    track: Callable[[Path], Tracker],
    remote: RemoteCheckpoints | None = None,
    background: bool = False,
    rewinds: bool = False,
) -> Iterator[tuple[Checkpoints, Tracker]]:
    """Checkpoints and tracker of a run. The first worker holds the run's lock as long as it trains; LeaseHeld if
    another process trains this run."""
    accepted = config.resume == directory.name
    checkpoints = Checkpoints(directory, fingerprint, config.every, config.keep, remote, accepted, background, rewinds)
    with contextlib.ExitStack() as stack:
        distributed.on_first(lambda: stack.enter_context(checkpoints.locked()))
        tracker = track(directory / METRICS) if distributed.rank() == 0 else FileTracker(os.devnull)
        stack.callback(tracker.close)
        yield checkpoints, tracker


def export_curves(run: Path, output: Path) -> None:
    """Copy a run's curves beside its model, without what the clock says: equal trainings make equal artifacts."""
    points = read(run / METRICS)
    rows = [{"step": step} | {n: v for n, v in values.items() if n not in CLOCKED} for step, values in points]
    (output / METRICS).write_text("".join(json.dumps(point) + "\n" for point in rows))
