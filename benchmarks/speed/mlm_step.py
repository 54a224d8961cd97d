"""Masked LM, forward and backward: ours against Hugging Face and fairseq, with a small and with XLM-R's vocabulary."""

import torch
from torch import nn

from benchmarks.speed import inputs, ours, peers
from benchmarks.speed.harness import OURS, Case, differences, measure, require_equal


def run(quick: bool) -> list[Case]:
    """Sentences and full blocks, 32,000 and 250,002 words."""
    rounds, count = (2, 4) if quick else (7, None)
    vocabularies = ["32k"] if quick else list(inputs.VOCABULARIES)
    return [case(shape, name, rounds, count=count) for name in vocabularies for shape in inputs.SHAPES]


def case(shape: str, vocabulary: str, rounds: int, size: dict | None = None, count: int | None = None) -> Case:
    """Assert that all sides have one loss and one gradient, then time them (rounds = 0: only assert)."""
    words = inputs.VOCABULARIES.get(vocabulary) or int(vocabulary)
    config = inputs.config(size or {}, objectives={"tlm": 0, "xlco": 0})
    model = ours.make_model(config, words)
    learner = ours.Given(config, model)
    sides: dict = {"Hugging Face": peers.HuggingFace(model)}
    batches = [inputs.batch(shape, words, number, count=count) for number in range(rounds + 1)]
    found = Case(f"mlm_step, {shape}, {vocabulary}", inputs.describe(batches[1:] or batches))
    found.about = {OURS: "packed, head and last layer on masked rows"}
    if reason := peers.fairseq_reason():
        found.skipped["fairseq"] = reason
    else:
        sides["fairseq"] = peers.Fairseq(model)
    fed = {name: [side.inputs(batch) for batch in batches] for name, side in sides.items()}

    def mine(number: int) -> torch.Tensor:
        loss = learner.mean_loss(batches[number])
        loss.backward()
        return loss.detach()

    def theirs(name: str, number: int) -> torch.Tensor:
        loss = sides[name].loss(fed[name][number])
        loss.backward()
        return loss.detach()

    loss = float(mine(0))
    for name, side in sides.items():
        other = float(theirs(name, 0))
        apart = differences(loss, peers.gradients_of(model), other, side.gradients(), peers.ZERO_GRADIENT)
        found.equality[name] = require_equal(found.name, name, apart)
        found.about[name] = side.about

    def timed(module: nn.Module, work) -> object:
        def once(number: int) -> None:
            module.zero_grad(set_to_none=True)
            work(number)

        return once

    variants = {OURS: timed(model, mine)}
    for name, side in sides.items():
        variants[name] = timed(side.model, lambda number, name=name: theirs(name, number))
    return measure(found, variants, rounds)
