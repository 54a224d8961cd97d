"""Save and load the checkpoints of a training run: directories of safetensors and JSON whose manifest is written last.

    RUN/step=0000000400/   state.safetensors, meta.json, manifest.json (sizes and SHA-256)
    RUN/saved.json         the last saved step: a run that has saved never silently starts over
    RUN/lock               held by the process that trains
    RUN/stop               a request to save and stop

The newest checkpoint is the one with the highest step; clocks do not matter. Every byte is hashed before it is used.

Workers without a shared disk use `RemoteCheckpoints`: a checkpoint counts once it is uploaded. It then also contains
the other files from which a run resumes (`COMPANIONS`).
"""

import contextlib
import json
import logging
import os
import re
import shutil
import sys
from collections.abc import Collection, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from infoxlm_core import locks, manifests, user_files
from infoxlm_core.errors import InfoXLMError, LeaseHeld, NoValidCheckpoint, StorageUnavailable, TryAgain
from infoxlm_core.training import guard
from infoxlm_core.training.fingerprint import Fingerprint
from infoxlm_core.training.tracker import METRICS

logger = logging.getLogger(__name__)
_NAME = re.compile(r"step=(\d{10})")
META = "meta.json"
COMPANIONS = (METRICS, "kept")  # curves, and the weights of a fine-tuning's best steps
MAX_FAILED_UPLOADS = 3  # consecutive failed uploads after which a run stops


def name_checkpoint(step: int) -> str:
    """Return the name of the directory of a step's checkpoint."""
    return f"step={step:010d}"


def parse_step(name: str) -> int | None:
    """Return the step in the name of a checkpoint's directory, or None for any other name."""
    match = _NAME.fullmatch(name)
    return int(match[1]) if match else None


def list_checkpoints(run: Path) -> list[tuple[int, Path]]:
    """Return steps and directories of a run's checkpoints, valid or not, newest first."""
    return _find_checkpoints(run.iterdir())


def _find_checkpoints(paths: Iterable[Path]) -> list[tuple[int, Path]]:
    """Return the step and path of each path with the name of a checkpoint, newest first."""
    checkpoints = []
    for path in paths:
        step = parse_step(path.name)
        if step is not None:
            checkpoints.append((step, path))
    return sorted(checkpoints, reverse=True)


def select_outdated(
    names: Iterable[str], keep: int, damaged_names: Collection[str], rewind_interval: int = 0
) -> list[str]:
    """Return the names of the checkpoints to delete: damaged ones, and those that no run will resume from.

    Args:
        names: names of all checkpoints.
        keep: number of newest valid checkpoints to keep.
        damaged_names: names of checkpoints that are known to be damaged.
        rewind_interval: steps between two checkpoints to which a training may rewind, or 0 if it never rewinds.
    """
    newest_first = sorted(names, reverse=True)
    damaged = [name for name in newest_first if name in damaged_names]
    valid_names = [name for name in newest_first if name not in damaged_names]
    kept_names = set(valid_names[:keep])
    if rewind_interval and valid_names:
        kept_names |= _select_rewind_targets(valid_names, rewind_interval)
    return damaged + [name for name in valid_names if name not in kept_names]


def _select_rewind_targets(names: Sequence[str], rewind_interval: int) -> set[str]:
    """Return the names of the checkpoints to keep for rewinds, given the names of valid checkpoints, newest first.

    Two of them precede the newest checkpoint by at least `guard.REWIND_DISTANCE` steps, because training may diverge
    again after the first rewind. All later targets are kept, too, since their distance will grow.
    """
    steps_by_name = {name: parse_step(name) or 0 for name in names}
    targets = [name for name in names if steps_by_name[name] % rewind_interval == 0]
    last_distant_step = steps_by_name[names[0]] - guard.REWIND_DISTANCE
    recent_count = sum(steps_by_name[name] > last_distant_step for name in targets)
    return set(targets[: recent_count + 2])


@contextlib.contextmanager
def deleted_on_failure(unfinished_path: Path) -> Iterator[None]:
    """Delete a partly written file or directory if writing it inside this context fails.

    Raises:
        StorageFull, StorageUnavailable, InputError: instead of errors of the operating system that say the same.
    """
    try:
        yield
    except BaseException as error:
        if unfinished_path.is_dir():
            shutil.rmtree(unfinished_path, ignore_errors=True)
        else:
            unfinished_path.unlink(missing_ok=True)
        known_error = user_files.translate_error(error, unfinished_path)
        if known_error:
            raise known_error from error
        raise


