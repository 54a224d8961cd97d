"""The first ten minutes on a GPU: is it right, and how fast. `make gpu`, or `python3 -m benchmarks.gpu.checks`.

Each check compares the GPU with the CPU in a higher precision, or counts. It has a process of its own, since after one
illegal memory access nothing works any more in a process, and some minutes. A line of JSON is printed and saved as soon
as it is known, so that a crash or a time limit loses nothing. It needs torch, numpy, pyarrow, pydantic, safetensors,
sentencepiece and PyYAML; what else is missing costs its own check. Without a GPU: `--cpu` tries the checks themselves.
"""

import argparse
import contextlib
import copy
import importlib.util
import json
import logging
import os
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

NEEDED = ("torch", "numpy", "pyarrow", "pydantic", "safetensors", "sentencepiece", "yaml")
RESULTS = Path(__file__).parents[1] / "results"
COMMAND = [sys.executable, "-m", "benchmarks.gpu.checks"]
FIGURES = "figures"
"""What is measured when all is checked: `benchmarks.gpu`."""
LONGEST = 300.0
"""Seconds that a check may take; figures may take four times as many."""
Row = dict[str, Any]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python3 -m benchmarks.gpu.checks", description=__doc__)
    parser.add_argument("--cpu", action="store_true", help="the checks on a small model on the CPU, nothing is saved")
    parser.add_argument("--full", action="store_true", help="measure base and large, not base alone: twice as long")
    parser.add_argument("--only", choices=[*CHECKS, FIGURES], help="one of them, in this process; nothing is saved")
    parser.add_argument("--reference", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if missing := [name for name in NEEDED if importlib.util.find_spec(name) is None]:
        print(f"missing: {', '.join(missing)}: install them, without their dependencies if torch is here")
        return 2
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)

    import torch

    if options.reference:
        _, loss, gradient = _one_step(options.cpu)
        torch.save((loss, gradient), options.reference)
        return 0
    if not options.cpu and not torch.cuda.is_available():
        print("there is no CUDA device here; --cpu tries the checks themselves")
        return 0
    if options.only:
        for row in _rows(options):
            _keep(None, row)
        return 0
    kept = RESULTS / f"{time.strftime('%Y-%m-%d-%H%M', time.gmtime())}-gpu-checks.jsonl"
    failed = _run(options, lambda row: _keep(None if options.cpu else kept, row))
    print(f"{failed} checks failed" + ("" if options.cpu else f"; {kept}"))
    return 1 if failed else 0


def _keep(path: Path | None, row: Row) -> None:
    line = json.dumps(row, default=float)
    print(line, flush=True)
    if path:
        with path.open("a", encoding="utf-8") as file:
            print(line, file=file)


def _run(options: argparse.Namespace, keep: Callable[[Row], None]) -> int:
    """All checks, then the figures of `benchmarks.gpu`; how many of them failed."""
    from benchmarks import machine

    keep({"check": "machine", **machine.facts()})
    failed = 0
    for name in [*CHECKS, *[FIGURES] * (not options.cpu)]:
        began = time.monotonic()
        for row in _apart(name, options):
            keep(({} if "figure" in row else {"check": name}) | row)
            failed += not row.get("ok", True)
        keep({"check": name, "seconds": round(time.monotonic() - began, 1)})
    return failed


def _apart(name: str, options: argparse.Namespace) -> Iterator[Row]:
    """The rows of one check as a process of its own prints them, and one more if it crashes or does not end."""
    seconds = LONGEST * (4 if name == FIGURES else 1)
    command = [*COMMAND, "--only", name, *["--cpu"] * options.cpu, *["--full"] * options.full]
    allocating = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}  # as trainings do
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=allocating | os.environ) as process:
        assert process.stdout
        alarm = threading.Timer(seconds, process.kill)
        alarm.start()
        try:
            for line in process.stdout:
                if line.startswith("{"):
                    yield json.loads(line)
        finally:
            process.kill()
            code = process.wait()
            late = not alarm.is_alive()
            alarm.cancel()
    if code:
        yield {"ok": False, "why": f"it did not end within {seconds:.0f} s" if late else f"it ended with {code}"}


