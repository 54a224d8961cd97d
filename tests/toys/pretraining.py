"""Token shards of random but learnable pairs, and the config of a pre-training on them that takes seconds."""

from pathlib import Path

import numpy as np
import pyarrow as pa

from infoxlm_core import manifests
from infoxlm_core.config import PretrainingConfig
from infoxlm_core.data.vocabulary import EOS, FIRST_PIECE, Vocabulary
from infoxlm_core.data.writing import BLOCK_TOKENS, PART_TOKENS, make_column, write_table

VOCABULARY = 64
LAYOUT = Vocabulary.xlm_r(VOCABULARY)


def make_text(ids: np.ndarray, lengths: np.ndarray) -> pa.Table:
    """Return sentences as `write_table` reads them."""
    return pa.table({"text": make_column(ids, lengths)})


def make_pairs(source: np.ndarray, target: np.ndarray, lengths: np.ndarray, sentence_ids: np.ndarray) -> pa.Table:
    """Return pairs, whose sides have equal lengths, as `write_table` reads them."""
    return pa.table(
        {
            "source": make_column(source, lengths),
            "target": make_column(target, lengths),
            "sentence_id": sentence_ids.astype(np.uint64),
        }
    )


def write_shards(
    directory: Path,
    corpora: dict[str, int],
    languages: tuple[str, ...] = ("de", "fr"),
    vocabulary: Vocabulary = LAYOUT,
    part_tokens: int = PART_TOKENS,
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
            pairs = make_pairs(source, target, lengths, rng.integers(0, 2**63, count))
            tables[stem] = write_table(directory, stem, [pairs], part_tokens=part_tokens)
            sentences_with_eos = np.insert(target, lengths.cumsum(), EOS)
            name = f"mono/{language}/{corpus}"
            text = make_text(sentences_with_eos, lengths + 1)
            tables[name] = write_table(directory, name, [text], part_tokens=part_tokens)
    facts = {"tables": tables, "block_tokens": BLOCK_TOKENS, "corpus": "sha256:c", "tokenizer": "sha256:t"}
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
