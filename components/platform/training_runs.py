"""Runs: folders of a store with the checkpoints of a training, and the choice of the run that a training continues.

STORE/runs/pretrained-77b0…/lease.json            the process that may write (`lease`)
                           /step=0000000400/      a checkpoint; its manifest.json is written last
                           /saved.json            the step that was saved last
                           /stop                  a request to save and stop
STORE/begun/PIPELINE.json                         the training that a pipeline started last

A run is named by a digest of everything that decides its result. A training with other data or settings would therefore
silently start at step 0 in another run, so `choose_run` compares each training with the pipeline's previous training.
"""

import json
import logging
import os
import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from typing_extensions import TypedDict

from components.adapters import storage
from components.adapters.lease import Lease
from components.platform import artifact_files, artifacts, runtime
from infoxlm_core import manifests, user_files
from infoxlm_core.config import PretrainingConfig
from infoxlm_core.errors import ConfigError, InfoXLMError, InputError
from infoxlm_core.training import fingerprint

logger = logging.getLogger(__name__)

_CHECKPOINT_PREFIX = "step="


class StartedTraining(TypedDict):
    """The training that a pipeline started last: the content of STORE/begun/PIPELINE.json."""

    pipeline_run: str
    run: str
    artifact: str
    fingerprint: dict[str, Any]


def choose_run(
    store: str,
    kind: str,
    name: str,
    config: PretrainingConfig,
    inputs: Mapping[str, str],
    trial: Mapping[str, Any] | None = None,
) -> str:
    """Return the name of the folder of STORE/runs for the checkpoints of a training run, and record the training.

    If the pipeline's previous training is unfinished and has other settings, it is not continued. That is an error if
    this pipeline run started it. Otherwise, the new settings are intended, and a warning names the unfinished training.

    Args:
        store: directory, or s3://bucket/prefix.
        kind: kind of the artifact that the training produces.
        name: name of that artifact.
        config: settings of the training; `checkpoints.resume` names a run to continue.
        inputs: digests of the inputs by name, to report the inputs that differ.
        trial: the trial of an ablation to which the training belongs.

    Raises:
        ConfigMismatch: this pipeline run started a training run with other settings, data or version of the stage.
        InputError: `checkpoints.resume` does not name a run with a checkpoint.
        ConfigError: `checkpoints.resume` is set for a trial of an ablation.
    """
    run = f"{kind}-{name}"
    if artifacts.exists(store, kind, name):
        return run
    resume = config.checkpoints.resume
    if resume:
        if trial:
            raise ConfigError("pretraining.checkpoints.resume names one run, but an ablation has a run for each trial")
        if not _has_saved(store, resume):
            raise InputError(f"pretraining.checkpoints.resume: {store}/runs has no run {resume} with a checkpoint")
        run = resume
    current = StartedTraining(
        pipeline_run=runtime.read_run_id(),
        run=run,
        artifact=name,
        fingerprint=fingerprint.collect_decisive_values(config, manifests.VERSIONS[kind], inputs),
    )
    path = f"begun/{_name_pipeline(trial)}.json"
    previous = _read_started_training(store, path)
    if previous and previous["run"] != run and _has_saved(store, previous["run"]):
        is_finished = artifacts.exists(store, kind, previous["artifact"])
        if not is_finished:
            _refuse_or_warn_about_change(store, previous, current)
    if current != previous:
        artifacts.write(store, path, json.dumps(current, indent=1, sort_keys=True))
    return run


def _read_started_training(store: str, path: str) -> StartedTraining | None:
    """Return the training that a pipeline started last, or None if it has started none."""
    content = artifacts.read(store, path)
    if content is None:
        return None
    started: StartedTraining = user_files.parse_json(
        content, StartedTraining, f"{store}/{path}", "delete it, then run again"
    )
    return started


def _refuse_or_warn_about_change(store: str, previous: StartedTraining, current: StartedTraining) -> None:
    """Raise ConfigMismatch if this pipeline run started the previous, unfinished training with other settings.

    If another pipeline run started it, log a warning that it is not continued.
    """
    changes = fingerprint.list_differences(previous["fingerprint"], current["fingerprint"])
    unfinished_run = f"{store}/runs/{previous['run']}"
    if previous["pipeline_run"] == current["pipeline_run"]:
        raise fingerprint.make_mismatch(unfinished_run, changes)
    logger.warning(
        "%s is not continued, because this training differs: %s. To continue it anyway, set checkpoints.resume: %s",
        unfinished_run,
        "; ".join(changes),
        previous["run"],
    )


