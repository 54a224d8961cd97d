"""Digests of what a config names: the content of files, folders and models, never where they lie."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from infoxlm_core import manifests, outside
from infoxlm_core.languages import is_known
from infoxlm_core.training.finetuning.selection import FILE as SELECTION


def digest_inputs(paths: str | Sequence[str] | None) -> list[str]:
    """Digests of what a config names: files, models, folders of data. Their content belongs to the key, not the path.

    A file counts with its name, which often says language and split (`xquad.de.json`), and with that of its folder if
    this is a language's (`fr/dev_2k.tsv`).
    """
    named = [paths] if isinstance(paths, str) else paths or []
    found = [Path(path).absolute() for path in named]
    return [_digest_folder(path) if path.is_dir() else _digest_file(path) for path in found if path.exists()]


def digest_inputs_by_role(roles: Mapping[str, Sequence[str]]) -> str:
    """One digest of data by what they are for: a file for training is another input than the same one for a test."""
    return manifests.digest({role: digest_inputs(paths) for role, paths in roles.items()})


def _digest_file(path: Path) -> str:
    return manifests.digest([_language(path.parent), path.name, manifests.file_sha256(path)])


def _digest_folder(folder: Path) -> str:
    """Names and contents of the files below a folder; of a model only what is loaded, since more may lie beside it."""
    files = [path for path in outside.below(folder) if path.is_file()]
    if is_model := any(path.parent == folder and path.suffix == ".safetensors" for path in files):
        loaded, places = (".safetensors", ".json", ".model", ".txt"), [folder]
        if (folder / SELECTION).is_file():  # it may have models of single languages below it
            places += (folder / "steps").glob("*")
        files = [path for path in files if path.parent in places and path.suffix in loaded]
    files = [path for path in files if path.name != manifests.NAME]  # it also says which code made them
    content = {str(path.relative_to(folder)): manifests.file_sha256(path) for path in files}
    return manifests.digest(["" if is_model else _language(folder), content])


def _language(folder: Path) -> str:
    """The name of a folder if it is a language's: readers of its files go by it."""
    return folder.name if is_known(folder.name) else ""
