"""The store: content-addressed artifacts, and checkpoints, in a directory or on S3.

Our KFP artifacts are small JSON files that point into the store: `{"location", "digest"}`. The store holds each
artifact once, under a digest of everything that determines its content (`compute_key`):

    STORE/corpus/3f2a…/manifest.json     a finished artifact, reused by every later run with the same inputs
    STORE/runs/pretrained-77b0…/         checkpoints of a training run (`training_runs`)
    STORE/begun/PIPELINE.json            the training run that a pipeline started last
    STORE/preparing/3f2a…/               intermediate files of a corpus preparation, deleted when it succeeds
    STORE/cost/demo-2026…/pretrained/…   duration of each attempt in a pipeline run (`costs`)
    STORE/outcome/demo-2026…/…json       failures of a pipeline run's stages, because KFP keeps no exit codes
    STORE/verified/                      last verified state of each artifact, because hashing is slow
    STORE/parameters/                    settings that are passed by reference (`parameters`)
    STORE/work/j-pretrain-….json         build spec of a RayJob (`builds.BuildSpec`)
    STORE/leases/                        locks of uploads

STORE is a directory, or `s3://bucket/prefix` (see `adapters/storage.py`). Each machine has a local copy of a remote
store in its cache, with the same layout. Artifacts are built in the local copy before their upload, and downloaded to
the local copy when needed. INFOXLM_CACHE names the cache; the default is ~/.cache/infoxlm. Each local copy has a
directory `summaries`, with the same layout and only the small files of artifacts (`fetch_summary`).
"""

import contextlib
import json
import logging
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from typing_extensions import TypedDict

from components.adapters import storage
from components.adapters.lease import Lease
from components.platform import artifact_files
from components.settings.environment import cache
from infoxlm_core import locks, manifests, user_files
from infoxlm_core.config import StageConfig
from infoxlm_core.errors import DataCorrupt, InputError

logger = logging.getLogger(__name__)

KINDS = (*manifests.VERSIONS, "promotion")
"""Artifact kinds, which name the store's directories. Promotions have no version, because MLflow run ids name them."""
MAX_UPLOAD_SECONDS = 6 * 3600.0
"""Longest time to wait while another machine uploads the same artifact."""
MAX_BUILD_SECONDS = 14 * 86_400.0
"""Longest time to wait while another machine builds the same artifact. A training run may take weeks."""
_NOT_IN_STORE = "is no longer in the store: run again without Kubeflow's cache (--no-cache)"
_URI_FILE = "COPY_OF"  # file with the remote store's URI, in the local copy and in its directory `summaries`
_SUMMARY_FILES = (manifests.NAME, "report.json", "metrics.jsonl")  # what a step reads of the artifact that it publishes


# ---------------------------------------------------------------- the store


def local_directory(store: str) -> Path:
    """Return a store's directory on this machine: the store itself, or the local copy of a remote store."""
    directory = storage.open(store).directory
    if directory:
        return directory
    _, _, bucket_and_prefix = store.partition("://")
    readable_name = re.sub(r"[^\w.-]+", "-", bucket_and_prefix)  # may be the same for two stores, unlike the digest
    digest = manifests.digest(store).removeprefix("sha256:")[:8]
    return _make_copy_root(cache() / "stores" / f"{readable_name}-{digest}", store)


def _make_copy_root(root: Path, store: str) -> Path:
    """Create and return a directory for copies of artifacts, with the file that tells `find_uri` the remote store."""
    root.mkdir(parents=True, exist_ok=True)
    uri_file = root / _URI_FILE  # `find_uri` reads it, so replace it if it was changed
    if not uri_file.is_file() or uri_file.read_bytes() != store.encode():
        manifests.write_atomically(uri_file, store)
    return root


def find_uri(location: Path) -> str:
    """Return the remote URI for a path in the local copy of a remote store. Return any other path unchanged."""
    for root in location.parents:
        uri_file = root / _URI_FILE
        if uri_file.is_file():
            return f"{uri_file.read_text()}/{location.relative_to(root)}"
    return str(location)


def compute_key(kind: str, config: StageConfig, *inputs: str) -> str:
    """Return an artifact's key: a digest of its kind, the kind's version, the config and the input digests."""
    content = [kind, manifests.VERSIONS[kind], config.result_fields(), inputs]
    # `_split_location` and the garbage collection recognise keys by these 16 digits.
    return manifests.digest(content).removeprefix("sha256:")[:16]


