"""Finds the published model that a model was trained from, and its licence."""

import logging
from pathlib import Path

from huggingface_hub import ModelCard
from typing_extensions import TypedDict

from infoxlm_core import manifests, user_files
from infoxlm_core.errors import one_line

logger = logging.getLogger(__name__)
FACT = "origin"
"""Key of the origin among the facts in the manifest of an encoder that was trained from a published model."""
_CARD = "README.md"
_HUB_FOLDER = "models--"
"""Prefix of the folder of a model in the cache of the hub, such as models--intfloat--multilingual-e5-small."""


class Origin(TypedDict, total=False):
    """The known facts about the published model."""

    base_model: str
    """The name of the model on the hub."""
    licence: str


def read(directory: Path) -> Origin:
    """Return the published model from which a model was made, and its licence, as far as they are known.

    They are in the manifest of a model that we trained. Otherwise they are found in the path and the model card.
    """
    manifest = manifests.load_if_ours(directory)
    if manifest:
        facts = manifest.get("facts", {})
        return Origin(**facts.get(FACT, {}))
    origin = Origin()
    for folder in directory.parts:
        if folder.startswith(_HUB_FOLDER):
            # models--intfloat--multilingual-e5-small -> intfloat/multilingual-e5-small
            origin["base_model"] = folder.removeprefix(_HUB_FOLDER).replace("--", "/", 1)
    licence = _read_licence(directory / _CARD)
    if licence:
        origin["licence"] = licence
    return origin


def _read_licence(card: Path) -> str:
    """Return the licence in a model card, or "" if the card is missing, cannot be read, or names no licence."""
    if not card.is_file():
        return ""
    try:
        text = user_files.read_text(card, user_files.MAX_JSON)
        licence = ModelCard(text, ignore_metadata_errors=True).data.to_dict().get("license")
    except Exception as error:  # a card may contain anything, and must not make a long training fail at its end
        logger.warning("%s: its metadata cannot be read: %s", card, one_line(error))
        return ""
    return licence if isinstance(licence, str) else ""


def describe_origin(origin: Origin) -> str:
    """Return a sentence about the origin for a model card, or "" if nothing is known."""
    if not origin:
        return ""
    name = origin.get("base_model", "a published model")
    licence = origin.get("licence")
    if licence is None:
        return f"It was made from {name}, whose licence is not recorded: find it out before you share this model."
    return f"It was made from {name}, whose licence is {licence}."


def name_adapted(encoder: Path) -> str:
    """Return the name of an encoder that was trained from a published model: "multilingual-e5-small, adapted"."""
    base_model = read(encoder).get("base_model")
    return f"{base_model.rpartition('/')[2]}, adapted" if base_model else "Adapted encoder"
