"""A registered model as one to start from: models:/infoxlm@champion or models:/infoxlm/3."""

import shutil
import tempfile
from pathlib import Path

from components.adapters.mlflow import model_registry
from components.adapters.source import Wanted
from infoxlm_core import manifests


def fetch(wanted: Wanted) -> Path:
    """A copy in the store: what the registry hands out may lie in a folder of this process alone."""
    found = model_registry.load_encoder(wanted.source, wanted.store)
    named = manifests.digest_files(found).removeprefix("sha256:")[:16]  # weights may have more than one tokenizer
    final = wanted.store.resolve() / "models" / f"registry-{named}"
    final.parent.mkdir(parents=True, exist_ok=True)
    if not final.is_dir():
        with tempfile.TemporaryDirectory(prefix=".fetch-", dir=final.parent) as folder:
            shutil.copytree(found, Path(folder) / "it")
            manifests.move_into_place(Path(folder) / "it", final)
    return final
