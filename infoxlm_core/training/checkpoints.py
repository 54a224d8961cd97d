"""Save and load the checkpoints of a training run.

    RUN/step=0000000400/   state.safetensors, meta.json, manifest.json (sizes and SHA-256, written last)
    RUN/saved.json         last saved step, so that a run with lost checkpoints never silently starts over
    RUN/lock               lock of the training process
    RUN/stop               request to save and stop

The newest checkpoint is the one with the highest step, regardless of file times. Every file is hashed before use.

Workers without a shared disk use `RemoteCheckpoints`. A checkpoint is valid only once it is uploaded. Remote
checkpoints also contain the other files that a resumed run needs (`RESUME_FILES`).
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
RESUME_FILES = (METRICS, "kept")  # curves, and the best weights of a fine-tuning run
MAX_FAILED_UPLOADS = 3  # number of consecutive failed uploads that stops a run


def name_checkpoint(step: int) -> str:
    """Return the directory name of a step's checkpoint."""
    return f"step={step:010d}"


def parse_step(name: str) -> int | None:
    """Return the step in a checkpoint's directory name, or None for any other name."""
    match = _NAME.fullmatch(name)
    return int(match[1]) if match else None


def list_checkpoints(run: Path) -> list[tuple[int, Path]]:
    """Return the steps and directories of all checkpoints of a run, valid or not, newest first."""
    return _find_checkpoints(run.iterdir())


def _find_checkpoints(paths: Iterable[Path]) -> list[tuple[int, Path]]:
    """Select the paths with a checkpoint's name. Return their steps and paths, newest first."""
    checkpoints = [(step, path) for path in paths if (step := parse_step(path.name)) is not None]
    return sorted(checkpoints, reverse=True)


def select_outdated(
    names: Iterable[str], keep: int, damaged_names: Collection[str], rewind_interval: int = 0
) -> list[str]:
    """Return the names of the checkpoints to delete, which are damaged or no longer needed.

    Args:
        names: names of all checkpoints.
        keep: number of newest valid checkpoints to keep.
        damaged_names: names of damaged checkpoints.
        rewind_interval: steps between two rewind targets, to which training returns if it diverges; 0: no rewinds.
    """
    newest_first = sorted(names, reverse=True)
    damaged = [name for name in newest_first if name in damaged_names]
    valid_names = [name for name in newest_first if name not in damaged_names]
    kept_names = set(valid_names[:keep])
    if rewind_interval and valid_names:
        kept_names |= _select_rewind_targets(valid_names, rewind_interval)
    return damaged + [name for name in valid_names if name not in kept_names]


def _select_rewind_targets(names: Sequence[str], rewind_interval: int) -> set[str]:
    """Return the names of the rewind targets to keep, given the names of valid checkpoints, newest first.

    Keep two targets at least `guard.REWIND_DISTANCE` steps before the newest checkpoint, because training may diverge
    again after the first rewind. Also keep all later targets, because their distance grows as training continues.
    """
    steps_by_name = {name: parse_step(name) or 0 for name in names}
    targets = [name for name in names if steps_by_name[name] % rewind_interval == 0]
    last_distant_step = steps_by_name[names[0]] - guard.REWIND_DISTANCE
    recent_count = sum(steps_by_name[name] > last_distant_step for name in targets)
    return set(targets[: recent_count + 2])


@contextlib.contextmanager
def deleted_on_failure(unfinished_path: Path) -> Iterator[None]:
    """Delete a partly written file or directory if this context fails.

    Raises:
        StorageFull, StorageUnavailable, InputError: translations of operating system errors.
    """
    try:
        yield
    except BaseException as error:  # also if the user interrupts the program
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
    """The state of a training run after `step` optimizer steps: tensors by name, and JSON values."""

    step: int
    tensors: dict[str, Tensor]
    meta: dict[str, Any]


class RemoteCheckpoints(Protocol):
    """A run's checkpoints by directory name, in storage that all machines can reach."""

    def held(self) -> contextlib.AbstractContextManager[Any]:
        """Return a context in which only this process may write. Raises LeaseHeld if another process may write."""

    def names(self) -> list[str]:
        """Return the names of all complete checkpoints."""

    def fetch(self, name: str, directory: Path) -> None:
        """Download a checkpoint. Raises DataCorrupt for a damaged checkpoint."""

    def send(self, directory: Path, keep: int, damaged_names: Collection[str], rewind_interval: int = 0) -> None:
        """Upload a checkpoint, then delete outdated checkpoints. Raises Fenced if the lease was lost."""

    def drop(self, name: str) -> None:
        """Delete a checkpoint. Raises Fenced if the lease was lost."""

    def has_saved(self) -> bool:
        """Return whether a checkpoint was ever uploaded."""

    def is_stop_requested(self) -> bool:
        """Return without blocking whether the run should save and stop."""

    def delete_stop_request(self) -> None:
        """Delete the stop request."""


