"""Peak resident memory of one masked-LM step with 250,002 words, above the weights. One process a variant.

python -m benchmarks.speed.memory VARIANT WORDS     is such a process; it prints bytes.
"""

import ctypes
import gc
import json
import os
import subprocess
import sys
from pathlib import Path

from benchmarks.speed.harness import OURS, Case

VARIANTS = (OURS, "Hugging Face", "fairseq")


def run(quick: bool) -> list[Case]:
    from benchmarks.speed import inputs, peers

    words = inputs.VOCABULARIES["32k" if quick else "250k"]
    found = Case(f"memory, ragged, {'32k' if quick else '250k'}", inputs.describe([inputs.batch("ragged", words, 1)]))
    found.about = {
        OURS: "packed, logits of masked rows in one buffer; gradients included",
        "Hugging Face": peers.HuggingFace.about + ": logits of all rows; gradients included",
    }
    if reason := peers.fairseq_reason():
        found.skipped["fairseq"] = reason
    else:
        found.about["fairseq"] = peers.Fairseq.about + "; gradients included"
    for name in found.about:
        command = [sys.executable, "-m", "benchmarks.speed.memory", name, str(words)]
        done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2])
        found.peak[name] = json.loads(done.stdout.splitlines()[-1])
    return [found]


def _resident(field: str) -> int:
    """Bytes of this process by /proc/self/status: VmRSS now, VmHWM at most."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def peak(variant: str, words: int) -> int:
    """Bytes that forward and backward of one batch need at most, beyond what is resident before."""
    from benchmarks.speed import inputs, ours, peers

    config = inputs.config({}, objectives={"tlm": 0, "xlco": 0})
    model = ours.make_model(config, words)
    batches = [inputs.batch("ragged", words, 0, count=1), inputs.batch("ragged", words, 1)]
    if variant == OURS:
        learner, module = ours.Given(config, model), model
        steps = [lambda b=batch: learner.mean_loss(b).backward() for batch in batches]
    else:
        side = {"Hugging Face": peers.HuggingFace, "fairseq": peers.Fairseq}[variant](model)
        module = side.model
        del model
        fed = [side.inputs(batch) for batch in batches]
        steps = [lambda f=one: side.loss(f).backward() for one in fed]
    steps[0]()  # what libraries set up once is no part of a step
    module.zero_grad(set_to_none=True)
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    before = _resident("VmRSS")
    steps[1]()
    return _resident("VmHWM") - before


if __name__ == "__main__":
    os.environ["OMP_NUM_THREADS"] = "1"
    print(json.dumps(peak(sys.argv[1], int(sys.argv[2]))))
