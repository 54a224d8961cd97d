"""Checks that a Hugging Face directory of a model is complete and safe to load."""

from collections.abc import Collection
from pathlib import Path
from typing import Any

from typing_extensions import TypedDict

from infoxlm_core import manifests, user_files
from infoxlm_core.errors import InputError

MODULES = "modules.json"
"""The file that lists the modules of a sentence-transformers model."""
POOLING = "1_Pooling"
"""The folder of the second module, which computes the vector of a sentence from the vectors of its tokens."""
TRANSLATOR = "infoxlm-translator"
"""Model type of a translator, for which transformers has no class."""
_CODE_SUFFIXES = (".pt", ".pth", ".pkl", ".py")
"""Suffixes of pickles and Python modules, which can run code. Pickles with the suffix .bin are accepted, because public
models often have them beside safetensors, and our loaders read only safetensors."""


@user_files.allow_extra_keys
class Index(TypedDict):
    """The index of a model whose weights are in several files."""

    weight_map: dict[str, str]


def check_model(directory: Path) -> None:
    """Check that a directory contains an encoder, and that its files are those in its manifest if we wrote one.

    Raises:
        InputError: the directory contains no encoder, or files that could run code when they are loaded.
        DataCorrupt: a file differs from the manifest.
    """
    check_encoder(directory)
    manifest = manifests.load_if_ours(directory)
    if manifest:
        manifests.load_verified(directory, manifest["kind"], producer="the export or the copy of the model")


def is_translator(directory: Path) -> bool:
    """Return whether a model is a translator, not an encoder."""
    config = user_files.read_json(directory / "config.json", dict[str, Any], "export the model again")
    return config.get("model_type") == TRANSLATOR


def check_file_names(source: Path | str, file_names: Collection[str]) -> None:
    """Raise InputError if a model lacks its config or its weights in safetensors.

    Args:
        source: directory or name of the model, for the error message.
        file_names: names of the files at the top level of the model.
    """
    has_config = "config.json" in file_names
    has_safetensors = any(name.endswith(".safetensors") for name in file_names)
    if has_config and has_safetensors:
        return
    pickles = sorted(name for name in file_names if name.endswith(".bin"))
    if has_config and pickles:
        raise InputError(
            f"{source} has {pickles[0]}, but no *.safetensors, and pickles are not read: convert a local copy with "
            f"`infoxlm import {pickles[0]} DIRECTORY`"
        )
    raise InputError(f"{source} has no config.json with *.safetensors: give the output of pretrain")


def check_encoder(directory: Path) -> None:
    """Raise InputError if a directory contains no encoder, or files that could run code when they are loaded."""
    file_names = [path.name for path in directory.iterdir()] if directory.is_dir() else []
    check_file_names(directory, file_names)
    check_no_code(directory)


def check_no_code(directory: Path) -> None:
    """Raise InputError if a model has a file that could run code when Transformers loads it.

    The directory needs no weights, so that a model can be checked before its weights are downloaded.
    """
    for path in directory.rglob("*"):
        if path.suffix in _CODE_SUFFIXES:
            raise InputError(f"{directory} holds {path.name}, which could run code: keep only safetensors and JSON")
    for path in directory.glob("*.index.json"):
        _check_index(path)
    for path in directory.glob("*config.json"):
        _check_built_in_class(path)


def _check_index(path: Path) -> None:
    """Raise InputError if an index names weight files outside its folder, which Transformers would load."""
    index = user_files.read_json(path, Index, "export the model again")
    for file_name in index["weight_map"].values():
        if Path(file_name).name != file_name:
            raise InputError(f"{path}: {file_name!r:.200} is not in this folder: export the model again")


def _check_built_in_class(path: Path) -> None:
    """Raise InputError if a config requires a Python class that is not part of Transformers."""
    config = user_files.read_json(path, dict[str, Any], "export the model again")
    if "auto_map" in config:
        remedy = "export the model with a built-in class"
        if config.get("model_type") == "new":  # Alibaba-NLP/gte-multilingual-base
            remedy = "give alibaba-nlp-community/gte-multilingual-base, the same weights for a built-in class"
        raise InputError(f"{path} requires custom code (auto_map): {remedy}")
