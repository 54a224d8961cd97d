"""Where models and data may be that are no files here and lie in no storage, and the tables of those places.

Another place is a module with `fetch(wanted: Wanted) -> Path` and a line in a table.
"""

import importlib
import re
from dataclasses import dataclass
from pathlib import Path

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


def scheme(source: str) -> str:
    """What stands before the first colon; a path, and a name on the hub, have none."""
    match = re.match(r"([a-z][a-z0-9+.-]*):", source)
    return match[1] if match else ""


def fetch(table: dict[str, str], wanted: Wanted) -> Path | None:
    """Where on this machine it is now; None if there is no such place."""
    module = table.get(scheme(wanted.source))
    return importlib.import_module(module).fetch(wanted) if module else None
