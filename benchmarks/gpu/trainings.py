"""Compare small training runs with one or two workers, with or without sharding, and killed or not.

torchrun starts the workers. They communicate through NCCL on GPUs and through gloo on CPUs.
"""

import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from benchmarks.speed import inputs, ours
from components.adapters.torchrun import train as torchrun
from infoxlm_core import manifests
from infoxlm_core.config import PretrainingConfig
from infoxlm_core.data.shards import open_shards
from infoxlm_core.data.vocabulary import EOS, FIRST_PIECE
from infoxlm_core.data.writing import BLOCK_TOKENS, make_column, write_table
from infoxlm_core.systems.infoxlm.learner import InfoXLMLearner
from infoxlm_core.training import distributed, loop, tracker
from infoxlm_core.training.fingerprint import Fingerprint
from infoxlm_core.training.run import run_directory

WORDS = 1_000
STEPS = 12
DIES_AT = 8
LIMITS = {"cpu": 1e-4, "cuda": 2e-2}
"""Largest relative differences of losses. The order of fp32 sums differs on CPUs; GPUs round 12 steps to bf16."""


class Training(NamedTuple):
    """One training run."""

    name: str
    workers: int
    like: str = ""  # name of an earlier training run with the same losses
    sharded: bool = False
    killed: bool = False


TRAININGS = (
    Training("one worker", 1),
    Training("one worker, killed and resumed", 1, "one worker", killed=True),
    Training("two workers", 2, "one worker"),
    Training("two workers, killed and resumed", 2, "two workers", killed=True),
    Training("two workers, sharded", 2, "two workers", sharded=True),
)


class DiesOnce(tracker.FileTracker):
    """A tracker that kills its worker after step `DIES_AT`, but only once."""

    def log(self, step: int, values: dict[str, float]) -> None:
        """Log a step's values, and then perhaps kill this worker, as if a machine had failed."""
        super().log(step, values)
        marker = self.path.with_name("killed")
        if step == DIES_AT and not marker.exists():
            marker.touch()  # the restarted worker finds the file and does not die again
            os.kill(os.getpid(), signal.SIGKILL)


def compare_losses(gpus: int, limit: float) -> Iterator[dict[str, Any]]:
    """Compare training runs that should have equal losses. Yield one row per run.

    Args:
        gpus: number of GPUs, or on a CPU the largest number of workers. Runs with more workers are skipped.
        limit: largest relative difference of losses.
    """
    losses: dict[str, np.ndarray] = {}
    with tempfile.TemporaryDirectory(prefix="infoxlm-gpu-") as directory:
        text = write_shards(Path(directory) / "shards")
        for training in TRAININGS:
            if training.workers > gpus:  # torchrun would start fewer workers than the name of the run says
                yield {"training": training.name, "skipped": f"{gpus} GPU"}
                continue
            run = Path(directory) / training.name.replace(" ", "-").replace(",", "")
            run.mkdir()
            options = {"sharded": training.sharded, "killed": training.killed}
            torchrun.launch_training(train, training.workers, run, text=text, **options)
            step_losses = []
            for _, values in tracker.read(run / tracker.METRICS):
                step_losses.append([values["loss/mlm"], values["loss/tlm"], values["loss/xlco"]])
            curve = np.array(step_losses)  # (steps, 3)
            losses[training.name] = curve
            row = {"training": training.name, "steps": len(curve), "killed": (run / "killed").exists()}
            # A resumed training must have logged each step once.
            is_ok = len(curve) == STEPS and row["killed"] == training.killed
            if is_ok and training.like in losses:
                largest_error = float(np.max(np.abs(curve / losses[training.like] - 1)))
                row |= {"like": training.like, "off": largest_error, "limit": limit}
                is_ok = largest_error <= limit
            yield row | {"ok": is_ok}


def train(run: Path, text: Path, sharded: bool, killed: bool) -> dict[str, Any]:
    """Train in one worker as the pre-training stage does, but without export."""
    config = PretrainingConfig.parse({
        "model": {"layers": 2, "hidden": 128, "ffn": 256, "heads": 2, "max_tokens": 64, "sharded": sharded,
                  "compiled": False},
        "contrast": {"layer": 1, "queue_size": 64, "normalise": True},
        "batches": {"global_batch_size": 16, "virtual_shards": 2, "micro_batch_size": 4, "block_tokens": 48,
                    "side_tokens": 30},
        "optimization": {"steps": STEPS, "learning_rate": 1e-4, "warmup_steps": 2},
        "checkpoints": {"every": 3},  # a worker that dies at step `DIES_AT` loses two steps and repeats them
        "log_every": 1,
    })  # fmt: skip
    model = ours.make_model(config, WORDS, noise=False)
    device = distributed.device()
    learner = InfoXLMLearner(config, model.to(device), open_shards(text))
    tracker_class = DiesOnce if killed else tracker.FileTracker
    fingerprint = Fingerprint.of(config, version=1, inputs={})
    # On a GPU, a thread writes the checkpoints, as in the pre-training stage.
    opened_run = run_directory(run, fingerprint, config.checkpoints, tracker_class, background=device.type == "cuda")
    with opened_run as (checkpoints, metrics):
        return loop.train(learner, config.optimization, checkpoints, metrics, config.log_every)


def write_shards(directory: Path) -> Path:
    """Write shards of random text, with 500 sentences and 200 pairs. Return their directory."""
    rng = np.random.default_rng(inputs.SEED)

    def draw_rows(count: int, last_token: int | None = None) -> pa.LargeListArray:
        """Draw sentences of random tokens that end with `last_token`, if it is given."""
        # Sentences are shorter than `side_tokens`, so none is cut.
        lengths = np.clip(inputs.draw_lengths("ragged", rng, count), 3, 28)
        tokens = rng.integers(FIRST_PIECE, WORDS - 1, lengths.sum())
        if last_token is not None:
            tokens[lengths.cumsum() - 1] = last_token
        return make_column(tokens, lengths)

    text = pa.table({"text": draw_rows(500, EOS)})
    sentence_ids = np.arange(200, dtype=np.uint64)
    pairs = pa.table({"source": draw_rows(200), "target": draw_rows(200), "sentence_id": sentence_ids})
    tables = {
        "mono/en/a": write_table(directory, "mono/en/a", [text]),
        "pairs/en-de/a": write_table(directory, "pairs/en-de/a", [pairs]),
    }
    facts = {"vocabulary_size": WORDS, "tables": tables, "block_tokens": BLOCK_TOKENS}
    # Random tokens have no corpus and no tokenizer, so these digests are placeholders.
    manifests.write(directory, "shards", facts | {"corpus": "sha256:c", "tokenizer": "sha256:t"})
    return directory
