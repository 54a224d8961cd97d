"""transformers' Trainer as a variant, on a CPU with fused AdamW. Token counts exclude padding."""

import logging
import random
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from transformers import PrinterCallback, Trainer, TrainingArguments
from transformers.trainer_pt_utils import LengthGroupedSampler
from transformers.utils import logging as transformers_logging

from benchmarks.speed import inputs

Rows = list[dict[str, Any]]


class TrainerRounds:
    """Rounds of optimizer steps with the Trainer.

    Args:
        rows: tokenized examples, with `input_ids` and all other fields that `collate` needs.
        sampling: `random`, or `group_by_length` for batches of similar lengths.
        steps: number of optimizer steps per round.
        **adamw: options of AdamW, in addition to the learning rate of 1e-5.
    """

    def __init__(self, model: nn.Module, rows: Rows, collate: Callable[[Rows], Any], sampling: str, batch_size: int,
                 steps: int, **adamw: Any) -> None:  # fmt: skip
        transformers_logging.set_verbosity_error()
        logging.getLogger("transformers").setLevel(logging.ERROR)
        self.model = model
        self.rows = rows
        self.collate = collate
        self.batch_size = batch_size
        self.steps = steps
        self.output = tempfile.mkdtemp()
        self.batches = draw_batches([len(row["input_ids"]) for row in rows], sampling, batch_size)
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.AdamW(parameters, lr=1e-5, fused=True, **adamw)
        # A constant learning rate. Without a schedule, the Trainer would make one that ends at 0 in every round.
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 1.0)

    def run(self, number: int) -> float:
        """Take the steps of a round and return their number of tokens, without padding."""
        arguments = TrainingArguments(
            output_dir=self.output, use_cpu=True, report_to="none", save_strategy="no", logging_strategy="no",
            disable_tqdm=True, max_steps=self.steps, per_device_train_batch_size=self.batch_size,
            seed=inputs.SEED + number, train_sampling_strategy="sequential", max_grad_norm=1.0,
        )  # fmt: skip
        # Sample batches from the whole epoch, because grouping by length puts the longest sequences first.
        examples: Rows = []
        for indices in random.Random(number).sample(self.batches, self.steps):
            examples += [self.rows[index] for index in indices]
        # The sampling strategy `sequential` keeps the order of the examples, so the Trainer forms the same batches.
        trainer = Trainer(
            self.model, arguments, data_collator=lambda batch_rows: dict(self.collate(batch_rows)),
            train_dataset=examples, optimizers=(self.optimizer, self.schedule),
        )  # fmt: skip
        trainer.remove_callback(PrinterCallback)  # it would print the metrics of every round
        trainer.train()
        return float(sum(len(example["input_ids"]) for example in examples))


def draw_batches(lengths: Sequence[int], sampling: str, batch: int) -> list[list[int]]:
    """Divide the indices of an epoch's examples into batches, without the last incomplete batch."""
    order = list(range(len(lengths)))
    random.Random(inputs.SEED).shuffle(order)
    if sampling == "group_by_length":
        generator = torch.Generator().manual_seed(inputs.SEED)
        order = list(LengthGroupedSampler(batch, lengths=list(lengths), generator=generator))
    return [order[start : start + batch] for start in range(0, len(order) - batch, batch)]
