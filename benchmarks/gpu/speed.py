"""Measurements on one GPU in bf16: speed limits of the machine, and optimizer steps with their MFU.

Each measurement yields rows. The text is random, and nothing is downloaded.
"""

import functools
import gc
import statistics
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from benchmarks.speed import inputs, ours
from infoxlm_core.config import PretrainingConfig
from infoxlm_core.data.batches import PackedBatch
from infoxlm_core.model.flops import find_peak_flops

SIZES = {
    "base": {"layers": 12, "hidden": 768, "ffn": 3072, "heads": 12},
    "large": {"layers": 24, "hidden": 1024, "ffn": 4096, "heads": 16},
}
CONTRAST_LAYER = {"base": 8, "large": 12}
WORDS = inputs.VOCABULARIES["250k"]
QUEUE = 131_072
WARM_UP = 10
STEPS = 30
Row = dict[str, Any]


def attempt(measure: Callable[..., Row], *arguments: Any) -> Row:
    """Return the row made by `measure`. Turn an error into a row, so that the next measurement runs."""
    free_memory()
    try:
        return measure(*arguments)
    except Exception as error:
        lines = str(error).splitlines() or [type(error).__name__]
        return {"skipped": lines[0][:120]}


def free_memory() -> None:
    """Free the memory of the previous measurement, and reset the peak for the next one."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()


def median_seconds(function: Callable[[], object]) -> float:
    """Return the median time of a function on the GPU, in seconds."""
    for _ in range(WARM_UP):
        function()
    intervals = []
    for _ in range(STEPS):
        start = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        start.record()
        function()
        end.record()
        intervals.append((start, end))
    torch.cuda.synchronize()  # times are known only after the GPU has passed the events
    return statistics.median(start.elapsed_time(end) for start, end in intervals) / 1e3


def product_flops(m: int, k: int, n: int) -> float:
    """Measure the FLOP/s of a bf16 matrix product (m, k) x (k, n)."""
    first = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
    second = torch.randn(k, n, device="cuda", dtype=torch.bfloat16)
    return 2 * m * k * n / median_seconds(functools.partial(torch.mm, first, second))


def measure_ceilings(full: bool) -> Iterator[Row]:
    """Measure matrix products of our shapes, a large square product, and a copy."""
    # Feed-forward layers of `base` on 65,536 tokens, and its head on 8,192 masked rows; logits are padded to 250,048.
    for shape in ((65_536, 768, 3072), (65_536, 3072, 768), (8_192, 768, 250_048), (8_192, 8_192, 8_192)):
        yield {"product": "x".join(map(str, shape)), "TFLOP/s": product_flops(*shape) / 1e12}
    source = torch.empty(2**30, device="cuda", dtype=torch.uint8)
    seconds = median_seconds(functools.partial(torch.empty_like(source).copy_, source))
    yield {"copy": "1 GiB, read and written", "TB/s": 2 * 2**30 / seconds / 1e12}


def measure_steps(full: bool) -> Iterator[Row]:
    """Measure optimizer steps of MLM and InfoXLM, on sentences and on full blocks."""
    fastest_product = product_flops(8_192, 8_192, 8_192)
    for name in SIZES if full else ["base"]:
        for objective in ("MLM", "InfoXLM"):
            for shape in inputs.SHAPES:
                labels = {"model": name, "objective": objective, "shape": shape}
                yield labels | attempt(measure_step, name, objective, shape, fastest_product)


def measure_step(name: str, objective: str, shape: str, fastest_product: float) -> Row:
    """Measure the time and peak memory of an optimizer step, and compare its speed with a large matrix product.

    MFU (model FLOPs utilization) counts only the FLOPs that a step needs: no padding, and the head only on masked rows.
    """
    learner = make_learner(name, objective)
    batch = make_batch(objective, shape).to("cuda")
    seconds = median_seconds(lambda: learner.take_step(batch))
    flops_per_second = learner._count_flops(batch) / seconds
    device_peak = find_peak_flops(torch.cuda.get_device_name())
    return {
        "tokens": batch.tokens, "ms": seconds * 1e3, "ktok/s": batch.tokens / seconds / 1e3,
        "MFU": flops_per_second / device_peak if device_peak else None,
        "of the fastest product": flops_per_second / fastest_product,
        "peak GB": torch.cuda.max_memory_allocated() / 1e9,
    }  # fmt: skip


def make_batch(objective: str, shape: str) -> PackedBatch:
    """Make a batch of about 65,000 random tokens: sentences, or full sequences (512 tokens) and views (128 tokens)."""
    rng = np.random.default_rng(inputs.SEED)
    tokens = {"mlm": 512, "tlm": 512, "query": 128, "key": 128}
    sentences = {"mlm": 1, "tlm": 2, "query": 2, "key": 2}
    names = ["mlm"] if objective == "MLM" else list(tokens)
    # A sample of MLM is one sequence. A sample of InfoXLM is four, so fewer samples have about as many tokens.
    if shape == "full":
        count = 128 if objective == "MLM" else 48
        lengths = {name: np.full(count, tokens[name]) for name in names}
    else:
        count = 1600 if objective == "MLM" else 224
        lengths = {name: inputs.draw_lengths("ragged", rng, count, sentences[name]) for name in names}
    return inputs.pack_random_batch(lengths, WORDS, rng)


def make_learner(name: str, objective: str) -> ours.FixedBatchLearner:
    """Make our learner on the GPU, with random weights."""
    objectives = {"tlm": 0, "xlco": 0} if objective == "MLM" else {}
    contrast = {"layer": CONTRAST_LAYER[name], "queue_size": QUEUE}
    config = inputs.make_config(SIZES[name], objectives=objectives, contrast=contrast, optimization={"warmup_steps": 0})
    return ours.FixedBatchLearner(config, ours.make_model(config, WORDS, noise=False).cuda())


def set_batch_size(config: PretrainingConfig, samples: int) -> PretrainingConfig:
    """Return a config with one micro-batch per step, of `samples` samples of each objective."""
    values = config.model_dump(mode="json")
    values["batches"] |= {"global_batch_size": samples, "virtual_shards": 1, "micro_batch_size": samples}
    return PretrainingConfig.parse(values)


FIGURES: dict[str, Callable[[bool], Iterator[Row]]] = {"ceilings": measure_ceilings, "steps": measure_steps}