def write(store: str, name: str, content: str) -> None:
    """Write a small file into the store."""
    storage.open(store).put(name, content)


def read(store: str, name: str) -> bytes | None:
    """Return the content of a small file in the store, or None if the file does not exist."""
    content_and_version = storage.open(store).get(name)
    return content_and_version[0] if content_and_version else None


# ---------------------------------------------------------------- looking up and building artifacts


def lookup(store: str, kind: str, name: str) -> Path | None:
    """Return the local directory of the artifact `kind/name`, or None if the artifact does not exist yet.

    The artifact is verified if it was touched since its last verification, whereas `locate` always verifies it. A
    damaged local copy of a remote artifact is downloaded again.

    Raises:
        DataCorrupt: a file differs from the manifest.
    """
    path = manifests.join_inside(local_directory(store), f"{kind}/{name}")
    uri = f"{store}/{kind}/{name}"
    if not storage.is_remote(store):
        if not (path / manifests.NAME).is_file():
            return None
        artifact_files.verify(path, kind)
        return path
    manifest = artifact_files.read_manifest(uri)
    if manifest is None:
        return None
    # Without the lock, processes that start at the same time would each download the artifact.
    with _hold_lock(path.parent / f".{name}.fetching"):
        if not _is_intact(path, kind, manifest["digest"]):
            artifact_files.download(uri, path)  # verifies every file
            artifact_files.record_verified(path, artifact_files.compute_state(path))
    return path


def fetch_summary(store: str, kind: str, name: str) -> Path | None:
    """Return a local directory with the small files of the artifact `kind/name`, or None if it does not exist yet.

    The small files are the manifests, the report of a corpus and the curves of a training run. The other files of a
    remote artifact, such as token shards, are not downloaded, because the pod of a step may have no space for them.

    Raises:
        DataCorrupt: a file differs from the manifest.
    """
    if not storage.is_remote(store):
        return lookup(store, kind, name)
    uri = f"{store}/{kind}/{name}"
    manifest = artifact_files.read_manifest(uri)
    if manifest is None:
        return None
    root = _make_copy_root(local_directory(store) / "summaries", store)
    path = manifests.join_inside(root, f"{kind}/{name}")
    with _hold_lock(path.parent / f".{name}.fetching"):
        # Keep a current copy, because another process may be reading it.
        if not (path / manifests.NAME).is_file() or manifests.load(path) != manifest:
            artifact_files.download(uri, path, lambda file: file.name in _SUMMARY_FILES)
    return path


def _is_intact(directory: Path, kind: str, expected_digest: str) -> bool:
    """Return whether a directory holds an undamaged artifact with the expected digest."""
    if not (directory / manifests.NAME).is_file():
        return False
    try:
        return artifact_files.verify(directory, kind)["digest"] == expected_digest
    except DataCorrupt as error:
        logger.warning("%s: downloading it again", error)
        return False


def exists(store: str, kind: str, name: str) -> bool:
    """Return whether an artifact exists, either in the store or still only on this machine."""
    if (local_directory(store) / kind / name / manifests.NAME).is_file():
        return True
    return storage.is_remote(store) and artifact_files.manifest_exists(f"{store}/{kind}/{name}")


def get_or_build(store: str, kind: str, name: str, build: Callable[[Path], dict[str, Any] | None]) -> Path:
    """Return the local directory of the artifact `kind/name`. Build the artifact first if it does not exist.

    An interrupted build leaves no artifact. If two machines build the same artifact for a remote store, the first
    upload wins.

    Args:
        store: directory, or s3://bucket/prefix.
        kind: artifact kind.
        name: artifact name, a digest of everything that determines the artifact's content.
        build: function that writes the files into an empty directory and returns the facts for the manifest.
    """
    existing = lookup(store, kind, name)
    if existing:
        logger.info("reusing %s/%s/%s, which was built from the same inputs", store, kind, name)
        return existing
    path = local_directory(store) / kind / name
    if not (path / manifests.NAME).is_file():  # an earlier attempt may have built the artifact without uploading it
        _build_locally(path, kind, build)
    if not storage.is_remote(store):
        return path
    uri = f"{store}/{kind}/{name}"
    with Lease(f"{store}/leases/{kind}-{name}.json", wait=MAX_UPLOAD_SECONDS):
        if not artifact_files.manifest_exists(uri):
            artifact_files.upload(path, uri)
            logger.info("uploaded %s", uri)
            return path
    # Another machine uploaded the artifact first. Use its files, because all machines must use the same ones.
    return lookup(store, kind, name) or path