def _rows(options: argparse.Namespace) -> Iterator[Row]:
    """The rows of the one check that is asked for; an error is the last."""
    if options.only == FIGURES:
        from benchmarks.gpu import speed as gpu

        logging.getLogger("benchmarks").setLevel(logging.INFO)
        gpu.run(quick=not options.full, keep=lambda what, row: _keep(None, {"figure": what} | row))
        return
    try:
        yield from CHECKS[options.only](options.cpu)
    except Exception as error:
        yield {"ok": False, "why": f"{type(error).__name__}: {error}"[:500]}


def _device(cpu: bool) -> Any:
    import torch

    return torch.device("cpu" if cpu else "cuda")


def _row(found: Any, exact: Any, limit: float, **about: Any) -> Row:
    """How far tensors are from exact ones, relative to the norm of these."""
    off = max(
        float((mine.double().cpu() - other.double().cpu()).norm() / other.double().norm().clamp_min(1e-30))
        for mine, other in zip(found, exact, strict=True)
    )
    return about | {"off": off, "limit": limit, "ok": off <= limit}


def attention(cpu: bool) -> Iterator[Row]:
    """Two layers, forward and backward, against fp64: ragged, of one token, with rows that nobody reads, causal."""
    import torch

    from benchmarks.speed import inputs
    from infoxlm_core.model.attention import choose_flash
    from infoxlm_core.model.encoder import Encoder, EncoderSize, initialise

    device, drawn = _device(cpu), torch.Generator().manual_seed(1)
    flash = choose_flash(device)
    start = Encoder(EncoderSize(vocabulary=100, layers=2, hidden=128, ffn=256, heads=2))
    initialise(start, 1)
    inputs.perturb(start, 1)
    shapes = {"ragged": [1, 37, 128, 2, 90], "of one token": [1] * 32, "one sequence": [512]}
    for name, lengths in shapes.items():
        hidden = torch.randn(sum(lengths), 128, generator=drawn)
        counts = [max(length // 2, int(flash == "3")) for length in lengths]  # which needs a row of each
        edges = torch.tensor([0, *lengths]).cumsum(0)
        read = torch.cat([edges[i] + torch.arange(count) for i, count in enumerate(counts)]).long()
        for rows, causal in ((None, False), (None, True), (read, False)):
            if rows is not None and not len(rows):
                continue
            found = {}
            for where, kind in ((torch.device("cpu"), torch.float64), (device, torch.float32), (device, None)):
                model = copy.deepcopy(start).to(where, kind)
                given = hidden.detach().clone().to(where, kind).requires_grad_()
                with torch.autocast(where.type, torch.bfloat16, enabled=kind is None):
                    asked = {} if rows is None else {"rows": rows.to(where), "row_counts": counts}
                    out = model.run(given, lengths, 0, 2, causal=causal, **asked)
                out.to(kind or torch.float32).mul(out.detach()).mean().backward()
                weights = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.layers.parameters()]
                found[kind] = (out.detach(), given.grad, torch.cat([each.flatten() for each in weights]))
            about = {"lengths": name, "causal": causal, "rows": "all" if rows is None else "half of each"}
            # roundings to 24 and to 8 bits, of what goes from layer to layer too, add up like noise
            yield _row(found[torch.float32], found[torch.float64], 1e-5, kind="fp32", **about)
            yield _row(found[None], found[torch.float64], 4e-2, kind="bf16", flash=flash, **about)


def dropout(cpu: bool) -> Iterator[Row]:
    """Attention that drops weights: what it keeps is scaled, stays in its sequence, and has a gradient."""
    import torch

    from infoxlm_core.model.attention import attend, pack

    device, lengths = _device(cpu), [1, 37, 128, 2, 90]
    packing = pack(lengths, device)
    for kind in (torch.float32, torch.bfloat16):
        rows = torch.zeros(sum(lengths), 128, device=device, dtype=kind)  # so each weight is one over the length
        value = torch.ones_like(rows, requires_grad=True)
        found = torch.stack([attend(rows, rows, value, packing, packing, 2, dropout=0.1) for _ in range(200)]).double()
        longer = found[:, 1:38].mean().item()  # of 200 x 37 rows x 2 heads, each a mean of 37: 5 deviations are 0.3 %
        one = found[:, 0].mean().item()  # of 400: 5 are 8 %
        found.sum().backward()
        gradient = value.grad.double().mean().item() / 200
        off = {"mean": abs(longer - 1), "of one token": abs(one - 1), "gradient": abs(gradient - 1)}
        fine = off["mean"] < 0.01 and off["of one token"] < 0.1 and off["gradient"] < 0.02
        yield {"kind": str(kind), **off, "dropped": found.std().item(), "ok": fine and found.std().item() > 0.01}
        numbers = torch.repeat_interleave(torch.arange(1.0, 6.0), torch.tensor(lengths))[:, None].expand(-1, 128)
        owned = attend(rows, rows, numbers.to(device, kind).contiguous(), packing, packing, 2, dropout=0.1).double()
        means = torch.stack([part.mean() for part in owned.cpu().split(lengths)[1:3]]) / torch.tensor([2.0, 3.0])
        yield {"kind": str(kind), "leaks": (means - 1).abs().max().item(), "ok": bool(((means - 1).abs() < 0.1).all())}


def loss(cpu: bool) -> Iterator[Row]:
    """The loss over a vocabulary and its gradients, where the answer is likely already, against fp64."""
    import math

    import torch
    import torch.nn.functional as F

    from infoxlm_core.model.linear_cross_entropy import linear_cross_entropy

    device, drawn = _device(cpu), torch.Generator().manual_seed(1)
    words, d = (1_000, 64) if cpu else (32_002, 768)
    for count in (1, 65, 130) if cpu else (1, 4096, 4097):
        for probability in (0.5, 0.99, 0.999):
            weight = F.normalize(torch.randn(words, d, generator=drawn)).bfloat16().float()
            targets = torch.randint(words, (count,), generator=drawn)
            hidden = weight[targets] * math.log((words - 1) * probability / (1 - probability))
            leaves = [hidden.bfloat16().float(), weight, torch.zeros(words)]
            scale = torch.full((count,), 1 / 157_286)
            exact = [leaf.double().requires_grad_() for leaf in leaves]
            each = F.cross_entropy(F.linear(*exact), targets, reduction="none")
            (each * scale.double()).sum().backward()
            mine = [leaf.to(device, copy=True).requires_grad_() for leaf in leaves]
            with torch.autocast(device.type, torch.bfloat16):
                total, _ = linear_cross_entropy(*mine, targets.to(device), scale.to(device), rows=64 if cpu else 4096)
            total.backward()
            likely = float(each.detach().neg().exp().median())
            yield _row(
                [leaf.grad for leaf in mine], [leaf.grad for leaf in exact], 0.01, rows=count, probability=likely
            )


def _one_step(small: bool) -> tuple[Any, float, dict[str, Any]]:
    """Our learner, the loss of one batch of all objectives, and its gradient on the CPU."""
    from benchmarks.speed import inputs, ours

    words = 1_000 if small else inputs.VOCABULARIES["32k"]
    size = {"layers": 2, "hidden": 64, "ffn": 128, "heads": 2} if small else {"layers": 12, "hidden": 768, "ffn": 3072,
                                                                             "heads": 12}  # fmt: skip
    contrast = {"layer": 1 if small else 8, "queue_size": 1024, "temperature": 20.0}
    config = inputs.config(size, contrast=contrast, optimization={"warmup_steps": 0, "learning_rate": 1e-5})
    model = ours.make_model(config, words, noise=False)
    learner = ours.Given(config, model.to(_learning_device()))
    loss = learner.mean_loss(inputs.batch("ragged", words, 0, ("mlm", "tlm", "xlco")))
    loss.backward()
    gradient = {name: p.grad.detach().cpu() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return learner, loss.item(), gradient


def _learning_device() -> Any:
    from infoxlm_core.training import distributed

    return distributed.device()


def step(cpu: bool) -> Iterator[Row]:
    """Loss and gradient of base (12 layers) in bf16 on the GPU, against fp32 on the CPU, in a process of its own."""
    import torch

    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "reference.pt"
        command = [sys.executable, "-m", "benchmarks.gpu.checks", f"--reference={out}", *["--cpu"] * cpu]
        subprocess.run(command, check=True, env=os.environ | {"CUDA_VISIBLE_DEVICES": ""})
        exact_loss, exact = torch.load(out, weights_only=True)
    _, loss, gradient = _one_step(cpu)
    flat, other = (
        torch.cat([values[name].flatten() for name in sorted(exact)]).double() for values in (gradient, exact)
    )
    cosine = float(flat @ other / (flat.norm() * other.norm()))
    off = abs(loss - exact_loss) / exact_loss
    yield {"loss off": off, "gradient cosine": cosine, "ok": off < 0.01 and cosine > 0.999}


def waiting(cpu: bool) -> Iterator[Row]:
    """Lines of ours that wait for the device, in three steps; only those at the boundary of a step may."""
    if cpu:
        return
    import torch

    from benchmarks.speed import inputs

    learner, *_ = _one_step(small=False)
    batch = inputs.batch("ragged", inputs.VOCABULARIES["32k"], 1, ("mlm", "tlm", "xlco"))
    learner.take_step(batch)
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            for _ in range(3):
                learner.take_step(batch)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    places = Counter(
        f"{'/'.join(Path(w.filename).parts[-3:])}:{w.lineno}" for w in seen if "synchroniz" in str(w.message)
    )
    waits = sum(places.values()) / 3
    yield {"a step": waits, "places": dict(places), "ok": waits <= 1}  # for the verdict on its numbers


def repeatable(cpu: bool) -> Iterator[Row]:
    """Whether three steps, done twice, end with the same weights; as torch likes, and with deterministic kernels."""
    import torch

    for deterministic in (False, True):
        torch.use_deterministic_algorithms(deterministic, warn_only=True)
        ends = []
        for _ in range(2):
            learner, *_ = _one_step(cpu)
            from benchmarks.speed import inputs

            for number in range(3):
                words = learner.module.encoder.size.vocabulary
                learner.take_step(inputs.batch("ragged", words, number, ("mlm", "tlm", "xlco")))
            ends.append([p.detach().cpu().clone() for p in learner.module.parameters()])
        torch.use_deterministic_algorithms(False)
        same = all(torch.equal(a, b) for a, b in zip(*ends, strict=True))
        yield {"deterministic": deterministic, "equal": same, "ok": same or not (deterministic or cpu)}


def inference_then_training(cpu: bool) -> Iterator[Row]:
    """32 short examples in inference mode, then as many in training: what was remembered must not be of the former."""
    import torch

    from infoxlm_core.model.encoder import Encoder, EncoderSize, initialise

    model = Encoder(EncoderSize(vocabulary=100, layers=2, hidden=128, ffn=256, heads=2)).to(_device(cpu))
    initialise(model, 1)
    lengths = [9] * 32
    ids = torch.arange(sum(lengths), device=_device(cpu)) % 90
    edges = torch.arange(32, device=_device(cpu)) * 9
    for mode in (torch.inference_mode(), contextlib.nullcontext()):
        with mode, torch.autocast(_device(cpu).type, torch.bfloat16):
            hidden = model.embed(ids, ids % 9 + 2)
            found = model.run(hidden, lengths, 0, 2, rows=edges, row_counts=[1] * 32)
    found.float().square().sum().backward()
    yield {"gradient": float(model.token_embedding.weight.grad.norm()), "ok": True}


def fewer_gpus_than_workers(cpu: bool) -> Iterator[Row]:
    """One process more than there are GPUs is asked for: as many train as have a GPU each."""
    import torch

    from components.adapters.torchrun import train

    there = 0 if cpu else torch.cuda.device_count()
    with tempfile.TemporaryDirectory() as folder:
        found = train.run(_count_workers, there + 1, run=Path(folder))["workers"]
    yield {"GPUs": there, "workers": found, "ok": found == max(1, there)}


def _count_workers(run: Path) -> dict[str, Any]:
    """The body of such a process: they add up a number by the network that gradients take."""
    import torch

    from infoxlm_core.training import distributed

    return {"workers": int(distributed.sum_over_workers(torch.ones((), device=distributed.device())))}


def profile(cpu: bool) -> Iterator[Row]:
    """Where the device's time goes in one step: by kind of kernel, and the ten longest."""
    if cpu:
        return
    import torch

    from benchmarks.gpu import speed as gpu

    learner, batch = gpu.make_learner("base", "InfoXLM"), gpu.make_batch("InfoXLM", "full").to("cuda")
    for _ in range(3):
        learner.take_step(batch)
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as traced:
        learner.take_step(batch)
        torch.cuda.synchronize()
    kernels = [e for e in traced.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    total, kinds, longest = sum(e.device_time for e in kernels), Counter(), Counter()
    for event in kernels:
        kinds[_kind(event.name)] += event.device_time
        longest[event.name[:100]] += event.device_time
    yield {"kernels": len(kernels), "ms": total / 1e3, **{k: v / total for k, v in kinds.most_common()}}
    predicted = gpu.planned(learner.config, batch, torch.cuda.get_device_name())
    yield from beside_the_plan({name: spent / 1e3 for name, spent in kinds.items()}, predicted)
    for name, spent in longest.most_common(10):
        yield {"kernel": name, "ms": spent / 1e3, "share": spent / total}


_PLANNED = {"attention": "attention", "products": "products", "optimizer": "AdamW, key encoder"}


def beside_the_plan(measured: dict[str, float], planned: dict[str, float]) -> Iterator[Row]:
    """Milliseconds of a step by kind of kernel, beside those of `infoxlm plan`: the largest gap is next."""
    if not planned:
        return
    rest = dict(planned)
    for name in ("a step", "end of the step", "saving"):  # no kernels
        del rest[name]
    named = {kind: rest.pop(part) for kind, part in _PLANNED.items()}
    named["all else, through memory"] = sum(rest.values())
    found = {kind: measured.get(kind, 0.0) for kind in _PLANNED}
    found["all else, through memory"] = sum(measured.values()) - sum(found.values())
    for kind, predicted in named.items():
        yield {"part": kind, "ms": found[kind], "planned ms": predicted}


_KINDS = {
    "attention": ("flash", "fmha", "attention"),
    "products": ("gemm", "cutlass", "nvjet", "cublas", "wgrad"),
    "copies": ("memcpy", "memset"),
    "optimizer": ("adam", "multi_tensor", "foreach"),
    "reductions": ("reduce", "softmax", "norm"),
}


def _kind(kernel: str) -> str:
    name = kernel.lower()
    return next((kind for kind, words in _KINDS.items() if any(word in name for word in words)), "elementwise")


def memory(cpu: bool) -> Iterator[Row]:
    """The most memory of a step of base, beside what `infoxlm plan` says."""
    if cpu:
        return
    import torch

    from benchmarks.gpu import speed as gpu
    from infoxlm_core.systems.infoxlm import plan

    gpu.free()
    learner = gpu.make_learner("base", "InfoXLM")
    batch = gpu.make_batch("InfoXLM", "full").to("cuda")
    learner.take_step(batch)
    most = torch.cuda.max_memory_allocated()
    config = gpu.as_a_run(learner.config, len(batch.key_lengths))
    planned = sum(row.value for row in plan.memory(config, gpu.WORDS, gpus=1))
    yield {"GB": most / 1e9, "planned GB": planned / 1e9, "ok": most <= 1.1 * planned}


def several_workers(cpu: bool) -> Iterator[Row]:
    """One worker and two, whole and sharded, left alone and killed: on one GPU only what one can show."""
    from benchmarks.gpu import trainings

    yield from trainings.compare(cpu)


CHECKS: dict[str, Callable[[bool], Iterator[Row]]] = {
    "attention": attention,
    "dropout": dropout,
    "loss": loss,
    "step": step,
    "waiting": waiting,
    "repeatable": repeatable,
    "inference, then training": inference_then_training,
    "fewer GPUs than workers": fewer_gpus_than_workers,
    "several workers": several_workers,
    "profile": profile,
    "memory": memory,
}


if __name__ == "__main__":
    sys.exit(main())
