"""Predicts the parameters, memory, FLOPs and time of an InfoXLM run, without data, weights or GPUs.

Parameters are counted on a model on torch's meta device; a test compares the exact part of the memory with a real
training run. FLOPs are the necessary ones (`flops.py`). Time is their number at an assumed utilisation of the GPUs.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from infoxlm_core.config import PretrainingConfig
from infoxlm_core.errors import ConfigError, InputError
from infoxlm_core.model import flops
from infoxlm_core.model.encoder import EncoderSize
from infoxlm_core.model.heads import InfoXLM
from infoxlm_core.model.linear_cross_entropy import ROWS
from infoxlm_core.model.mixed_precision import Linear
from infoxlm_core.model.momentum import KeyEncoder

ACTIVATION_BYTES = 38
"""Bytes stored for the backward pass per token, layer and unit of d, in bf16 without compilation; tested."""

ASSUMED_MFU = {True: 0.4, False: 0.25}
"""Assumed share of the GPUs' peak speed, by whether layers are compiled. It counts the necessary FLOPs."""


class PlanRow(NamedTuple):
    """A line of the plan."""

    name: str
    value: float
    unit: str
    formula: str  # how the value is calculated, in words


class Shape(NamedTuple):
    """The length in tokens of each kind of sequence in a step. 0: the step has no sequences of this kind."""

    name: str
    mlm: int
    tlm: int
    view: int


LONG = Shape("long", 512, 512, 128)
"""A step in which all sequences are full."""
SHORT = Shape("short", 512, 96, 64)
"""A step of sentences as short as those of the released recipe."""


def size_of(config: PretrainingConfig, vocabulary: int) -> EncoderSize:
    """Return the sizes of the model `model.start` if it is a directory of this machine, else those of the config."""
    model = config.model
    if model.start and (Path(model.start) / "config.json").is_file():
        from infoxlm_core.model.huggingface import pretrained  # here, since it imports transformers

        return pretrained.size_of(Path(model.start))
    return EncoderSize.of(model, vocabulary)


def build_on_meta_device(config: PretrainingConfig, vocabulary: int) -> tuple[InfoXLM, KeyEncoder]:
    """Return the networks of a run with shapes but without memory."""
    with torch.device("meta"):
        model = InfoXLM.of(config, size_of(config, vocabulary))
        return model, KeyEncoder(model)


def count_parameters(module: nn.Module | None) -> int:
    """Return the number of parameters of a module, or 0 for None."""
    return 0 if module is None else sum(parameter.numel() for parameter in module.parameters())


def fit_shape(config: PretrainingConfig, shape: Shape) -> Shape:
    """Return a shape truncated to the configured lengths, without the disabled objectives."""
    objectives = config.objectives
    longest_pair = 2 * config.batches.side_tokens + 4
    return Shape(
        shape.name,
        min(shape.mlm, config.batches.block_tokens) if objectives.mlm else 0,
        min(shape.tlm, longest_pair) if objectives.tlm else 0,
        min(shape.view, longest_pair) if objectives.xlco else 0,
    )


def count_step_flops(config: PretrainingConfig, size: EncoderSize, shape: Shape) -> float:
    """Return the necessary FLOPs of an optimizer step with sequences of a shape."""
    samples = config.batches.global_batch_size
    view_lengths = [shape.view] * samples if shape.view else []
    lm_lengths: list[int] = []
    for length in (shape.mlm, shape.tlm):
        if length:
            lm_lengths += [length] * samples
    contrast_layer = config.contrast.resolve_layer(size.layers)
    targets = round(config.objectives.mask_ratio * (shape.mlm + shape.tlm) * samples)
    queue_size = config.contrast.queue_size
    return flops.count_step_flops(size, lm_lengths, targets, view_lengths, view_lengths, contrast_layer, queue_size)


def count_step_tokens(config: PretrainingConfig, shape: Shape) -> int:
    """Return the tokens of an optimizer step. A sample of XLCO has two views."""
    return config.batches.global_batch_size * (shape.mlm + shape.tlm + 2 * shape.view)


