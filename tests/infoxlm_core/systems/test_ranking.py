"""The order of the paper on a tiny synthetic corpus: MLM < MLM + TLM < MLM + TLM + XLCO (item A26)."""

from pathlib import Path
from statistics import fmean

import numpy as np
import pytest
import torch

from infoxlm_core import manifests
from infoxlm_core.data.shards import Shards, open_shards
from infoxlm_core.data.vocabulary import EOS, FIRST_PIECE
from infoxlm_core.data.writing import write_table
from infoxlm_core.systems.infoxlm.learner import InfoXLMLearner
from infoxlm_core.systems.infoxlm.probe import Probe
from infoxlm_core.systems.infoxlm.system import build
from infoxlm_core.training import optimizer
from infoxlm_core.training.state import Progress
from infoxlm_core.training.step import train_step
from tests.toys.pretraining import make_pairs, make_text, tiny_config

TOPICS = 24
WORDS_PER_TOPIC = 4
TRAINING_PAIRS = 2800
HELD_OUT_PAIRS = 200
STEPS = 200


def write_bilingual_shards(directory: Path) -> Path:
    """Write sentences of three words of each of two topics, and their translations word by word in another order.

    Each language has its own vocabulary, so that only the meaning connects them.
    """
    rng = np.random.default_rng(9)
    pair_count = TRAINING_PAIRS + HELD_OUT_PAIRS
    topics_of_pairs = np.array([rng.choice(TOPICS, 2, replace=False) for _ in range(pair_count)])
    sentences = []
    for topics in topics_of_pairs:
        words_of_topics = [topic * WORDS_PER_TOPIC + rng.choice(WORDS_PER_TOPIC, 3, replace=False) for topic in topics]
        sentences.append(np.concatenate(words_of_topics))
    words = np.stack(sentences)  # (pairs, 6)
    source = rng.permuted(words, axis=1) + FIRST_PIECE
    target = rng.permuted(words, axis=1) + FIRST_PIECE + TOPICS * WORDS_PER_TOPIC
    tables: dict[str, dict] = {}
    middle = TRAINING_PAIRS // 2
    for name, start, end in (
        ("pairs/en-de/one", 0, middle),
        ("pairs/en-de/two", middle, TRAINING_PAIRS),
        ("held_out/en-de/kept", TRAINING_PAIRS, pair_count),
    ):
        ids = np.arange(start, end)
        pairs = make_pairs(source[start:end].ravel(), target[start:end].ravel(), np.full(len(ids), 6), ids)
        tables[name] = write_table(directory, name, [pairs])
    for language, side in (("en", source), ("de", target)):
        with_eos = np.insert(side[:TRAINING_PAIRS], 6, EOS, axis=1)
        text = make_text(with_eos.ravel(), np.full(TRAINING_PAIRS, 7))
        tables[f"mono/{language}/one"] = write_table(directory, f"mono/{language}/one", [text])
    vocabulary_size = FIRST_PIECE + 2 * TOPICS * WORDS_PER_TOPIC + 1
    facts = {"vocabulary_size": vocabulary_size, "tables": tables, "block_tokens": 512}
    manifests.write(directory, "shards", facts | {"corpus": "sha256:c", "tokenizer": "sha256:t"})
    return directory


def train_and_score(shards: Shards, seed: int, objectives: dict[str, float]) -> float:
    """Return the held-out retrieval accuracy of the best layer after a training."""
    config = tiny_config(
        seed=seed,
        objectives=objectives | {"mask_ratio": 0.5},
        model={"hidden": 32, "ffn": 64},
        optimization={"steps": STEPS, "warmup_steps": STEPS // 10},
        batches={"global_batch_size": 32, "virtual_shards": 1, "micro_batch_size": 32, "block_tokens": 8},
        contrast={"pooling": "mean", "queue_size": 256, "momentum": 0.99},
    )
    learner = InfoXLMLearner(config, build(config, shards), shards)
    learner.after_step(0)
    adam = optimizer.make_adamw(learner.module.parameters(), config.optimization)
    progress = Progress()
    for step in range(config.optimization.steps):
        train_step(learner, adam, config.optimization, progress, learner.batches(step))
    probe = Probe(shards, HELD_OUT_PAIRS, 12)
    encoder = learner.module.encoder
    return max(probe.score(encoder, layer, "mean", torch.device("cpu"))["probe/retrieval"] for layer in range(3))


@pytest.mark.item("A26")
@pytest.mark.slow
def test_tlm_beats_mlm_and_contrast_beats_both(tmp_path, record_property):
    shards = open_shards(write_bilingual_shards(tmp_path))
    systems = {"MLM": {"tlm": 0, "xlco": 0}, "MLM+TLM": {"xlco": 0}, "MLM+TLM+XLCO": {}}

    scores = {}
    for name, objectives in systems.items():
        scores[name] = [train_and_score(shards, seed, objectives) for seed in (1, 2, 3)]

    # With six seeds each: MLM 0.5 to 1.5 %, where 0.5 is chance; MLM+TLM 14 to 40 %; all three 81 to 87 %. Another
    # processor rounds differently, which is like another seed: the gaps are nine times the lower score, and twice.
    means = {name: fmean(values) for name, values in scores.items()}
    record_property("figure", ", ".join(f"{name} {100 * mean:.1f} %" for name, mean in means.items()))
    assert means["MLM"] < means["MLM+TLM"] < means["MLM+TLM+XLCO"]
    assert max(scores["MLM"]) < min(scores["MLM+TLM"])
    assert max(scores["MLM+TLM"]) < min(scores["MLM+TLM+XLCO"])
