"""What we require (below it something is broken) and what we aim to publish. Missing a target never fails a run."""

import statistics
from dataclasses import dataclass

from benchmarks.harness import OURS, Case


@dataclass(frozen=True)
class Target:
    """One figure of one case.

    Attributes:
        kind: `ratio` of CPU seconds a unit, at least · `rate` of ours in millions a CPU second, at least · `memory`
            relative to the variant, at most · `same`: percent of equal sentences, at least.
    """

    what: str
    case: str
    variant: str
    accept: float
    goal: float
    kind: str = "ratio"

    def measured(self, case: Case) -> float | None:
        """The figure; None if the case did not run against this variant."""
        if self.kind == "rate":
            return case.rate(OURS) / 1e6
        if self.variant not in (case.cpu or case.peak):
            return None
        if self.kind == "same":
            return 100 * (1 - next(iter(case.equality[self.variant].values())))
        return statistics.median(case.ratios(self.variant))

    def verdict(self, value: float) -> str:
        at_most = self.kind == "memory"
        for limit, word in ((self.goal, "goal"), (self.accept, "accepted")):
            if value <= limit if at_most else value >= limit:
                return word
        return "**missed**"


TARGETS = (
    Target("MLM, ragged, 32k, vs Hugging Face", "mlm_step, ragged, 32k", "Hugging Face", 4.0, 5.0),
    Target("MLM, ragged, 32k, vs fairseq", "mlm_step, ragged, 32k", "fairseq", 2.0, 2.5),
    Target("MLM, ragged, 250k, vs Hugging Face", "mlm_step, ragged, 250k", "Hugging Face", 6.5, 8.0),
    Target("MLM, full, 32k, vs Hugging Face", "mlm_step, full, 32k", "Hugging Face", 2.2, 2.5),
    Target("MLM, full, 32k, vs fairseq", "mlm_step, full, 32k", "fairseq", 1.05, 1.15),
    Target("InfoXLM step, 32k, vs released algorithm", "infoxlm_step, ragged, 32k", "reference algorithm", 2.0, 2.2),
    Target("InfoXLM step, 250k, vs released algorithm", "infoxlm_step, ragged, 250k", "reference algorithm", 2.7, 3.2),
    Target("end to end vs Trainer", "end_to_end", "Trainer", 3.0, 4.0),
    Target("end to end vs Trainer, group_by_length", "end_to_end", "Trainer, group_by_length", 1.7, 2.2),
    Target("fine-tuning, 32k, vs Trainer", "finetune_step, 32k", "Trainer", 2.5, 2.5),
    Target("fine-tuning, 250k, vs Trainer", "finetune_step, 250k", "Trainer", 2.5, 2.5),
    Target(
        "fine-tuning, 250k, vs Trainer, group_by_length", "finetune_step, 250k", "Trainer, group_by_length", 1.1, 1.3
    ),
    Target("fine-tuning, 250k, vs run_xnli.py", "finetune_step, 250k", "Trainer, as in run_xnli.py", 3.0, 4.0),
    Target("AdamW vs fairseq's Adam", "optimizer, AdamW", "fairseq's Adam", 3.5, 4.5),
    Target("EMA vs reference formula", "key encoder, EMA", "reference formula", 7.0, 9.0),
    Target("tokenizing vs Rust tokenizer", "data_path, tokenizing", "Rust tokenizer", 4.0, 5.5),
    Target("ids equal to SentencePiece's, %", "data_path, tokenizing", "Rust tokenizer", 100.0, 100.0, "same"),
    Target("exact masking vs collator, full", "data_path, masking, full", "collator", 1.3, 2.0),
    Target("language draw vs random.choices", "data_path, drawing languages", "random.choices", 30.0, 60.0),
    Target("shards to packed batches, Mtok/s", "data_path, shards to packed batches", OURS, 10.0, 12.0, "rate"),
    Target("peak memory, 250k, vs Hugging Face", "memory, ragged, 250k", "Hugging Face", 0.4, 0.3, "memory"),
)
