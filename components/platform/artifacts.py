"""The store: artifacts by content, and checkpoints, in a directory or on S3.

A KFP artifact of ours is a small JSON file that says where in the store the bulk data is: `{"location", "digest"}`.
The store holds each artifact once, under a key of everything that decides its content (`keys.artifact_key`):

    STORE/corpus/3f2a…/manifest.json     finished: found again by every later run with the same inputs
    STORE/runs/pretrained-77b0…/         checkpoints of a training; an interrupted one continues here
    STORE/cost/                          hours of GPUs and processes that artifacts and runs have cost (`costs`)
    STORE/outcome/demo-2026…/…json       why a stage of a pipeline run failed, if it did: KFP keeps no exit codes
    STORE/verified/                      when every byte of an artifact was compared last: hashing takes long
    STORE/parameters/                    what is too large to be a parameter, by its digest
    STORE/work/j-pretrain-….json         what a RayJob is to do; STORE/leases/ who is sending what

STORE is a directory, or `s3://bucket/prefix`; `adapters/storage.py` has the table. Of a store that is elsewhere each
machine has a copy in its cache, laid out alike: artifacts are made there and sent, or fetched when they are needed
(INFOXLM_CACHE says where; default ~/.cache/infoxlm).
"""

import contextlib
import json
import logging
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from typing_extensions import TypedDict

from components.adapters import storage
from components.adapters.lease import Lease
from components.platform import artifact_transfer, verification
from components.settings.environment import cache
from infoxlm_core import locks, manifests, outside
from infoxlm_core.errors import DataCorrupt, InputError

logger = logging.getLogger(__name__)

KINDS = (
    "corpus",
    "shards",
    "pretrained",
    "classifier",
    "tuned",
    "scores",
    "points",
    "comparison",
    "suite",
    "promotion",
)
"""Of artifacts: the folders of a store."""
LONGEST_PUSH, LONGEST_TRAINING = 6 * 3600.0, 14 * 86_400.0
"""Seconds to wait for another machine that sends, or makes, the same artifact."""
_COPY_OF = "COPY_OF"  # a file in a machine's copy of a store on S3 that says of which


def local(store: str) -> Path:
    """The store on this machine: the directory itself, or the copy of what is elsewhere."""
    if directory := storage.open(store).directory:
        return directory
    named = re.sub(r"[^\w.-]+", "-", store.partition("://")[2])
    root = cache() / "stores" / f"{named}-{manifests.digest(store).removeprefix('sha256:')[:8]}"
    root.mkdir(parents=True, exist_ok=True)
    if not (root / _COPY_OF).is_file() or (root / _COPY_OF).read_bytes() != store.encode():
        manifests.write_atomically(root / _COPY_OF, store)
    return root


def url_of(location: Path) -> str:
    """What the rest of the world calls a place in the store: its URI, or the path itself."""
    for root in location.parents:
        if (root / _COPY_OF).is_file():
            return f"{(root / _COPY_OF).read_text()}/{location.relative_to(root)}"
    return str(location)


def write(store: str, name: str, content: str) -> None:
    """Write a small file into the store."""
    storage.open(store).put(name, content)


def read(store: str, name: str) -> bytes | None:
    """Read a small file of the store; None if there is none."""
    found = storage.open(store).get(name)
    return found[0] if found else None


def lookup(store: str, kind: str, name: str) -> Path | None:
    """The artifact `kind/name` of the store on this machine; None if nobody has made it yet.

    What was written to since its bytes were last compared is compared again; who reads it asks `locate`, which always
    does. A copy that is damaged is fetched once more.

    Raises:
        DataCorrupt: a file is not what the manifest says.
    """
    final, remote = manifests.inside(local(store), f"{kind}/{name}"), storage.is_remote(store)
    uri = f"{store}/{kind}/{name}"
    if remote:
        described = artifact_transfer.manifest(uri)
        if described is None:
            return None
        with _one_at_a_time(final.parent / f".{name}.fetching"):
            if not _is_whole(final, kind, described["digest"]):
                artifact_transfer.pull(uri, final)  # and every byte compared
                verification.note(final, verification.state_of(final))
    elif not (final / manifests.NAME).is_file():
        return None
    else:
        verification.verify(final, kind)
    logger.info("found %s, made before from the same inputs", uri if remote else final)
    return final


def _is_whole(directory: Path, kind: str, digest: str) -> bool:
    """Whether this machine's copy of an artifact is there, the same as elsewhere, and not damaged."""
    if not (directory / manifests.NAME).is_file():
        return False
    try:
        return verification.verify(directory, kind)["digest"] == digest
    except DataCorrupt as error:
        logger.warning("%s: fetching it once more", error)
        return False


def is_made(store: str, kind: str, name: str) -> bool:
    """Whether there is such an artifact, in the store or, not sent yet, on this machine."""
    here = (local(store) / kind / name / manifests.NAME).is_file()
    return here or (storage.is_remote(store) and artifact_transfer.manifest_exists(f"{store}/{kind}/{name}"))


def get_or_build(store: str, kind: str, name: str, build: Callable[[Path], dict[str, Any] | None]) -> Path:
    """Return the artifact `kind/name` of the store; build it first if it is not there, whole or not at all.

    Args:
        store: directory, or s3://bucket/prefix.
        kind: of the artifact.
        name: of the artifact, from all that decides its content.
        build: fills an empty directory and returns the facts of the manifest.

    Returns:
        where it is on this machine.
    """
    if found := lookup(store, kind, name):
        return found
    final = local(store) / kind / name
    if not (storage.is_remote(store) and (final / manifests.NAME).is_file()):  # made before, and never arrived
        _build(final, kind, build)
    if not storage.is_remote(store):
        return final
    uri = f"{store}/{kind}/{name}"
    with Lease(f"{store}/leases/{kind}-{name}.json", wait=LONGEST_PUSH):
        if not artifact_transfer.manifest_exists(uri):  # else somebody made the same meanwhile: theirs counts
            artifact_transfer.push(final, uri)
            return final
    return lookup(store, kind, name) or final


