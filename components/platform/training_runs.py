"""Training runs: store directories with checkpoints, and the choice of the run to continue.

STORE/runs/pretrained-77b0…/lease.json            the process that may write (`lease`)
                           /step=0000000400/      a checkpoint; its manifest.json is written last
                           /saved.json            the last saved step
                           /stop                  a request to save and stop
STORE/begun/PIPELINE.json                         the training run that a pipeline started last

A run's name contains a digest of everything that determines its result. After a change of data or settings, training
would therefore silently start at step 0 in a new run. To prevent this, `choose_run` compares a pipeline's new training
run with its previous one.
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
    """Content of STORE/begun/PIPELINE.json: the training run that a pipeline started last."""

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
    """Choose and record the run to train in. Return the name of its checkpoint directory in STORE/runs.

    The pipeline's previous training run is not continued if its settings or data differ. If it is unfinished and was
    started by this same pipeline run, the difference is an error. If an earlier pipeline run started it, the change is
    assumed to be intended, and a warning names the unfinished run.

    Args:
        store: directory, or s3://bucket/prefix.
        kind: kind of the trained artifact.
        name: name of the trained artifact.
        config: training settings; `checkpoints.resume` names a run to continue.
        inputs: input digests by name, for reporting differences.
        trial: trial of an ablation, if the training is for a trial.

    Raises:
        ConfigMismatch: this pipeline run has started a training run with different settings, data or stage version.
        InputError: `checkpoints.resume` does not name a run with a checkpoint.
        ConfigError: `checkpoints.resume` is set for a trial of an ablation.
    """
    run = f"{kind}-{name}"
    if artifacts.exists(store, kind, name):  # nothing will be trained
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
    # A training run that ended before its first checkpoint loses nothing if it is not continued.
    if previous and previous["run"] != run and _has_saved(store, previous["run"]):
        is_finished = artifacts.exists(store, kind, previous["artifact"])
        if not is_finished:
            _refuse_or_warn_about_change(store, previous, current)
    if current != previous:
        artifacts.write(store, path, json.dumps(current, indent=1, sort_keys=True))
    return run


def _read_started_training(store: str, path: str) -> StartedTraining | None:
    """Return the training run that a pipeline started last, or None for a pipeline without training runs."""
    content = artifacts.read(store, path)
    if content is None:
        return None
    return user_files.parse_json(content, StartedTraining, f"{store}/{path}", "delete it, then run again")


def _refuse_or_warn_about_change(store: str, previous: StartedTraining, current: StartedTraining) -> None:
    """Report that the previous, unfinished training run differs from the current one.

    Within a pipeline run, settings and data must not change, so raise ConfigMismatch. A change in a new pipeline run is
    probably intended, so only log a warning.
    """
    changes = fingerprint.list_differences(previous["fingerprint"], current["fingerprint"])
    unfinished_run = f"{store}/runs/{previous['run']}"
    if previous["pipeline_run"] == current["pipeline_run"]:
        raise fingerprint.make_mismatch(unfinished_run, changes)
    text = (
        "%s is not continued, because this training differs: %s. To continue it anyway, set "
        "pretraining.checkpoints.resume: %s"
    )
    logger.warning(text, unfinished_run, "; ".join(changes), previous["run"])


def _name_pipeline(trial: Mapping[str, Any] | None) -> str:
    """Return a file name for a pipeline or a pipeline's trial. On one machine, all runs of the pipeline share it."""
    # On Kubeflow, RUN_NAME is not set, so only retries within a pipeline run share the file name.
    name = os.environ.get("RUN_NAME") or runtime.read_run_id()
    if trial:
        name = f"{name} {trial['variant']} {trial['seed']}"
    return re.sub(r"[^\w.-]+", "-", name)


def _has_saved(store: str, run: str) -> bool:
    """Return whether a training run has ever saved a checkpoint."""
    return artifacts.read(store, f"runs/{run}/saved.json") is not None


