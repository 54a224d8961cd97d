"""Token shards of random but learnable pairs, and the config of a pre-training on them that takes seconds."""

from pathlib import Path

import numpy as np

from infoxlm_core import manifests
from infoxlm_core.config import PretrainingConfig
from infoxlm_core.data import shards
from infoxlm_core.data.vocabulary import EOS, FIRST_PIECE, Vocabulary

VOCABULARY = 64
LAYOUT = Vocabulary.xlm_r(VOCABULARY)


def write_shards(
    directory: Path,
    corpora: dict[str, int],
    languages: tuple[str, ...] = ("de", "fr"),
    vocabulary: Vocabulary = LAYOUT,
) -> Path:
    """Write random but learnable pairs: a target token is its source token plus half the pieces."""
    rng = np.random.default_rng(7)
    tables = {}
    half = (VOCABULARY - FIRST_PIECE - 1) // 2
    for language in languages:
        for corpus, count in corpora.items():
            lengths = rng.integers(3, 9, count)
            source = rng.integers(FIRST_PIECE, FIRST_PIECE + half, lengths.sum())
            target = source + half
            stem = f"pairs/en-{language}/{corpus}"
            tables[f"{stem}.source"] = shards.write_table(directory / f"{stem}.source", [(source, lengths)])
            tables[f"{stem}.target"] = shards.write_table(directory / f"{stem}.target", [(target, lengths)])
            rng.integers(0, 2**63, count).astype(shards.SENTENCE_IDS).tofile(directory / f"{stem}.meanings")
            sentences_with_eos = np.insert(target, lengths.cumsum(), EOS)
            name = f"mono/{language}/{corpus}"
            tables[name] = shards.write_table(directory / name, [(sentences_with_eos, lengths + 1)])
    facts = {"tables": tables, "corpus": "sha256:c", "tokenizer": "sha256:t"}
    manifests.write(directory, "shards", facts | vocabulary.as_facts())
    return directory


def tiny_config(**changes) -> PretrainingConfig:
    """Return a config with 2 layers of 16, a queue of 32 and 8 samples per objective.

    Args:
        changes: fields to change, by section: `optimization={"steps": 3}`.
    """
    values = {
        "model": {"layers": 2, "hidden": 16, "ffn": 32, "heads": 2, "max_tokens": 32},
        "contrast": {"layer": 1, "queue_size": 32, "momentum": 0.9, "temperature": 0.1, "normalise": True},
        "batches": {"global_batch_size": 8, "virtual_shards": 4, "micro_batch_size": 4, "block_tokens": 24,
                    "side_tokens": 12},
        "optimization": {"steps": 6, "learning_rate": 0.01, "warmup_steps": 2},
        "checkpoints": {"every": 2},
        "log_every": 1,
    }  # fmt: skip
    for section, change in changes.items():
        values[section] = values.get(section, {}) | change if isinstance(change, dict) else change
    return PretrainingConfig.parse(values)