def _build_locally(path: Path, kind: str, build: Callable[[Path], dict[str, Any] | None]) -> None:
    """Build an artifact in a temporary directory, and rename the directory to `path` when it is complete.

    A directory without a manifest at `path`, which an interrupted deletion has left, is removed.
    """
    manifests.make_directory(path.parent)
    with locks.scratch_directory(path.parent) as scratch:
        # In this order, because another process may finish the artifact at any time.
        if path.is_dir() and not (path / manifests.NAME).exists():
            path.rename(scratch / "incomplete")
        output = scratch / "artifact"
        output.mkdir()
        facts = build(output)
        manifests.write(output, kind, facts)
        # Compute the state before the move, because another process may have finished the same artifact first. `path`
        # then keeps that process's files, which this process has not hashed.
        state = artifact_files.compute_state(output)
        manifests.move_into_place(output, path, marker=manifests.NAME)
        artifact_files.record_verified(path, state)


@contextlib.contextmanager
def exclusive(store: str, kind: str, name: str) -> Iterator[None]:
    """Let one process at a time run the block, so that processes do not build the same costly artifact twice."""
    # The lock file is for the processes of this machine, and the lease for other machines.
    with _hold_lock(local_directory(store) / kind / f".{name}.lock"):
        if not storage.is_remote(store):
            yield
            return
        with Lease(f"{store}/leases/making-{kind}-{name}.json", wait=MAX_BUILD_SECONDS):
            yield


@contextlib.contextmanager
def _hold_lock(path: Path) -> Iterator[None]:
    """Hold a lock file inside the block. If another process on this machine holds the lock, log a line and wait."""
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        lock = locks.acquire(path, timeout=0)
    except locks.Timeout:
        logger.info("waiting for the process that holds the lock %s", path)
        lock = locks.acquire(path)
    with lock:
        yield


# ---------------------------------------------------------------- KFP artifacts


class Pointer(TypedDict):
    """Content of a KFP artifact file."""

    location: str
    digest: str


def publish(artifact: Any, location: Path) -> None:
    """Make a KFP output artifact point to an artifact's local directory."""
    publish_pointer(artifact, find_uri(location), manifests.load(location)["digest"])


def publish_pointer(artifact: Any, location: str, digest: str) -> None:
    """Make a KFP output artifact point to a store location with a known digest."""
    pointer = Pointer(location=location, digest=digest)
    Path(artifact.path).parent.mkdir(parents=True, exist_ok=True)
    manifests.write_atomically(Path(artifact.path), json.dumps(pointer))
    artifact.metadata.update(pointer)  # Kubeflow shows the metadata on the page of the artifact


def read_pointer(artifact: Any) -> tuple[str, str]:
    """Return the store location and the digest that a KFP input artifact contains."""
    pointer = user_files.read_json(Path(artifact.path), Pointer, "repeat the step that builds it", DataCorrupt)
    return pointer["location"], pointer["digest"]


def resolve(artifact: Any) -> tuple[Path, str]:
    """Return the local directory and the digest of a KFP input artifact. Download the artifact if needed."""
    location, digest = read_pointer(artifact)
    return locate(location), digest


class _ArtifactLocation(NamedTuple):
    """Parts of an artifact's location in a remote store."""

    store: str
    kind: str
    name: str
    inner_path: str
    """Path of a directory inside the artifact; empty for the artifact itself."""

    @property
    def local_copy(self) -> Path:
        """Directory of the artifact in the local copy of the store. It may not exist."""
        return local_directory(self.store) / self.kind / self.name


