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


def find(encoder: Path, tests: Iterable[Path], corpus: Path | None = None) -> list[str]:
    """Names of the files of a test whose sentences were not taken out of the text that an encoder was trained on.

    Args:
        encoder: its directory; of one without a manifest of ours nothing is known.
        tests: the files.
        corpus: the prepared corpus that they are of, if they are of one: all of its held-out text was taken out of
            its own training text.
    """
    if not (encoder / manifests.NAME).is_file():
        return []
    said = manifests.load(encoder)
    if said["kind"] != "encoder" or not said["facts"].get("steps"):  # it was not trained, or on what a task brings
        return []
    inputs: Any = said.get("inputs")
    trained_on = inputs.get("corpus") if isinstance(inputs, Mapping) else None
    if corpus and (corpus / manifests.NAME).is_file() and manifests.load(corpus)["digest"] == trained_on:
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
