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

TOPICS, WORDS, TRAINING, HELD_OUT, STEPS = 24, 4, 2800, 200, 200


def write_bilingual(directory: Path) -> Path:
    """Sentences of three words of each of two topics; the translation has other words, one for one, in another order.

    Each language has its own vocabulary: only meaning connects them.
    """
    rng = np.random.default_rng(9)
    count = TRAINING + HELD_OUT
    topics = np.array([rng.choice(TOPICS, 2, replace=False) for _ in range(count)])
    words = np.stack([np.concatenate([topic * WORDS + rng.choice(WORDS, 3, replace=False) for topic in two])
                      for two in topics])  # fmt: skip
    source, target = (rng.permuted(words, axis=1) + FIRST_PIECE + side * TOPICS * WORDS for side in (0, 1))
    tables: dict[str, dict] = {}

    def write_pairs(stem: str, rows: slice) -> None:
        numbers = np.arange(count)[rows]
        pairs = make_pairs(source[rows].ravel(), target[rows].ravel(), np.full(len(numbers), 6), numbers)
        tables[stem] = write_table(directory, stem, [pairs])

    write_pairs("pairs/en-de/one", slice(0, TRAINING // 2))
    write_pairs("pairs/en-de/two", slice(TRAINING // 2, TRAINING))
    write_pairs("held_out/en-de/kept", slice(TRAINING, count))
    for language, side in (("en", source), ("de", target)):
        sentences = np.insert(side[:TRAINING], 6, EOS, axis=1)
        text = make_text(sentences.ravel(), np.full(TRAINING, 7))
        tables[f"mono/{language}/one"] = write_table(directory, f"mono/{language}/one", [text])
    facts = {"vocabulary_size": FIRST_PIECE + 2 * TOPICS * WORDS + 1, "tables": tables, "block_tokens": 512}
    manifests.write(directory, "shards", facts | {"corpus": "sha256:c", "tokenizer": "sha256:t"})
    return directory


def retrieval(corpus: Shards, seed: int, objectives: dict[str, float]) -> float:
    """Held-out retrieval at the best layer after 200 steps."""
    config = tiny_config(
        seed=seed,
        objectives=objectives | {"mask_ratio": 0.5},
        model={"hidden": 32, "ffn": 64},
        optimization={"steps": STEPS, "warmup_steps": STEPS // 10},
        batches={"global_batch_size": 32, "virtual_shards": 1, "micro_batch_size": 32, "block_tokens": 8},
        contrast={"pooling": "mean", "queue_size": 256, "momentum": 0.99},
    )
    learner = InfoXLMLearner(config, build(config, corpus), corpus)
    learner.after_step(0)
    adam = optimizer.make_adamw(learner.module.parameters(), config.optimization)
    progress = Progress()
    for step in range(config.optimization.steps):
        train_step(learner, adam, config.optimization, progress, learner.batches(step))
    probe, encoder = Probe(corpus, HELD_OUT, 12), learner.module.encoder
    return max(probe.score(encoder, layer, "mean", torch.device("cpu"))["probe/retrieval"] for layer in range(3))


@pytest.mark.item("A26")
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_translation_lm_beats_masked_lm_and_contrast_beats_both(tmp_path, record_property):
    corpus = open_shards(write_bilingual(tmp_path))
    systems = {"MLM": {"tlm": 0, "xlco": 0}, "MLM+TLM": {"xlco": 0}, "MLM+TLM+XLCO": {}}

    scores = {name: [retrieval(corpus, seed, found) for seed in (1, 2, 3)] for name, found in systems.items()}

    # With six seeds each: MLM 0.5 to 1.5 %, where 0.5 is chance; MLM+TLM 14 to 40 %; all three 81 to 87 %. What a
    # processor rounds otherwise is another draw of these: the gaps are nine times the lower score, and twice.
    means = {name: fmean(values) for name, values in scores.items()}
    record_property("figure", ", ".join(f"{name} {100 * mean:.1f} %" for name, mean in means.items()))
    assert means["MLM"] < means["MLM+TLM"] < means["MLM+TLM+XLCO"]
    assert max(scores["MLM"]) < min(scores["MLM+TLM"]) and max(scores["MLM+TLM"]) < min(scores["MLM+TLM+XLCO"])