def _build(final: Path, kind: str, build: Callable[[Path], dict[str, Any] | None]) -> None:
    if final.exists():
        raise InputError(f"{final} is in the way: it holds no manifest; remove it")
    manifests.make_folder(final.parent)
    _sweep(final.parent)
    partial = Path(tempfile.mkdtemp(prefix=".making-", dir=final.parent))
    try:
        with locks.acquire(f"{partial}.lock"):  # held while this process lives: nobody sweeps it away
            (partial / "it").mkdir()
            facts = build(partial / "it")
            state = verification.state_of(partial / "it")
            manifests.write(partial / "it", kind, facts)
            manifests.move_into_place(partial / "it", final, manifests.NAME)
            verification.note(final, state)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        Path(f"{partial}.lock").unlink(missing_ok=True)


@contextlib.contextmanager
def exclusive(store: str, kind: str, name: str) -> Iterator[None]:
    """Wait until nobody else makes an artifact that takes long, and keep others waiting: its second maker finds it."""
    with _one_at_a_time(local(store) / kind / f".{name}.lock"):
        if not storage.is_remote(store):
            yield
            return
        with Lease(f"{store}/leases/making-{kind}-{name}.json", wait=LONGEST_TRAINING):
            yield


@contextlib.contextmanager
def _one_at_a_time(path: Path) -> Iterator[None]:
    """One process of this machine at a time, by a lock on a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        held = locks.acquire(path, timeout=0)
    except locks.Timeout:
        logger.info("somebody else holds %s: waiting", path)
        held = locks.acquire(path)
    with held:
        yield


def _sweep(directory: Path) -> None:
    """Remove what processes that are gone have left half-made."""
    for path in directory.glob(".making-*.lock"):
        with (
            contextlib.suppress(locks.Timeout, OSError),
            locks.acquire(path, timeout=0),
        ):  # OSError: somebody else's file
            shutil.rmtree(path.with_suffix(""), ignore_errors=True)
            path.unlink(missing_ok=True)


class Pointer(TypedDict):
    """What a KFP artifact of ours says."""

    location: str
    digest: str


def publish(artifact: Any, location: Path) -> None:
    """Let a KFP output artifact point to a directory of the store."""
    digest, place = manifests.load(location)["digest"], url_of(location)
    Path(artifact.path).parent.mkdir(parents=True, exist_ok=True)
    manifests.write_atomically(Path(artifact.path), json.dumps({"location": place, "digest": digest}))
    artifact.metadata["digest"], artifact.metadata["location"] = digest, place


def read_pointer(artifact: Any) -> tuple[str, str]:
    """Where in the store what a KFP input artifact points to is, and its digest."""
    said = outside.read_json(Path(artifact.path), Pointer, "run the step that makes it again", DataCorrupt)
    return said["location"], said["digest"]


def resolve(artifact: Any) -> tuple[Path, str]:
    """Where on this machine it is, fetched if it is on S3, and its digest."""
    location, digest = read_pointer(artifact)
    return locate(location), digest


def locate(location: str, hashed: bool = True) -> Path:
    """Where on this machine an artifact of the store is, or what lies in one: `s3://bucket/prefix/pretrained/7b/encoder`.

    Args:
        location: as `publish` has written it.
        hashed: compare every byte with the manifest, since it will be read. A copy that is damaged is fetched again.

    Raises:
        InputError: there is no such artifact, or the location is none, or leads out of the store.
        DataCorrupt: a file is not what the manifest says.
    """
    whole, found = _place(location)
    if not hashed or not (found / manifests.NAME).is_file():
        return found
    try:
        verification.hash_what_is_read(found)
    except DataCorrupt:
        if not storage.is_remote(location):
            raise
        verification.marker_of(whole).unlink(missing_ok=True)  # `lookup` compares every byte now, and fetches
        _place(location)
    return found


def _place(location: str) -> tuple[Path, Path]:
    """Where the artifact is on this machine, and where in it what is meant."""
    if directory := storage.open(location).directory:
        return directory, directory
    # the last kind with a key: a folder above the store may be called like a kind, too
    said = re.fullmatch(rf"(.+?://.+)/({'|'.join(KINDS)})/([0-9a-f]{{16}})(?:/(.*))?", location)
    if not said:
        raise InputError(f"{location} is no artifact, which is STORE/KIND/KEY: run the step that makes it again")
    store, kind, name, inner = said.groups()
    found = lookup(store, kind, name)
    if found is None:
        raise InputError(f"{location} is not in the store any more: run again without Kubeflow's cache (--no-cache)")
    return found, manifests.inside(found, inner) if inner else found


def log_facts(location: Path, metrics: Any) -> dict[str, float]:
    """The numbers in an artifact's manifest; they also become KFP metrics."""
    numbers = {
        name: value for name, value in manifests.load(location)["facts"].items() if isinstance(value, int | float)
    }
    show(numbers, metrics)
    return numbers


def show(figures: Mapping[str, float], metrics: Any) -> None:
    """Let KFP's page show figures, under names that it takes."""
    for name, value in figures.items():
        metrics.log_metric(name.replace("/", "_"), value)
