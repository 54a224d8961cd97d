"""Compare our optimizer step of InfoXLM with the released code: losses, clipping, AdamW, key encoder and queue."""

from benchmarks.speed import inputs, ours, peers
from benchmarks.speed.harness import OURS, Case, Round, compute_differences, measure, require_equal
from benchmarks.speed.reference import Reference

QUEUE = 131_072
PEER = "reference algorithm"


def run(quick: bool) -> list[Case]:
    """Measure sentences with 32,000 and 250,002 words, and full blocks with 32,000."""
    if quick:
        return [compare_steps("ragged", "32k", rounds=2, queue=8192, count=4)]
    return [compare_steps(shape, name, 7) for shape, name in (("ragged", "32k"), ("full", "32k"), ("ragged", "250k"))]


def compare_steps(shape: str, vocabulary: str, rounds: int, size: dict[str, int] | None = None, queue: int = QUEUE,
                  count: int | None = None) -> Case:  # fmt: skip
    """Check that both variants have equal losses and gradients, then time whole optimizer steps."""
    words = inputs.VOCABULARIES.get(vocabulary) or int(vocabulary)
    layers = (size or {}).get("layers", 6)
    # Noisy weights produce long vectors, so a high temperature keeps the logits small.
    contrast = {"layer": max(1, layers * 2 // 3), "queue_size": queue, "temperature": 20.0}
    # With a tiny learning rate, the weights hardly change, so all rounds do the same work.
    config = inputs.make_config(size or {}, contrast=contrast, optimization={"warmup_steps": 0, "learning_rate": 1e-7})
    model = ours.make_model(config, words)
    learner = ours.FixedBatchLearner(config, model)
    batches = [inputs.make_batch(shape, words, number, ("mlm", "tlm", "xlco"), count) for number in range(rounds + 1)]
    case = Case(f"infoxlm_step, {shape}, {vocabulary}", inputs.describe_batches(batches[1:] or batches))
    case.inputs["queue"] = queue
    case.about = {OURS: "train_step: packed, one backward, contrast stops at its layer, fused AdamW, lerp"}
    variants: dict[str, Round] = {OURS: lambda number: learner.take_step(batches[number])}
    fairseq_problem = peers.why_no_fairseq()
    if fairseq_problem:
        case.skipped[PEER] = fairseq_problem
        return measure(case, variants, rounds)
    reference = Reference(config, model, learner.xlco.key_encoder, learner.xlco.queue)
    reference_inputs = [reference.inputs(batch) for batch in batches]
    reference_loss = reference.losses(reference_inputs[0])
    loss = learner.mean_loss(batches[0])
    loss.backward()
    relative = compute_differences(
        loss.item(), peers.gradients_of(model), reference_loss, reference.gradients(), ignored=peers.ZERO_GRADIENTS
    )
    case.equality[PEER] = require_equal(case.name, PEER, relative)
    case.about[PEER] = reference.about
    model.zero_grad()
    variants[PEER] = lambda number: reference.take_step(reference_inputs[number])
    return measure(case, variants, rounds)
