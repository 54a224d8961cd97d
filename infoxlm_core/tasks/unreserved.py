"""Was the text that an encoder of ours was trained on kept free of what it is tested on?

What was kept free of which files stands in its manifest. Of encoders that others have trained nobody knows, so that
nothing is said of them.
"""

import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from infoxlm_core import manifests
from infoxlm_core.corpora import evaluation_sets

logger = logging.getLogger(__name__)


def trained_by_us(encoder: Path) -> dict[str, Any] | None:
    """The manifest of an encoder that was trained here; None of others, of which nothing is known."""
    if not (encoder / manifests.NAME).is_file():
        return None
    said = manifests.load(encoder)
    if said["kind"] != "encoder" or not said["facts"].get("steps"):  # it was not trained, or on what a task brings
        return None
    return said | {"inputs": said["inputs"] if isinstance(said.get("inputs"), Mapping) else {}}


def find(encoder: Path, tests: Iterable[Path], corpus: Path | None = None) -> list[str]:
    """Names of the files of a test whose sentences were not taken out of the text that an encoder was trained on.

    Args:
        encoder: its directory; of one without a manifest of ours nothing is known.
        tests: the files.
        corpus: the prepared corpus that they are of, if they are of one: all of its held-out text was taken out of
            its own training text, but not out of that of another corpus, on which the training may have begun.
    """
    if not (said := trained_by_us(encoder)):
        return []
    alone = not said["facts"].get("other_corpora")
    own = corpus and (corpus / manifests.NAME).is_file() and manifests.load(corpus)["digest"]
    if alone and own and own == said["inputs"].get("corpus"):
        return []
    reserved = set(said["facts"].get("reserved", ()))
    missing = [file.name for file in tests if evaluation_sets.digest(file) not in reserved]
    if missing:
        logger.warning(
            "%s may have been trained on this test: %d of its files (%s, …) were not taken out of its text: name them "
            "in preparation.evaluation_sets and train again, or compare its scores with care",
            encoder, len(missing), missing[0],
        )  # fmt: skip
    return missing
