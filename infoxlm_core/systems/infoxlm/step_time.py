"""How long a GPU takes for an optimizer step, predicted part by part: what is counted, by how fast it may go.

Bytes and FLOPs were counted on 2026-11-22 from the operators and kernels of a step. How fast a GPU moves and multiplies
is its data sheet times the shares below, which are assumptions: nobody has measured them here. Parts follow each other;
of the gradients' sum what the backward pass hides does not count. Not for models so small that launching kernels is
what takes the time.
"""

from statistics import NormalDist
from typing import NamedTuple

from infoxlm_core.config import PretrainingConfig
from infoxlm_core.model.encoder import EncoderSize
from infoxlm_core.model.flops import PEAKS
from infoxlm_core.model.linear_cross_entropy import ROWS


class Gpu(NamedTuple):
    """What NVIDIA's data sheet says beside the half-precision peak."""

    fp32: float  # FLOP/s
    memory: float  # bytes/s
    others: float  # bytes/s to the other GPUs of its node, one way: NVLink, or PCIe
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
"""The same names as in `flops.PEAKS`."""

PRODUCTS = 0.60
"""Of the peak in matrix products: 580 to 600 TFLOP/s of an H100's 989 where rows are 768 or 1,024 wide."""
ATTENTION = 0.20
"""Of the peak in attention: FlashAttention 2 at 200 TFLOP/s on an H100, heads of 64, sequences of 512."""
MEMORY = 0.86
"""Of the memory's rate: 2.9 TB/s on an H100, 4.1 on an H200."""
LINKS = 0.80
"""Of NVLink and of network cards in an all-reduce of a gigabyte."""
NODE, CARDS, TCP = 8, 8 * 50e9, 50e9 / 8
"""GPUs of a node, bytes/s of its eight network cards, which they share; the same without RDMA, over one socket."""
WAITING = 1e-3
"""Seconds at the end of each step in which the GPU waits for the host."""
UNEVEN = 0.094
"""Spread of the tokens of a step's samples around their mean: the worker that has most is waited for."""

LAYER_BYTES = {True: (32.1, 70.1), False: (92.1, 130.1)}
"""Moved by a layer, forward and backward, a token and d, outside products and attention; by whether it is compiled."""
LOGIT_BYTES = {True: 10.1, False: 94.0}
"""Moved by the loss a logit, between its products."""
EMBEDDING_BYTES = 42, 26
"""Forward and backward, a token and d."""
HEAD_BYTES = 58
"""Of the dense layer before the logits, forward and backward, a target and d."""
TABLE_BYTES = 42
"""A micro-batch, V and d: copy in bf16 6, gradient of the loss scaled 8, of the look-up 4, added up 12 and 12."""
QUEUE_BYTES = 77
"""An item and row of the queue: logits, which negatives are none, the loss and its gradient."""
OPTIMIZER_BYTES = 40
"""An optimizer step and parameter: AdamW 28, the norm 4, clipping 8."""
MOVED_BYTES, COPY_BYTES = 12, 6
"""A parameter that is added to or moved (gradients, key encoder); one that is copied to bf16."""


class Part(NamedTuple):
    """A part of the step: seconds, and how that follows."""

    name: str
    seconds: float
    formula: str


class Step(NamedTuple):
    """What the parts follow from, of all workers together where it is not said otherwise."""

    size: EncoderSize
    parameters: int
    of_layers: int  # parameters of the query encoder's layers
    of_key_layers: int
    followed: int  # parameters of the key encoder
    lm: tuple[int, ...]  # tokens of a sample's MLM and TLM sequences
    view: int  # tokens of each of its two contrast views; 0: without contrast
    must_do: float  # FLOPs
    saved: float  # bytes of a checkpoint


