"""Checks that a model directory, ours or another Hugging Face one, is complete and safe to load."""

from pathlib import Path
from typing import Any

from typing_extensions import TypedDict

from infoxlm_core import manifests, outside
from infoxlm_core.errors import DataCorrupt, InputError


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
    path = directory / manifests.NAME
    if not path.is_file():
        return
    content = outside.read_json(path, Any, "make or copy the model again", DataCorrupt)
    # Other tools write files of this name too; ours has all of these keys.
    if isinstance(content, dict) and manifests.Manifest.__required_keys__ <= content.keys():
        manifests.read(directory, content["kind"], producer="the export or the copy of the model")


def check_encoder(directory: Path) -> None:
    """Raise InputError if a directory holds no encoder, or files that could run code when they are loaded."""
    if not (directory / "config.json").is_file() or not list(directory.glob("*.safetensors")):
        raise InputError(f"{directory} holds no config.json with *.safetensors: give the output of pretrain")
    pickles = [path.name for path in directory.rglob("*") if path.suffix in (".bin", ".pt", ".pth", ".pkl", ".py")]
    if pickles:
        raise InputError(f"{directory} holds {pickles[0]}, which could run code: keep only safetensors and JSON")
    for path in directory.glob("*.index.json"):
        file_names = outside.read_json(path, Index, "export the model again")["weight_map"].values()
        outside_names = [name for name in file_names if Path(name).name != name]
        if outside_names:
            raise InputError(f"{path}: {outside_names[0]!r:.200} is not in this folder: export the model again")
    for path in directory.glob("*config.json"):
        if "auto_map" in outside.read_json(path, dict[str, Any], "export the model again"):
            raise InputError(f"{path} requires custom code (auto_map): export the model with a built-in class")
