"""Predicts how long a GPU takes for an optimizer step: counted FLOPs and bytes, divided by rates.

A rate is a data sheet's times one of the shares below. The shares are assumptions: nobody has measured them here. Parts
do not overlap, except that the backward pass hides most of the all-reduce. The prediction does not hold for models so
small that launching kernels takes the time.
"""

import math
from statistics import NormalDist
from typing import NamedTuple

from infoxlm_core.config import PretrainingConfig
from infoxlm_core.model.encoder import EncoderSize
from infoxlm_core.model.flops import PEAKS
from infoxlm_core.model.linear_cross_entropy import ROWS


class Gpu(NamedTuple):
    """Rates of NVIDIA's data sheets; `flops.PEAKS` has the half-precision peak under the same name."""

    fp32: float  # FLOP/s
    memory: float  # bytes/s
    links: float  # bytes/s to the other GPUs of its node, one way: NVLink, or PCIe
    host: float  # bytes/s to the host's memory


GPUS = {
    "A100": Gpu(19.5e12, 2.04e12, 300e9, 32e9),
    "B200": Gpu(75e12, 8.0e12, 900e9, 64e9),
    "H100": Gpu(67e12, 3.35e12, 450e9, 64e9),
    "H100-NVL": Gpu(60e12, 3.9e12, 64e9, 64e9),
    "H100-PCIE": Gpu(51e12, 2.0e12, 64e9, 64e9),
    "H20": Gpu(44e12, 4.0e12, 450e9, 64e9),
    "H200": Gpu(67e12, 4.8e12, 450e9, 64e9),
    "H200-NVL": Gpu(60e12, 4.8e12, 64e9, 64e9),
    "V100": Gpu(15.7e12, 0.9e12, 150e9, 16e9),
}

# Shares of the data sheets' rates. Sources: public figures of cuBLAS, FlashAttention 2 and nccl-tests on H100s.
PRODUCTS = 0.60  # matrix products whose rows are 768 or 1,024 wide
ATTENTION = 0.20  # attention with heads of 64 and sequences of 512
MEMORY = 0.86
LINKS = 0.80  # NVLink and network cards in an all-reduce of a gigabyte

NODE_GPUS = 8
NODE_NETWORK, NODE_TCP = 8 * 50e9, 50e9 / 8  # bytes/s of a node's eight network cards, and of one socket without RDMA
HOST_WAIT = 1e-3  # seconds at the end of each step in which the GPU waits for the host
TOKEN_SPREAD = 0.094  # standard deviation / mean of the tokens of a sample

# Bytes moved, by whether layers are compiled where there are two values.
LAYER_BYTES = {True: (32.1, 70.1), False: (92.1, 130.1)}  # forward, backward; of a token, layer and unit of d
LOGIT_BYTES = {True: 10.1, False: 94.0}  # of a logit
EMBEDDING_BYTES = 42, 26  # forward, backward; of a token and unit of d
HEAD_BYTES = 58  # of a target and unit of d
TABLE_BYTES = 42  # of a value of the word table, in each micro-batch
QUEUE_BYTES = 77  # of an item and row of the queue
OPTIMIZER_BYTES = 40  # of a parameter, in each step
MOVED_BYTES, COPY_BYTES = 12, 6  # of a parameter that is added or moved, and of one that is copied to bf16


class Part(NamedTuple):
    """One part of the step's time, in seconds, and how it is calculated."""

    name: str
    seconds: float
    formula: str


class Step(NamedTuple):
    """The size of an optimizer step of all workers."""

    size: EncoderSize
    parameters: int
    layer_parameters: int  # of the query encoder's layers
    key_layer_parameters: int
    key_parameters: int  # of the whole key encoder
    lm_tokens: tuple[int, ...]  # of a sample's MLM and TLM sequences
    view_tokens: int  # of each of its two contrast views; 0 without contrast
    flops: float  # must-do FLOPs
    checkpoint_bytes: float


