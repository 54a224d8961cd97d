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


class Load(NamedTuple):
    """What the GPU with the most samples computes in a step."""

    share: float  # of the samples of the global batch
    samples: float
    micro_batches: float
    lm_tokens: float  # of MLM and TLM sequences
    view_tokens: float  # of query views; there are as many of key views
    targets: float
    layer_tokens: float  # tokens times the layers of the query encoder that process them


class Flops(NamedTuple):
    """FLOPs of a step, by the rate at which a GPU computes them."""

    products: float
    attention: float
    queue: float


class Traffic(NamedTuple):
    """Bytes of a step that a GPU reads from and writes to its memory."""

    layers: float
    word_table: float
    embeddings: float  # and the head
    updates: float  # of weights and key encoder
    queue: float


def predict_parts(config: PretrainingConfig, step: Step, gpus: int, gpu: str) -> list[Part]:
    """Return the parts of an optimizer step on the GPU with the most samples."""
    device = GPUS[gpu]
    load = _measure_load(config, step, gpus)
    computed = _predict_computation(config, step, load, gpus, gpu)
    lag = 0.0
    if gpus > 1:
        # The expected maximum of as many normally distributed numbers of tokens, by Blom's approximation.
        lag = TOKEN_SPREAD / load.samples**0.5 * NormalDist().inv_cdf((gpus - 0.375) / (gpus + 0.25))
    every = config.checkpoints.every
    return [
        *computed,
        _all_reduce(config, step, load.micro_batches, gpus, device),
        Part("slowest worker", lag * sum(part.seconds for part in computed),
             f"{lag:.1%}: {load.samples:,.0f} samples, spread {TOKEN_SPREAD}"),
        Part("end of the step", HOST_WAIT, "the host reads the norm, starts the next"),
        Part("saving", step.checkpoint_bytes / device.host / every,
             f"copy to the host, every {every:,} steps; the rest is in a thread"),
    ]  # fmt: skip


def _measure_load(config: PretrainingConfig, step: Step, gpus: int) -> Load:
    """Return samples, tokens and targets of the GPU with the most virtual shards."""
    shards = math.ceil(config.batches.virtual_shards / gpus)
    share = shards / config.batches.virtual_shards
    samples = config.batches.global_batch_size * share
    if config.model.dropout:  # then micro-batches lie within virtual shards
        micro_batches = shards * math.ceil(samples / shards / config.batches.micro_batch_size)
    else:
        micro_batches = math.ceil(samples / config.batches.micro_batch_size)
    lm_tokens = samples * sum(step.lm_tokens)
    view_tokens = samples * step.view_tokens
    return Load(
        share=share,
        samples=samples,
        micro_batches=micro_batches,
        lm_tokens=lm_tokens,
        view_tokens=view_tokens,
        targets=config.objectives.mask_ratio * lm_tokens,
        layer_tokens=lm_tokens * step.size.layers + view_tokens * config.contrast.layer,
    )


def _count_flops(config: PretrainingConfig, step: Step, load: Load) -> Flops:
    """Return the FLOPs of a GPU: attention and the queue run at other rates than matrix products."""
    size = step.size
    d = size.hidden
    top = config.contrast.layer
    forward_again = int(config.model.recompute)
    scores = load.samples * (sum(n * n for n in step.lm_tokens) * size.layers + step.view_tokens**2 * top)
    attention = 12 * d * scores
    key_attention = 4 * d * load.samples * step.view_tokens**2 * top
    queue = 4 * load.samples * config.contrast.queue_size * d if step.view_tokens else 0
    skipped = 0.0
    if size.layers > top or not step.view_tokens:  # then the last layer skips rows without target
        skipped = 3 * (4 * d * d + 4 * d * size.ffn) * (load.lm_tokens - load.targets)
    products = step.flops * load.share - attention - key_attention - queue - skipped
    products += forward_again * (8 * d * d + 4 * d * size.ffn) * load.layer_tokens
    # FlashAttention's backward pass computes the scores again: 3.5 forward passes in all, where FLOPs count 3.
    attended = attention * (3.5 + forward_again) / 3 + key_attention
    return Flops(products, attended, queue)


