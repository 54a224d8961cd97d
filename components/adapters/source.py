"""Sources of models and data other than files and storages, and the tables of them.

A new source is a module with `fetch(request: Request) -> Path | None` and a line in a table.
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
"""Text before the first colon of a source -> the module that fetches it; imported on first use."""


@dataclass(frozen=True)
class Request:
    """A request for a model or data."""

    source: str
    store: Path
    """Directory for copies that all workers of a run must see. Without an MLflow server it also has the registry."""
    cache: Path
    """Cache of this machine."""
    only: str | None = None
    """The one file of a model that is needed."""
    sha256: str | None = None
    """Expected digest of a file."""


def fetch(table: dict[str, str], request: Request) -> Path | None:
    """Return the local path of what was fetched; None if the table has no such source."""
    module = table.get(storage.scheme(request.source, ":"))
    return importlib.import_module(module).fetch(request) if module else None
