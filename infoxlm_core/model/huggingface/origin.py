"""Finds a model's origin: the published model that it was trained from, and the licence of the published model."""

import logging
from pathlib import Path

from huggingface_hub import ModelCard
from typing_extensions import TypedDict

from infoxlm_core import manifests, user_files
from infoxlm_core.errors import one_line

logger = logging.getLogger(__name__)
FACT = "origin"
"""Key of the origin in the manifest's facts, if an encoder was trained from a published model."""
_CARD = "README.md"
_CACHE_PREFIX = "models--"
"""Prefix of model directories in the hub's cache, such as models--intfloat--multilingual-e5-small."""


class Origin(TypedDict, total=False):
    """The known facts about a published model."""

    base_model: str
    """Name of the model on the hub."""
    licence: str


def read(directory: Path) -> Origin:
    """Return what is known about a model's origin.

    The manifest of a model that we trained records its origin. The origin of any other model is read from its path in
    the hub's cache and from its model card.
    """
    manifest = manifests.load_if_ours(directory)
    if manifest:
        return Origin(**manifest.get("facts", {}).get(FACT, {}))
    origin = Origin()
    for name in directory.parts:
        if name.startswith(_CACHE_PREFIX):
            # models--intfloat--multilingual-e5-small -> intfloat/multilingual-e5-small
            origin["base_model"] = name.removeprefix(_CACHE_PREFIX).replace("--", "/", 1)
    licence = _read_licence(directory / _CARD)
    if licence:
        origin["licence"] = licence
    return origin


def _read_licence(card: Path) -> str:
    """Return the licence in a model card, or "" if the card is missing, unreadable, or does not name a licence."""
    if not card.is_file():
        return ""
    try:
        text = user_files.read_text(card, user_files.MAX_JSON)
        licence = ModelCard(text, ignore_metadata_errors=True).data.to_dict().get("license")
    except Exception as error:  # a damaged card must not make a long training run fail at its end
        logger.warning("%s: its metadata cannot be read: %s", card, one_line(error))
        return ""
    return licence if isinstance(licence, str) else ""


def describe_origin(origin: Origin) -> str:
    """Return a sentence about a model's origin for the model card, or "" if nothing is known."""
    if not origin:
        return ""
    name = origin.get("base_model", "a published model")
    licence = origin.get("licence")
    if licence is None:
        return f"It was made from {name}, whose licence is not recorded: find it out before you share this model."
    return f"It was made from {name}, whose licence is {licence}."


def name_adapted(encoder: Path) -> str:
    """Return a display name for an encoder trained from a published model, such as "multilingual-e5-small, adapted"."""
    base_model = read(encoder).get("base_model")
    return f"{base_model.rpartition('/')[2]}, adapted" if base_model else "Adapted encoder"