def _name_pipeline(trial: Mapping[str, Any] | None) -> str:
    """Return a file name for a pipeline or one of its trials, which is the same in all runs of the pipeline."""
    name = os.environ.get("RUN_NAME") or runtime.read_run_id()
    if trial:
        name = f"{name} {trial['variant']} {trial['seed']}"
    return re.sub(r"[^\w.-]+", "-", name)


def _has_saved(store: str, run: str) -> bool:
    """Return whether a run has ever saved a checkpoint."""
    return artifacts.read(store, f"runs/{run}/saved.json") is not None


class RemoteRun:
    """The checkpoints of one run in a storage, for workers that share no disk. Implements `RemoteCheckpoints`.

    Args:
        url: URL of the run's folder.
        holder: name of the lease's holder. A restarted worker with the same name takes the lease without waiting.
    """

    def __init__(self, url: str, holder: str) -> None:
        self.url = url
        self.holder = holder
        self._store = storage.open(url)
        self._lease: Lease | None = None
        self._stop_requested = False

    @contextmanager
    def held(self) -> Iterator[None]:
        """Hold the lease of the run inside the block, after removing incomplete uploads and checkpoints."""
        with Lease(f"{self.url}/lease.json", self.holder, periodic_check=self._check_for_stop) as self._lease:
            self._store.sweep()
            self.delete_stop_request()  # the request was meant for an earlier process
            incomplete_checkpoints = set(self._checkpoint_folders()) - set(self.names())
            for name in incomplete_checkpoints:
                artifact_files.delete(f"{self.url}/{name}")
            yield

    def names(self) -> list[str]:
        """Return the names of complete checkpoints, oldest first."""
        folders = self._checkpoint_folders()
        return [name for name in folders if artifact_files.manifest_exists(f"{self.url}/{name}")]

    def fetch(self, name: str, directory: Path) -> None:
        """Download a checkpoint."""
        artifact_files.download(f"{self.url}/{name}", directory)

    def send(self, directory: Path, keep: int, damaged_names: Collection[str] = (), rewind_interval: int = 0) -> None:
        """Upload a checkpoint, and delete older checkpoints that `select_outdated` selects.

        The lease is renewed before the manifest is uploaded, so a worker that has lost the lease cannot complete a
        checkpoint.

        Args:
            directory: the checkpoint.
            keep: number of newest checkpoints to keep.
            damaged_names: names of checkpoints that are known to be damaged.
            rewind_interval: steps between two checkpoints to which a training may rewind, or 0 if it never rewinds.
        """
        lease = self._held_lease()
        artifact_files.upload(directory, f"{self.url}/{directory.name}", before_commit=lease.renew, replace=True)
        self._store.put("saved.json", json.dumps({"step": directory.name}))
        # This module imports torch, which a step that only chooses a run does not need.
        from infoxlm_core.training.checkpoints import select_outdated

        for outdated_name in select_outdated(self.names(), keep, damaged_names, rewind_interval):
            with suppress(InfoXLMError):  # the next save tries again
                artifact_files.delete(f"{self.url}/{outdated_name}")

    def drop(self, name: str) -> None:
        """Delete a checkpoint. Raises Fenced if another process has taken the run over."""
        self._held_lease().renew()
        artifact_files.delete(f"{self.url}/{name}")

    def has_saved(self) -> bool:
        """Return whether the run has ever saved a checkpoint."""
        return self._store.get("saved.json") is not None

    def is_stop_requested(self) -> bool:
        """Return whether this process has been asked to save and stop."""
        return self._stop_requested

    def delete_stop_request(self) -> None:
        """Delete the request to stop."""
        self._store.delete("stop")
        self._stop_requested = False

    def _held_lease(self) -> Lease:
        """Return the lease. Raise RuntimeError outside of `held`."""
        if self._lease is None:
            raise RuntimeError("call this inside `with run.held()`")
        return self._lease

    def _check_for_stop(self) -> None:
        """Note a request to stop that names this holder or nobody; two pipeline runs may share a training run."""
        request = self._store.get("stop", quick=True)
        if request is None:
            return
        addressee, _ = request
        if addressee in (b"", self.holder.encode()):
            self._stop_requested = True

    def _checkpoint_folders(self) -> list[str]:
        """Return the names of checkpoints, complete or not, oldest first."""
        return [name for name in self._store.folders() if name.startswith(_CHECKPOINT_PREFIX)]
