"""Where a data set may be, and a local copy of it.

    /data/xnli                  a file or folder on this machine
    s3://bucket/eval/xnli       the same on S3, with all folders below it, or one object

Copies lie in the store, where all workers of a run see them, and are whole or not there. They keep the names that the
files have, since names say what is in them: `tatoeba.deu-eng.deu`, `test-context-de-question-de.json`.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from components.adapters.s3 import client as s3
from infoxlm_core.errors import InputError


def fetch(source: str, store: Path) -> Path:
    """Return the local file or folder of a data set; copies go to `store/data`.

    What has not changed on S3 is found again by names, sizes and ETags.

    Raises:
        InputError: there is no such file, folder, bucket or prefix.
        ShardCorrupt: what was downloaded is not what was stored.
        StorageUnavailable: S3 does not answer.
    """
    if source.startswith("s3://"):
        return s3.mirror(source, store.resolve() / "data", deep=True)
    if not Path(source).exists():
        raise InputError(f"{source}: no such file or folder: give a path, or s3://bucket/prefix")
    return Path(source)


def localise(settings: Any, store: Path) -> Any:
    """The same settings of a task, with all their data on this machine; raises as `fetch` does."""
    from infoxlm_core.tasks import task_of

    return task_of(settings).localise(settings, lambda source: str(fetch(source, store)))


def states(sources: Iterable[str]) -> list[str]:
    """What tells the content of sources on S3 from another: names, sizes and ETags. Nothing is downloaded.

    Raises:
        InputError: there is no such bucket or prefix.
        StorageUnavailable: S3 does not answer.
    """
    return [s3.state(source, deep=True) for source in sources if source.startswith("s3://")]
