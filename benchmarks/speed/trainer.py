"""The Trainer of transformers as a side of a benchmark: on a CPU, with fused AdamW, counting real tokens."""

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


def make(
    model: nn.Module,
    rows: Rows,
    collate: Callable[[Rows], Any],
    sampling: str,
    batch: int,
    steps: int,
    **optimizing: Any,
) -> Callable[[int], float]:
    """What does a round: so many optimizer steps on batches from anywhere in an epoch; it returns their real tokens.

    Args:
        rows: every example, tokenized: `input_ids` and what else `collate` wants.
        sampling: `random`, or `group_by_length`, which puts similar lengths together.
        optimizing: settings of AdamW, beside its rate of 1e-5.
    """
    transformers_logging.set_verbosity_error()
    logging.getLogger("transformers").setLevel(logging.ERROR)
    output, batches = tempfile.mkdtemp(), _batches([len(row["input_ids"]) for row in rows], sampling, batch)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-5, fused=True, **optimizing)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)

    def once(number: int) -> float:
        arguments = TrainingArguments(
            output_dir=output, use_cpu=True, report_to="none", save_strategy="no", logging_strategy="no",
            disable_tqdm=True, max_steps=steps, per_device_train_batch_size=batch, seed=inputs.SEED + number,
            train_sampling_strategy="sequential", max_grad_norm=1.0,
        )  # fmt: skip
        # batches from anywhere in an epoch: at its start grouping by length would show the longest of all
        some = [rows[i] for part in random.Random(number).sample(batches, steps) for i in part]
        trainer = Trainer(
            model, arguments, data_collator=lambda part: dict(collate(part)), train_dataset=some,
            optimizers=(optimizer, schedule),
        )  # fmt: skip
        trainer.remove_callback(PrinterCallback)
        trainer.train()
        return float(sum(len(row["input_ids"]) for row in some))

    return once


def _batches(lengths: Sequence[int], sampling: str, batch: int) -> list[list[int]]:
    order = list(range(len(lengths)))
    random.Random(inputs.SEED).shuffle(order)
    if sampling == "group_by_length":
        generator = torch.Generator().manual_seed(inputs.SEED)
        order = list(LengthGroupedSampler(batch, lengths=list(lengths), generator=generator))
    return [order[start : start + batch] for start in range(0, len(order) - batch, batch)]
