"""Which published model a model was made from, and under which licence it was published."""

from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard
from typing_extensions import TypedDict

from infoxlm_core import manifests, outside

FACT = "origin"
"""Name among the facts in the manifest of an encoder that was trained from a published model."""
_CARD = "README.md"
_HUB_FOLDER = (
    "models--"  # begins the folder of a model in the cache of the hub: models--intfloat--multilingual-e5-small
)


class Origin(TypedDict, total=False):
    """What is known of the published model."""

    base_model: str
    """Its name on the hub."""
    licence: str


def read(directory: Path) -> Origin:
    """Read the origin of a model from its manifest if we trained it, else from its card; empty if nothing is known."""
    if (directory / manifests.NAME).is_file():
        return Origin(**manifests.load(directory).get("facts", {}).get(FACT, {}))
    origin = Origin()
    for folder in directory.parts:
        if folder.startswith(_HUB_FOLDER):
            origin["base_model"] = folder.removeprefix(_HUB_FOLDER).replace("--", "/", 1)
    if (directory / _CARD).is_file():
        text = outside.read_text(directory / _CARD, outside.MAX_JSON)
        metadata: dict[str, Any] = ModelCard(text, ignore_metadata_errors=True).data.to_dict()
        if isinstance(metadata.get("license"), str):
            origin["licence"] = metadata["license"]
    return origin


def describe_origin(origin: Origin) -> str:
    """Return a sentence about the origin for a model card; empty if nothing is known."""
    if not origin:
        return ""
    name = origin.get("base_model", "a published model")
    licence = origin.get("licence")
    if licence is None:
        return f"It was made from {name}, whose licence is not recorded: find it out before you share this model."
    return f"It was made from {name}, whose licence is {licence}."
