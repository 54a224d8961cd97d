"""A whole optimizer step of InfoXLM: all objectives, clipping, AdamW, key encoder and queue; ours and the released."""

from benchmarks.speed import inputs, ours, peers
from benchmarks.speed.harness import OURS, Case, differences, measure, require_equal
from benchmarks.speed.reference import Reference

QUEUE = 131_072
PEER = "reference algorithm"


def run(quick: bool) -> list[Case]:
    """Sentences with 32,000 and 250,002 words, full blocks with 32,000."""
    if quick:
        return [case("ragged", "32k", rounds=2, queue=8192, count=4)]
    return [case(shape, name, 7) for shape, name in (("ragged", "32k"), ("full", "32k"), ("ragged", "250k"))]


def case(shape: str, vocabulary: str, rounds: int, size: dict | None = None, queue: int = QUEUE,
         count: int | None = None) -> Case:  # fmt: skip
    """Assert one loss and one gradient over all objectives, then time whole steps (rounds = 0: only assert)."""
    words = inputs.VOCABULARIES.get(vocabulary) or int(vocabulary)
    layers = (size or {}).get("layers", 6)
    # weights with noise make long vectors: the temperature brings their products back to a few units
    contrast = {"layer": max(1, layers * 2 // 3), "queue_size": queue, "temperature": 20.0}
    config = inputs.config(size or {}, contrast=contrast, optimization={"warmup_steps": 0, "learning_rate": 1e-7})
    model = ours.make_model(config, words)
    learner = ours.Given(config, model)
    batches = [inputs.batch(shape, words, number, ("mlm", "tlm", "xlco"), count) for number in range(rounds + 1)]
    found = Case(f"infoxlm_step, {shape}, {vocabulary}", inputs.describe(batches[1:] or batches))
    found.inputs["queue"] = queue
    found.about = {OURS: "train_step: packed, one backward, contrast stops at its layer, fused AdamW, lerp"}
    if reason := peers.fairseq_reason():
        found.skipped[PEER] = reason
    else:
        reference = Reference(config, model, learner.key_encoder, learner.queue)
        fed = [reference.inputs(batch) for batch in batches]
        other = reference.losses(fed[0])
        loss = learner.mean_loss(batches[0])
        loss.backward()
        apart = differences(loss.item(), peers.gradients_of(model), other, reference.gradients(), peers.ZERO_GRADIENT)
        found.equality[PEER] = require_equal(found.name, PEER, apart)
        found.about[PEER] = reference.about
        model.zero_grad()
    variants = {OURS: lambda number: learner.take_step(batches[number])}
    if PEER in found.about:
        variants[PEER] = lambda number: reference.take_step(fed[number])
    return measure(found, variants, rounds)
