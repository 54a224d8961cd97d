"""Our own checkpoints: complete directories of safetensors and JSON whose manifest is written last.

    checkpoints/step=0000000400/   state.safetensors, meta.json, manifest.json (sizes, sha256)
    checkpoints/saved.json         the newest step ever saved: with it, a run never silently starts over
    checkpoints/lock               held by the one process that trains
    checkpoints/stop               somebody asks the run to save and stop

A checkpoint is chosen by its step, never by a clock, and every byte of it is hashed before it is used.

Machines that share no disk have `RemoteCheckpoints` too: then what has not arrived there does not exist, and a
checkpoint carries what else a run needs to go on somewhere else (`COMPANIONS`).
"""

import contextlib
import json
import logging
import os
import re
import shutil
import sys
from collections.abc import Collection, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NotRequired, Protocol

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from typing_extensions import TypedDict

from infoxlm_core import locks, manifests, outside
from infoxlm_core.errors import DataCorrupt, InfoXLMError, LeaseHeld, NoValidCheckpoint, StorageUnavailable, TryAgain
from infoxlm_core.training import guard
from infoxlm_core.training.fingerprint import Fingerprint
from infoxlm_core.training.tracker import METRICS

logger = logging.getLogger(__name__)
_NAME = re.compile(r"step=(\d{10})")
META = "meta.json"
COMPANIONS = (METRICS, "kept")  # what else a run goes on from: curves, and the weights of a fine-tuning's best steps
MAX_FAILED_UPLOADS = 3  # saves in a row that may fail to arrive elsewhere before the run stops


def list_of(run: Path) -> list[tuple[int, Path]]:
    """Steps and directories of a run's checkpoints, valid or not, newest first."""
    found = [(m, path) for path in run.iterdir() if (m := _NAME.fullmatch(path.name))]
    return sorted(((int(m[1]), path) for m, path in found), reverse=True)


def superfluous(names: Iterable[str], keep: int, bad: Collection[str], spacing: int = 0) -> list[str]:
    """Those checkpoints that may go: what is known to be bad, and of the others all but the newest `keep`.

    `spacing`: what a training may have to go back to stays, too. These are the checkpoints at multiples of it: the two
    newest that lie far enough behind the newest of all, for it may happen twice, and those after them, which will.
    """
    ordered = sorted(names, reverse=True)
    others = [name for name in ordered if name not in bad]
    steps = {name: int(m[1]) for name in others if (m := _NAME.fullmatch(name))}
    regular = [name for name, step in steps.items() if spacing and step % spacing == 0]
    behind = [name for name in regular if steps[name] <= max(steps.values()) - guard.DISTANCE]
    needed = {*others[:keep], *regular[: len(regular) - len(behind) + 2]}
    return [name for name in ordered if name in bad] + [name for name in others if name not in needed]


@dataclass(frozen=True)
class Checkpoint:
    """State of a training after `step` optimizer steps: tensors by name, and small facts."""

    step: int
    tensors: dict[str, Tensor]
    meta: dict[str, Any]


@outside.with_more
class Meta(TypedDict):
    """What every checkpoint says of itself; each training adds more."""

    step: int
    fingerprint: dict[str, Any]
    made_by: NotRequired[dict[str, Any]]


class RemoteCheckpoints(Protocol):
    """Where a run's checkpoints are for all machines, such as a prefix on S3. Names are those of their directories."""

    def held(self) -> contextlib.AbstractContextManager[Any]:
        """Be the only one who writes there; raises LeaseHeld if somebody else does."""

    def names(self) -> list[str]:
        """All whole checkpoints."""

    def fetch(self, name: str, directory: Path) -> None:
        """Copy a checkpoint to this machine; raises DataCorrupt if it is damaged."""

    def send(self, directory: Path, keep: int, bad: Collection[str], spacing: int = 0) -> None:
        """Make a checkpoint exist there, then drop what is `superfluous`; raises Fenced if it is not ours to do."""

    def drop(self, name: str) -> None:
        """Let a checkpoint no longer exist there; raises Fenced if it is not ours to do."""

    def has_saved(self) -> bool:
        """Whether a checkpoint ever existed there."""

    def asked_to_stop(self) -> bool:
        """Whether somebody wants the run to save and stop; answers at once."""

    def forget_request(self) -> None: ...


