"""Which directories of models, ours and Hugging Face's, may be loaded."""

from pathlib import Path
from typing import Any

from typing_extensions import TypedDict

from infoxlm_core import manifests, outside
from infoxlm_core.errors import DataCorrupt, InputError


@outside.allow_extra_keys
class Index(TypedDict):
    """The index of a large model: the file of each weight."""

    weight_map: dict[str, str]


def check(directory: Path) -> None:
    """Make sure that a directory on this machine holds an encoder (else InputError) and, if it has a manifest of ours,
    what that says (else DataCorrupt)."""
    check_encoder(directory)
    path = directory / manifests.NAME
    found = outside.read_json(path, Any, "make or copy the model again", DataCorrupt) if path.is_file() else None
    if isinstance(found, dict) and manifests.Manifest.__required_keys__ <= found.keys():  # other tools have some too
        manifests.read(directory, found["kind"], made_with="what made the model, or the copy of it,")


def check_encoder(directory: Path) -> None:
    """Raise InputError if a directory holds no encoder, or something that could run code while it is loaded."""
    if not (directory / "config.json").is_file() or not list(directory.glob("*.safetensors")):
        raise InputError(f"{directory} holds no config.json with *.safetensors: give the output of pretrain")
    pickles = [path.name for path in directory.rglob("*") if path.suffix in (".bin", ".pt", ".pth", ".pkl", ".py")]
    if pickles:
        raise InputError(f"{directory} holds {pickles[0]}, which could run code: keep only safetensors and JSON")
    for path in directory.glob("*.index.json"):
        named = outside.read_json(path, Index, "export the model again")["weight_map"].values()
        outside_names = [name for name in named if Path(name).name != name]
        if outside_names:
            raise InputError(f"{path}: {outside_names[0]!r:.200} is not in this folder: export the model again")
    for path in directory.glob("*config.json"):
        if "auto_map" in outside.read_json(path, dict[str, Any], "export the model again"):
            raise InputError(f"{path} asks for code of its own (auto_map): export the model with a built-in class")