def parts(config: PretrainingConfig, step: Step, gpus: int, gpu: str) -> list[Part]:
    """Return the parts of an optimizer step on the GPU with the most samples."""
    peak, device, size, d = PEAKS[gpu], GPUS[gpu], step.size, step.size.hidden
    memory, compiled, top = device.memory * MEMORY, config.model.compiled, config.contrast.layer
    shards = math.ceil(config.batches.virtual_shards / gpus)
    share = shards / config.batches.virtual_shards
    samples = config.batches.global_batch_size * share
    if config.model.dropout:  # then micro-batches lie within virtual shards
        micro_batches = shards * math.ceil(samples / shards / config.batches.micro_batch_size)
    else:
        micro_batches = math.ceil(samples / config.batches.micro_batch_size)

    lm, views = samples * sum(step.lm_tokens), samples * step.view_tokens
    targets = config.objectives.mask_ratio * lm
    forward_again = int(config.model.recompute)
    layer_tokens = lm * size.layers + views * top  # tokens of the query encoder, times layers

    # FLOPs: attention and the queue run at other rates than products; the last layer skips rows without target.
    scores = samples * (sum(n * n for n in step.lm_tokens) * size.layers + step.view_tokens**2 * top)
    attention, key_attention = 12 * d * scores, 4 * d * samples * step.view_tokens**2 * top
    queue_products = 4 * samples * config.contrast.queue_size * d if step.view_tokens else 0
    skips_rows = size.layers > top or not step.view_tokens
    skipped = 3 * (4 * d * d + 4 * d * size.ffn) * (lm - targets) if skips_rows else 0
    products = step.flops * share - attention - key_attention - queue_products - skipped
    products += forward_again * (8 * d * d + 4 * d * size.ffn) * layer_tokens
    attended = attention * (3.5 + forward_again) / 3 + key_attention

    # Bytes.
    forward_bytes, backward_bytes = LAYER_BYTES[compiled]
    step_bytes = forward_bytes + backward_bytes + forward_again * forward_bytes
    layers = d * (step_bytes * layer_tokens + forward_bytes * views * top)
    layers += micro_batches * MOVED_BYTES * step.layer_parameters
    chunks = max(1, math.ceil(targets / micro_batches / ROWS))
    table = micro_batches * size.vocabulary * d * (TABLE_BYTES + (4 + 8 * chunks if chunks > 1 else 0))
    embedded = d * (sum(EMBEDDING_BYTES) * (lm + views) + EMBEDDING_BYTES[0] * views + HEAD_BYTES * targets)
    updated: float = OPTIMIZER_BYTES * step.parameters + MOVED_BYTES * step.key_parameters
    updated /= gpus if config.model.sharded else 1
    updated += COPY_BYTES * (step.layer_parameters + step.key_layer_parameters)
    queue = QUEUE_BYTES * samples * config.contrast.queue_size if step.view_tokens else 0

    computed = [
        Part("products", products / (peak * PRODUCTS),
             f"{products / 1e12:,.0f} TFLOP in bf16 at {PRODUCTS:.2f} of {peak / 1e12:.0f} TFLOP/s"),
        Part("attention", attended / (peak * ATTENTION),
             f"{attended / 1e12:,.0f} TFLOP, {3.5 + forward_again} passes for 3, at {ATTENTION:.2f}"),
        Part("layers", layers / memory,
             f"{layers / 1e9:,.0f} GB, {forward_bytes + backward_bytes:.0f} B a token, d and layer, "
             f"at {memory / 1e12:.1f} TB/s"),
        Part("loss", LOGIT_BYTES[compiled] * targets * size.vocabulary / memory,
             f"{LOGIT_BYTES[compiled]:.0f} B x {targets:,.0f} targets x V"),
        Part("word table", table / memory, f"{table / 1e9:,.0f} GB, {micro_batches:.0f} micro-batches"),
        Part("embeddings, head", embedded / memory, f"{embedded / 1e9:,.0f} GB"),
        Part("queue", queue_products / (device.fp32 * PRODUCTS) + queue / memory,
             f"{queue_products / 1e9:,.0f} GFLOP in fp32 at {PRODUCTS:.2f} of {device.fp32 / 1e12:.0f} TFLOP/s, "
             f"{queue / 1e9:,.1f} GB"),
        Part("AdamW, key encoder", updated / memory, f"{updated / 1e9:,.1f} GB"),
    ]  # fmt: skip
    lag = TOKEN_SPREAD / samples**0.5 * NormalDist().inv_cdf((gpus - 0.375) / (gpus + 0.25)) if gpus > 1 else 0.0
    every = config.checkpoints.every
    return [
        *computed,
        _all_reduce(config, step, micro_batches, gpus, device),
        Part("slowest worker", lag * sum(part.seconds for part in computed),
             f"{lag:.1%}: {samples:,.0f} samples, spread {TOKEN_SPREAD}"),
        Part("end of the step", HOST_WAIT, "the host reads the norm, starts the next"),
        Part("saving", step.checkpoint_bytes / device.host / every,
             f"copy to the host, every {every:,} steps; the rest is in a thread"),
    ]  # fmt: skip


def _all_reduce(config: PretrainingConfig, step: Step, micro_batches: float, gpus: int, device: Gpu) -> Part:
    """Return the time of summing gradients in fp32, inside a node and then between nodes.

    A sharded model is gathered for each forward and backward pass, layers in bf16 and everything else in fp32.
    """
    nodes, node_gpus = math.ceil(gpus / NODE_GPUS), min(gpus, NODE_GPUS)
    if config.model.sharded:
        moved = 4 * step.parameters * (micro_batches + 1) + micro_batches * 4 * step.key_parameters
    else:
        moved = 4 * step.parameters * 2
    inside, between = moved * (node_gpus - 1) / node_gpus, moved * (nodes - 1) / nodes
    seconds = max(inside / (device.links * LINKS), between / (NODE_NETWORK * LINKS))
    formula = f"{inside / 1e9:,.2f} GB a GPU inside a node"
    if nodes > 1:
        formula += (
            f", {between / 1e9:,.2f} GB a node over 8 cards of {NODE_NETWORK / 8e9:.0f} GB/s; "
            f"without RDMA {between / NODE_TCP * 1e3:,.0f} ms"
        )
    if not config.model.sharded:  # the backward pass hides all but the word table's gradient, which is complete last
        seconds *= step.size.vocabulary * step.size.hidden / step.parameters
        formula += "; waited for: the word table's"
    return Part("all-reduce", seconds, formula)
