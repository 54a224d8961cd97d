"""Predict the parameters, memory, FLOPs and time of an InfoXLM run, without data, weights or GPUs.

Parameters are counted on torch's meta device. The exact part of the memory plan is tested against a real training run.
FLOPs exclude padding and recomputation (`flops.py`). Time estimates assume a fixed GPU utilization.
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
from infoxlm_core.model.linear_cross_entropy import CHUNK_ROWS
from infoxlm_core.model.mixed_precision import Linear
from infoxlm_core.model.momentum import KeyEncoder

ACTIVATION_BYTES = 38
"""Measured bytes stored for the backward pass, per token, layer and hidden unit, in bf16 without compilation."""

ASSUMED_MFU = {True: 0.4, False: 0.25}
"""Assumed model FLOPs utilization (share of the GPUs' peak speed), with and without compiled layers."""


class PlanRow(NamedTuple):
    """A row of a plan table."""

    name: str
    value: float
    unit: str
    formula: str  # explanation of the calculation


class SequenceLengths(NamedTuple):
    """Sequence lengths in tokens, by objective. 0: the objective is disabled."""

    name: str
    mlm: int
    tlm: int
    view: int  # one side of an XLCO sample


LONG = SequenceLengths("long", 512, 512, 128)
"""Sequences of maximum length."""
SHORT = SequenceLengths("short", 512, 96, 64)
"""Sequences with typical sentence lengths of the released recipe."""


def size_of(config: PretrainingConfig, vocabulary_size: int) -> EncoderSize:
    """Return the size of the start model if `model.start` is a local directory, else the configured size."""
    model = config.model
    if model.start and (Path(model.start) / "config.json").is_file():
        from infoxlm_core.model.huggingface import pretrained  # imports transformers, which is slow

        return pretrained.read_encoder_size(Path(model.start))
    return EncoderSize.from_config(model, vocabulary_size)


def build_on_meta_device(config: PretrainingConfig, vocabulary_size: int) -> tuple[InfoXLM, KeyEncoder]:
    """Build a run's query encoder and key encoder without allocating memory for their weights."""
    with torch.device("meta"):
        model = InfoXLM.from_config(config, size_of(config, vocabulary_size))
        return model, KeyEncoder(model)


def count_parameters(module: nn.Module | None) -> int:
    """Count a module's parameters. None counts as 0."""
    return 0 if module is None else sum(parameter.numel() for parameter in module.parameters())


def count_trained_parameters(module: nn.Module) -> int:
    """Count the parameters that receive gradients."""
    return sum(parameter.numel() for parameter in module.parameters() if parameter.requires_grad)


def fit_lengths(config: PretrainingConfig, lengths: SequenceLengths) -> SequenceLengths:
    """Truncate sequence lengths to the configured maximum, and set those of disabled objectives to 0."""
    objectives = config.objectives
    longest_pair = 2 * config.batches.side_tokens + 4  # 3 special tokens; rounded up to 512 for the default of 254
    return SequenceLengths(
        lengths.name,
        mlm=min(lengths.mlm, config.batches.block_tokens) if objectives.mlm else 0,
        tlm=min(lengths.tlm, longest_pair) if objectives.tlm else 0,
        view=min(lengths.view, longest_pair) if objectives.xlco else 0,
    )


def count_step_flops(config: PretrainingConfig, size: EncoderSize, lengths: SequenceLengths) -> float:
    """Return the FLOPs of a step whose sequences have the given lengths."""
    sample_count = config.batches.global_batch_size
    lm_lengths: list[int] = []
    if lengths.mlm:
        lm_lengths += [lengths.mlm] * sample_count
    if lengths.tlm:
        lm_lengths += [lengths.tlm] * sample_count
    target_count = round(config.objectives.mask_ratio * (lengths.mlm + lengths.tlm) * sample_count)
    view_lengths = [lengths.view] * sample_count if lengths.view else []
    return flops.count_step_flops(
        size,
        lm_lengths,
        target_count,
        query_lengths=view_lengths,
        key_lengths=view_lengths,
        contrast_layer=config.contrast.resolve_layer(size.layers),
        queue_rows=config.contrast.queue_size,
    )


def count_step_tokens(config: PretrainingConfig, lengths: SequenceLengths) -> int:
    """Return the number of tokens per step. An XLCO sample has two views."""
    return config.batches.global_batch_size * (lengths.mlm + lengths.tlm + 2 * lengths.view)


def plan_memory(config: PretrainingConfig, vocabulary_size: int, gpu_count: int) -> list[PlanRow]:
    """Plan the bytes on each GPU: first exact values, then estimates for long sequences."""
    model, key_encoder = build_on_meta_device(config, vocabulary_size)
    persistent_memory = _plan_persistent_memory(config, model, key_encoder, gpu_count)
    return persistent_memory + _plan_temporary_memory(config, model, key_encoder, gpu_count)


def _plan_persistent_memory(
    config: PretrainingConfig, model: InfoXLM, key_encoder: KeyEncoder, gpu_count: int
) -> list[PlanRow]:
    """Compute the exact number of bytes that each GPU holds from the first step to the last."""
    parameter_count = count_parameters(model)
    trained_count = count_trained_parameters(model)
    trained_tensors = sum(parameter.requires_grad for parameter in model.parameters())
    moment_bytes = 8 * trained_count + 4 * trained_tensors  # two moments per parameter, one step count per tensor
    key_parameter_count = count_parameters(key_encoder)
    queue_size = config.contrast.queue_size
    key_bytes = 0
    queue_bytes = 0
    if config.objectives.xlco:
        key_bytes = 4 * key_parameter_count
        # A queue row is an fp32 key, two sentence ids and a step number. Ids and step number have 8 bytes each.
        queue_bytes = queue_size * (4 * model.encoder.size.hidden + 24)
    shards = 1
    storage = "fp32"
    if config.model.sharded:  # the queue is not sharded
        shards = gpu_count
        storage = f"fp32, divided by {gpu_count} GPUs"
    weight_formula = f"4 B x {parameter_count:,} parameters, {storage}"
    gradient_formula = f"4 B x parameters that are trained, {storage}"
    moment_formula = f"8 B x parameters that are trained and 4 B x {trained_tensors} tensors, {storage}"
    key_formula = f"4 B x {key_parameter_count:,} (up to layer {model.contrast_layer}, and the projection), {storage}"
    return [
        PlanRow("weights", 4 * parameter_count / shards, "B", weight_formula),
        PlanRow("gradients", 4 * trained_count / shards, "B", gradient_formula),
        PlanRow("AdamW moments", moment_bytes / shards, "B", moment_formula),
        PlanRow("key encoder", key_bytes / shards, "B", key_formula),
        PlanRow("queue", queue_bytes, "B", f"K x (4 d + 24) B: K {queue_size:,} keys, ids"),
    ]


def _plan_temporary_memory(
    config: PretrainingConfig, model: InfoXLM, key_encoder: KeyEncoder, gpu_count: int
) -> list[PlanRow]:
    """Estimate the bytes that each GPU needs temporarily within a step."""
    size = model.encoder.size
    all_reduce_bytes = 4 * count_trained_parameters(model) if gpu_count > 1 else 0
    copied_key_weights = 0
    if config.objectives.xlco and not config.model.sharded:  # autocast keeps bf16 copies of linear layers
        linear_layers = [module for module in key_encoder.modules() if isinstance(module, Linear)]
        copied_key_weights = sum(count_parameters(layer) for layer in linear_layers)
    bf16_bytes = 2 * (count_parameters(model) + copied_key_weights)
    lengths = fit_lengths(config, LONG)
    sample_count = _count_micro_batch_samples(config)
    lm_tokens = sample_count * (lengths.mlm + lengths.tlm)
    view_tokens = sample_count * lengths.view
    # The loss computes logits for one chunk of targets at a time.
    chunk_rows = min(CHUNK_ROWS, round(config.objectives.mask_ratio * lm_tokens))
    logit_bytes = 6 * chunk_rows * size.vocabulary  # logits in fp32, and their gradients in bf16
    # The output layer and the lookup each compute an fp32 gradient, before autograd adds the two.
    embedding_gradient_bytes = 2 * 4 * size.hidden * size.vocabulary
    all_reduce_formula = "4 B x parameters that are trained, with several workers, even if the model is sharded"
    bf16_formula = f"2 B x parameters and {copied_key_weights:,} of the key encoder, under autocast"
    logit_formula = f"6 B x {chunk_rows:,} rows x {size.vocabulary:,} words"
    return [
        PlanRow("gradients to be summed", all_reduce_bytes, "B", all_reduce_formula),
        PlanRow("bf16 weights", bf16_bytes, "B", bf16_formula),
        _plan_activations(config, size, model.contrast_layer, lm_tokens, view_tokens),
        PlanRow("one chunk of logits", logit_bytes, "B", logit_formula),
        PlanRow("word embedding gradients", embedding_gradient_bytes, "B", "2 x 4 B x vocabulary x d, fp32"),
    ]


def _count_micro_batch_samples(config: PretrainingConfig) -> int:
    """Return the number of samples per objective in a micro-batch."""
    batches = config.batches
    if config.model.dropout:  # with dropout, a micro-batch never mixes virtual shards
        return min(batches.micro_batch_size, batches.global_batch_size // batches.virtual_shards)
    return batches.micro_batch_size


def _plan_activations(
    config: PretrainingConfig, size: EncoderSize, contrast_layer: int, lm_tokens: int, view_tokens: int
) -> PlanRow:
    """Estimate the bytes of activations stored for a micro-batch's backward pass.

    MLM and TLM sequences pass through all layers, query views only through the first `contrast_layer` layers.
    """
    layer_tokens = lm_tokens * size.layers + view_tokens * contrast_layer  # a token counts once in each layer
    if config.model.recompute:
        # Each layer stores only its input in bf16 (2 bytes). The layer being recomputed also stores all activations.
        batch_tokens = lm_tokens + view_tokens
        stored_bytes = size.hidden * (ACTIVATION_BYTES * batch_tokens + 2 * layer_tokens)
        formula = f"{ACTIVATION_BYTES} B x d per token in one layer, and 2 B x d in each layer: {batch_tokens:,} tokens"
    else:
        stored_bytes = size.hidden * ACTIVATION_BYTES * layer_tokens
        formula = (
            f"{ACTIVATION_BYTES} B x d per token and layer: {lm_tokens:,} tokens x {size.layers} layers, "
            f"{view_tokens:,} x {contrast_layer}"
        )
    return PlanRow("activations", stored_bytes, "B", formula)


def check_memory(config: PretrainingConfig, size: EncoderSize, available_bytes: float) -> None:
    """Check that a run's weights, gradients, optimizer state and queue fit into the device's memory.

    Raises:
        ConfigError: memory is insufficient; the message names the largest part and the responsible setting.
    """
    # Assume the largest possible number of GPUs, so that only runs that can never fit are refused.
    max_gpu_count = config.batches.virtual_shards if config.model.sharded else 1
    model, key_encoder = build_on_meta_device(config, size.vocabulary)
    rows = _plan_persistent_memory(config, model, key_encoder, max_gpu_count)
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


def plan(
    config: PretrainingConfig, vocabulary_size: int, gpu_count: int = 8, gpu_type: str = "h200"
) -> dict[str, list[PlanRow]]:
    """Estimate the parameters, memory, FLOPs and time of a run.

    Args:
        config: settings of the run.
        vocabulary_size: number of token ids.
        gpu_count: number of GPUs, with one worker each.
        gpu_type: a key of `flops.PEAKS`, in upper or lower case.

    Returns:
        The tables `parameters`, `memory`, `steps` and `run`.

    Raises:
        InputError: the GPU type is unknown, or the run has fewer virtual shards than GPUs.
    """
    _check_request(config, gpu_count, gpu_type)
    gpu_type = gpu_type.upper()
    model, _ = build_on_meta_device(config, vocabulary_size)
    parameters = _plan_parameters(model)
    memory = plan_memory(config, vocabulary_size, gpu_count)
    bytes_by_name = {row.name: row.value for row in memory}
    memory.append(PlanRow("sum", sum(bytes_by_name.values()), "B", f"on each {gpu_type}"))
    step_rows: list[PlanRow] = []
    run_rows: list[PlanRow] = []
    for lengths in (fit_lengths(config, LONG), fit_lengths(config, SHORT)):
        step_flops = count_step_flops(config, model.encoder.size, lengths)
        step_rows += _plan_step(config, lengths, step_flops)
        run_rows.append(_plan_duration(config, lengths, step_flops, gpu_count, gpu_type))
    queue_turnover_steps = config.contrast.queue_size / config.batches.global_batch_size
    step_rows += [
        PlanRow("all-reduce", bytes_by_name["gradients to be summed"], "B", "gradients in fp32, once a step"),
        PlanRow("queue turnover", queue_turnover_steps, "steps", "queue size / samples per step"),
    ]
    run_rows += _plan_files(config, vocabulary_size, parameters)
    return {"parameters": parameters, "memory": memory, "steps": step_rows, "run": run_rows}


def _check_request(config: PretrainingConfig, gpu_count: int, gpu_type: str) -> None:
    """Raise InputError if the system, GPU type or number of GPUs is not supported."""
    if config.system != "infoxlm":
        raise InputError(f"pretraining.system {config.system} cannot be planned: only infoxlm (MLM, TLM, XLCO) can")
    if gpu_type.upper() not in flops.PEAKS:
        raise InputError(f"gpu {gpu_type!r} is not known: give one of {', '.join(flops.PEAKS)}")
    virtual_shards = config.batches.virtual_shards
    if not 0 < gpu_count <= virtual_shards:  # each worker needs at least one virtual shard
        raise InputError(f"gpus {gpu_count}: give 1 to {virtual_shards:,} (pretraining.batches.virtual_shards)")


def _plan_parameters(model: InfoXLM) -> list[PlanRow]:
    """Count the parameters of the network's parts and of the exported model."""
    encoder_count = count_parameters(model.encoder)
    head_count = count_parameters(model.head)
    projection_count = 0 if model.projection is None else model.projection.numel()
    exported_count = encoder_count + head_count + model.encoder.size.hidden  # Hugging Face adds a token type embedding
    return [
        PlanRow("encoder", encoder_count, "", "embeddings and layers"),
        PlanRow("masked-LM head", head_count, "", "without its output matrix, which is tied to the word embeddings"),
        PlanRow("contrast projection", projection_count, "", "d x d"),
        PlanRow("exported", exported_count, "", "encoder, head and Hugging Face's token type embedding"),
    ]


def _plan_files(config: PretrainingConfig, vocabulary_size: int, parameters: Sequence[PlanRow]) -> list[PlanRow]:
    """Plan the sizes of a checkpoint and of the exported encoder, given the rows of `_plan_parameters`."""
    saved_names = ("weights", "AdamW moments", "key encoder", "queue")
    memory_of_one_gpu = plan_memory(config, vocabulary_size, gpu_count=1)  # checkpoints store whole tensors, not shards
    checkpoint_bytes = sum(row.value for row in memory_of_one_gpu if row.name in saved_names)
    exported_count = sum(row.value for row in parameters if row.name in ("exported", "contrast projection"))
    checkpoint_frequency = f"every {config.checkpoints.every:,} steps, {config.checkpoints.keep} kept"
    return [
        PlanRow("checkpoint", checkpoint_bytes, "B", checkpoint_frequency),
        PlanRow("exported encoder", 4 * exported_count, "B", "fp32 safetensors"),
    ]


def _plan_step(config: PretrainingConfig, lengths: SequenceLengths, step_flops: float) -> list[PlanRow]:
    """Plan the tokens and FLOPs of a step."""
    samples = config.batches.global_batch_size
    formula = f"{samples:,} x (MLM {lengths.mlm} + TLM {lengths.tlm} + 2 x XLCO {lengths.view})"
    return [
        PlanRow(f"{lengths.name} sequences", count_step_tokens(config, lengths), "tokens", formula),
        PlanRow("", step_flops, "FLOP", "without padding; output layer only for masked tokens"),
    ]


def _plan_duration(
    config: PretrainingConfig, lengths: SequenceLengths, step_flops: float, gpu_count: int, gpu_type: str
) -> PlanRow:
    """Estimate the run's hours from the FLOPs per step and the assumed GPU utilization."""
    mfu = ASSUMED_MFU[config.model.compiled]
    step_seconds = step_flops / (mfu * gpu_count * flops.PEAKS[gpu_type])
    steps = config.optimization.steps
    if config.tokens:  # a token budget replaces the configured number of steps
        steps = round(config.tokens / count_step_tokens(config, lengths))
    hours = steps * step_seconds / 3600
    formula = (
        f"{hours * gpu_count:,.0f} GPU-hours, {gpu_count} GPUs: {steps:,} steps of {step_seconds:.3g} s, "
        f"at an assumed MFU of {mfu}"
    )
    return PlanRow(f"{lengths.name} sequences", hours, "h", formula)


def describe(tables: Mapping[str, Sequence[PlanRow]]) -> list[str]:
    """Format a plan's tables as text lines with aligned columns."""
    lines: list[str] = []
    for title, rows in tables.items():
        lines.append(title)
        for row in rows:
            lines.append(f"  {row.name:28}{_format_amount(row):>16}   {row.formula}")
    return lines


def _format_amount(row: PlanRow) -> str:
    """Format a row's value in a readable unit: bytes in GB, FLOPs in PFLOP."""
    if row.unit == "B":
        return f"{row.value / 1e9:,.3f} GB"
    if row.unit == "FLOP":
        return f"{row.value / 1e15:,.4g} PFLOP"
    digits = 1 if row.unit in ("h", "steps") else 0
    return f"{row.value:,.{digits}f} {row.unit}".strip()
