"""Small trainings by one and by two workers, whole and sharded, left alone and killed: do they learn the same?

Workers are processes that torch starts, joined by NCCL on GPUs and by gloo without.
"""

import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from benchmarks.speed import inputs
from components.adapters.torchrun import train as torchrun
from infoxlm_core import manifests
from infoxlm_core.config import PretrainingConfig
from infoxlm_core.data import shards
from infoxlm_core.data.vocabulary import EOS, FIRST_PIECE
from infoxlm_core.model.encoder import EncoderSize, initialise
from infoxlm_core.model.heads import InfoXLM
from infoxlm_core.systems.infoxlm.learner import InfoXLMLearner
from infoxlm_core.training import distributed, loop, tracker
from infoxlm_core.training.fingerprint import Fingerprint
from infoxlm_core.training.run import run_directory

WORDS, STEPS, DIES_AT = 1_000, 12, 8
LIMITS = {"cpu": 1e-4, "cuda": 2e-2}
"""How far losses may be apart, relatively: sums in another order in fp32; roundings to bf16 in 12 steps."""


class Training(NamedTuple):
    """One training, and which one before it should have had the same losses."""

    name: str
    workers: int
    like: str = ""
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
    """Kills its worker after a step, the first time that it comes there."""

    def log(self, step: int, values: dict[str, float]) -> None:
        super().log(step, values)
        mark = self.path.with_name("killed")
        if step == DIES_AT and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)


def compare(cpu: bool) -> Iterator[dict[str, Any]]:
    """A row for each training that there are GPUs for: how far its losses are from those of the one it is like."""
    gpus, limit = torch.cuda.device_count(), LIMITS["cpu" if cpu else "cuda"]
    losses: dict[str, np.ndarray] = {}
    with tempfile.TemporaryDirectory(prefix="infoxlm-gpu-") as folder:
        write_shards(Path(folder) / "shards")
        for one in TRAININGS:
            if not cpu and one.workers > gpus:
                yield {"training": one.name, "skipped": f"{gpus} GPU"}
                continue
            run = Path(folder) / one.name.replace(" ", "-").replace(",", "")
            run.mkdir()
            torchrun.run(train, one.workers, run, text=Path(folder) / "shards", sharded=one.sharded, killed=one.killed)
            points = tracker.read(run / tracker.METRICS)
            found = np.array([[values[f"loss/{name}"] for name in ("mlm", "tlm", "xlco")] for _, values in points])
            losses[one.name] = found
            row = {"training": one.name, "steps": len(points), "killed": (run / "killed").exists()}
            ok = len(points) == STEPS and row["killed"] == one.killed
            if one.like in losses and ok:
                off = float(np.max(np.abs(found / losses[one.like] - 1)))
                row |= {"like": one.like, "off": off, "limit": limit}
                ok = off <= limit
            yield row | {"ok": ok}


def train(run: Path, text: Path, sharded: bool, killed: bool) -> dict[str, Any]:
    """What each worker does: as the stage, without the export."""
    config = PretrainingConfig.parse({
        "model": {"layers": 2, "hidden": 128, "ffn": 256, "heads": 2, "max_tokens": 64, "sharded": sharded,
                  "compiled": False},
        "contrast": {"layer": 1, "queue_size": 64, "normalise": True},
        "batches": {"global_batch_size": 16, "virtual_shards": 2, "micro_batch_size": 4, "block_tokens": 48,
                    "side_tokens": 30},
        "optimization": {"steps": STEPS, "learning_rate": 1e-4, "warmup_steps": 2},
        "checkpoints": {"every": 3},
        "log_every": 1,
    })  # fmt: skip
    model = InfoXLM(EncoderSize.of(config.model, WORDS), 1, config.contrast.pooling, config.contrast.normalise)
    initialise(model, config.seed)
    device = distributed.device()
    learner = InfoXLMLearner(config, model.to(device), distributed.open_shards(text))
    track = DiesOnce if killed else tracker.FileTracker
    fingerprint = Fingerprint.of(config, 1, {})
    with run_directory(run, fingerprint, config.checkpoints, track, background=device.type == "cuda") as (saved, curve):
        return loop.train(learner, config.optimization, saved, curve, config.log_every)


def write_shards(directory: Path) -> None:
    """Random text: 500 sentences, 200 pairs."""
    rng = np.random.default_rng(inputs.SEED)

    def table(name: str, rows: int) -> tuple[str, Any]:
        counts = np.clip(inputs.lengths("ragged", rng, rows), 3, 28)
        flat = rng.integers(FIRST_PIECE, WORDS - 1, counts.sum())
        if name.startswith("mono/"):
            flat[counts.cumsum() - 1] = EOS
        return name, shards.write_table(directory / name, [(flat, counts)])

    tables = dict([table("mono/en/a", 500), table("pairs/en-de/a.source", 200), table("pairs/en-de/a.target", 200)])
    np.arange(200).astype(shards.SENTENCE_IDS).tofile(directory / "pairs/en-de/a.meanings")
    facts = {"vocabulary_size": WORDS, "tables": tables, "corpus": "sha256:c", "tokenizer": "sha256:t"}
    manifests.write(directory, "shards", facts)
