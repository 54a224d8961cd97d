"""Measure how many tokens one of eight workers draws from shards, masks and packs per CPU second."""

from benchmarks.speed import corpus
from benchmarks.speed.harness import OURS, Case, measure
from infoxlm_core.config import PretrainingConfig
from infoxlm_core.data.batches import pack_micro_batches
from infoxlm_core.data.samples import Sampler
from infoxlm_core.data.shards import open_shards

DRAWS_PER_ROUND = 4


def run(quick: bool) -> list[Case]:
    """Measure how fast one of eight workers draws its micro-batches."""
    config = PretrainingConfig()
    sampler = Sampler(open_shards(corpus.make_shards()), config)
    shards_per_worker = config.batches.virtual_shards // 8  # 8 workers, as on a usual machine with GPUs
    case = Case("shards to packed batches", {"samples of each objective": 256, "block_tokens": 512})
    case.about = {
        OURS: "Sampler.draw and pack_micro_batches: MLM, TLM and mixup views, default config, 8 of 64 virtual shards"
    }

    def draw_round(number: int) -> float:
        """Draw the micro-batches of `DRAWS_PER_ROUND` steps and return their number of tokens."""
        tokens = 0
        for step in range(DRAWS_PER_ROUND * number, DRAWS_PER_ROUND * (number + 1)):
            samples = sampler.draw(step, range(shards_per_worker))
            tokens += sum(batch.tokens for batch in pack_micro_batches(samples, config.batches.micro_batch_size))
        return tokens

    return [measure(case, {OURS: draw_round}, 2 if quick else 7)]
