"""One GPU, in bf16: the ceilings of the machine, our steps with their MFU and parts, Hugging Face, waiting for data.

Nothing is downloaded, text is random. Under ten minutes; without a CUDA device it says what it would measure.
"""

import functools
import gc
import logging
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.speed import inputs, ours
from benchmarks.speed.harness import Sheet
from infoxlm_core.config import PretrainingConfig
from infoxlm_core.data.batches import PackedBatch
from infoxlm_core.data.shards import Pairs, Shards, Table, write_table
from infoxlm_core.data.vocabulary import EOS, FIRST_PIECE
from infoxlm_core.model.flops import kind, peak
from infoxlm_core.systems.infoxlm import plan, step_time
from infoxlm_core.systems.infoxlm.learner import InfoXLMLearner
from infoxlm_core.training.learner import autocast
from infoxlm_core.training.optimizer import make_adamw
from infoxlm_core.training.state import Progress
from infoxlm_core.training.step import train_step

logger = logging.getLogger(__name__)
SIZES = {
    "base": {"layers": 12, "hidden": 768, "ffn": 3072, "heads": 12},
    "large": {"layers": 24, "hidden": 1024, "ffn": 4096, "heads": 16},
}
CONTRAST_LAYER = {"base": 8, "large": 12}
WORDS, QUEUE = inputs.VOCABULARIES["250k"], 131_072
WARM_UP, STEPS = 10, 30
WOULD = (
    "bf16 ceilings (products at our shapes and at 8192³, a copy), base and large × MLM and InfoXLM × sentences and "
    "full blocks (tokens/s, MFU, peak memory, parts of the step), Hugging Face eager and compiled, waiting for data"
)


def run(quick: bool, keep: Callable[[str, dict[str, Any]], None] = lambda what, row: None) -> list[Sheet]:
    """All sheets; each row goes to `keep` as soon as it is measured."""
    if not torch.cuda.is_available():
        logger.info("gpu: skipped, there is no CUDA device; on one it measures %s", WOULD)
        return []
    skipped: dict[str, str] = {}

    def tried(what: str, measure: Callable[..., Any], *given: Any) -> list[dict[str, Any]]:
        rows = measured(what, skipped, measure, *given)
        for row in rows or [{"skipped": skipped.get(what, "nothing of it fits")}]:
            keep(what, row)
        return rows

    top = tried("ceilings", ceilings)
    reached = max((row["TFLOP/s"] for row in top), default=0.0)
    names = ["base"] if quick else list(SIZES)
    steps = [
        row
        for name in names
        for objective in ("MLM", "InfoXLM")
        for shape in inputs.SHAPES
        for row in tried(f"{name} {objective} {shape}", step, name, objective, shape, reached)
    ]
    against = [
        row
        for name in names
        for shape in inputs.SHAPES
        for row in tried(f"{name} {shape} beside Hugging Face", hugging_face, name, shape)
    ]
    waiting = tried("waiting for data", data_wait)
    plain = {"all": "MLM forward and backward, bf16 autocast, dropout 0, 250,002 words"}
    about = {
        "MFU": "flops.must_do_flops by the device's dense bf16 peak, and by the fastest product measured here",
        "parts": "key encoder, head, optimizer and EMA timed apart; encoder: what remains of the step",
        "planned ms": "what `infoxlm plan` predicts of full blocks",
    }
    sheets = [
        Sheet("gpu, ceilings", {}, top),
        Sheet("gpu, steps", about, steps),
        Sheet("gpu, Hugging Face", plain, against),
        Sheet("gpu, waiting for data", {"wait": "1 - time on batches in memory / time with the loader"}, waiting),
        Sheet("gpu, skipped", {}, [{"what": what, "why": why} for what, why in skipped.items()]),
    ]
    return [sheet for sheet in sheets if sheet.rows]


def measured(what: str, skipped: dict[str, str], measure: Callable[..., Any], *given: Any) -> list[dict[str, Any]]:
    """The row or rows that `measure` gives, logged at once; if it fails (out of memory, above all) none, and why."""
    free()
    try:
        found = measure(*given)
    except Exception as error:  # a benchmark of half an hour must not lose what it has
        skipped[what] = (str(error).splitlines() or [type(error).__name__])[0][:120]
        logger.info("gpu, %s: skipped, %s", what, skipped[what])
        return []
    rows: list[dict[str, Any]] = found if isinstance(found, list) else [found]
    for row in rows:
        logger.info("gpu, %s: %s", what, row)
    return rows


def seconds_of(work: Callable[[], object], warm_up: int = WARM_UP, steps: int = STEPS) -> float:
    """Median seconds by CUDA events."""
    for _ in range(warm_up):
        work()
    marks = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(steps)]
    for begin, end in marks:
        begin.record()
        work()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(begin.elapsed_time(end) for begin, end in marks) / 1e3


