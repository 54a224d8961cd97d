"""Find test files whose sentences an encoder may have seen in pre-training.

The manifest of an encoder lists the digests of its reserved test files, whose sentences were removed from the training
text. Nothing is known about encoders that were trained outside this project.
"""

import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from infoxlm_core import manifests
from infoxlm_core.corpora import evaluation_sets

logger = logging.getLogger(__name__)


def load_pretraining_manifest(encoder: Path) -> dict[str, Any] | None:
    """Load the manifest of an encoder pre-trained by this project. Return None for all other models."""
    manifest = manifests.load_if_ours(encoder)
    if manifest is None or manifest["kind"] != "encoder" or not manifest["facts"].get("steps"):
        return None
    inputs = manifest.get("inputs")
    return manifest | {"inputs": inputs if isinstance(inputs, Mapping) else {}}


def find_unreserved_files(encoder: Path, test_files: Iterable[Path], corpus: Path | None = None) -> list[str]:
    """Return the names of test files whose sentences were not removed from an encoder's training text.

    Args:
        encoder: directory of the encoder.
        test_files: the test files.
        corpus: prepared corpus from which the test files come; None for other test files.
    """
    manifest = load_pretraining_manifest(encoder)
    if manifest is None:
        return []
    facts = manifest["facts"]
    # Held-out text was removed from its own corpus's training text, but not from the start model's `other_corpora`.
    if corpus and (corpus / manifests.NAME).is_file() and not facts.get("other_corpora"):
        corpus_digest = manifests.load(corpus)["digest"]
        if corpus_digest and corpus_digest == manifest["inputs"].get("corpus"):
            return []
    reserved_digests = set(facts.get("reserved", ()))
    unreserved_names = [file.name for file in test_files if evaluation_sets.digest(file) not in reserved_digests]
    if unreserved_names:
        logger.warning(
            "%s may have been trained on this test: %d of its files (%s, …) were not removed from its training text. "
            "Add them to preparation.evaluation_sets and train again, or compare its scores with care.",
            encoder, len(unreserved_names), unreserved_names[0],
        )  # fmt: skip
    return unreserved_names
