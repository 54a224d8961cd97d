"""Masked LM, forward and backward: ours beside Hugging Face and fairseq, with a small and with XLM-R's vocabulary."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from benchmarks.speed import inputs, ours, peers
from benchmarks.speed.harness import OURS, Case, differences, measure, require_equal


def run(quick: bool) -> list[Case]:
    """Measure sentences and full blocks, with 32,000 and 250,002 words."""
    rounds, count = (2, 4) if quick else (7, None)
    vocabularies = ["32k"] if quick else list(inputs.VOCABULARIES)
    return [compare(shape, name, rounds, count=count) for name in vocabularies for shape in inputs.SHAPES]


def compare(shape: str, vocabulary: str, rounds: int, size: dict | None = None, count: int | None = None) -> Case:
    """Require one loss and one gradient of all variants, then time them. With `rounds` 0, time nothing."""
    words = inputs.VOCABULARIES.get(vocabulary) or int(vocabulary)
    config = inputs.config(size or {}, objectives={"tlm": 0, "xlco": 0})
    model = ours.make_model(config, words)
    learner = ours.FixedBatchLearner(config, model)
    batches = [inputs.batch(shape, words, number, count=count) for number in range(rounds + 1)]
    case = Case(f"mlm_step, {shape}, {vocabulary}", inputs.describe(batches[1:] or batches))
    case.about = {OURS: "packed, head and last layer on masked rows"}
    fairseq_problem = peers.why_no_fairseq()
    padded_peers: dict = {"Hugging Face": peers.HuggingFace(model)}
    if fairseq_problem:
        case.skipped["fairseq"] = fairseq_problem
    else:
        padded_peers["fairseq"] = peers.Fairseq(model)

    def backward(loss: torch.Tensor) -> float:
        loss.backward()
        return float(loss.detach())

    loss = backward(learner.mean_loss(batches[0]))
    variants = {OURS: make_step(model, learner.mean_loss, batches)}
    for name, peer in padded_peers.items():
        peer_inputs = [peer.inputs(batch) for batch in batches]
        peer_loss = backward(peer.loss(peer_inputs[0]))
        relative = differences(
            loss, peers.gradients_of(model), peer_loss, peer.gradients(), ignored=peers.ZERO_GRADIENTS
        )
        case.equality[name] = require_equal(case.name, name, relative)
        case.about[name] = peer.about
        variants[name] = make_step(peer.model, peer.loss, peer_inputs)
    return measure(case, variants, rounds)


def make_step(module: nn.Module, loss: Callable[[Any], torch.Tensor], batches: list) -> Callable[[int], None]:
    """Return a function that runs forward and backward on the batch of a round."""

    def forward_backward(number: int) -> None:
        module.zero_grad(set_to_none=True)
        loss(batches[number]).backward()

    return forward_backward