def ceilings() -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for m, k, n in ((65_536, 768, 3072), (65_536, 3072, 768), (8_192, 768, 250_048), (8_192, 8_192, 8_192)):
        left, right = (torch.randn(*shape, device="cuda", dtype=torch.bfloat16) for shape in ((m, k), (k, n)))
        seconds = seconds_of(functools.partial(torch.mm, left, right))
        rows.append({"what": f"product {m} x {k} x {n}", "TFLOP/s": 2 * m * k * n / seconds / 1e12, "TB/s": 0.0})
    source = torch.empty(2**30, device="cuda", dtype=torch.uint8)
    seconds = seconds_of(functools.partial(torch.empty_like(source).copy_, source))
    rows.append({"what": "copy of 1 GiB, read and written", "TFLOP/s": 0.0, "TB/s": 2 * 2**30 / seconds / 1e12})
    return rows


def make_batch(objective: str, shape: str, share: int = 1) -> PackedBatch:
    """About 65,000 tokens (by `share`): blocks of 512 and views of 128, or sentences."""
    rng = np.random.default_rng(inputs.SEED)
    if shape == "full":
        each = {"mlm": 512} if objective == "MLM" else {"mlm": 512, "tlm": 512, "query": 128, "key": 128}
        count = (128 if objective == "MLM" else 48) // share
        return inputs.pack({name: np.full(count, length) for name, length in each.items()}, WORDS, rng)
    each = {"mlm": 1} if objective == "MLM" else {"mlm": 1, "tlm": 2, "query": 2, "key": 2}
    count = (1600 if objective == "MLM" else 224) // share
    return inputs.pack({name: inputs.lengths("ragged", rng, count, n) for name, n in each.items()}, WORDS, rng)


def make_learner(name: str, objective: str) -> ours.Given:
    off = {"tlm": 0, "xlco": 0} if objective == "MLM" else {}
    contrast = {"layer": CONTRAST_LAYER[name], "queue_size": QUEUE}
    config = inputs.config(SIZES[name], objectives=off, contrast=contrast, optimization={"warmup_steps": 0})
    model = ours.make_model(config, WORDS, noise=False).cuda()
    return ours.Given(config, model)


def free() -> None:
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()


def step(name: str, objective: str, shape: str, reached: float) -> dict[str, Any]:
    """Whole optimizer steps on one batch, and their parts."""
    learner, batch = make_learner(name, objective), make_batch(objective, shape).to("cuda")
    seconds = seconds_of(lambda: learner.take_step(batch))
    memory = torch.cuda.max_memory_allocated()
    flops = learner._flops(batch) / seconds
    parts = _parts(learner, batch)
    device = peak(torch.cuda.get_device_name())
    return {
        "model": name,
        "objective": objective,
        "shape": shape,
        "tokens": batch.tokens,
        "ms": seconds * 1e3,
        "planned ms": planned(learner.config, batch, torch.cuda.get_device_name()).get("a step", 0.0),
        "ktok/s": batch.tokens / seconds / 1e3,
        "MFU": flops / device if device else 0.0,
        "of the product": flops / (reached * 1e12) if reached else 0.0,
        "peak GB": memory / 1e9,
        "encoder ms": (seconds - sum(parts.values())) * 1e3,
    } | {f"{part} ms": value * 1e3 for part, value in parts.items()}


def as_a_run(config: PretrainingConfig, items: int) -> PretrainingConfig:
    """The config of a run whose steps are one micro-batch of so many samples of each objective, on one GPU."""
    batches = {"global_batch_size": items, "virtual_shards": 1, "micro_batch_size": items}
    values = config.model_dump(mode="json")
    return PretrainingConfig.parse(values | {"batches": values["batches"] | batches})


def planned(config: PretrainingConfig, batch: PackedBatch, gpu: str) -> dict[str, float]:
    """Milliseconds that `infoxlm plan` predicts for a step on this batch, part by part and `a step`; nothing if the GPU
    is not known to it, or the batch is not one of full blocks."""
    items = len(batch.lengths) if not batch.key_lengths else len(batch.key_lengths)
    if kind(gpu) not in step_time.GPUS or set(batch.lengths[: batch.lm_sequences]) != {512}:
        return {}
    rows = plan.plan(as_a_run(config, items), WORDS, 1, kind(gpu)).time
    return {row.name.removeprefix("long: "): row.value for row in rows if row.name.startswith("long: ")}


