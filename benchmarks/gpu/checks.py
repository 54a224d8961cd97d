"""Checks of results on a GPU. Each check yields rows; `ok` in a row tells whether its numbers are within their limit.

`small` selects toy sizes, with which the tests run the checks on a CPU.
"""

import contextlib
import copy
import math
import os
import subprocess
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.gpu import speed
from benchmarks.speed import inputs, ours
from infoxlm_core.model import devices
from infoxlm_core.model.attention import activate_flash_attention, attend, pack
from infoxlm_core.model.encoder import Encoder, EncoderSize, initialise
from infoxlm_core.model.linear_cross_entropy import linear_cross_entropy
from infoxlm_core.systems.infoxlm import plan
from infoxlm_core.training import distributed

Row = dict[str, Any]


def compare(values: Sequence[Tensor], exact: Sequence[Tensor], limit: float, **labels: Any) -> Row:
    """Return the largest relative distance of tensors from the exact tensors, and whether it is within the limit."""
    distances = []
    for value, reference in zip(values, exact, strict=True):
        reference = reference.double()
        distances.append(float((value.double().cpu() - reference.cpu()).norm() / reference.norm().clamp_min(1e-30)))
    return labels | {"off": max(distances), "limit": limit, "ok": max(distances) <= limit}


def attention(small: bool) -> Iterator[Row]:
    """Compare the outputs and gradients of a two-layer encoder with those of an fp64 copy.

    The batches are ragged, contain one-token sequences, and use causal attention.
    """
    device = devices.choose()
    generator = torch.Generator().manual_seed(1)
    flash = activate_flash_attention(device)
    encoder = Encoder(EncoderSize(vocabulary=100, layers=2, hidden=128, ffn=256, heads=2))
    initialise(encoder, 1)
    inputs.perturb(encoder, 1)
    batches = {"ragged": [1, 37, 128, 2, 90], "of one token": [1] * 32, "one sequence": [512]}
    for name, lengths in batches.items():
        hidden = torch.randn(sum(lengths), 128, generator=generator)
        minimum = 1 if flash == "3" else 0  # FlashAttention 3 needs a query of every sequence
        row_counts = [max(length // 2, minimum) for length in lengths]
        starts = torch.tensor([0, *lengths]).cumsum(0)
        first_rows = [starts[i] + torch.arange(row_count) for i, row_count in enumerate(row_counts)]
        half = torch.cat(first_rows).long()
        variants: list[tuple[Tensor | None, bool]] = [(None, False), (None, True)]
        if len(half):
            variants.append((half, False))
        for rows, causal in variants:
            options = {"causal": causal}
            if rows is not None:
                options |= {"rows": rows, "row_counts": row_counts}
            exact = run_layers(encoder, hidden, lengths, torch.device("cpu"), torch.float64, options)
            fp32 = run_layers(encoder, hidden, lengths, device, torch.float32, options)
            bf16 = run_layers(encoder, hidden, lengths, device, None, options)
            labels = {"lengths": name, "causal": causal, "rows": "all" if rows is None else "half of each"}
            # Rounding errors of 24 and of 8 bits add up from layer to layer, like noise.
            yield compare(fp32, exact, 1e-5, dtype="fp32", **labels)
            yield compare(bf16, exact, 4e-2, dtype="bf16", flash=flash, **labels)


def run_layers(
    encoder: Encoder,
    hidden: Tensor,
    lengths: Sequence[int],
    device: torch.device,
    dtype: torch.dtype | None,
    options: dict[str, Any],
) -> list[Tensor]:
    """Return the output of the layers, and the gradients of their input and of their parameters.

    Args:
        encoder: is copied.
        hidden: (T, d) input of the first layer.
        lengths: tokens of each sequence.
        device: where to compute.
        dtype: type of weights and rows; None: fp32 weights under autocast to bf16.
        options: other arguments of `Encoder.run`.
    """
    model = copy.deepcopy(encoder).to(device, dtype)
    layer_input = hidden.detach().clone().to(device, dtype).requires_grad_()
    options = {name: value.to(device) if isinstance(value, Tensor) else value for name, value in options.items()}
    with torch.autocast(device.type, torch.bfloat16, enabled=dtype is None):
        output = model.run(layer_input, lengths, 0, 2, **options)
    output.to(dtype or torch.float32).mul(output.detach()).mean().backward()
    gradients = []
    for parameter in model.layers.parameters():
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        gradients.append(gradient.flatten())
    return [output.detach(), layer_input.grad, torch.cat(gradients)]


def dropout(small: bool) -> Iterator[Row]:
    """Check that attention with dropout has the right mean and gradient, and does not cross sequences."""
    device = devices.choose()
    lengths = [1, 37, 128, 2, 90]
    packing = pack(lengths, device)
    for dtype in (torch.float32, torch.bfloat16):
        zeros = torch.zeros(sum(lengths), 128, device=device, dtype=dtype)  # equal scores: each weight is 1 / length
        value = torch.ones_like(zeros, requires_grad=True)
        draws = torch.stack([attend(zeros, zeros, value, packing, packing, 2, dropout=0.1) for _ in range(200)])
        draws = draws.double()
        mean = draws[:, 1:38].mean().item()  # of 200 x 37 rows x 2 heads, each a mean of 37: 5 deviations are 0.3 %
        mean_of_one_token = draws[:, 0].mean().item()  # of 400 values: 5 deviations are 8 %
        draws.sum().backward()
        gradient = value.grad.double().mean().item() / 200
        errors = {"mean": abs(mean - 1), "of one token": abs(mean_of_one_token - 1), "gradient": abs(gradient - 1)}
        is_accurate = errors["mean"] < 0.01 and errors["of one token"] < 0.1 and errors["gradient"] < 0.02
        deviation = draws.std().item()
        yield {"dtype": str(dtype), **errors, "dropped": deviation, "ok": is_accurate and deviation > 0.01}
        # Each sequence has its number as its values, so that values of another sequence would change its mean.
        values = torch.repeat_interleave(torch.arange(1.0, 6.0), torch.tensor(lengths))[:, None].expand(-1, 128)
        output = attend(zeros, zeros, values.to(device, dtype).contiguous(), packing, packing, 2, dropout=0.1)
        means = torch.stack([rows.mean() for rows in output.double().cpu().split(lengths)[1:3]])
        leak = (means / torch.tensor([2.0, 3.0]) - 1).abs().max().item()
        yield {"dtype": str(dtype), "leaks": leak, "ok": leak < 0.1}


def loss(small: bool) -> Iterator[Row]:
    """Compare the loss over the vocabulary and its gradients with fp64, also where the target is already likely."""
    device = devices.choose()
    generator = torch.Generator().manual_seed(1)
    words, width, chunk = (1_000, 64, 64) if small else (32_002, 768, 4096)
    for count in (1, 65, 130) if small else (1, 4096, 4097):
        for probability in (0.5, 0.99, 0.999):
            weight = F.normalize(torch.randn(words, width, generator=generator)).bfloat16().float()
            targets = torch.randint(words, (count,), generator=generator)
            hidden = weight[targets] * math.log((words - 1) * probability / (1 - probability))
            leaves = [hidden.bfloat16().float(), weight, torch.zeros(words)]
            scale = torch.full((count,), 1 / 157_286)
            exact = [leaf.double().requires_grad_() for leaf in leaves]
            losses = F.cross_entropy(F.linear(*exact), targets, reduction="none")
            (losses * scale.double()).sum().backward()
            copies = [leaf.to(device, copy=True).requires_grad_() for leaf in leaves]
            with torch.autocast(device.type, torch.bfloat16):
                total, _ = linear_cross_entropy(*copies, targets.to(device), scale.to(device), max_chunk_rows=chunk)
            total.backward()
            gradients = [leaf.grad for leaf in copies]
            exact_gradients = [leaf.grad for leaf in exact]
            median = float(losses.detach().neg().exp().median())
            yield compare(gradients, exact_gradients, 0.01, rows=count, probability=median)


def one_step(small: bool) -> tuple[ours.FixedBatchLearner, float, dict[str, Tensor]]:
    """Return our learner on this machine's device, the loss of one batch of all objectives, and its gradient."""
    words = 1_000 if small else inputs.VOCABULARIES["32k"]
    size = {"layers": 2, "hidden": 64, "ffn": 128, "heads": 2} if small else speed.SIZES["base"]
    contrast = {"layer": 1 if small else 8, "queue_size": 1024, "temperature": 20.0}
    config = inputs.config(size, contrast=contrast, optimization={"warmup_steps": 0, "learning_rate": 1e-5})
    model = ours.make_model(config, words, noise=False)
    learner = ours.FixedBatchLearner(config, model.to(distributed.device()))
    loss = learner.mean_loss(inputs.batch("ragged", words, 0, ("mlm", "tlm", "xlco")))
    loss.backward()
    gradient = {name: p.grad.detach().cpu() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return learner, loss.item(), gradient


def save_reference(path: Path, small: bool) -> None:
    """Write loss and gradient of `one_step` to a file, for a process that compares another device with this one."""
    _, loss, gradient = one_step(small)
    torch.save((loss, gradient), path)


def step(small: bool) -> Iterator[Row]:
    """Compare loss and gradient of base (12 layers) in bf16 with fp32 on the CPU, computed by another process."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "reference.pt"
        command = [sys.executable, "-m", "benchmarks.gpu", f"--reference={path}", *["--cpu"] * small]
        subprocess.run(command, check=True, env=os.environ | {"CUDA_VISIBLE_DEVICES": ""})
        exact_loss, exact = torch.load(path, weights_only=True)
    _, loss, gradient = one_step(small)
    flat = torch.cat([gradient[name].flatten() for name in sorted(exact)]).double()
    exact_flat = torch.cat([exact[name].flatten() for name in sorted(exact)]).double()
    cosine = float(flat @ exact_flat / (flat.norm() * exact_flat.norm()))
    relative_error = abs(loss - exact_loss) / exact_loss
    is_equal = relative_error < 0.01 and cosine > 0.999
    yield {"loss off": relative_error, "gradient cosine": cosine, "ok": is_equal}


def repeatable(small: bool) -> Iterator[Row]:
    """Take three steps twice and compare the weights, with torch's default and with its deterministic kernels."""
    on_cpu = devices.choose().type == "cpu"
    for deterministic in (False, True):
        torch.use_deterministic_algorithms(deterministic, warn_only=True)
        weights = []
        for _ in range(2):
            learner, _, _ = one_step(small)
            words = learner.module.encoder.size.vocabulary
            for number in range(3):
                learner.take_step(inputs.batch("ragged", words, number, ("mlm", "tlm", "xlco")))
            weights.append([parameter.detach().cpu().clone() for parameter in learner.module.parameters()])
        torch.use_deterministic_algorithms(False)
        equal = all(torch.equal(first, second) for first, second in zip(*weights, strict=True))
        yield {"deterministic": deterministic, "equal": equal, "ok": equal or not (deterministic or on_cpu)}


def inference_then_training(small: bool) -> Iterator[Row]:
    """Run 32 short sequences in inference mode, then in training: no tensor may be cached from inference."""
    device = devices.choose()
    model = Encoder(EncoderSize(vocabulary=100, layers=2, hidden=128, ffn=256, heads=2)).to(device)
    initialise(model, 1)
    lengths = [9] * 32
    ids = torch.arange(sum(lengths), device=device) % 90
    starts = torch.arange(32, device=device) * 9
    for mode in (torch.inference_mode(), contextlib.nullcontext()):
        with mode, torch.autocast(device.type, torch.bfloat16):
            hidden = model.embed(ids, ids % 9)
            output = model.run_layers(hidden, lengths, 0, 2, rows=starts, row_counts=[1] * 32)
    output.float().square().sum().backward()
    yield {"gradient": float(model.token_embedding.weight.grad.norm()), "ok": True}


def fewer_gpus_than_workers(small: bool) -> Iterator[Row]:
    """Request one worker more than there are GPUs: as many workers train as have a GPU each."""
    from components.adapters.torchrun import train

    gpus = devices.count_gpus()
    with tempfile.TemporaryDirectory() as folder:
        workers = train.launch_training(count_workers, gpus + 1, run=Path(folder))["workers"]
    yield {"GPUs": gpus, "workers": workers, "ok": workers == max(1, gpus)}


def count_workers(run: Path) -> dict[str, Any]:
    """Return the number of workers, summed over the network that gradients use. This runs in each worker."""
    return {"workers": int(distributed.sum_over_workers(torch.ones((), device=distributed.device())))}


def several_workers(small: bool) -> Iterator[Row]:
    """Compare small training runs of one and of two workers, whole and sharded, undisturbed and killed."""
    from benchmarks.gpu import trainings

    on_cpu = devices.choose().type == "cpu"
    yield from trainings.compare(2 if on_cpu else devices.count_gpus(), trainings.LIMITS["cpu" if on_cpu else "cuda"])


def waiting(small: bool) -> Iterator[Row]:
    """Count the lines of ours that wait for the GPU in three steps. Only the end of a step may wait."""
    learner, _, _ = one_step(small=False)
    batch = inputs.batch("ragged", inputs.VOCABULARIES["32k"], 1, ("mlm", "tlm", "xlco"))
    learner.take_step(batch)
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(3):
                learner.take_step(batch)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    lines: Counter[str] = Counter()
    for warning in caught:
        if "synchroniz" in str(warning.message):
            lines[f"{'/'.join(Path(warning.filename).parts[-3:])}:{warning.lineno}"] += 1
    waits_per_step = lines.total() / 3
    # One wait is needed, for the check of the losses for NaN.
    yield {"a step": waits_per_step, "lines": dict(lines), "ok": waits_per_step <= 1}


def memory(small: bool) -> Iterator[Row]:
    """Compare the peak memory of a step of base with the prediction of `infoxlm plan`."""
    speed.free_memory()
    learner = speed.make_learner("base", "InfoXLM")
    batch = speed.make_batch("InfoXLM", "full").to("cuda")
    learner.take_step(batch)
    peak = torch.cuda.max_memory_allocated()
    config = speed.one_batch_a_step(learner.config, len(batch.key_lengths))
    planned = sum(row.value for row in plan.plan_memory(config, speed.WORDS, gpu_count=1))
    yield {"GB": peak / 1e9, "planned GB": planned / 1e9, "ok": peak <= 1.1 * planned}


CHECKS: dict[str, Callable[[bool], Iterator[Row]]] = {
    "attention": attention,
    "dropout": dropout,
    "loss": loss,
    "step": step,
    "repeatable": repeatable,
    "inference, then training": inference_then_training,
    "fewer GPUs than workers": fewer_gpus_than_workers,
    "several workers": several_workers,
}
GPU_CHECKS: dict[str, Callable[[bool], Iterator[Row]]] = {"waiting": waiting, "memory": memory}
"""Checks that a CPU cannot run."""