def locate(location: str) -> Path:
    """Return the local path for the location of an artifact or a directory inside an artifact.

    An artifact of a remote store is downloaded if needed, and again if the local copy is damaged. The files of an
    artifact are hashed and verified, but not the files of a directory that has no manifest of its own.

    Args:
        location: location in the form that `publish` writes, such as `s3://bucket/prefix/pretrained/7b…/encoder`.

    Raises:
        InputError: the artifact does not exist, or the location is malformed or leads out of the store.
        DataCorrupt: a file differs from the manifest.
    """
    path = _locate_unverified(location)
    if not (path / manifests.NAME).is_file():  # a directory inside the artifact that is not an artifact itself
        return path
    try:
        artifact_files.verify_files(path)
    except DataCorrupt:
        if not storage.is_remote(location):
            raise
        marker = artifact_files.find_marker(_split_location(location).local_copy)
        marker.unlink(missing_ok=True)  # so that the next line hashes all files
        return _locate_unverified(location)
    return path


def _locate_unverified(location: str) -> Path:
    """Return the same path as `locate`, but hash only artifacts that were touched since their last verification.

    In a store on this machine, nothing is checked.

    Raises:
        InputError: a remote store has no such artifact, or the location is malformed or leads out of the store.
        DataCorrupt: a file differs from the manifest.
    """
    directory = storage.open(location).directory
    if directory:  # the store is on this machine, so nothing is downloaded or checked
        return directory
    store, kind, name, inner_path = _split_location(location)
    artifact = lookup(store, kind, name)
    if artifact is None:
        raise InputError(f"{location} {_NOT_IN_STORE}")
    return manifests.join_inside(artifact, inner_path) if inner_path else artifact


def read_manifest(location: str) -> dict[str, Any]:
    """Return the manifest at the location of an artifact or a nested artifact, without downloading other files.

    Raises:
        InputError: the artifact does not exist.
        DataCorrupt: the manifest is malformed.
    """
    manifest = artifact_files.read_manifest(location)
    if manifest is None:
        raise InputError(f"{location} {_NOT_IN_STORE}")
    return manifest


def _split_location(location: str) -> _ArtifactLocation:
    """Split a location in a remote store into its parts. Raise InputError if the location is malformed."""
    # The first group is greedy, because a directory above the store may have the name of an artifact kind.
    match = re.fullmatch(rf"(.+?://.+)/({'|'.join(KINDS)})/([0-9a-f]{{16}})(?:/(.*))?", location)
    if not match:
        raise InputError(f"{location} is not an artifact (STORE/KIND/KEY): repeat the step that builds the artifact")
    return _ArtifactLocation(*match.groups(default=""))


class ShardsLocation(NamedTuple):
    """Local and remote location of token shards for a training run."""

    directory: Path
    """Local directory with the manifest, the tokenizer, and all or some of the tokens."""
    source: storage.Store | None
    """Storage to stream missing tokens from; None if the directory has all tokens."""


def open_shards(location: str) -> ShardsLocation:
    """Locate token shards for a training run.

    If this machine has no complete copy, only the manifest and the tokenizer are downloaded, and the training run
    streams the tokens.

    Raises:
        InputError: the shards do not exist.
        DataCorrupt: a file differs from the manifest.
    """
    if not storage.is_remote(location):
        return ShardsLocation(locate(location), source=None)
    local_copy = _split_location(location).local_copy
    if (local_copy / manifests.NAME).is_file():  # complete, because the manifest is written last
        return ShardsLocation(locate(location), source=None)
    manifest = read_manifest(location)
    directory = streaming_directory(local_copy)
    source = storage.open(location)
    token_directories = manifest["facts"]["tables"]  # the keys are the directories of the tokens
    small_files = [name for name in manifest["files"] if name.rpartition("/")[0] not in token_directories]
    for name in (*small_files, manifests.NAME):  # as in every artifact, write the manifest last
        path = manifests.join_inside(directory, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        manifests.write_atomically(path, source.read(name))
    return ShardsLocation(directory, source)


def streaming_directory(artifact: Path) -> Path:
    """Return the directory for streamed tokens, which lies beside the local copy of the token shards."""
    return artifact.with_name(f".{artifact.name}.streaming")


def log_facts(location: Path, metrics: Any) -> dict[str, float]:
    """Log the numeric facts of an artifact's manifest as KFP metrics, and return these facts."""
    facts = manifests.load(location)["facts"]
    numeric_facts = {name: value for name, value in facts.items() if isinstance(value, int | float)}
    log_metrics(numeric_facts, metrics)
    return numeric_facts


def log_metrics(values: Mapping[str, float], metrics: Any) -> None:
    """Log values to the KFP output `metrics`."""
    for name, value in values.items():
        metrics.log_metric(name.replace("/", "_"), value)  # KFP allows no slash in a metric name
