"""Train on real text, including the data loading: our sampler, loader and step beside transformers' Trainer.

Both train a masked LM on translation pairs from message catalogs, one pair per sequence. Token counts exclude padding.
"""

from dataclasses import replace
from pathlib import Path

import numpy as np
from transformers import DataCollatorForLanguageModeling

from benchmarks.speed import corpus, inputs, ours, peers, trainer
from benchmarks.speed.harness import OURS, Case, measure
from infoxlm_core.data.layouts import lay_out, read_rows
from infoxlm_core.data.samples import Sampler
from infoxlm_core.data.shards import open_shards
from infoxlm_core.model.huggingface import tokenizers
from infoxlm_core.systems.infoxlm.learner import InfoXLMLearner

BATCH = 16
SIDE = 62  # largest number of tokens per side; longer sides are cut, as in the demo
WORDS = inputs.VOCABULARIES["32k"]


def run(quick: bool) -> list[Case]:
    """Measure the training on message catalogs."""
    rounds, steps = (1, 1) if quick else (7, 4)
    return [compare_steps(corpus.make_shards(), rounds, steps)]


def compare_steps(path: Path, rounds: int, steps: int) -> Case:
    """Time our training and the Trainer's, with TLM only, in rounds of `steps` optimizer steps."""
    shards = open_shards(path)
    # The text has a small vocabulary, but the model gets the vocabulary size of the other benchmarks.
    shards = replace(shards, manifest={"facts": shards.manifest["facts"] | {"vocabulary_size": WORDS}})
    batches = {"global_batch_size": BATCH, "virtual_shards": 1, "micro_batch_size": BATCH, "alpha": 1.0}
    config = inputs.make_config(
        {}, objectives={"mlm": 0, "xlco": 0}, batches=batches | {"side_tokens": SIDE},
        optimization={"warmup_steps": 0, "learning_rate": 1e-5},
    )  # fmt: skip
    model = ours.make_model(config, WORDS, noise=False)
    case = Case("end_to_end", {"steps a round": steps, "sequences a step": BATCH, "words": WORDS})
    case.about = {OURS: "Sampler, pack_micro_batches and train_step: TLM only, alpha 1"}
    variants = {OURS: ours.TrainingRounds(InfoXLMLearner(config, model, shards), config.optimization, steps).run}
    rows = tokenize_pairs(Sampler(shards, config))
    collate = DataCollatorForLanguageModeling(tokenizers.load_fast(path / "tokenizer"), mlm_probability=0.15)
    for name, sampling in (("Trainer", "random"), ("Trainer, group_by_length", "group_by_length")):
        case.about[name] = (
            f"transformers Trainer, DataCollatorForLanguageModeling, fused AdamW, {sampling}; text tokenized before"
        )
        peer = peers.HuggingFace(model).model
        variants[name] = trainer.TrainerRounds(peer, rows, collate, sampling, BATCH, steps).run
    return measure(case, variants, rounds)


def tokenize_pairs(sampler: Sampler) -> list[dict[str, list[int]]]:
    """Return all translation pairs in the shards as tokenized sequences, laid out as in our training."""
    sequences = []
    for table in sampler.pairs:
        pairs = table.read_pairs()
        rows = np.arange(len(pairs))
        # `read_rows` takes a table for each row, because the rows of a batch may come from several tables.
        source = read_rows([pairs.source] * len(rows), rows, SIDE)
        target = read_rows([pairs.target] * len(rows), rows, SIDE)
        sequences_of_table = lay_out([source, target], sampler.vocabulary).rows
        sequences += [{"input_ids": token_ids.tolist()} for token_ids in sequences_of_table]
    return sequences
