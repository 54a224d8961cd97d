"""Checks that a model's Hugging Face directory is complete and safe to load."""

from collections.abc import Collection
from pathlib import Path
from typing import Any

from typing_extensions import TypedDict

from infoxlm_core import manifests, user_files
from infoxlm_core.errors import InputError

MODULES = "modules.json"
"""File that lists the modules of a sentence-transformers model."""
POOLING = "1_Pooling"
"""Directory of the second module. This module pools token vectors to a sentence vector."""
TRANSLATOR = "infoxlm-translator"
"""Model type of our translators. Transformers has no class for this type."""
_CODE_SUFFIXES = (".pt", ".pth", ".pkl", ".py")
"""Suffixes of pickles and Python modules, which can run code. The suffix .bin is accepted: many public models include
such pickles beside safetensors, and our loaders read only safetensors."""


@user_files.allow_extra_keys
class Index(TypedDict):
    """The index of a model with several weight files."""

    weight_map: dict[str, str]


def check_model(directory: Path) -> None:
    """Check that a directory contains an encoder, and that its files match the manifest if we wrote one.

    Raises:
        InputError: the directory contains no encoder, or contains files that could run code when loaded.
        DataCorrupt: a file differs from the manifest.
    """
    check_encoder(directory)
    manifest = manifests.load_if_ours(directory)
    if manifest:
        manifests.load_verified(directory, manifest["kind"], producer="the step that wrote the model")


def is_translator(directory: Path) -> bool:
    """Return whether a model is a translator instead of an encoder."""
    config = user_files.read_json(directory / "config.json", dict[str, Any], "export the model again")
    return config.get("model_type") == TRANSLATOR


def check_file_names(source: Path | str, file_names: Collection[str]) -> None:
    """Raise InputError if a model has no config or no safetensors weights.

    Args:
        source: directory or name of the model, for the error message.
        file_names: names of the model's top-level files.
    """
    has_config = "config.json" in file_names
    if has_config and any(name.endswith(".safetensors") for name in file_names):
        return
    pickles = sorted(name for name in file_names if name.endswith(".bin"))
    if has_config and pickles:
        raise InputError(
            f"{source} has {pickles[0]}, but no *.safetensors, and pickles are not read: give a model with "
            f"safetensors. `infoxlm import {pickles[0]} DIRECTORY` converts a local copy of an XLM-R, RoBERTa, BERT or "
            "DistilBERT model"
        )
    raise InputError(f"{source} has no config.json with *.safetensors: give the output of pretrain")


def check_encoder(directory: Path) -> None:
    """Raise InputError if a directory contains no encoder, or contains files that could run code when loaded."""
    check_file_names(directory, [path.name for path in directory.iterdir()] if directory.is_dir() else [])
    check_no_code(directory)


def check_no_code(directory: Path) -> None:
    """Raise InputError if a model's files could run code, or load other files, when Transformers loads the model.

    The weights may be missing, so that a model can be checked before its weights are downloaded.
    """
    for path in directory.rglob("*"):
        if path.suffix in _CODE_SUFFIXES:
            raise InputError(f"{directory} holds {path.name}, which could run code: keep only safetensors and JSON")
    for path in directory.glob("*.index.json"):
        _check_indexed_files(path)
    for path in directory.glob("*config.json"):
        _check_built_in_class(path)


def _check_indexed_files(path: Path) -> None:
    """Raise InputError if an index lists weight files outside its directory. Transformers would load such files."""
    index = user_files.read_json(path, Index, "export the model again")
    for file_name in index["weight_map"].values():
        if Path(file_name).name != file_name:
            raise InputError(f"{path}: {file_name!r:.200} is not in this directory: export the model again")


def _check_built_in_class(path: Path) -> None:
    """Raise InputError if a config requires a Python class from outside Transformers."""
    config = user_files.read_json(path, dict[str, Any], "export the model again")
    if "auto_map" in config:
        remedy = "export the model with a built-in class"
        if config.get("model_type") == "new":  # Alibaba-NLP/gte-multilingual-base
            remedy = "give alibaba-nlp-community/gte-multilingual-base, the same weights for a built-in class"
        raise InputError(f"{path} requires custom code (auto_map): {remedy}")
