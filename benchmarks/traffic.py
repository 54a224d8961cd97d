"""Bytes that a step moves outside matrix products and attention; counted, so that any CPU will do.

    PyTorch's operators   each reads its inputs and writes its outputs: what a network costs that is not compiled
    inductor's kernels    what is left of them when `torch.compile` has fused the operators between two products

and what a micro-batch of InfoXLM launches on a GPU, key encoder, contrast and statistics among it, in the same two
ways. It runs here on tensors without content: nothing in it can have waited for a value.

Attention and products with sums in fp32, which a CPU lacks, are operators here that have shapes and no content.
`infoxlm plan` predicts with what is counted here.
"""

import contextlib
import logging
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.harness import Sheet
from infoxlm_core.config import PretrainingConfig
from infoxlm_core.data.batches import PackedBatch
from infoxlm_core.model import attention, encoder, linear_cross_entropy, mixed
from infoxlm_core.model.encoder import Encoder, EncoderSize, Layer
from infoxlm_core.model.heads import InfoXLM, MaskedLMHead
from infoxlm_core.model.momentum import KeyEncoder, Queue
from infoxlm_core.model.objectives import share_a_sentence, xlco_hits, xlco_logits, xlco_losses
from infoxlm_core.systems.infoxlm.learner import InfoXLMLearner
from infoxlm_core.training.learner import LossWeights

BF16 = torch.bfloat16
TOKENS, HIDDEN = 8_192, 192  # as many tokens for each d as 32,768 of base: what weights cost counts as there
ROWS, WORDS = 4_096, 250_002
MICRO_BATCHES = (  # sizes, universal layer, samples of each objective
    ("base", {"layers": 12, "hidden": 768, "ffn": 3072, "heads": 12}, 8, 32),
    ("large", {"layers": 24, "hidden": 1024, "ffn": 4096, "heads": 16}, 12, 16),
)
VIEWS = {
    "_reshape_alias", "_unsafe_view", "alias", "as_strided", "detach", "device", "empty", "empty_like",
    "empty_strided", "expand", "is_pinned", "lift_fresh", "new_empty", "new_empty_strided", "permute",
    "promote_types", "select", "slice", "split", "split_with_sizes", "squeeze", "t", "transpose", "unbind",
    "unflatten", "unsqueeze", "view",
}  # fmt: skip
PRODUCTS = {"addmm", "bmm", "linear", "mm", "attend", "attend_backward", "product", "product_into_"}