def parts(config: PretrainingConfig, step: Step, gpus: int, gpu: str) -> list[Part]:
    """The parts of an optimizer step on each of so many GPUs of a kind, as long as one that has most samples takes.

    Source of the shares: public figures of torch's own FlashAttention and cuBLAS on H100s, and of nccl-tests.
    """
    peak, device, size, d = PEAKS[gpu], GPUS[gpu], step.size, step.size.hidden
    most = -(-config.batches.virtual_shards // gpus)  # virtual shards of who has most
    share = most / config.batches.virtual_shards
    samples = config.batches.global_batch_size * share
    micro_batches = -(-samples // config.batches.micro_batch_size)
    if config.model.dropout:  # no micro-batch reaches beyond a virtual shard
        micro_batches = most * -(-samples // most // config.batches.micro_batch_size)
    compiled = config.model.compiled
    memory, layer, top = device.memory * MEMORY, LAYER_BYTES[compiled], config.contrast.layer

    lm, views = samples * sum(step.lm), samples * step.view
    targets = config.objectives.mask_ratio * lm
    table, queue = size.vocabulary * d, config.contrast.queue_size
    forward = lm * size.layers + views * top  # tokens of the query encoder, times layers
    scores = samples * (sum(n * n for n in step.lm) * size.layers + step.view**2 * top)
    attention, of_keys = 12 * d * scores, 4 * d * samples * step.view**2 * top
    against_queue = 4 * samples * queue * d if step.view else 0
    unread = lm - targets  # rows of the last layer that nobody computes
    skipped = 3 * (4 * d * d + 4 * d * size.ffn) * unread if size.layers > top or not step.view else 0
    products = step.must_do * share - attention - of_keys - against_queue - skipped
    again = int(config.model.recompute)  # layers' forward passes, a second time
    products += again * (8 * d * d + 4 * d * size.ffn) * forward
    attended = attention * (3.5 + again) / 3 + of_keys

    per_micro = targets / micro_batches
    chunks = max(1, -(-per_micro // ROWS))
    table_bytes = micro_batches * table * (TABLE_BYTES + (4 + 8 * chunks if chunks > 1 else 0))
    layers = (
        d * ((sum(layer) + again * layer[0]) * forward + layer[0] * views * top)
        + micro_batches * MOVED_BYTES * step.of_layers
    )
    embedded = d * (sum(EMBEDDING_BYTES) * (lm + views) + EMBEDDING_BYTES[0] * views) + HEAD_BYTES * d * targets
    states = 1 / gpus if config.model.sharded else 1
    updated = states * (OPTIMIZER_BYTES * step.parameters + MOVED_BYTES * step.followed) + COPY_BYTES * (
        step.of_layers + step.of_key_layers
    )
    of_queue = QUEUE_BYTES * samples * queue if step.view else 0

    found = [
        Part("products", products / (peak * PRODUCTS),
             f"{products / 1e12:,.0f} TFLOP in bf16 at {PRODUCTS:.2f} of {peak / 1e12:.0f} TFLOP/s"),
        Part("attention", attended / (peak * ATTENTION),
             f"{attended / 1e12:,.0f} TFLOP, {3.5 + again} passes for 3, at {ATTENTION:.2f}"),
        Part("layers", layers / memory,
             f"{layers / 1e9:,.0f} GB, {sum(layer):.0f} B a token, d and layer, at {memory / 1e12:.1f} TB/s"),
        Part("loss", LOGIT_BYTES[compiled] * targets * size.vocabulary / memory,
             f"{LOGIT_BYTES[compiled]:.0f} B x {targets:,.0f} targets x V"),
        Part("word table", table_bytes / memory, f"{table_bytes / 1e9:,.0f} GB, {micro_batches:.0f} micro-batches"),
        Part("embeddings, head", embedded / memory, f"{embedded / 1e9:,.0f} GB"),
        Part("queue", against_queue / (device.fp32 * PRODUCTS) + of_queue / memory,
             f"{against_queue / 1e9:,.0f} GFLOP in fp32 at {PRODUCTS:.2f} of {device.fp32 / 1e12:.0f} TFLOP/s, "
             f"{of_queue / 1e9:,.1f} GB"),
        Part("AdamW, key encoder", updated / memory, f"{updated / 1e9:,.1f} GB"),
    ]  # fmt: skip
    computing = sum(part.seconds for part in found)
    slowest = UNEVEN / samples**0.5 * NormalDist().inv_cdf((gpus - 0.375) / (gpus + 0.25)) if gpus > 1 else 0.0
    to_host = step.saved / device.host / config.checkpoints.every
    return [
        *found,
        _all_reduce(config, step, micro_batches, gpus, device),
        Part("slowest worker", computing * slowest, f"{slowest:.1%}: {samples:,.0f} samples, spread {UNEVEN}"),
        Part("end of the step", WAITING, "the host reads the norm, starts the next"),
        Part("saving", to_host, f"copy to the host, every {config.checkpoints.every:,} steps; the rest is in a thread"),
    ]


def _all_reduce(config: PretrainingConfig, step: Step, micro_batches: float, gpus: int, device: Gpu) -> Part:
    """Of gradients in fp32, inside a node and then between nodes. Shards: layers are gathered in bf16 for each forward
    and each backward pass and what belongs to none in fp32 for both, the key encoder in fp32 for its forward pass;
    gradients are summed once."""
    nodes, inside = -(-gpus // NODE), min(gpus, NODE)
    moved = 4 * step.parameters * (2 if not config.model.sharded else micro_batches + 1)
    if config.model.sharded:
        moved += micro_batches * 4 * step.followed
    own = moved * (inside - 1) / inside
    between = moved * (nodes - 1) / nodes
    seconds = max(own / (device.others * LINKS), between / (CARDS * LINKS))
    said = f"{own / 1e9:,.2f} GB a GPU inside a node"
    if nodes > 1:
        said += (
            f", {between / 1e9:,.2f} GB a node over 8 cards of {CARDS / 8e9:.0f} GB/s; "
            f"without RDMA {between / TCP * 1e3:,.0f} ms"
        )
    if not config.model.sharded:  # the rest is sent while the backward pass runs; this table is ready when it ends
        seconds *= step.size.vocabulary * step.size.hidden / step.parameters
        said += "; waited for: the word table's"
    return Part("all-reduce", seconds, said)
