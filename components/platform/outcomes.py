"""Why stages of a pipeline run failed, as they have written it into the store."""

import logging
from typing import Any, NotRequired

from typing_extensions import TypedDict

from components.adapters import storage
from components.platform import runtime
from infoxlm_core import outside
from infoxlm_core.errors import InputError

logger = logging.getLogger(__name__)


Outcome = TypedDict(
    "Outcome", {"stage": str, "code": int, "class": str, "message": str, "run": NotRequired[str]}, total=True
)


def parse(content: bytes | None, where: str) -> dict[str, Any] | None:
    """What a stage has written down; None if it has not, or nobody can read it: then it ended without a word."""
    try:
        return outside.parse_json(content, Outcome, where, "look into the log") if content else None
    except InputError as error:
        logger.warning("%s", error)
        return None


def read(store: str, run: str) -> list[dict[str, Any]]:
    """The outcomes of a pipeline run, the oldest first: stage, code, class, message.

    Raises:
        InputError, StorageUnavailable: the store refuses, or does not answer.
    """
    folder = storage.open(f"{store}/{runtime.outcome_name(run=run)}")
    names = [entry.name for entry in sorted(folder.entries(), key=lambda entry: (entry.modified, entry.name))]
    found = [(name, folder.get(name)) for name in names]
    return [said for name, content in found if content and (said := parse(content[0], name))]