class Checkpoints:
    """The checkpoints of one run.

    Args:
        directory: directory of the run; created if missing.
        fingerprint: fingerprint that every loaded checkpoint must match; see `Fingerprint.check`.
        every: number of steps between two checkpoints.
        keep: number of newest valid checkpoints to keep.
        remote: remote checkpoint storage; None if all machines share `directory`.
        accept_changes: whether to resume even if data or settings have changed.
        background: whether training continues while a checkpoint is written.
        may_rewind: whether training may rewind, so that rewind targets must be kept.
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
        may_rewind: bool = False,
    ) -> None:
        self.directory = directory
        self.fingerprint = fingerprint
        self.every = every
        self.keep = keep
        self.remote = remote
        self.accept_changes = accept_changes
        self.background = background
        self.rewind_interval = guard.compute_rewind_interval(every) if may_rewind else 0
        self._writer = ThreadPoolExecutor(1, "checkpoint")
        self._pending_save = Future[None]()
        self._pending_save.set_result(None)  # before the first save, there is nothing to wait for
        self._failed_uploads = 0
        self._damaged_names: set[str] = set()  # to be deleted after the next save
        manifests.make_directory(directory)

    @contextlib.contextmanager
    def locked(self, timeout_seconds: float = 60.0) -> Iterator[None]:
        """Lock the run for this process. Raise LeaseHeld if another process holds the lock until the timeout."""
        try:
            # Wait, because the run's previous process may be about to end.
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
                    self._stop_writer()  # still under the lock, so that no two processes write

    def _delete_unfinished(self) -> None:
        """Delete partly written checkpoints of a process that died while saving."""
        for unfinished_path in self.directory.glob(".step=*"):
            shutil.rmtree(unfinished_path, ignore_errors=True)

    def _stop_writer(self) -> None:
        """Wait for a pending save. Log its error, unless the training failed with the same error."""
        self._writer.shutdown()
        error = self._pending_save.exception()
        if error is not None and error is not sys.exception():
            logger.error("a checkpoint could not be saved: %s", error)

    def is_stop_requested(self) -> bool:
        """Return without blocking whether the run should save and stop."""
        return (self.directory / "stop").exists() or bool(self.remote and self.remote.is_stop_requested())

    def delete_stop_request(self) -> None:
        """Delete the stop request, so that the run can be started again."""
        (self.directory / "stop").unlink(missing_ok=True)
        if self.remote:
            self.remote.delete_stop_request()

    def begin_save(self, checkpoint: Checkpoint) -> None:
        """Start saving in a thread. Call `finish_save` before changing the tensors or saving again."""
        self._pending_save = self._writer.submit(self.save, checkpoint)

    def finish_save(self) -> None:
        """Wait for the save that `begin_save` started, and raise its error, if any."""
        self._pending_save.result()

    def save_has_failed(self) -> bool:
        """Return without blocking whether the pending save has failed."""
        return self._pending_save.done() and self._pending_save.exception() is not None

    def save(self, checkpoint: Checkpoint, is_last: bool = False) -> None:
        """Write a checkpoint atomically, upload it, then delete damaged and outdated checkpoints.

        Args:
            checkpoint: the checkpoint to write.
            is_last: whether this is the process's last save, whose upload must succeed.

        Raises:
            StorageUnavailable: the upload of the last save or several consecutive uploads failed.
            StorageFull: the disk is full; older checkpoints are unchanged.
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
            manifests.sync_file(self.directory)  # otherwise, a power failure could undo the renaming
            manifests.write_atomically(self.directory / "saved.json", json.dumps({"step": checkpoint.step}))
        damaged_names = self._damaged_names - {name}  # a damaged checkpoint of this step has just been replaced
        if self._upload(final_path, damaged_names, is_last):
            self._damaged_names = damaged_names
            logger.info("saved checkpoint %s", final_path)
        self._delete_outdated(damaged_names)

    def _delete_outdated(self, damaged_names: set[str]) -> None:
        """Delete outdated and damaged local checkpoints. Checkpoints without a manifest count as damaged."""
        names = []
        for _, path in list_checkpoints(self.directory):
            names.append(path.name)
            if not (path / manifests.NAME).is_file():
                damaged_names.add(path.name)
        for name in select_outdated(names, self.keep, damaged_names, self.rewind_interval):
            self._delete(self.directory / name)

    def _write(self, checkpoint: Checkpoint, directory: Path) -> None:
        """Write a checkpoint's files into a new directory, the manifest last, because it makes a checkpoint valid."""
        directory.mkdir()
        save_file(checkpoint.tensors, directory / "state.safetensors")
        meta = checkpoint.meta | {"step": checkpoint.step} | self.fingerprint.meta()
        manifests.write_atomically(directory / META, json.dumps(meta, indent=1, sort_keys=True))
        if self.remote:  # another machine that resumes the run also needs the curves and the best weights
            for name in RESUME_FILES:
                _replace_with_copy(self.directory / name, directory / name)
        manifests.sync_tree(directory)
        manifests.write(directory, "checkpoint", {"step": checkpoint.step})

    def _delete(self, directory: Path) -> None:
        """Delete a local checkpoint."""
        # Delete the manifest first, so that no reader uses a partly deleted checkpoint.
        (directory / manifests.NAME).unlink(missing_ok=True)
        shutil.rmtree(directory, ignore_errors=True)

    def _upload(self, directory: Path, damaged_names: set[str], is_last: bool) -> bool:
        """Upload a checkpoint to remote storage, if configured. Return whether the upload succeeded.

        A few failures are tolerated, because a later save may succeed. A failure of the last save is always raised.
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
        """Verify and load the newest valid checkpoint. Return None if this run has never saved.

        Raises:
            NoValidCheckpoint: the run has saved checkpoints, but none is valid.
            ConfigMismatch: data or settings have changed since the checkpoint was saved.
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
        # Checkpoints after the loaded step are damaged or were never uploaded. `save` deletes them once a newer valid
        # checkpoint exists.
        all_checkpoints = candidates + list_checkpoints(self.directory)
        self._damaged_names = {path.name for step, path in all_checkpoints if step > checkpoint.step}
        if self.remote:  # another machine may have written the checkpoint, so the files of this machine may not match
            for name in RESUME_FILES:
                source = self.directory / name_checkpoint(checkpoint.step) / name
                _replace_with_copy(source, self.directory / name)
        return checkpoint

    def _has_saved(self) -> bool:
        """Return whether this run has ever saved a checkpoint."""
        if self.remote:
            return self.remote.has_saved()
        return (self.directory / "saved.json").exists()

    def rewind(self, step: int) -> Checkpoint | None:
        """Load the newest valid rewind target and delete all later checkpoints. Return None without a target.

        Only multiples of `rewind_interval` are targets, because interrupted runs save additional checkpoints, which
        must not affect the choice.
        """
        if not self.rewind_interval:
            return None
        candidates = self._list_candidates()
        targets = []
        for saved_step, path in candidates:
            if saved_step % self.rewind_interval == 0 and saved_step <= step - guard.REWIND_DISTANCE:
                targets.append((saved_step, path))
        checkpoint, _ = self._load_first_valid(targets)
        if checkpoint is None:
            return None
        all_checkpoints = {*candidates, *list_checkpoints(self.directory)}
        # Interrupting this loop is harmless: the restarted run diverges again and repeats the rewind.
        for saved_step, path in sorted(all_checkpoints, reverse=True):
            if saved_step > checkpoint.step:  # a restarted run must not resume from here and use the skipped data
                if self.remote:
                    self.remote.drop(path.name)
                self._delete(path)
        return checkpoint

    def _load_first_valid(self, candidates: Iterable[tuple[int, Path]]) -> tuple[Checkpoint | None, list[str]]:
        """Load the first valid candidate. Return the checkpoint and the problems of earlier candidates."""
        problems: list[str] = []
        for step, path in candidates:
            try:
                self._verify(path)
                meta = json.loads((path / META).read_bytes())
                tensors = load_file(path / "state.safetensors")
            except TryAgain:  # the download failed, but the checkpoint may be valid
                raise
            except (InfoXLMError, OSError, ValueError, SafetensorError) as error:
                known_error = user_files.translate_error(error, path)
                if isinstance(known_error, TryAgain):  # for example, a failing disk
                    raise known_error from error
                logger.warning("CheckpointCorrupt step=%d reason=%s", step, error)
                problems.append(f"step {step}: {error}")
                continue
            # Changed data or settings are not damage, so they stop the run instead of selecting an earlier checkpoint.
            self.fingerprint.check(meta, str(self.directory), self.accept_changes)
            logger.info("resuming after step %d from %s", step, path)
            return Checkpoint(step, tensors, meta), problems
        return None, problems

    def _list_candidates(self) -> list[tuple[int, Path]]:
        """Return the steps and local directories of all checkpoints, newest first, downloaded or not."""
        if self.remote is None:
            return list_checkpoints(self.directory)
        return _find_checkpoints(self.directory / name for name in self.remote.names())

    def _verify(self, path: Path) -> None:
        """Verify a local checkpoint. If it is missing or damaged, download it from remote storage."""
        try:
            manifests.load_verified(path, "checkpoint", producer="pretrain")
        except InfoXLMError:
            if self.remote is None:
                raise
            self.remote.fetch(path.name, path)  # verifies all files, so only the manifest must be read again
            manifests.load_verified(path, "checkpoint", producer="pretrain", should_hash=lambda _: False)


def _replace_with_copy(source: Path, target: Path) -> None:
    """Replace the target by a copy of a source file, or by hard links to the files of a source directory.

    If the source does not exist, only delete the target.
    """
    if target.is_dir():
        shutil.rmtree(target, ignore_errors=True)
    else:
        target.unlink(missing_ok=True)
    if source.is_dir():  # weights, which are never changed in place, so that links are safe
        shutil.copytree(source, target, copy_function=os.link)
    elif source.is_file():  # curves, to which the run appends
        shutil.copy(source, target)
