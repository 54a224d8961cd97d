"""What a run of InfoXLM would take, without data, weights or GPUs: parameters, memory, FLOPs, time.

The model is built on torch's meta device, so its parameters are counted, not guessed; a test compares the rest of the
first table with a real training. FLOPs are the must-do ones (`flops.py`). Time is predicted part by part
(`step_time.py`): nobody has measured it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
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
from infoxlm_core.model.mixed import Linear
from infoxlm_core.model.momentum import KeyEncoder
from infoxlm_core.systems.infoxlm import step_time

ACTIVATION_BYTES = 38
"""Kept for the backward pass, times d, of each token in each layer, in bf16 and not compiled (a test measures it)."""


class PlanRow(NamedTuple):
    """A line of the plan: what, how much, and how that follows."""

    name: str
    value: float
    unit: str
    formula: str


@dataclass(frozen=True)
class Plan:
    """A plan, table by table."""

    parameters: list[PlanRow]
    memory: list[PlanRow]
    steps: list[PlanRow]
    time: list[PlanRow]
    run: list[PlanRow]


class Shape(NamedTuple):
    """Tokens of the sequences of a step, where they are all alike."""

    name: str
    mlm: int
    tlm: int
    view: int


SHAPES = (Shape("long", 512, 512, 128), Shape("short", 512, 96, 64))
"""All sequences full; and sentences as long as in the released recipe."""


def size_of(config: PretrainingConfig, vocabulary: int) -> EncoderSize:
    """Sizes of the encoder: of the directory it starts from if that is here, else those of the config."""
    model = config.model
    if model.start and (Path(model.start) / "config.json").is_file():
        from infoxlm_core.model.huggingface import pretrained  # imports transformers: all else does without

        return pretrained.size_of(Path(model.start))
    return EncoderSize.of(model, vocabulary)


def build(config: PretrainingConfig, vocabulary: int) -> tuple[InfoXLM, KeyEncoder]:
    """The networks of a run on the meta device: every shape, no memory."""
    contrast = config.contrast
    with torch.device("meta"):
        model = InfoXLM(size_of(config, vocabulary), contrast.layer, contrast.pooling, contrast.normalise)
        return model, KeyEncoder(model)


def count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def shapes(config: PretrainingConfig) -> list[Shape]:
    """`SHAPES`, cut at what the config lays out, without the objectives that are off."""
    objectives, pair = config.objectives, 2 * config.batches.side_tokens + 4
    return [
        Shape(
            shape.name,
            min(shape.mlm, config.batches.block_tokens) if objectives.mlm else 0,
            min(shape.tlm, pair) if objectives.tlm else 0,
            min(shape.view, pair) if objectives.xlco else 0,
        )
        for shape in SHAPES
    ]


def step_flops(config: PretrainingConfig, size: EncoderSize, shape: Shape) -> float:
    """Must-do FLOPs of an optimizer step whose sequences all have the lengths of a shape."""
    samples = config.batches.global_batch_size
    views = [shape.view] * samples if shape.view else []
    lm = [tokens for tokens in (shape.mlm, shape.tlm) if tokens for _ in range(samples)]
    targets = round(config.objectives.mask_ratio * (shape.mlm + shape.tlm) * samples)
    return flops.must_do_flops(size, lm, targets, views, views, config.contrast.layer, config.contrast.queue_size)


def step_tokens(config: PretrainingConfig, shape: Shape) -> int:
    """Tokens that go through an encoder in a step; both views of a contrast item count."""
    return config.batches.global_batch_size * (shape.mlm + shape.tlm + 2 * shape.view)


def memory(config: PretrainingConfig, vocabulary: int, gpus: int) -> list[PlanRow]:
    """Bytes on each device, part by part; the first five are exact, the others estimates for full sequences."""
    model, keys = build(config, vocabulary)
    size, micro = model.encoder.size, config.batches.micro_batch_size
    if config.model.dropout:  # no micro-batch reaches beyond a virtual shard
        micro = min(micro, config.batches.global_batch_size // config.batches.virtual_shards)
    queue, top = config.contrast.queue_size, config.contrast.layer
    d, total, slow, tensors = size.hidden, count(model), count(keys), len(list(model.parameters()))
    shape, on = shapes(config)[0], bool(config.objectives.xlco)
    lm, views = micro * (shape.mlm + shape.tlm), micro * shape.view
    kept, above = lm * size.layers + views * top, 0  # tokens x layers
    activations = f"{ACTIVATION_BYTES} B x d a token a layer: {lm:,} tokens x {size.layers} layers, {views:,} x {top}"
    if config.model.recompute:  # one layer at a time is whole
        kept, above = lm + views, kept
        activations = f"{ACTIVATION_BYTES} B x d a token in one layer, 2 B in the others: {lm + views:,} tokens"
    rows = min(ROWS, round(config.objectives.mask_ratio * lm))
    share, of = (gpus, f", by {gpus} GPUs") if config.model.sharded else (1, "")
    copied = 0 if config.model.sharded else on * sum(count(part) for part in keys.modules() if isinstance(part, Linear))
    reduced = 4 * total if gpus > 1 else 0
    parts = [
        ("weights", 4 * total / share, f"4 B x {total:,} parameters, fp32{of}"),
        ("gradients", 4 * total / share, f"4 B x parameters, fp32{of}"),
        ("AdamW moments", (8 * total + 4 * tensors) / share, f"8 B x parameters, fp32; 4 B x {tensors} tensors{of}"),
        ("key encoder", on * 4 * slow / share, f"4 B x {slow:,}: fp32, up to layer {top}, and W{of}"),
        ("queue", on * queue * (4 * d + 24), f"K x (4 d + 24) B: K {queue:,} keys, ids"),
        ("gradients to be summed", reduced, "4 B x parameters, with several workers; of shards until the step ends"),
        ("bf16 weights", 2 * (total + copied), f"2 B x parameters and {copied:,} of the key encoder, under autocast"),
        ("activations", d * (ACTIVATION_BYTES * kept + 2 * above), activations),
        ("one chunk of logits", 6 * rows * size.vocabulary, f"6 B x {rows:,} rows x {size.vocabulary:,} words"),
        ("gradient of the word table", 8 * d * size.vocabulary, "8 B x V x d, inside the loss"),
    ]
    return [PlanRow(name, value, "B", formula) for name, value, formula in parts]


def check_memory(config: PretrainingConfig, size: EncoderSize, available: float) -> None:
    """Refuse a run whose tensors cannot all be held by a device with so many bytes, before the first is made.

    Only what is exact counts, so that no run is refused that would fit. With sharding it is one worker's part.

    Raises:
        ConfigError: it names the largest part and the setting that it follows from.
    """
    parts = memory(config, size.vocabulary, config.batches.virtual_shards if config.model.sharded else 1)[:5]
    if (needed := sum(part.value for part in parts)) <= available:
        return
    largest = max(parts, key=lambda part: part.value)
    setting = (
        f"pretraining.contrast.queue_size ({config.contrast.queue_size:,})"
        if largest.name == "queue"
        else f"pretraining.model ({size.layers} layers of {size.hidden}) or the vocabulary ({size.vocabulary:,} ids)"
    )
    raise ConfigError(
        f"training needs {_bytes(needed)} on each device, of which {largest.name} {_bytes(largest.value)}, and there "
        f"are {_bytes(available)}: lower {setting}"
    )


def _bytes(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB", "TB", "PB"):
        if count < 1000 or unit == "PB":
            return f"{count:,.1f} {unit}"
        count /= 1000
    raise AssertionError


def _step(
    config: PretrainingConfig, model: InfoXLM, keys: KeyEncoder, shape: Shape, must_do: float, saved: float
) -> step_time.Step:
    """What the time of a step follows from."""
    lm = tuple(tokens for tokens in (shape.mlm, shape.tlm) if tokens)
    on = bool(config.objectives.xlco)
    return step_time.Step(
        model.encoder.size, count(model), count(model.encoder.layers), on * count(keys.encoder.layers),
        on * count(keys), lm, shape.view, must_do, saved,
    )  # fmt: skip


def plan(config: PretrainingConfig, vocabulary: int, gpus: int = 8, gpu: str = "h200") -> Plan:
    """Plan a run on so many GPUs of a kind; `vocabulary`: ids of the tokenizer.

    Raises:
        InputError: the kind is none of `flops.PEAKS`, or a run cannot have as many workers.
    """
    if (peak := flops.PEAKS.get(gpu.upper())) is None:
        raise InputError(f"gpu {gpu!r} is not known: give one of {', '.join(flops.PEAKS)}")
    most = config.batches.virtual_shards
    if not 0 < gpus <= most:
        raise InputError(f"gpus {gpus}: give 1 to {most:,} (pretraining.batches.virtual_shards), a worker each")
    model, keys = build(config, vocabulary)
    size, samples, updates = model.encoder.size, config.batches.global_batch_size, config.optimization.steps
    bytes_of = memory(config, vocabulary, gpus)
    saved = sum(
        row.value
        for row in memory(config, vocabulary, gpus=1)  # whole, however it is sharded
        if row.name in ("weights", "AdamW moments", "key encoder", "queue")
    )
    exported = count(model.encoder) + count(model.head) + size.hidden
    by_shape = {shape: step_flops(config, size, shape) for shape in shapes(config)}
    by_part = {
        shape: step_time.parts(config, _step(config, model, keys, shape, amount, saved), gpus, gpu.upper())
        for shape, amount in by_shape.items()
    }
    seconds = {shape: sum(part.seconds for part in found) for shape, found in by_part.items()}
    return Plan(
        parameters=[
            PlanRow("encoder", count(model.encoder), "", "embeddings and layers"),
            PlanRow("masked-LM head", count(model.head), "", "its output matrix is the word table"),
            PlanRow("contrast projection", model.projection.numel(), "", "d x d"),
            PlanRow("exported", exported, "", "encoder and head, with Hugging Face's row of token types"),
        ],
        memory=[*bytes_of, PlanRow("sum", sum(row.value for row in bytes_of), "B", f"on each {gpu.upper()}")],
        steps=[
            row
            for shape, amount in by_shape.items()
            for row in (
                PlanRow(f"{shape.name} sequences", step_tokens(config, shape), "tokens",
                    f"{samples:,} x (MLM {shape.mlm} + TLM {shape.tlm} + 2 x XLCO {shape.view})"),
                PlanRow("", amount, "FLOP", "must-do: no padding, masked rows only"),
            )
        ] + [
            PlanRow("all-reduce", 4 * count(model) if gpus > 1 else 0, "B", "gradients in fp32, once a step"),
            PlanRow("queue turnover", config.contrast.queue_size / samples, "steps", "K / samples a step"),
        ],
        time=[
            row
            for shape, found in by_part.items()
            for row in (
                *(PlanRow(f"{shape.name}: {part.name}", part.seconds * 1e3, "ms", part.formula) for part in found),
                PlanRow(f"{shape.name}: a step", seconds[shape] * 1e3, "ms",
                    f"MFU {by_shape[shape] / (seconds[shape] * gpus * peak):.2f} of {peak / 1e12:.0f} TFLOP/s: "
                    "predicted, never measured"),
            )
        ],
        run=[
            *(PlanRow(f"{shape.name} sequences", updates * each / 3600, "h",
                  f"{updates * each / 3600 * gpus:,.0f} GPU-hours, {gpus} GPUs: {updates:,} steps as above")
              for shape, each in seconds.items()),
            PlanRow("checkpoint", saved, "B",
                    f"every {config.checkpoints.every:,} steps, {config.checkpoints.keep} kept"),
            PlanRow("exported encoder", 4 * (exported + model.projection.numel()), "B", "fp32 safetensors"),
        ],
    )  # fmt: skip


def describe(tables: Plan) -> Sequence[str]:
    """The plan as lines of text, columns aligned."""
    lines: list[str] = []
    for title, rows in vars(tables).items():
        lines += [title, *(f"  {row.name:28}{_say(row):>16}   {row.formula}" for row in rows)]
    return lines


def _say(row: PlanRow) -> str:
    if row.unit == "B":
        return f"{row.value / 1e9:,.3f} GB"
    if row.unit == "FLOP":
        return f"{row.value / 1e15:,.4g} PFLOP"
    digits = 1 if row.unit in ("h", "ms", "steps") else 0
    return f"{row.value:,.{digits}f} {row.unit}".strip()