def plan_memory(config: PretrainingConfig, vocabulary: int, gpus: int) -> list[PlanRow]:
    """Return the bytes on each device: the exact part, then estimates for long sequences."""
    model, key_encoder = build_on_meta_device(config, vocabulary)
    return [*_plan_state(config, model, key_encoder, gpus), *_plan_buffers(config, model, key_encoder, gpus)]


def _plan_state(config: PretrainingConfig, model: InfoXLM, key_encoder: KeyEncoder, gpus: int) -> list[PlanRow]:
    """Return the exact number of bytes that a run occupies from its first step on."""
    parameters = count_parameters(model)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    trained_parameters = sum(parameter.numel() for parameter in trained)
    key_parameters = count_parameters(key_encoder)
    key_bytes = 4 * key_parameters if config.objectives.xlco else 0
    contrast = config.contrast
    queue_bytes = contrast.queue_size * (4 * model.encoder.size.hidden + 24) if config.objectives.xlco else 0
    shards = gpus if config.model.sharded else 1
    divided_by_gpus = f", by {gpus} GPUs" if config.model.sharded else ""
    return [
        PlanRow("weights", 4 * parameters / shards, "B", f"4 B x {parameters:,} parameters, fp32{divided_by_gpus}"),
        PlanRow("gradients", 4 * trained_parameters / shards, "B",
                f"4 B x parameters that are trained, fp32{divided_by_gpus}"),
        PlanRow("AdamW moments", (8 * trained_parameters + 4 * len(trained)) / shards, "B",
                f"8 B x parameters that are trained, fp32; 4 B x {len(trained)} tensors{divided_by_gpus}"),
        PlanRow("key encoder", key_bytes / shards, "B",
                f"4 B x {key_parameters:,}: fp32, up to layer {model.contrast_layer}, and W{divided_by_gpus}"),
        PlanRow("queue", queue_bytes, "B", f"K x (4 d + 24) B: K {contrast.queue_size:,} keys, ids"),
    ]  # fmt: skip


def _plan_buffers(config: PretrainingConfig, model: InfoXLM, key_encoder: KeyEncoder, gpus: int) -> list[PlanRow]:
    """Return estimates of the bytes that parts of a step occupy until they end."""
    size = model.encoder.size
    trained_parameters = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    num_copied_key_weights = 0  # weights of the key encoder of which autocast makes bf16 copies
    if config.objectives.xlco and not config.model.sharded:
        linear_modules = [module for module in key_encoder.modules() if isinstance(module, Linear)]
        num_copied_key_weights = sum(count_parameters(module) for module in linear_modules)
    shape = fit_shape(config, LONG)
    lm_tokens = _count_micro_batch_samples(config) * (shape.mlm + shape.tlm)
    activation_bytes, activations = _estimate_activations(config, size, model.contrast_layer, lm_tokens, shape.view)
    chunk_rows = min(ROWS, round(config.objectives.mask_ratio * lm_tokens))
    return [
        PlanRow("gradients to be summed", 4 * trained_parameters if gpus > 1 else 0, "B",
                "4 B x parameters that are trained, with several workers; of shards until the step ends"),
        PlanRow("bf16 weights", 2 * (count_parameters(model) + num_copied_key_weights), "B",
                f"2 B x parameters and {num_copied_key_weights:,} of the key encoder, under autocast"),
        PlanRow("activations", activation_bytes, "B", activations),
        PlanRow("one chunk of logits", 6 * chunk_rows * size.vocabulary, "B",
                f"6 B x {chunk_rows:,} rows x {size.vocabulary:,} words"),
        PlanRow("gradient of the word table", 8 * size.hidden * size.vocabulary, "B", "8 B x V x d, inside the loss"),
    ]  # fmt: skip