def _parts(learner: ours.Given, batch: PackedBatch) -> dict[str, float]:
    """Seconds of head, key encoder, and of optimizer with EMA."""
    model, count = learner.module, len(batch.target_ids)
    hidden = torch.randn(count, learner.config.model.hidden, device="cuda", requires_grad=True)
    scale = torch.full((count,), 1.0 / count, device="cuda")

    def head() -> None:
        with autocast(learner.device):
            loss, _ = model.head.loss(hidden, model.encoder.token_embedding.weight, batch.target_ids, scale)
        loss.backward()

    def keys() -> None:
        with torch.no_grad(), autocast(learner.device):
            learner.key_encoder(batch.key_ids, batch.key_positions, batch.key_lengths)

    def update() -> None:
        learner.optimizer.step()
        if learner.contrasting:
            learner.key_encoder.follow(learner.config.contrast.momentum)

    found = {"head": seconds_of(head, 2, 10), "key encoder": seconds_of(keys, 2, 10) if learner.contrasting else 0.0}
    model.zero_grad()
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    found["optimizer, EMA"] = seconds_of(update, 2, 10)
    model.zero_grad()
    return found


def hugging_face(name: str, shape: str) -> list[dict[str, Any]]:
    """MLM forward and backward on an eighth of the tokens: Hugging Face stores logits of every one of them."""
    learner, batch = make_learner(name, "MLM"), make_batch("MLM", shape, share=8)
    on_device = batch.to("cuda")
    from benchmarks.speed import peers  # the rest of this file needs no transformers

    peer = peers.HuggingFace(learner.module.cpu())
    learner.module.cuda()
    peer.model.cuda()
    fed = {key: value.cuda() for key, value in peer.inputs(batch).items()}

    def mine() -> None:
        learner.module.zero_grad()
        learner.mean_loss(on_device).backward()

    def theirs(model: Callable) -> None:
        peer.model.zero_grad()
        with torch.autocast("cuda", torch.bfloat16):
            loss = model(**fed).loss
        loss.backward()

    compiled = torch.compile(peer.model)
    rows, own = [], 0.0
    for variant, work in (
        ("ours", mine),
        ("Hugging Face, eager", lambda: theirs(peer.model)),
        ("Hugging Face, compiled", lambda: theirs(compiled)),
    ):
        free()
        try:
            began = time.perf_counter()
            work()
            torch.cuda.synchronize()
            first = time.perf_counter() - began
            seconds = seconds_of(work)
        except Exception as error:  # out of memory, or no compiler here: one line, and on
            logger.info("gpu, %s %s, %s: skipped, %s", name, shape, variant, str(error).splitlines()[0][:120])
            continue
        own = own or seconds
        rows.append({
            "model": name, "shape": shape, "variant": variant, "tokens": batch.tokens, "ms": seconds * 1e3,
            "times ours": seconds / own, "peak GB": torch.cuda.max_memory_allocated() / 1e9, "first call s": first,
        })  # fmt: skip
    return rows


def data_wait() -> dict[str, Any]:
    """The same steps with batches from shards, made ahead in a thread as the loop does, and with batches in memory."""
    count, steps = 48, STEPS
    config = inputs.config(
        SIZES["base"],
        contrast={"layer": CONTRAST_LAYER["base"], "queue_size": QUEUE},
        batches={"global_batch_size": count, "virtual_shards": 1, "micro_batch_size": count},
        optimization={"warmup_steps": 0},
    )
    with tempfile.TemporaryDirectory() as folder:
        learner = InfoXLMLearner(config, ours.make_model(config, WORDS, noise=False).cuda(), _shards(Path(folder)))
        optimizer, progress = make_adamw(learner.module.parameters(), config.optimization), Progress()

        def train(batches: Callable[[int], Any]) -> float:
            with ThreadPoolExecutor(1) as ahead:
                coming = ahead.submit(batches, 0)
                torch.cuda.synchronize()
                began = time.perf_counter()
                for number in range(steps):
                    now, coming = coming.result(), ahead.submit(batches, number + 1)
                    train_step(learner, optimizer, config.optimization, progress, now)
                torch.cuda.synchronize()
                return time.perf_counter() - began

        held = [learner.batches(number) for number in range(steps + 1)]
        train(held.__getitem__)
        memory, loader = train(held.__getitem__), train(learner.batches)
    return {"steps": steps, "in memory, s": memory, "loader, s": loader, "wait": max(0.0, 1 - memory / loader)}


def _shards(folder: Path) -> Shards:
    """Random text: a million sentences, a hundred thousand pairs."""
    rng = np.random.default_rng(inputs.SEED)

    def table(name: str, rows: int) -> Table:
        counts = inputs.lengths("ragged", rng, rows)
        flat = rng.integers(FIRST_PIECE, WORDS - 1, counts.sum())
        flat[counts.cumsum() - 1] = EOS
        write_table(folder / name, [(flat, counts)])
        return Table.open(folder / name)

    pairs = Pairs("random", table("source", 100_000), table("target", 100_000), np.arange(100_000))
    facts = {"facts": {"vocabulary_size": WORDS}}
    mono = {"en": [table("mono", 1_000_000)]}
    return Shards(mono=mono, pairs={"en-de": [pairs]}, held_out={}, manifest=facts, directory=folder)
