"""Measure the peak resident memory of one masked-LM step above the weights, in one process per variant.

Each process runs `python -m benchmarks.speed.memory VARIANT WORDS` and prints the number of bytes.
"""

import ctypes
import gc
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.speed.harness import OURS, Case


def run(quick: bool) -> list[Case]:
    """Measure the peak memory of every installed variant, each in its own process."""
    from benchmarks.speed import inputs, peers

    vocabulary = "32k" if quick else "250k"
    words = inputs.VOCABULARIES[vocabulary]
    case = Case(f"memory, ragged, {vocabulary}", inputs.describe_batches([inputs.make_batch("ragged", words, 1)]))
    case.about = {
        OURS: "packed, logits of masked rows in one buffer; gradients included",
        "Hugging Face": peers.HuggingFace.about + ": logits of all rows; gradients included",
    }
    reason = peers.why_no_fairseq()
    if reason:
        case.skipped["fairseq"] = reason
    else:
        case.about["fairseq"] = peers.Fairseq.about + "; gradients included"
    for name in case.about:
        command = [sys.executable, "-m", "benchmarks.speed.memory", name, str(words)]
        completed = subprocess.run(command, capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2])
        # Only the last line is the result, because libraries may print lines of their own.
        case.peak[name] = json.loads(completed.stdout.splitlines()[-1])
    return [case]


def measure_peak(variant: str, words: int) -> int:
    """Return the peak memory of a forward and backward pass in bytes, above the memory in use before."""
    from benchmarks.speed import inputs, ours, peers

    config = inputs.make_config({}, objectives={"tlm": 0, "xlco": 0})
    model = ours.make_model(config, words)
    small_batch: Any = inputs.make_batch("ragged", words, 0, count=1)
    batch: Any = inputs.make_batch("ragged", words, 1)
    module: Any = model
    loss: Any
    if variant == OURS:
        loss = ours.FixedBatchLearner(config, model).mean_loss
    else:
        peer = peers.HuggingFace(model) if variant == "Hugging Face" else peers.Fairseq(model)
        module = peer.model
        loss = peer.loss
        del model  # the peer has its own copy of the weights
        small_batch = peer.inputs(small_batch)
        batch = peer.inputs(batch)
    loss(small_batch).backward()  # let libraries allocate the memory that they need only once
    module.zero_grad(set_to_none=True)
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)  # return free memory to the system, or the pass would reuse it uncounted
    Path("/proc/self/clear_refs").write_text("5")  # Linux resets the peak, VmHWM, if 5 is written
    resident_bytes = read_status("VmRSS")
    loss(batch).backward()
    return read_status("VmHWM") - resident_bytes


def read_status(field: str) -> int:
    """Return a size from /proc/self/status in bytes: VmRSS is this process's current memory, VmHWM the peak."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


if __name__ == "__main__":
    os.environ["OMP_NUM_THREADS"] = "1"
    print(json.dumps(measure_peak(sys.argv[1], int(sys.argv[2]))))