def _count_micro_batch_samples(config: PretrainingConfig) -> int:
    """Return the number of samples of each objective in a micro-batch."""
    batches = config.batches
    if config.model.dropout:  # then micro-batches lie within virtual shards
        return min(batches.micro_batch_size, batches.global_batch_size // batches.virtual_shards)
    return batches.micro_batch_size


def _estimate_activations(
    config: PretrainingConfig, size: EncoderSize, contrast_layer: int, lm_tokens: int, view_length: int
) -> tuple[int, str]:
    """Return the bytes that layers store for the backward pass of a micro-batch, and how they are calculated."""
    view_tokens = _count_micro_batch_samples(config) * view_length
    layer_tokens = lm_tokens * size.layers + view_tokens * contrast_layer  # tokens, counted once in each layer
    if config.model.recompute:  # layers store their input; one layer at a time stores everything
        stored_bytes = size.hidden * (ACTIVATION_BYTES * (lm_tokens + view_tokens) + 2 * layer_tokens)
        return stored_bytes, (
            f"{ACTIVATION_BYTES} B x d a token in one layer, 2 B in the others: {lm_tokens + view_tokens:,} tokens"
        )
    return size.hidden * ACTIVATION_BYTES * layer_tokens, (
        f"{ACTIVATION_BYTES} B x d a token a layer: {lm_tokens:,} tokens x {size.layers} layers, "
        f"{view_tokens:,} x {contrast_layer}"
    )


def check_memory(config: PretrainingConfig, size: EncoderSize, available_bytes: float) -> None:
    """Refuse a run if the exact part of its memory, without the estimates, exceeds the memory of the device.

    Raises:
        ConfigError: the run does not fit; the message names the largest part and the setting that determines it.
    """
    gpus = config.batches.virtual_shards if config.model.sharded else 1  # the largest possible number of workers
    rows = _plan_state(config, *build_on_meta_device(config, size.vocabulary), gpus)
    required_bytes = sum(row.value for row in rows)
    if required_bytes <= available_bytes:
        return
    largest = max(rows, key=lambda row: row.value)
    if largest.name == "queue":
        setting = f"pretraining.contrast.queue_size ({config.contrast.queue_size:,})"
    else:
        setting = (
            f"pretraining.model ({size.layers} layers of {size.hidden}) or the vocabulary ({size.vocabulary:,} ids)"
        )
    raise ConfigError(
        f"training needs {required_bytes / 1e9:,.1f} GB on each device, of which {largest.name} "
        f"{largest.value / 1e9:,.1f} GB, and there are {available_bytes / 1e9:,.1f} GB: lower {setting}"
    )


def plan(config: PretrainingConfig, vocabulary: int, gpus: int = 8, gpu: str = "h200") -> dict[str, list[PlanRow]]:
    """Estimate a run. Return the tables `parameters`, `memory`, `steps` and `run`.

    Args:
        config: settings of the run.
        vocabulary: number of ids of the tokenizer.
        gpus: number of GPUs, with one worker each.
        gpu: type of GPU, a name of `flops.PEAKS` in upper or lower case.

    Raises:
        InputError: the type is unknown, or the run cannot have as many workers.
    """
    _check_request(config, gpus, gpu)
    gpu = gpu.upper()
    model, _ = build_on_meta_device(config, vocabulary)
    parameters = _plan_parameters(model)
    memory = plan_memory(config, vocabulary, gpus)
    total_bytes = sum(row.value for row in memory)
    steps: list[PlanRow] = []
    run: list[PlanRow] = []
    for shape in (fit_shape(config, LONG), fit_shape(config, SHORT)):
        step_flops = count_step_flops(config, model.encoder.size, shape)
        steps += _plan_step(config, shape, step_flops)
        run.append(_plan_duration(config, shape, step_flops, gpus, gpu))
    all_reduce_bytes = next(row.value for row in memory if row.name == "gradients to be summed")
    queue_turnover = config.contrast.queue_size / config.batches.global_batch_size
    steps.append(PlanRow("all-reduce", all_reduce_bytes, "B", "gradients in fp32, once a step"))
    steps.append(PlanRow("queue turnover", queue_turnover, "steps", "K / samples a step"))
    return {
        "parameters": parameters,
        "memory": [*memory, PlanRow("sum", total_bytes, "B", f"on each {gpu}")],
        "steps": steps,
        "run": run + _plan_files(config, vocabulary, parameters),
    }


def _check_request(config: PretrainingConfig, gpus: int, gpu: str) -> None:
    """Raise InputError if the system or the GPU has no plan, or the run cannot have as many workers."""
    if config.system != "infoxlm":
        raise InputError(f"pretraining.system {config.system} cannot be planned: only infoxlm (MLM, TLM, XLCO) can")
    if gpu.upper() not in flops.PEAKS:
        raise InputError(f"gpu {gpu!r} is not known: give one of {', '.join(flops.PEAKS)}")
    virtual_shards = config.batches.virtual_shards
    if not 0 < gpus <= virtual_shards:
        raise InputError(
            f"gpus {gpus}: give 1 to {virtual_shards:,} (pretraining.batches.virtual_shards), a worker each"
        )


def _plan_parameters(model: InfoXLM) -> list[PlanRow]:
    """Return the numbers of parameters of the network."""
    projection = 0 if model.projection is None else model.projection.numel()
    exported = count_parameters(model.encoder) + count_parameters(model.head) + model.encoder.size.hidden
    return [
        PlanRow("encoder", count_parameters(model.encoder), "", "embeddings and layers"),
        PlanRow("masked-LM head", count_parameters(model.head), "", "its output matrix is the word table"),
        PlanRow("contrast projection", projection, "", "d x d"),
        PlanRow("exported", exported, "", "encoder and head, with Hugging Face's row of token types"),
    ]


def _plan_files(config: PretrainingConfig, vocabulary: int, parameters: Sequence[PlanRow]) -> list[PlanRow]:
    """Return the sizes of a checkpoint and of the exported encoder. `parameters` are the rows of `_plan_parameters`."""
    parts_of_checkpoint = ("weights", "AdamW moments", "key encoder", "queue")
    memory_of_one_gpu = plan_memory(config, vocabulary, gpus=1)  # a checkpoint has whole tensors, sharded or not
    checkpoint_bytes = sum(row.value for row in memory_of_one_gpu if row.name in parts_of_checkpoint)
    num_exported = sum(row.value for row in parameters if row.name in ("exported", "contrast projection"))
    checkpoint_frequency = f"every {config.checkpoints.every:,} steps, {config.checkpoints.keep} kept"
    return [
        PlanRow("checkpoint", checkpoint_bytes, "B", checkpoint_frequency),
        PlanRow("exported encoder", 4 * num_exported, "B", "fp32 safetensors"),
    ]


def _plan_step(config: PretrainingConfig, shape: Shape, step_flops: float) -> list[PlanRow]:
    """Return the tokens and FLOPs of a step."""
    samples = config.batches.global_batch_size
    formula = f"{samples:,} x (MLM {shape.mlm} + TLM {shape.tlm} + 2 x XLCO {shape.view})"
    return [
        PlanRow(f"{shape.name} sequences", count_step_tokens(config, shape), "tokens", formula),
        PlanRow("", step_flops, "FLOP", "must-do: no padding, masked rows only"),
    ]


def _plan_duration(config: PretrainingConfig, shape: Shape, step_flops: float, gpus: int, gpu: str) -> PlanRow:
    """Return the hours of the whole run."""
    mfu = ASSUMED_MFU[config.model.compiled]
    step_seconds = step_flops / (mfu * gpus * flops.PEAKS[gpu])
    steps = config.optimization.steps
    if config.tokens:
        steps = round(config.tokens / count_step_tokens(config, shape))
    hours = steps * step_seconds / 3600
    formula = (
        f"{hours * gpus:,.0f} GPU-hours, {gpus} GPUs: {steps:,} steps of {step_seconds:.3g} s, "
        f"at an assumed MFU of {mfu}"
    )
    return PlanRow(f"{shape.name} sequences", hours, "h", formula)


def describe(tables: Mapping[str, Sequence[PlanRow]]) -> list[str]:
    """Return the tables of a plan as lines of text with aligned columns."""
    lines: list[str] = []
    for title, rows in tables.items():
        lines.append(title)
        for row in rows:
            lines.append(f"  {row.name:28}{_format_amount(row):>16}   {row.formula}")
    return lines


def _format_amount(row: PlanRow) -> str:
    """Return the value of a row with a unit of readable size: bytes in GB, FLOPs in PFLOP."""
    if row.unit == "B":
        return f"{row.value / 1e9:,.3f} GB"
    if row.unit == "FLOP":
        return f"{row.value / 1e15:,.4g} PFLOP"
    digits = 1 if row.unit in ("h", "steps") else 0
    return f"{row.value:,.{digits}f} {row.unit}".strip()