class Checkpoints:
    """The checkpoints of one run, in a directory that is made if missing.

    One is saved every so many steps; the newest `keep` stay, not counting those that a resume has found to be bad. Each
    is compared with the fingerprint before it is used, unless changes are accepted. `remote` is where they are for
    other machines; None if all share this directory. `background`: training goes on while one is written. `rewinds`:
    the training may have to go back, and what it needs for that stays, too.
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
        self.directory, self.fingerprint, self.every, self.keep = directory, fingerprint, every, keep
        self.remote, self.accept_changes, self.background = remote, accept_changes, background
        self.spacing = guard.spacing(every) if rewinds else 0
        self._writer, self._writing = ThreadPoolExecutor(1, "checkpoint"), Future[None]()
        self._writing.set_result(None)
        self._missed = 0
        self._bad: set[str] = set()
        manifests.make_folder(directory)

    @contextlib.contextmanager
    def locked(self, patience: float = 60.0) -> Iterator[None]:
        """Be the only process that trains this run; wait `patience` seconds for a dying one, then raise LeaseHeld."""
        try:
            held = locks.acquire(self.directory / "lock", timeout=patience, poll_interval=0.5)
        except locks.Timeout:
            raise LeaseHeld(
                f"{self.directory} is in use: another process trains this run; wait for it or stop it"
            ) from None
        with held:
            for dead in self.directory.glob(".step=*"):  # left behind by a process that died while it saved
                shutil.rmtree(dead, ignore_errors=True)
            with self.remote.held() if self.remote else contextlib.nullcontext():
                try:
                    yield
                finally:  # nobody else may write before it is done
                    self._writer.shutdown()
                    lost = self._writing.exception()
                    if lost is not None and lost is not sys.exception():  # the training ended by another error
                        logger.error("a checkpoint could not be saved: %s", lost)

    def asked_to_stop(self) -> bool:
        return (self.directory / "stop").exists() or bool(self.remote and self.remote.asked_to_stop())

    def forget_request(self) -> None:
        """The request to stop was granted: the next start must not find it."""
        (self.directory / "stop").unlink(missing_ok=True)
        if self.remote:
            self.remote.forget_request()

    def begin(self, checkpoint: Checkpoint) -> None:
        """`save` in a thread, of tensors that nobody changes meanwhile; after `finish` of the one before."""
        self._writing = self._writer.submit(self.save, checkpoint)

    def finish(self) -> None:
        """Wait for what `begin` has begun, and raise what it raises."""
        self._writing.result()

    def has_failed(self) -> bool:
        """Whether `finish` would raise; answers at once."""
        return self._writing.done() and self._writing.exception() is not None

    def save(self, checkpoint: Checkpoint, last: bool = False) -> None:
        """Write a checkpoint so that it exists whole or not at all; then drop the bad and the oldest.

        The `last` one of this process must arrive elsewhere, as nothing can follow it: StorageUnavailable if it, or
        several in a row, did not. StorageFull: older checkpoints are untouched and nothing half-written stays.
        """
        name = f"step={checkpoint.step:010d}"
        temporary, final = self.directory / f".{name}", self.directory / name
        shutil.rmtree(temporary, ignore_errors=True)
        try:
            temporary.mkdir()
            save_file(checkpoint.tensors, temporary / "state.safetensors")
            meta = checkpoint.meta | {"step": checkpoint.step} | self.fingerprint.meta()
            manifests.write_atomically(temporary / META, json.dumps(meta, indent=1, sort_keys=True))
            if self.remote:
                self._pack(temporary)
            manifests.sync_tree(temporary)
            manifests.write(temporary, "checkpoint", {"step": checkpoint.step})
            if final.exists():  # a bad one of the same step, or we would not have trained it again
                shutil.rmtree(final)
            temporary.replace(final)
            manifests.sync_file(self.directory)
            manifests.write_atomically(self.directory / "saved.json", json.dumps({"step": checkpoint.step}))
        except BaseException as error:
            shutil.rmtree(temporary, ignore_errors=True)
            if said := outside.translate(error, temporary):
                raise said from error
            raise
        bad = self._bad - {name}
        if self._send(final, bad, last):
            self._bad = bad
            logger.info("saved checkpoint %s", final)
        found = [path for _, path in list_of(self.directory)]
        bad |= {path.name for path in found if not (path / manifests.NAME).is_file()}  # half-deleted
        for old in superfluous([path.name for path in found], self.keep, bad, self.spacing):
            self._drop(self.directory / old)

    def _drop(self, directory: Path) -> None:
        (directory / manifests.NAME).unlink(missing_ok=True)  # first: half-deleted is not valid
        shutil.rmtree(directory, ignore_errors=True)

    def _pack(self, directory: Path) -> None:
        """Put what lies beside the checkpoints into one: curves as they are now, weights as second names of files."""
        for name in COMPANIONS:
            if (found := self.directory / name).is_dir():
                shutil.copytree(found, directory / name, copy_function=os.link)
            elif found.is_file():
                shutil.copy(found, directory / name)

    def _unpack(self, directory: Path) -> None:
        """Put it back where the run looks for it."""
        for name in COMPANIONS:
            target = self.directory / name
            shutil.rmtree(target, ignore_errors=True) if target.is_dir() else target.unlink(missing_ok=True)
            if (found := directory / name).is_dir():
                shutil.copytree(found, target, copy_function=os.link)
            elif found.is_file():
                shutil.copy(found, target)

    def _send(self, final: Path, bad: set[str], last: bool) -> bool:
        """Let a checkpoint exist elsewhere; return whether it does. Training goes on without it for a while."""
        if not self.remote:
            return True
        try:
            self.remote.send(final, self.keep, bad, self.spacing)
            self._missed = 0
            return True
        except StorageUnavailable as error:
            self._missed += 1
            logger.error(
                "checkpoint %s did not arrive (%d of %d): %s", final.name, self._missed, MAX_FAILED_UPLOADS, error
            )
            if last or self._missed >= MAX_FAILED_UPLOADS:
                raise
            return False

    def load_newest(self) -> Checkpoint | None:
        """The newest checkpoint whose every byte is as written; None if this run never saved one.

        Raises:
            NoValidCheckpoint: there were checkpoints, and none can be trusted.
            ConfigMismatch: it was made with other data or settings.
        """
        candidates = self._candidates()
        found, reasons = self._first_valid(candidates)
        if found is not None:
            # what is newer is damaged, or never arrived elsewhere; it goes when there is a new one
            self._bad = {path.name for step, path in candidates + list_of(self.directory) if step > found.step}
            if self.remote:
                self._unpack(self.directory / f"step={found.step:010d}")
            return found
        if reasons or (self.remote.has_saved() if self.remote else (self.directory / "saved.json").exists()):
            raise NoValidCheckpoint(
                f"{self.directory}: this run has saved before, but no checkpoint is valid "
                f"({'; '.join(reasons) or 'none is left'}): restore one, or remove the directory to start over"
            )
        return None

    def go_back(self, step: int) -> Checkpoint | None:
        """The newest valid checkpoint that lies far enough before a step, after all newer ones are gone; None if there
        is none. Only those at multiples of `spacing` count: which one it is must not depend on where the run was
        interrupted, and so has saved."""
        regular = [(at, path) for at, path in self._candidates() if self.spacing and at % self.spacing == 0]
        found, _ = self._first_valid([(at, path) for at, path in regular if at <= step - guard.DISTANCE])
        if found is None:
            return None
        for at, path in sorted({*self._candidates(), *list_of(self.directory)}, reverse=True):
            if at > found.step:  # else a restart would go on from there: with the data that is to be left out
                if self.remote:
                    self.remote.drop(path.name)
                self._drop(path)
        return found

    def _first_valid(self, candidates: Iterable[tuple[int, Path]]) -> tuple[Checkpoint | None, list[str]]:
        """The first checkpoint whose every byte is as written, and what is wrong with those before it."""
        reasons: list[str] = []
        for step, path in candidates:
            try:
                self._bring(path)
                meta = outside.read_json(path / META, Meta, "restore it", DataCorrupt)
                tensors = load_file(path / "state.safetensors")
            except TryAgain:  # a download that fails is no damage
                raise
            except (InfoXLMError, OSError, ValueError, SafetensorError) as error:
                if isinstance(said := outside.translate(error, path), TryAgain):  # nor is a disk that fails for a while
                    raise said from error
                logger.warning("CheckpointCorrupt step=%d reason=%s", step, error)
                reasons.append(f"step {step}: {error}")
                continue
            self.fingerprint.check(meta, str(self.directory), self.accept_changes)
            logger.info("resuming after step %d from %s", step, path)
            return Checkpoint(step, tensors, meta), reasons
        return None, reasons

    def _candidates(self) -> list[tuple[int, Path]]:
        """Steps of the checkpoints that exist, newest first, and where each is on this machine, or will be."""
        if self.remote is None:
            return list_of(self.directory)
        found = [(int(m[1]), self.directory / m[0]) for name in self.remote.names() if (m := _NAME.fullmatch(name))]
        return sorted(found, reverse=True)

    def _bring(self, path: Path) -> None:
        """Make sure that a checkpoint is here and whole; copy it, if it is elsewhere. Its bytes are hashed once."""
        try:
            manifests.read(path, "checkpoint", made_with="pretrain")
        except InfoXLMError:
            if self.remote is None:
                raise
            self.remote.fetch(path.name, path)  # compares every byte
            manifests.read(path, "checkpoint", made_with="pretrain", check=lambda _: False)
