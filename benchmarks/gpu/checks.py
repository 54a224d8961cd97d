"""Checks of results on a GPU. Each check yields rows. The field `ok` shows whether a row's numbers are within limits.

`small` selects toy sizes, so that tests can run the checks on a CPU.
"""

import contextlib
import copy
import itertools
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
from benchmarks.speed.harness import gradient_of
from infoxlm_core.model import devices
from infoxlm_core.model.attention import activate_flash_attention, attend, pack
from infoxlm_core.model.encoder import Encoder, EncoderSize, initialise
from infoxlm_core.model.linear_cross_entropy import linear_cross_entropy
from infoxlm_core.systems.infoxlm import plan
from infoxlm_core.training import distributed

Row = dict[str, Any]


def compare_with_exact(values: Sequence[Tensor], exact: Sequence[Tensor], limit: float, **labels: Any) -> Row:
    """Return a row with the largest relative error of tensors, and whether the error is within the limit."""
    distances = []
    for value, exact_value in zip(values, exact, strict=True):
        reference = exact_value.double()
        error = value.double().cpu() - reference.cpu()
        distances.append(float(error.norm() / reference.norm().clamp_min(1e-30)))  # a zero gradient has norm 0
    return labels | {"off": max(distances), "limit": limit, "ok": max(distances) <= limit}