@dataclass(frozen=True)
class Checkpoint:
    """State of a training run after `step` optimizer steps: tensors by name, and JSON values."""

    step: int
    tensors: dict[str, Tensor]
    meta: dict[str, Any]


class RemoteCheckpoints(Protocol):
    """Checkpoints of a run, by directory name, in a storage that all machines can reach."""

    def held(self) -> contextlib.AbstractContextManager[Any]:
        """Return a context in which this process is the only writer. Raises LeaseHeld if another process is."""

    def names(self) -> list[str]:
        """Return the names of all complete checkpoints."""

    def fetch(self, name: str, directory: Path) -> None:
        """Download a checkpoint. Raises DataCorrupt if it is damaged."""

    def send(self, directory: Path, keep: int, damaged_names: Collection[str], rewind_interval: int = 0) -> None:
        """Upload a checkpoint, then delete those of `select_outdated`. Raises Fenced if the lease was lost."""

    def drop(self, name: str) -> None:
        """Delete a checkpoint. Raises Fenced if the lease was lost."""

    def has_saved(self) -> bool:
        """Return whether a checkpoint was ever uploaded."""

    def is_stop_requested(self) -> bool:
        """Return without waiting whether the run was requested to save and stop."""

    def delete_stop_request(self) -> None:
        """Delete the request to stop."""


