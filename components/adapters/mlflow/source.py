"""A registered model as the source of an encoder: models:/infoxlm@champion or models:/infoxlm/3."""

import shutil
import tempfile
from pathlib import Path

from components.adapters.mlflow import model_registry
from infoxlm_core import manifests


def fetch(source: str, store: Path) -> Path:
    """Copy a registered model to the store and return the copy. Other processes may not see the registry's own path.

    A damaged copy is replaced.
    """
    model = model_registry.load_encoder(source, store)
    digest = manifests.digest_files(model)  # of all files, because the same weights may have another tokenizer
    short_digest = digest.removeprefix("sha256:")[:16]
    copy = store.resolve() / "models" / f"registry-{short_digest}"
    copy.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".fetch-", dir=copy.parent) as scratch:
        if copy.is_dir() and manifests.digest_files(copy) != digest:
            copy.rename(Path(scratch) / "damaged")
        if not copy.is_dir():
            temporary_copy = Path(scratch) / "copy"
            shutil.copytree(model, temporary_copy)
            manifests.move_into_place(temporary_copy, copy)  # other processes never see a part of the model
    return copy
