"""Checks that a model directory, ours or another Hugging Face one, is complete and safe to load."""

from pathlib import Path
from typing import Any

from typing_extensions import TypedDict

from infoxlm_core import manifests, outside
from infoxlm_core.errors import DataCorrupt, InputError

_CODE_SUFFIXES = (".bin", ".pt", ".pth", ".pkl", ".py")  # pickles and modules, which can run code


@outside.allow_extra_keys
class Index(TypedDict):
    """The index of a model in several files: the file name of each weight."""

    weight_map: dict[str, str]


def check(directory: Path) -> None:
    """Check that a local directory holds an encoder, and that its files match our manifest if it has one.

    Raises:
        InputError: see `check_encoder`.
        DataCorrupt: a file differs from the manifest.
    """
    check_encoder(directory)
    manifest_path = directory / manifests.NAME
    if not manifest_path.is_file():
        return
    manifest = outside.read_json(manifest_path, Any, "export or copy the model again", DataCorrupt)
    # Other tools write files of this name too, but without all of our keys.
    is_ours = isinstance(manifest, dict) and manifests.Manifest.__required_keys__ <= manifest.keys()
    if is_ours:
        manifests.read(directory, manifest["kind"], producer="the export or the copy of the model")


def check_encoder(directory: Path) -> None:
    """Raise InputError if a directory has no encoder, or has files that could run code when they are loaded."""
    if not (directory / "config.json").is_file() or not list(directory.glob("*.safetensors")):
        raise InputError(f"{directory} has no config.json with *.safetensors: give the output of pretrain")
    for path in directory.rglob("*"):
        if path.suffix in _CODE_SUFFIXES:
            raise InputError(f"{directory} holds {path.name}, which could run code: keep only safetensors and JSON")
    for path in directory.glob("*.index.json"):
        index = outside.read_json(path, Index, "export the model again")
        for file_name in index["weight_map"].values():
            if Path(file_name).name != file_name:  # transformers would follow a path out of the folder
                raise InputError(f"{path}: {file_name!r:.200} is not in this folder: export the model again")
    for path in directory.glob("*config.json"):
        if "auto_map" in outside.read_json(path, dict[str, Any], "export the model again"):
            raise InputError(f"{path} requires custom code (auto_map): export the model with a built-in class")