class Checkpoints:
    """The checkpoints of one run.

    Args:
        directory: directory of the run; created if missing.
        fingerprint: every loaded checkpoint must match it; see `Fingerprint.check`.
        every: steps between two checkpoints.
        keep: number of newest valid checkpoints to keep.
        remote: shared storage of the checkpoints; None if all machines share `directory`.
        accept_changes: resume even if data or settings have changed.
        background: continue training while a checkpoint is written.
        rewinds: training may rewind, so rewind targets are kept, too.
    """

    def __init__(
        self,
        directory: Path,
        fingerprint: Fingerprint,
        every: int,
        keep: int,
        remote: RemoteCheckpoints | None = None,
        accept_changes: bool = False,
        background: bool = False,
        rewinds: bool = False,
    ) -> None:
        self.directory = directory
        self.fingerprint = fingerprint
        self.every = every
        self.keep = keep
        self.remote = remote
        self.accept_changes = accept_changes
        self.background = background
        self.rewind_interval = guard.compute_rewind_interval(every) if rewinds else 0
        self._writer = ThreadPoolExecutor(1, "checkpoint")
        self._pending_save = Future[None]()
        self._pending_save.set_result(None)
        self._failed_uploads = 0
        self._damaged_names: set[str] = set()  # deleted after the next save
        manifests.make_directory(directory)

    @contextlib.contextmanager
    def locked(self, timeout_seconds: float = 60.0) -> Iterator[None]:
        """Lock the run for this process. Raise LeaseHeld if another process still holds it after the timeout."""
        try:
            lock = locks.acquire(self.directory / "lock", timeout=timeout_seconds, poll_interval=0.5)
        except locks.Timeout:
            raise LeaseHeld(
                f"{self.directory} is in use: another process trains this run. Wait for it or stop it"
            ) from None
        with lock:
            self._delete_unfinished()
            with self.remote.held() if self.remote else contextlib.nullcontext():
                try:
                    yield
                finally:
                    self._stop_writer()  # before the lock is released, so that no two processes write

    def _delete_unfinished(self) -> None:
        """Delete what a process left that died while it saved."""
        for unfinished_path in self.directory.glob(".step=*"):
            shutil.rmtree(unfinished_path, ignore_errors=True)

    def _stop_writer(self) -> None:
        """Wait for a pending save. Log its error, unless the training failed with the same error."""
        self._writer.shutdown()
        error = self._pending_save.exception()
        if error is not None and error is not sys.exception():
            logger.error("a checkpoint could not be saved: %s", error)

    def is_stop_requested(self) -> bool:
        """Return without waiting whether the run was requested to save and stop."""
        return (self.directory / "stop").exists() or bool(self.remote and self.remote.is_stop_requested())

    def delete_stop_request(self) -> None:
        """Delete the request to stop, so that the next start does not see it."""
        (self.directory / "stop").unlink(missing_ok=True)
        if self.remote:
            self.remote.delete_stop_request()

    def begin_save(self, checkpoint: Checkpoint) -> None:
        """Start to save in a thread. Do not change the tensors or save again before `finish_save` returns."""
        self._pending_save = self._writer.submit(self.save, checkpoint)

    def finish_save(self) -> None:
        """Wait for the save that `begin_save` started. Raise what it raised."""
        self._pending_save.result()

    def save_has_failed(self) -> bool:
        """Return without waiting whether the pending save has failed."""
        return self._pending_save.done() and self._pending_save.exception() is not None

    def save(self, checkpoint: Checkpoint, is_last: bool = False) -> None:
        """Write a checkpoint completely or not at all, upload it, then delete bad and outdated ones.

        Args:
            checkpoint: the checkpoint to write.
            is_last: whether this is the last save of the process, so that its upload must succeed.

        Raises:
            StorageUnavailable: the last upload failed, or several consecutive uploads.
            StorageFull: older checkpoints are untouched.
        """
        name = name_checkpoint(checkpoint.step)
        unfinished_path = self.directory / f".{name}"  # `parse_step` rejects this name, so no reader sees it
        final_path = self.directory / name
        shutil.rmtree(unfinished_path, ignore_errors=True)
        with deleted_on_failure(unfinished_path):
            self._write(checkpoint, unfinished_path)
            if final_path.exists():  # a damaged checkpoint of the same step
                shutil.rmtree(final_path)
            unfinished_path.replace(final_path)
            manifests.sync_file(self.directory)
            manifests.write_atomically(self.directory / "saved.json", json.dumps({"step": checkpoint.step}))
        damaged_names = self._damaged_names - {name}
        if self._upload(final_path, damaged_names, is_last):
            self._damaged_names = damaged_names
            logger.info("saved checkpoint %s", final_path)
        self._delete_outdated(damaged_names)

    def _delete_outdated(self, damaged_names: set[str]) -> None:
        """Delete the local checkpoints that `select_outdated` names. Add partly deleted ones to the damaged ones."""
        names = []
        for _, path in list_checkpoints(self.directory):
            names.append(path.name)
            if not (path / manifests.NAME).is_file():
                damaged_names.add(path.name)
        for name in select_outdated(names, self.keep, damaged_names, self.rewind_interval):
            self._delete(self.directory / name)

    def _write(self, checkpoint: Checkpoint, directory: Path) -> None:
        """Write the files of a checkpoint into a new directory, the manifest last."""
        directory.mkdir()
        save_file(checkpoint.tensors, directory / "state.safetensors")
        meta = checkpoint.meta | {"step": checkpoint.step} | self.fingerprint.meta()
        manifests.write_atomically(directory / META, json.dumps(meta, indent=1, sort_keys=True))
        if self.remote:
            for companion in COMPANIONS:
                _replace_with_copy(self.directory / companion, directory / companion)
        manifests.sync_tree(directory)
        manifests.write(directory, "checkpoint", {"step": checkpoint.step})

    def _delete(self, directory: Path) -> None:
        """Delete a local checkpoint."""
        # Delete the manifest first, so that no reader takes the rest for a valid checkpoint.
        (directory / manifests.NAME).unlink(missing_ok=True)
        shutil.rmtree(directory, ignore_errors=True)

    def _upload(self, directory: Path, damaged_names: set[str], is_last: bool) -> bool:
        """Upload a checkpoint if there is remote storage. Return whether nothing failed.

        A few failures are tolerated, unless this is the last save of the process.
        """
        if not self.remote:
            return True
        try:
            self.remote.send(directory, self.keep, damaged_names, self.rewind_interval)
        except StorageUnavailable as error:
            self._failed_uploads += 1
            logger.error(
                "checkpoint %s was not uploaded (attempt %d of %d): %s",
                directory.name, self._failed_uploads, MAX_FAILED_UPLOADS, error,
            )  # fmt: skip
            if is_last or self._failed_uploads >= MAX_FAILED_UPLOADS:
                raise
            return False
        self._failed_uploads = 0
        return True

    def load_newest(self) -> Checkpoint | None:
        """Return the newest valid checkpoint, after hashing all its bytes, or None if this run never saved one.

        Raises:
            NoValidCheckpoint: there were checkpoints, and none is valid.
            ConfigMismatch: the checkpoint was saved with other data or settings.
        """
        candidates = self._list_candidates()
        checkpoint, problems = self._load_first_valid(candidates)
        if checkpoint is None:
            if problems or self._has_saved():
                raise NoValidCheckpoint(
                    f"{self.directory}: this run has saved before, but no checkpoint is valid "
                    f"({'; '.join(problems) or 'none is left'}): "
                    "restore a checkpoint, or delete the directory to start over"
                )
            return None
        # A checkpoint after the loaded one is damaged, or was never uploaded. `save` deletes it after the next valid
        # checkpoint exists.
        all_checkpoints = candidates + list_checkpoints(self.directory)
        self._damaged_names = {path.name for step, path in all_checkpoints if step > checkpoint.step}
        if self.remote:
            for companion in COMPANIONS:
                source = self.directory / name_checkpoint(checkpoint.step) / companion
                _replace_with_copy(source, self.directory / companion)
        return checkpoint

    def _has_saved(self) -> bool:
        """Return whether this run has ever saved a checkpoint."""
        if self.remote:
            return self.remote.has_saved()
        return (self.directory / "saved.json").exists()

    def rewind(self, step: int) -> Checkpoint | None:
        """Return the newest valid checkpoint that is old enough to rewind to, or None. Delete all later checkpoints.

        Only multiples of `rewind_interval` count, so that the choice does not depend on interruptions of the run,
        which also save.
        """
        if not self.rewind_interval:
            return None
        candidates = self._list_candidates()
        last_target_step = step - guard.REWIND_DISTANCE
        targets = []
        for saved_step, path in candidates:
            if saved_step % self.rewind_interval == 0 and saved_step <= last_target_step:
                targets.append((saved_step, path))
        checkpoint, _ = self._load_first_valid(targets)
        if checkpoint is None:
            return None
        all_checkpoints = {*candidates, *list_checkpoints(self.directory)}
        # An interruption here does no harm: the restarted training diverges again and repeats this rewind.
        for saved_step, path in sorted(all_checkpoints, reverse=True):
            if saved_step > checkpoint.step:  # a restarted process would resume from it and use the skipped data
                if self.remote:
                    self.remote.drop(path.name)
                self._delete(path)
        return checkpoint

    def _load_first_valid(self, candidates: Iterable[tuple[int, Path]]) -> tuple[Checkpoint | None, list[str]]:
        """Return the first valid checkpoint, and the problems of the candidates before it."""
        problems: list[str] = []
        for step, path in candidates:
            try:
                self._verify(path)
                meta = json.loads((path / META).read_bytes())
                tensors = load_file(path / "state.safetensors")
            except TryAgain:  # after a failed download, the checkpoint may still be valid
                raise
            except (InfoXLMError, OSError, ValueError, SafetensorError) as error:
                known_error = user_files.translate_error(error, path)
                if isinstance(known_error, TryAgain):  # such as a failing disk
                    raise known_error from error
                logger.warning("CheckpointCorrupt step=%d reason=%s", step, error)
                problems.append(f"step {step}: {error}")
                continue
            self.fingerprint.check(meta, str(self.directory), self.accept_changes)
            logger.info("resuming after step %d from %s", step, path)
            return Checkpoint(step, tensors, meta), problems
        return None, problems

    def _list_candidates(self) -> list[tuple[int, Path]]:
        """Return steps and local directories of all checkpoints, newest first. Some may not be downloaded yet."""
        if self.remote is None:
            return list_checkpoints(self.directory)
        return _find_checkpoints(self.directory / name for name in self.remote.names())

    def _verify(self, path: Path) -> None:
        """Hash a checkpoint. Download it first if there is remote storage and the local copy is missing or damaged."""
        try:
            manifests.load_verified(path, "checkpoint", producer="pretrain")
        except InfoXLMError:
            if self.remote is None:
                raise
            self.remote.fetch(path.name, path)  # verifies every byte, so only the manifest is read again
            manifests.load_verified(path, "checkpoint", producer="pretrain", should_hash=lambda _: False)


def _replace_with_copy(source: Path, target: Path) -> None:
    """Replace a target by a copy of a file, or by a folder of links to its files.

    If the source does not exist, only delete the target.
    """
    if target.is_dir():
        shutil.rmtree(target, ignore_errors=True)
    else:
        target.unlink(missing_ok=True)
    if source.is_dir():
        shutil.copytree(source, target, copy_function=os.link)
    elif source.is_file():
        shutil.copy(source, target)
