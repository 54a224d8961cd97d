"""Training on real text, data included: our sampler, loader and step, against the Trainer of transformers.

The task of both is masked LM on translation pairs, one pair a sequence, drawn in proportion; sequences are as long as
catalogs make them. Real tokens are counted on both sides.
"""

from dataclasses import replace
from pathlib import Path

import numpy as np
from transformers import DataCollatorForLanguageModeling

from benchmarks.speed import corpus, inputs, ours, peers, trainer
from benchmarks.speed.harness import OURS, Case, measure
from infoxlm_core.data.layouts import gather, lay_out
from infoxlm_core.data.samples import Sampler
from infoxlm_core.data.shards import open_shards
from infoxlm_core.model.huggingface import tokenizers
from infoxlm_core.systems.infoxlm.learner import InfoXLMLearner

BATCH, SIDE = 16, 62  # sides of more tokens are cut, as in the demo
WORDS = inputs.VOCABULARIES["32k"]


def run(quick: bool) -> list[Case]:
    return [case(corpus.make().shards, *(1, 1) if quick else (7, 4))]


def case(path: Path, rounds: int, steps: int) -> Case:
    """So many optimizer steps a round."""
    shards = open_shards(path)
    # the text has a vocabulary of its own; the model gets as many words as in the other benchmarks
    shards = replace(shards, manifest={"facts": shards.manifest["facts"] | {"vocabulary_size": WORDS}})
    config = inputs.config(
        {},
        objectives={"mlm": 0, "xlco": 0},
        batches={
            "global_batch_size": BATCH,
            "virtual_shards": 1,
            "micro_batch_size": BATCH,
            "alpha": 1.0,
            "side_tokens": SIDE,
        },
        optimization={"warmup_steps": 0, "learning_rate": 1e-5},
    )
    model = ours.make_model(config, WORDS, noise=False)
    found = Case("end_to_end", {"steps a round": steps, "sequences a step": BATCH, "words": WORDS})
    found.about = {OURS: "Sampler, micro_batches and train_step: TLM only, alpha 1"}
    variants = {OURS: ours.steps(InfoXLMLearner(config, model, shards), config.optimization, steps)}
    samples = _samples(Sampler(shards, config))
    collate = DataCollatorForLanguageModeling(tokenizers.load_fast(path / "tokenizer"), mlm_probability=0.15)
    for name, sampling in (("Trainer", "random"), ("Trainer, group_by_length", "group_by_length")):
        found.about[name] = (
            f"transformers Trainer, DataCollatorForLanguageModeling, fused AdamW, {sampling}; text tokenized before"
        )
        variants[name] = trainer.make(peers.HuggingFace(model).model, samples, collate, sampling, BATCH, steps)
    return measure(found, variants, rounds)


def _samples(sampler: Sampler) -> list[dict[str, list[int]]]:
    """Every pair of the shards as the sequence that we would train on."""
    found = []
    for pairs in sampler.pairs:
        every = np.arange(len(pairs))
        sides = [gather([t], every * 0, every, SIDE) for t in (pairs.source, pairs.target)]
        found += [{"input_ids": row.tolist()} for row in lay_out(*sides).rows]
    return found