def _count_traffic(config: PretrainingConfig, step: Step, load: Load, gpus: int) -> Traffic:
    """Return the bytes that a GPU moves to and from its memory."""
    size = step.size
    d = size.hidden
    top = config.contrast.layer
    forward_again = int(config.model.recompute)
    forward_bytes, backward_bytes = LAYER_BYTES[config.model.compiled]
    step_bytes = forward_bytes + backward_bytes + forward_again * forward_bytes
    layers = d * (step_bytes * load.layer_tokens + forward_bytes * load.view_tokens * top)  # keys: forward only
    layers += load.micro_batches * MOVED_BYTES * step.layer_parameters

    chunks = max(1, math.ceil(load.targets / load.micro_batches / ROWS))
    chunk_bytes = 4 + 8 * chunks if chunks > 1 else 0  # to add the gradients of several chunks of logits
    word_table = load.micro_batches * size.vocabulary * d * (TABLE_BYTES + chunk_bytes)

    embedding_forward = EMBEDDING_BYTES[0]
    embeddings = d * (
        sum(EMBEDDING_BYTES) * (load.lm_tokens + load.view_tokens)
        + embedding_forward * load.view_tokens
        + HEAD_BYTES * load.targets
    )

    updates: float = OPTIMIZER_BYTES * step.parameters + MOVED_BYTES * step.key_parameters
    if config.model.sharded:
        updates /= gpus
    updates += COPY_BYTES * (step.layer_parameters + step.key_layer_parameters)
    queue = QUEUE_BYTES * load.samples * config.contrast.queue_size if step.view_tokens else 0
    return Traffic(layers, word_table, embeddings, updates, queue)


def _predict_computation(config: PretrainingConfig, step: Step, load: Load, gpus: int, gpu: str) -> list[Part]:
    """Return the parts in which a GPU computes, without communication and waiting."""
    peak = PEAKS[gpu]
    device = GPUS[gpu]
    memory = device.memory * MEMORY
    flops = _count_flops(config, step, load)
    traffic = _count_traffic(config, step, load, gpus)
    passes = 3.5 + int(config.model.recompute)
    layer_bytes = sum(LAYER_BYTES[config.model.compiled])
    logit_bytes = LOGIT_BYTES[config.model.compiled]
    return [
        Part("products", flops.products / (peak * PRODUCTS),
             f"{flops.products / 1e12:,.0f} TFLOP in bf16 at {PRODUCTS:.2f} of {peak / 1e12:.0f} TFLOP/s"),
        Part("attention", flops.attention / (peak * ATTENTION),
             f"{flops.attention / 1e12:,.0f} TFLOP, {passes} passes for 3, at {ATTENTION:.2f}"),
        Part("layers", traffic.layers / memory,
             f"{traffic.layers / 1e9:,.0f} GB, {layer_bytes:.0f} B a token, d and layer, "
             f"at {memory / 1e12:.1f} TB/s"),
        Part("loss", logit_bytes * load.targets * step.size.vocabulary / memory,
             f"{logit_bytes:.0f} B x {load.targets:,.0f} targets x V"),
        Part("word table", traffic.word_table / memory,
             f"{traffic.word_table / 1e9:,.0f} GB, {load.micro_batches:.0f} micro-batches"),
        Part("embeddings, head", traffic.embeddings / memory, f"{traffic.embeddings / 1e9:,.0f} GB"),
        Part("queue", flops.queue / (device.fp32 * PRODUCTS) + traffic.queue / memory,
             f"{flops.queue / 1e9:,.0f} GFLOP in fp32 at {PRODUCTS:.2f} of {device.fp32 / 1e12:.0f} TFLOP/s, "
             f"{traffic.queue / 1e9:,.1f} GB"),
        Part("AdamW, key encoder", traffic.updates / memory, f"{traffic.updates / 1e9:,.1f} GB"),
    ]  # fmt: skip


def _all_reduce(config: PretrainingConfig, step: Step, micro_batches: float, gpus: int, device: Gpu) -> Part:
    """Return the time of summing gradients in fp32, inside a node and then between nodes.

    A sharded model is gathered for each forward and backward pass, layers in bf16 and everything else in fp32.
    """
    nodes = math.ceil(gpus / NODE_GPUS)
    node_gpus = min(gpus, NODE_GPUS)
    if config.model.sharded:
        moved_bytes = 4 * step.parameters * (micro_batches + 1) + micro_batches * 4 * step.key_parameters
    else:
        moved_bytes = 4 * step.parameters * 2
    inside_node = moved_bytes * (node_gpus - 1) / node_gpus
    between_nodes = moved_bytes * (nodes - 1) / nodes
    seconds = max(inside_node / (device.links * LINKS), between_nodes / (NODE_NETWORK * LINKS))
    formula = f"{inside_node / 1e9:,.2f} GB a GPU inside a node"
    if nodes > 1:
        formula += (
            f", {between_nodes / 1e9:,.2f} GB a node over 8 cards of {NODE_NETWORK / 8e9:.0f} GB/s; "
            f"without RDMA {between_nodes / NODE_TCP * 1e3:,.0f} ms"
        )
    if not config.model.sharded:  # the backward pass hides all but the word table's gradient, which is complete last
        seconds *= step.size.vocabulary * step.size.hidden / step.parameters
        formula += "; waited for: the word table's"
    return Part("all-reduce", seconds, formula)
