"""Compare forward and backward passes of masked LM with Hugging Face and fairseq, for two vocabulary sizes."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from benchmarks.speed import inputs, ours, peers
from benchmarks.speed.harness import OURS, Case, compute_differences, measure, require_equal


def run(quick: bool) -> list[Case]:
    """Measure sentences and full blocks, with 32,000 and 250,002 words."""
    rounds, count = (2, 4) if quick else (7, None)
    vocabularies = ["32k"] if quick else list(inputs.VOCABULARIES)
    return [compare_steps(shape, name, rounds, count=count) for name in vocabularies for shape in inputs.SHAPES]


def compare_steps(shape: str, vocabulary: str, rounds: int, size: dict[str, int] | None = None,
                  count: int | None = None) -> Case:  # fmt: skip
    """Check that all variants have equal losses and gradients, then time `rounds` rounds.

    `vocabulary` is a key of `inputs.VOCABULARIES` or a number of words. `size` overrides the encoder's sizes. `count`
    is the number of sequences in a batch.
    """
    words = inputs.VOCABULARIES.get(vocabulary) or int(vocabulary)
    config = inputs.make_config(size or {}, objectives={"tlm": 0, "xlco": 0})
    model = ours.make_model(config, words)
    learner = ours.FixedBatchLearner(config, model)
    batches = [inputs.make_batch(shape, words, number, count=count) for number in range(rounds + 1)]
    case = Case(f"mlm_step, {shape}, {vocabulary}", inputs.describe_batches(batches[1:] or batches))
    case.about = {OURS: "packed, head and last layer on masked rows"}
    padded_peers: dict[str, peers.HuggingFace | peers.Fairseq] = {"Hugging Face": peers.HuggingFace(model)}
    fairseq_problem = peers.why_no_fairseq()
    if fairseq_problem:
        case.skipped["fairseq"] = fairseq_problem
    else:
        padded_peers["fairseq"] = peers.Fairseq(model)
    loss = learner.mean_loss(batches[0])
    loss.backward()
    variants = {OURS: BackwardRounds(model, learner.mean_loss, batches).run}
    for name, peer in padded_peers.items():
        peer_batches = [peer.inputs(batch) for batch in batches]
        peer_loss = peer.loss(peer_batches[0])
        peer_loss.backward()
        relative = compute_differences(
            loss.item(), peers.gradients_of(model), peer_loss.item(), peer.gradients(), ignored=peers.ZERO_GRADIENTS
        )
        case.equality[name] = require_equal(case.name, name, relative)
        case.about[name] = peer.about
        variants[name] = BackwardRounds(peer.model, peer.loss, peer_batches).run
    return measure(case, variants, rounds)


class BackwardRounds(NamedTuple):
    """Rounds of one forward and backward pass each."""

    module: nn.Module
    loss_of_batch: Callable[[Any], torch.Tensor]
    batches: Sequence[Any]

    def run(self, number: int) -> None:
        """Compute the gradients of a round's batch."""
        self.module.zero_grad(set_to_none=True)
        self.loss_of_batch(self.batches[number]).backward()