def check_attention(small: bool) -> Iterator[Row]:
    """Compare an encoder's outputs and gradients with fp64, for full attention, causal attention and half the rows."""
    device = devices.choose()
    generator = torch.Generator().manual_seed(1)
    flash = activate_flash_attention(device)
    encoder = Encoder(EncoderSize(vocabulary=100, layers=2, hidden=128, ffn=256, heads=2))
    initialise(encoder, 1)
    inputs.add_noise(encoder, 1)
    batches = {"ragged": [1, 37, 128, 2, 90], "of one token": [1] * 32, "one sequence": [512]}
    for name, lengths in batches.items():
        hidden = torch.randn(sum(lengths), 128, generator=generator)
        fewest_rows = 1 if flash == "3" else 0  # FlashAttention 3 needs a query in every sequence
        row_counts = [max(length // 2, fewest_rows) for length in lengths]
        offsets = torch.tensor([0, *lengths]).cumsum(0)
        half_rows = torch.cat([offset + torch.arange(n) for offset, n in zip(offsets, row_counts, strict=False)]).long()
        variants: list[dict[str, Any]] = [{"causal": False}, {"causal": True}]
        if len(half_rows):
            variants.append({"causal": False, "rows": half_rows, "row_counts": row_counts})
        for options in variants:
            exact = run_layers(encoder, hidden, lengths, torch.device("cpu"), torch.float64, options)
            fp32 = run_layers(encoder, hidden, lengths, device, torch.float32, options)
            bf16 = run_layers(encoder, hidden, lengths, device, None, options)
            row_label = "half of each" if "rows" in options else "all"
            labels = {"lengths": name, "causal": options["causal"], "rows": row_label}
            # fp32 rounds to 24 bits and bf16 to 8 bits. The errors add up from layer to layer, like noise.
            yield compare_with_exact(fp32, exact, 1e-5, dtype="fp32", **labels)
            yield compare_with_exact(bf16, exact, 4e-2, dtype="bf16", flash=flash, **labels)


def run_layers(encoder: Encoder, hidden: Tensor, lengths: Sequence[int], device: torch.device,
               dtype: torch.dtype | None, options: dict[str, Any]) -> list[Tensor]:  # fmt: skip
    """Run a copy of an encoder. Return the output and the gradients of the input and the layers' parameters.

    Args:
        encoder: encoder to copy.
        hidden: input of the first layer (T, d).
        lengths: number of tokens in each sequence.
        device: device of the copy.
        dtype: type of weights and activations, or None for fp32 weights under autocast to bf16.
        options: other arguments of `Encoder.run_layers`.
    """
    model = copy.deepcopy(encoder).to(device, dtype)
    layer_input = hidden.detach().clone().to(device, dtype).requires_grad_()
    options = {name: value.to(device) if isinstance(value, Tensor) else value for name, value in options.items()}
    with torch.autocast(device.type, torch.bfloat16, enabled=dtype is None):
        output = model.run_layers(layer_input, lengths, first_layer=0, last_layer=2, **options)
    # Weight each element by its own value. With a plain mean, the gradient would be the same for all elements.
    output.to(dtype or torch.float32).mul(output.detach()).mean().backward()
    gradients = []
    for parameter in model.layers.parameters():
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        gradients.append(gradient.flatten())
    return [output.detach(), gradient_of(layer_input), torch.cat(gradients)]


def check_dropout(small: bool) -> Iterator[Row]:
    """Check that dropout preserves the mean and gradient of attention, and that sequences stay separate."""
    device = devices.choose()
    lengths = [1, 37, 128, 2, 90]
    packing = pack(lengths, device)
    for dtype in (torch.float32, torch.bfloat16):
        zeros = torch.zeros(sum(lengths), 128, device=device, dtype=dtype)  # equal scores: each weight is 1 / length
        value = torch.ones_like(zeros, requires_grad=True)
        outputs = torch.stack([attend(zeros, zeros, value, packing, packing, heads=2, dropout=0.1) for _ in range(200)])
        outputs = outputs.double()
        # Five standard deviations are 0.3 % for 200 × 37 rows × 2 heads with 37 keys each, but 8 % for 400 single keys.
        mean = outputs[:, 1:38].mean().item()
        mean_of_one_token = outputs[:, 0].mean().item()
        outputs.sum().backward()
        gradient = gradient_of(value).double().mean().item() / 200
        errors = {"mean": abs(mean - 1), "of one token": abs(mean_of_one_token - 1), "gradient": abs(gradient - 1)}
        is_accurate = errors["mean"] < 0.01 and errors["of one token"] < 0.1 and errors["gradient"] < 0.02
        deviation = outputs.std().item()
        yield {"dtype": str(dtype), **errors, "dropped": deviation, "ok": is_accurate and deviation > 0.01}
        # All values of a sequence are its number, so attention to another sequence would change the mean.
        values = torch.repeat_interleave(torch.arange(1.0, 6.0), torch.tensor(lengths))[:, None].expand(-1, 128)
        output = attend(zeros, zeros, values.to(device, dtype).contiguous(), packing, packing, heads=2, dropout=0.1)
        # Two long sequences suffice. In a short one, dropout alone changes the mean.
        means = torch.stack([rows.mean() for rows in output.double().cpu().split(lengths)[1:3]])
        leak = (means / torch.tensor([2.0, 3.0]) - 1).abs().max().item()
        yield {"dtype": str(dtype), "leaks": leak, "ok": leak < 0.1}


def check_loss(small: bool) -> Iterator[Row]:
    """Compare the gradients of the vocabulary loss with fp64, for target probabilities up to 0.999."""
    device = devices.choose()
    generator = torch.Generator().manual_seed(1)
    words, width, chunk = (1_000, 64, 64) if small else (32_002, 768, 4096)
    row_counts = (1, 65, 130) if small else (1, 4096, 4097)  # one row, and one more than a chunk holds
    for row_count, probability in itertools.product(row_counts, (0.5, 0.99, 0.999)):
        # Inputs that bf16 represents exactly, so that only the computation rounds.
        weight = F.normalize(torch.randn(words, width, generator=generator)).bfloat16().float()
        targets = torch.randint(words, (row_count,), generator=generator)
        # All other words have logits near 0, so this logit gives the target approximately `probability`.
        target_logit = math.log((words - 1) * probability / (1 - probability))
        hidden = weight[targets] * target_logit
        operands = [hidden.bfloat16().float(), weight, torch.zeros(words)]
        scale = torch.full((row_count,), 1 / 157_286)  # targets of a real step: 15 % of 2,048 sequences of 512 tokens
        exact = [operand.double().requires_grad_() for operand in operands]
        losses = F.cross_entropy(F.linear(*exact), targets, reduction="none")
        (losses * scale.double()).sum().backward()
        hidden, weight, bias = (operand.to(device, copy=True).requires_grad_() for operand in operands)
        targets, scale = targets.to(device), scale.to(device)
        with torch.autocast(device.type, torch.bfloat16):
            total, _ = linear_cross_entropy(hidden, weight, bias, targets, scale, max_chunk_rows=chunk)
        total.backward()
        gradients = [gradient_of(operand) for operand in (hidden, weight, bias)]
        exact_gradients = [gradient_of(operand) for operand in exact]
        median_probability = float(losses.detach().neg().exp().median())
        yield compare_with_exact(gradients, exact_gradients, 0.01, rows=row_count, probability=median_probability)


def compute_one_step(small: bool) -> tuple[ours.FixedBatchLearner, float, dict[str, Tensor]]:
    """Compute the gradient of one batch with all objectives. Return the learner, the loss and gradients by name."""
    words = 1_000 if small else inputs.VOCABULARIES["32k"]
    size = {"layers": 2, "hidden": 64, "ffn": 128, "heads": 2} if small else speed.SIZES["base"]
    # The noisy key encoder produces long vectors, so a high temperature keeps the logits small.
    contrast = {"layer": 1 if small else 8, "queue_size": 1024, "temperature": 20.0}
    config = inputs.make_config(size, contrast=contrast, optimization={"warmup_steps": 0, "learning_rate": 1e-5})
    model = ours.make_model(config, words, noise=False)
    learner = ours.FixedBatchLearner(config, model.to(distributed.device()))
    loss = learner.mean_loss(inputs.make_batch("ragged", words, 0, ("mlm", "tlm", "xlco")))
    loss.backward()
    gradient = {name: p.grad.detach().cpu() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return learner, loss.item(), gradient


def save_reference(path: Path, small: bool) -> None:
    """Compute the loss and the gradient of one step on this device, and save them for another process."""
    _, loss, gradient = compute_one_step(small)
    torch.save((loss, gradient), path)


def check_step(small: bool) -> Iterator[Row]:
    """Compare a step's loss and gradient in bf16 with fp32 on the CPU, computed by another process."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "reference.pt"
        command = [sys.executable, "-m", "benchmarks.gpu", f"--reference={path}"]
        if small:
            command.append("--cpu")
        # The code uses a GPU if there is one, so the reference needs a process that sees none.
        subprocess.run(command, check=True, env=os.environ | {"CUDA_VISIBLE_DEVICES": ""})
        exact_loss, exact_gradients = torch.load(path, weights_only=True)
    _, loss, gradients = compute_one_step(small)
    names = sorted(exact_gradients)
    gradient = torch.cat([gradients[name].flatten() for name in names]).double()
    exact_gradient = torch.cat([exact_gradients[name].flatten() for name in names]).double()
    cosine = float(gradient @ exact_gradient / (gradient.norm() * exact_gradient.norm()))
    relative_error = abs(loss - exact_loss) / exact_loss
    is_equal = relative_error < 0.01 and cosine > 0.999
    yield {"loss off": relative_error, "gradient cosine": cosine, "ok": is_equal}


def check_repeatability(small: bool) -> Iterator[Row]:
    """Train twice for three steps and compare the weights, with torch's default and with deterministic kernels."""
    on_cpu = devices.choose().type == "cpu"
    for deterministic in (False, True):
        # Only warn, because some operations have no deterministic kernel.
        torch.use_deterministic_algorithms(deterministic, warn_only=True)
        weights = []
        for _ in range(2):
            learner, _, _ = compute_one_step(small)
            words = learner.module.encoder.size.vocabulary
            for number in range(3):
                learner.take_step(inputs.make_batch("ragged", words, number, ("mlm", "tlm", "xlco")))
            weights.append([parameter.detach().cpu().clone() for parameter in learner.module.parameters()])
        torch.use_deterministic_algorithms(False)
        is_equal = all(torch.equal(first, second) for first, second in zip(*weights, strict=True))
        must_be_equal = deterministic or on_cpu  # default GPU kernels may give different weights
        yield {"deterministic": deterministic, "equal": is_equal, "ok": is_equal or not must_be_equal}


def check_training_after_inference(small: bool) -> Iterator[Row]:
    """Run an encoder in inference mode, then train it. Training fails if it reuses tensors cached by inference."""
    device = devices.choose()
    model = Encoder(EncoderSize(vocabulary=100, layers=2, hidden=128, ffn=256, heads=2)).to(device)
    initialise(model, 1)
    lengths = [9] * 32
    ids = torch.arange(sum(lengths), device=device) % 90
    positions = torch.arange(sum(lengths), device=device) % 9
    starts = torch.arange(32, device=device) * 9
    for mode in (torch.inference_mode(), contextlib.nullcontext()):
        with mode, torch.autocast(device.type, torch.bfloat16):
            hidden = model.embed(ids, positions)
            output = model.run_layers(hidden, lengths, first_layer=0, last_layer=2, rows=starts, row_counts=[1] * 32)
    output.float().square().sum().backward()  # the output of the second pass, which recorded operations for gradients
    yield {"gradient": float(gradient_of(model.token_embedding.weight).norm()), "ok": True}  # no error was raised


def check_fewer_gpus_than_workers(small: bool) -> Iterator[Row]:
    """Request one worker more than there are GPUs, and check that only one worker per GPU trains."""
    from components.adapters.torchrun import train

    gpus = devices.count_gpus()
    with tempfile.TemporaryDirectory() as directory:
        workers = train.launch_training(count_workers, gpus + 1, run=Path(directory))["workers"]
    yield {"GPUs": gpus, "workers": workers, "ok": workers == max(1, gpus)}  # without a GPU, one worker was requested


def count_workers(run: Path) -> dict[str, Any]:
    """Count the workers over the network that carries gradients. Every worker runs this function."""
    return {"workers": int(distributed.sum_over_workers(torch.ones((), device=distributed.device())))}


def check_several_workers(small: bool) -> Iterator[Row]:
    """Compare small training runs with one or two workers, with or without sharding, and killed or not."""
    from benchmarks.gpu import trainings

    device = devices.choose().type
    yield from trainings.compare_losses(2 if device == "cpu" else devices.count_gpus(), trainings.LIMITS[device])


def check_waits_for_gpu(small: bool) -> Iterator[Row]:
    """Count how often the CPU waits for the GPU in a step, by line of code. A step may wait once, at its end."""
    learner, _, _ = compute_one_step(small=False)  # the check never runs on a CPU
    batch = inputs.make_batch("ragged", inputs.VOCABULARIES["32k"], 1, ("mlm", "tlm", "xlco"))
    learner.take_step(batch)  # not counted, because the first step allocates memory
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(3):
                learner.take_step(batch)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    waits_by_line: Counter[str] = Counter()
    for warning in caught:
        if "synchroniz" in str(warning.message):
            path = "/".join(Path(warning.filename).parts[-3:])
            waits_by_line[f"{path}:{warning.lineno}"] += 1
    waits_per_step = waits_by_line.total() / 3
    # Checking the losses for NaN needs one wait.
    yield {"a step": waits_per_step, "lines": dict(waits_by_line), "ok": waits_per_step <= 1}


def check_memory(small: bool) -> Iterator[Row]:
    """Check that a step of the base model needs at most 10 % more memory than `infoxlm plan` predicts."""
    speed.free_memory()  # also resets the peak that is read below
    learner = speed.make_learner("base", "InfoXLM")
    batch = speed.make_batch("InfoXLM", "full").to("cuda")
    learner.take_step(batch)
    peak_bytes = torch.cuda.max_memory_allocated()
    config = speed.set_batch_size(learner.config, len(batch.key_lengths))
    planned_bytes = sum(row.value for row in plan.plan_memory(config, speed.WORDS, gpu_count=1))
    yield {"GB": peak_bytes / 1e9, "planned GB": planned_bytes / 1e9, "ok": peak_bytes <= 1.1 * planned_bytes}


CHECKS: dict[str, Callable[[bool], Iterator[Row]]] = {
    "attention": check_attention,
    "dropout": check_dropout,
    "loss": check_loss,
    "step": check_step,
    "repeatable": check_repeatability,
    "inference, then training": check_training_after_inference,
    "fewer GPUs than workers": check_fewer_gpus_than_workers,
    "several workers": check_several_workers,
}
GPU_CHECKS: dict[str, Callable[[bool], Iterator[Row]]] = {"waiting": check_waits_for_gpu, "memory": check_memory}
"""Checks that a CPU cannot run."""