class RemoteRun:
    """Checkpoints of a training run in a storage, for workers that share no disk. Implements `RemoteCheckpoints`.

    Only the holder of the run's lease may write.

    Args:
        url: URL of the run's directory.
        holder: name of the lease holder. A restarted worker with the same name takes the lease without waiting.
    """

    def __init__(self, url: str, holder: str) -> None:
        self.url = url
        self.holder = holder
        self._store = storage.open(url)
        self._lease: Lease | None = None
        self._stop_requested = False

    @contextmanager
    def held(self) -> Iterator[None]:
        """Hold the run's lease inside the block. First remove incomplete uploads and checkpoints."""
        with Lease(f"{self.url}/lease.json", self.holder, periodic_check=self._check_for_stop) as self._lease:
            self._store.sweep()
            self.delete_stop_request()  # an old request was meant for an earlier process
            # A process that was killed during an upload has left a checkpoint without a manifest.
            incomplete_checkpoints = set(self._checkpoint_directories()) - set(self.names())
            for name in incomplete_checkpoints:
                artifact_files.delete(f"{self.url}/{name}")
            yield

    def names(self) -> list[str]:
        """Return the names of complete checkpoints, oldest first."""
        directories = self._checkpoint_directories()
        return [name for name in directories if artifact_files.manifest_exists(f"{self.url}/{name}")]

    def fetch(self, name: str, directory: Path) -> None:
        """Download a checkpoint."""
        artifact_files.download(f"{self.url}/{name}", directory)

    def send(self, directory: Path, keep: int, damaged_names: Collection[str] = (), rewind_interval: int = 0) -> None:
        """Upload a checkpoint, and delete outdated checkpoints.

        Args:
            directory: local directory of the checkpoint.
            keep: number of newest checkpoints to keep.
            damaged_names: names of damaged checkpoints, which are deleted.
            rewind_interval: steps between two checkpoints to which a diverging training may return; 0: no rewinds.

        Raises:
            Fenced: another process has taken the lease.
        """
        lease = self._held_lease()
        # Renew the lease first, because the upload replaces an existing checkpoint of the same step, which may be that
        # of a successor. Renew it again just before the manifest completes the checkpoint, so that a worker that was
        # cut off during the upload and has lost the lease cannot complete its checkpoint.
        lease.renew()
        try:
            artifact_files.upload(directory, f"{self.url}/{directory.name}", before_commit=lease.renew, replace=True)
        except InputError:
            lease.renew()  # raises Fenced if a successor has aborted the upload, to which S3 answers with a refusal
            raise
        # From now on, a start without a valid checkpoint is an error instead of a start at step 0.
        self._store.put("saved.json", json.dumps({"step": directory.name}))
        # Not at the top, because `checkpoints` imports torch, which steps that only call `choose_run` do not need.
        from infoxlm_core.training.checkpoints import select_outdated

        for outdated_name in select_outdated(self.names(), keep, damaged_names, rewind_interval):
            with suppress(InfoXLMError):  # the next save tries to delete the checkpoint again
                artifact_files.delete(f"{self.url}/{outdated_name}")

    def drop(self, name: str) -> None:
        """Delete a checkpoint. Raise Fenced if another process has taken the lease."""
        self._held_lease().renew()
        artifact_files.delete(f"{self.url}/{name}")

    def has_saved(self) -> bool:
        """Return whether the run has ever saved a checkpoint."""
        return self._store.get("saved.json") is not None

    def is_stop_requested(self) -> bool:
        """Return whether this process was asked to save and stop."""
        return self._stop_requested

    def delete_stop_request(self) -> None:
        """Delete the request to stop."""
        self._store.delete("stop")
        self._stop_requested = False

    def _held_lease(self) -> Lease:
        """Return the lease. Raise RuntimeError outside `held`."""
        if self._lease is None:
            raise RuntimeError("call this inside `with run.held()`")
        return self._lease

    def _check_for_stop(self) -> None:
        """Check for a stop request. Ignore a request for another holder, because pipeline runs may share this run."""
        request = self._store.get("stop", quick=True)  # the lease's thread calls this between its heartbeats
        if request is None:
            return
        addressee, _ = request
        if addressee in (b"", self.holder.encode()):  # an empty request is for any holder
            self._stop_requested = True

    def _checkpoint_directories(self) -> list[str]:
        """Return the names of all checkpoints, including incomplete checkpoints, oldest first."""
        return [name for name in self._store.directories() if name.startswith(_CHECKPOINT_PREFIX)]