def run(quick: bool) -> list[Sheet]:
    logger = logging.getLogger(__name__)
    ways = {
        "autocast alone, operator by operator": lambda: layer_by_operators(TOKENS, HIDDEN, plain=True),
        "ours, operator by operator": lambda: layer_by_operators(TOKENS, HIDDEN, plain=False),
    }
    if not quick:  # it takes a compiler, and a minute
        ways["ours, compiled"] = lambda: layer_by_kernels(TOKENS, HIDDEN)
    rows = []
    for name, count in ways.items():
        forward, backward = count()
        rows.append({"layer": name, "forward": forward, "backward": backward, "both": forward + backward})
        logger.info("traffic, %s: %s", name, rows[-1])
    loss = [{"loss": "operator by operator", "GB": loss_by_operators(ROWS, WORDS) / 1e9}]
    if not quick:
        small = 16  # the larger, the same a logit: it is computed, too
        loss.append({"loss": "compiled", "GB": loss_by_kernels(ROWS // small, WORDS // small) * small**2 / 1e9})
    logger.info("traffic, %s", loss)
    launched = [
        {"micro-batch": name} | launches(EncoderSize(WORDS, **given), contrast, samples, fused=not quick)
        for name, given, contrast, samples in MICRO_BATCHES
    ]
    logger.info("traffic, %s", launched)
    return [
        Sheet("traffic, a layer", {"unit": "bytes a token and d in bf16, outside products and attention"}, rows),
        Sheet("traffic, the loss", {"unit": f"GB for {ROWS:,} rows and {WORDS:,} words, outside products"}, loss),
        Sheet(
            "traffic, around the layers",
            {"unit": "GB a micro-batch of base, 32 items: 36,864 tokens, 4,915 targets, 131,072 keys"},
            [
                {
                    "embeddings, head, word table": around_layers(36_864, 4_915, WORDS, 768) / 1e9,
                    "queue": against_queue(32, 131_072, 768) / 1e9,
                }
            ],
        ),
        Sheet("traffic, launches", {"unit": "operators, kernels, a micro-batch of blocks of 512 tokens"}, launched),
    ]


def size(value: object) -> int:
    return value.numel() * value.element_size() if isinstance(value, Tensor) else 0


class Operators(TorchDispatchMode):
    """Counts the bytes of each operator."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes: Counter[str] = Counter()
        self.launched: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = function(*args, **(kwargs or {}))
        name = function.overloadpacket.__name__
        if name not in VIEWS:
            self.launched[name] += 1
            self.bytes[name] += self._moved(name, args, kwargs or {}, found)
        return found

    def _moved(self, name: str, args: Any, kwargs: Any, found: Any) -> int:
        given, out = tree_leaves((args, kwargs)), tree_leaves(found)
        new = sum(size(part) for part in out if not any(part is other for other in given))
        if name in ("embedding", "gather", "index", "index_select"):
            return 2 * new
        if name in ("index_add_", "scatter_"):  # reads and writes what it changes
            return 3 * size(args[-1]) if isinstance(args[-1], Tensor) else 2 * size(args[2])
        if name == "copy_":
            return size(args[0]) + size(args[1])
        if name in ("fill_", "zero_", "zeros_like", "zeros", "full", "ones_like", "new_zeros"):
            return size(args[0]) if name.endswith("_") else new
        changed = size(args[0]) if name.endswith("_") and name != "_to_copy" else 0  # written, too
        return sum(map(size, given)) + new + changed

    @property
    def count(self) -> int:
        return sum(self.launched.values())

    @property
    def total(self) -> int:
        return sum(count for name, count in self.bytes.items() if name not in PRODUCTS)


@torch.library.custom_op("traffic::attend", mutates_args=())
def _attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return torch.zeros_like(query)


@torch.library.custom_op("traffic::attend_backward", mutates_args=())
def _attend_backward(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, found: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.zeros_like(query), torch.zeros_like(key), torch.zeros_like(value)


@torch.library.custom_op("traffic::product", mutates_args=())
def _product(left: Tensor, right: Tensor) -> Tensor:
    return left.new_zeros(left.shape[0], right.shape[1], dtype=torch.float32)


@torch.library.custom_op("traffic::product_into_", mutates_args=("out",))
def _product_into(left: Tensor, right: Tensor, out: Tensor) -> None: ...


_product_into.register_fake(lambda left, right, out: None)
_attend.register_fake(lambda query, key, value: torch.empty_like(query))
_attend_backward.register_fake(
    lambda gradient, query, key, value, found: tuple(map(torch.empty_like, (query, key, value)))
)
_product.register_fake(lambda left, right: left.new_empty(left.shape[0], right.shape[1], dtype=torch.float32))
_attend.register_autograd(
    lambda ctx, gradient: _attend_backward(gradient, *ctx.saved_tensors),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs, output),
)


@contextlib.contextmanager
def _as_on_a_gpu() -> Iterator[None]:
    """Attention is one operator, and products with sums in fp32 are."""

    def attend(query: Tensor, key: Tensor, value: Tensor, *_: object) -> Tensor:
        return _attend(query, key, value)

    with mock.patch.object(encoder, "attend", attend), mock.patch.object(mixed, "product", _product):
        yield


class Autocast(nn.Module):
    """A layer in PyTorch's own words, which autocast turns to bf16: norms and residuals in fp32, as on a GPU."""

    def __init__(self, layer: Layer) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, hidden: Tensor, sequences: attention.Packing) -> Tensor:
        def linear(part: nn.Linear, rows: Tensor) -> Tensor:
            return F.linear(rows, part.weight, part.bias)

        def norm(part: nn.LayerNorm, rows: Tensor) -> Tensor:
            with torch.autocast("cpu", enabled=False):
                return F.layer_norm(rows.float(), part.normalized_shape, part.weight, part.bias, part.eps)

        one = self.layer
        context = _attend(*(linear(part, hidden) for part in (one.query, one.key, one.value)))
        hidden = norm(one.attention_norm, hidden + linear(one.attention_output, context))
        return norm(one.output_norm, hidden + linear(one.down, F.gelu(linear(one.up, hidden))))


def layer_by_operators(tokens: int, hidden: int, plain: bool) -> tuple[float, float]:
    """Bytes a token and d of a layer's forward and backward pass, `plain`: as autocast alone has it."""
    with FakeTensorMode(allow_non_fake_inputs=True), _as_on_a_gpu():
        layer = Layer(EncoderSize(8, 1, hidden, 4 * hidden, hidden // 64), 0.0)
        for parameter in layer.parameters():
            parameter.grad = torch.empty_like(parameter)
        rows = torch.empty(tokens, hidden, dtype=torch.float32 if plain else BF16).requires_grad_() * 1
        packing = attention.Packing(torch.empty(65, dtype=torch.int32), attention.LONGEST)
        for part in layer.modules():
            if isinstance(part, mixed.Linear):  # as after the first micro-batch
                part.weight_copy, part.bias_copy = part.weight.detach().to(BF16), part.bias.detach().to(BF16)
        runs = Autocast(layer) if plain else layer
        with torch.autocast("cpu", BF16, enabled=plain), Operators() as forward:
            found = runs(rows, packing)
        gradient = torch.empty_like(found)
        with Operators() as backward:
            found.backward(gradient)
    return forward.total / tokens / hidden, backward.total / tokens / hidden


def around_layers(tokens: int, targets: int, words: int, hidden: int) -> float:
    """Bytes of what comes before and after the layers of a micro-batch, both ways, without what `loss_by_operators`
    counts; gradients are added to those of other micro-batches."""

    def norm(rows: Tensor, shape: Any, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        return torch.layer_norm(rows.float(), shape, weight, bias, eps)  # as autocast has it on GPUs

    def backward(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Any, ...]:
        return *(value.mul_(gradient) for value in ctx.gradients), *[None] * 6

    def between(function: object, _: str) -> Callable[..., Any]:
        if function is linear_cross_entropy.totals:
            return lambda logits, *_: (logits.new_empty(len(logits)),) * 2
        return lambda logits, *rows: rows[-1].new_empty(logits.shape)

    with contextlib.ExitStack() as stack:
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        for where, name, value in (
            (F, "layer_norm", norm),
            (linear_cross_entropy, "_multiply", lambda left, right, out: _product_into(left, right, out) or out),
            (linear_cross_entropy, "_add_product", lambda total, left, right, first: _product_into(left, right, total)),
            (linear_cross_entropy, "_by_rows", between),
            (linear_cross_entropy._LinearCrossEntropy, "backward", staticmethod(backward)),
        ):
            stack.enter_context(mock.patch.object(where, name, value))
        size = EncoderSize(words, 1, hidden, 4 * hidden, hidden // 64)
        network, head = Encoder(size), MaskedLMHead(size)
        for parameter in (*network.parameters(), *head.parameters()):
            parameter.grad = torch.empty_like(parameter)
        ids, answers = (torch.empty(count, dtype=torch.long) for count in (tokens, targets))
        read = torch.empty(targets, hidden, dtype=BF16).requires_grad_()
        with Operators() as counted:
            rows = network.embed(ids, ids).to(BF16)
            with torch.autocast("cpu", BF16):
                loss, _ = head.loss(read, network.token_embedding.weight, answers, torch.empty(targets))
            torch.autograd.backward([loss, rows], [torch.ones(()), torch.empty_like(rows)])
    return counted.total


def against_queue(items: int, queue: int, hidden: int) -> float:
    """Bytes of the contrast of a micro-batch against the queue, both ways."""
    with FakeTensorMode():
        ids = [torch.empty(count, 2, dtype=torch.long) for count in (items, queue)]
        query, key, rows = (torch.empty(count, hidden) for count in (items, items, queue))
        query.requires_grad_()
        with Operators() as counted:
            logits = xlco_logits(query, key, rows, 0.25, share_a_sentence(*ids))
            xlco_hits(logits)
            xlco_losses(logits).sum().backward()
    return counted.total


def kernels(work: Callable[[], object]) -> list[tuple[str, int]]:
    """Each kernel of the graphs that `work` compiles, products left out, and its bytes."""
    nodes = _nodes(work)
    apart = {node.node.get_name() for node, _ in nodes if node.is_extern() and not _is_product(node.node)}
    if apart:
        raise ValueError(f"{', '.join(sorted(apart))} were not compiled: their bytes are not known")
    return [(node.get_name(), 4 * count) for node, count in nodes if not node.is_extern()]


def _nodes(work: Callable[[], object]) -> list[tuple[Any, int]]:
    """Each kernel and product of the graphs that `work` compiles, and its numbers."""
    from torch._inductor import compile_fx, config, metrics

    metrics.reset()
    listening = SimpleNamespace(isEnabledFor=lambda level: True, info=lambda *_: None)  # else it does not count
    with config.patch(force_disable_caches=True), mock.patch.object(compile_fx, "inductor_metrics_log", listening):
        work()
    return list(metrics.nodes_num_elem)


def _is_product(kernel: Any) -> bool:
    name = str(getattr(kernel, "op_overload", "") or getattr(kernel, "python_kernel_name", ""))
    return type(kernel).__name__ == "MultiOutput" or any(part in PRODUCTS for part in name.split("."))


def layer_by_kernels(tokens: int, hidden: int) -> tuple[float, float]:
    """The same compiled."""
    torch.manual_seed(1)
    layer = Layer(EncoderSize(8, 1, hidden, 4 * hidden, hidden // 64), 0.0)
    rows = torch.randn(tokens, hidden, dtype=BF16).requires_grad_()
    packing = attention.Packing(torch.zeros(65, dtype=torch.int32), attention.LONGEST)
    mixed.refresh([layer], BF16)
    found: list[Tensor] = []
    with _as_on_a_gpu():
        compiled = torch.compile(layer.forward, fullgraph=True)
        forward = kernels(lambda: found.append(compiled(rows, packing)))
        backward = kernels(lambda: found[0].backward(torch.ones_like(found[0])))
    added = 12 * sum(parameter.numel() for parameter in layer.parameters())  # into the sum over micro-batches
    moved = sum(count for _, count in forward), sum(count for _, count in backward) + added
    return moved[0] / tokens / hidden, moved[1] / tokens / hidden


def _chunk(rows: int, words: int) -> tuple[Tensor, Tensor, Tensor]:
    """Logits, bias and targets."""
    return torch.zeros(rows, words), torch.zeros(words), torch.zeros(rows, dtype=torch.long)


def _between_products(chunk: tuple[Tensor, Tensor, Tensor], compiler: str) -> None:
    parts = (linear_cross_entropy.totals, linear_cross_entropy.derivatives)
    totals, derivatives = (torch.compile(part, fullgraph=True) if compiler else part for part in parts)
    others, right = totals(*chunk)
    derivatives(*chunk, others, right, right, torch.zeros(len(right), 1, dtype=BF16))


def loss_by_operators(rows: int, words: int) -> float:
    """Bytes that the loss and its gradients move between their products."""
    with FakeTensorMode():
        chunk = _chunk(rows, words)
        with Operators() as counted:
            _between_products(chunk, "")
    return counted.total


def loss_by_kernels(rows: int, words: int) -> float:
    """The same compiled."""
    chunk = _chunk(rows, words)
    return sum(count for _, count in kernels(lambda: _between_products(chunk, "inductor")))


def launches(size: EncoderSize, contrast_layer: int, samples: int, fused: bool) -> dict[str, int]:
    """Operators of a micro-batch after the first of a step, with so many samples of each objective; and, `fused`, how
    many kernels and products are left of them where layers and the loss are compiled."""
    counted, layer, loss = _micro_batch(size, contrast_layer, samples)
    row = {"operators": counted}
    if fused:
        torch._dynamo.reset()  # what is compiled already is not counted again
        forward, backward = layer_launches(EncoderSize(8, 1, 64, 256, 1))
        chunk = len(kernels(lambda: _between_products(_chunk(64, 512), "inductor")))
        # queries to the top, forward and backward; keys to the universal layer, forward
        before = size.layers * (layer[0] + layer[1]) + contrast_layer * layer[0]
        now = size.layers * (forward + backward) + contrast_layer * forward
        row["compiled"] = counted - before - sum(loss) + now + len(loss) // 2 * chunk
    return row


@contextlib.contextmanager
def _loss_as_on_a_gpu() -> Iterator[list[int]]:
    """Products with sums in fp32 are one operator each, nothing is computed in parts, and no edges are remembered.
    Yields how many operators each call between two products was."""
    between: list[int] = []

    def edges(lengths: tuple[int, ...], device: torch.device) -> Tensor:
        return torch.empty(len(lengths) + 1, dtype=torch.int32)

    def into(left: Tensor, right: Tensor, out: Tensor) -> Tensor:
        _product_into(left, right, out)
        return out

    def add(total: Tensor, left: Tensor, right: Tensor, first: bool) -> None:
        _product_into(left, right, total)

    def counting(function: Callable[..., Any], compiler: str) -> Callable[..., Any]:
        def call(*given: Tensor) -> Any:
            with Operators() as operators:
                found = function(*given)
            between.append(operators.count)
            return found

        return call

    def backward(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Any, ...]:  # a CPU looks whether there is a factor
        return *(value.mul_(gradient) for value in ctx.gradients), *(None,) * 5

    loss = linear_cross_entropy._LinearCrossEntropy
    with (
        mock.patch.object(attention, "starts", edges),
        mock.patch.object(encoder, "starts", edges),
        mock.patch.multiple(linear_cross_entropy, _multiply=into, _add_product=add, _by_rows=counting),
        mock.patch.object(loss, "backward", staticmethod(backward)),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")  # copies of weights ask where these lie
        yield between


def _learner(size: EncoderSize, contrast_layer: int) -> InfoXLMLearner:
    """A learner in bf16 that has everything but data."""
    config = PretrainingConfig.parse({"model": {"precision": "bf16"}})
    learner = object.__new__(InfoXLMLearner)
    learner.config, learner.module = config, InfoXLM(size, contrast_layer, "cls", False)
    learner.device, learner.sampler = torch.device("cpu"), SimpleNamespace(groups=["one", "two"])
    learner.weights, learner.contrasting = LossWeights(config.objectives.weights()), True
    learner.key_encoder = KeyEncoder(learner.module)
    learner.queue = Queue(config.contrast.queue_size, size.hidden)
    return learner


def _batch(samples: int) -> PackedBatch:
    """Blocks of 512 tokens of MLM and TLM, 15 % masked, and views of 128."""

    def indices(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.long)

    blocks, views = (512,) * 2 * samples, (128,) * samples
    masked, tokens = 77 * len(blocks), sum(blocks + views)
    return PackedBatch(
        indices(tokens), indices(tokens), blocks + views, len(blocks), indices(masked), indices(masked),
        (77,) * len(blocks), indices(masked), masked // 2, indices(sum(views)), indices(sum(views)), views,
        indices(samples, 2), indices(samples), samples,
    )  # fmt: skip


def _micro_batch(size: EncoderSize, contrast_layer: int, samples: int) -> tuple[int, tuple[int, int], list[int]]:
    """Operators of a micro-batch; of a layer of it, forward and backward; of the loss between its products."""
    with FakeTensorMode(allow_non_fake_inputs=True), _as_on_a_gpu(), _loss_as_on_a_gpu() as between:
        learner, batch = _learner(size, contrast_layer), _batch(samples)
        for _ in range(2):  # the second: copies of weights in bf16 are made, gradients add up
            learner.new_keys, between[:] = [], []
            with Operators() as whole:
                learner.losses(batch, dict.fromkeys(learner.weights.by_name, 1.0))[0].backward()
        rows = torch.empty(512, size.hidden, dtype=BF16).requires_grad_()
        with Operators() as forward:
            found = learner.module.encoder.layers[0](rows, attention.pack((512,), learner.device))
        with Operators() as backward:
            found.backward(torch.empty_like(found))
    return whole.count, (forward.count, backward.count), between


def layer_launches(size: EncoderSize) -> tuple[int, int]:
    """Kernels and products of a compiled layer, forward and backward, and what adds its gradients to earlier ones."""
    torch.manual_seed(1)
    layer, packing = Layer(size, 0.0), attention.Packing(torch.zeros(2, dtype=torch.int32), attention.LONGEST)
    rows = torch.randn(64, size.hidden, dtype=BF16).requires_grad_()
    mixed.refresh([layer], BF16)
    found: list[Tensor] = []
    with _as_on_a_gpu():
        compiled = torch.compile(layer.forward, fullgraph=True)
        forward = _nodes(lambda: found.append(compiled(rows, packing)))
        backward = _nodes(lambda: found[0].backward(torch.ones_like(found[0])))
    launched = (sum(type(node.node).__name__ != "MultiOutput" for node, _ in part) for part in (forward, backward))
    one, other = launched
    return one, other + len(list(layer.parameters()))
