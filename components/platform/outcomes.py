"""Why stages of a pipeline run failed, as they have written it into the store."""

import json
from typing import Any

from components.adapters import storage
from components.platform import runtime


def read(store: str, run: str) -> list[dict[str, Any]]:
    """The outcomes of a pipeline run, the oldest first: stage, code, class, message.

    Raises:
        InputError, StorageUnavailable: the store refuses, or does not answer.
    """
    folder = storage.open(f"{store}/{runtime.outcome_name(run=run)}")
    names = [entry.name for entry in sorted(folder.entries(), key=lambda entry: (entry.modified, entry.name))]
    return [json.loads(content[0]) for content in map(folder.get, names) if content]
