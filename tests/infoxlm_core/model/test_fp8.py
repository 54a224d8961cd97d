"""Layers whose products are in FP8."""

import copy

import pytest
import torch

from infoxlm_core.errors import ConfigError
from infoxlm_core.model import fp8, mixed
from infoxlm_core.model.attention import pack
from infoxlm_core.model.encoder import Encoder, EncoderSize, Layer, compiled, initialise

CPU, BF16 = torch.device("cpu"), torch.bfloat16
ROUNDED = 2**-4 / 3**0.5  # relative error of a number with 3 bits behind the first, at most on average


@pytest.fixture
def torchao():
    return pytest.importorskip("torchao.float8", reason="torchao, an extra, is not installed")


@pytest.fixture
def encoder(monkeypatch) -> Encoder:
    monkeypatch.setattr(fp8, "MIN_FEATURES", 64)
    found = Encoder(EncoderSize(vocabulary=50, layers=2, hidden=64, ffn=128, heads=4, positions=66))
    initialise(found, 1)
    drawn = torch.Generator().manual_seed(1)
    for parameter in found.parameters():
        parameter.data.add_(torch.randn(parameter.shape, generator=drawn) * 0.05)
    return found


def gradients(encoder: Encoder) -> dict[str, torch.Tensor]:
    """Of 64 rows, of which the last layer computes 9."""
    drawn = torch.Generator().manual_seed(2)
    rows, target = torch.randn(64, 64, generator=drawn), torch.randn(9, 64, generator=drawn)
    with torch.autocast("cpu", BF16):
        found = encoder.run(rows, (40, 24), 0, 2, torch.arange(0, 63, 7), (6, 3))
    (found.float() * target).sum().backward()
    return {name: p.grad for name, p in encoder.layers.named_parameters()}


def test_a_device_without_fp8_or_layers_that_are_not_compiled_are_refused(monkeypatch):
    with pytest.raises(ConfigError, match=r"compute capability 8.9 or more \(this one computes on the CPU\)"):
        fp8.check(CPU, "inductor")

    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    with pytest.raises(ConfigError, match=r"\(NVIDIA A100\)"):
        fp8.check(torch.device("cuda"), "inductor")

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    with pytest.raises(ConfigError, match="cannot be compiled"):
        fp8.check(torch.device("cuda"), "")


@pytest.mark.usefixtures("torchao")
def test_gradients_in_fp8_are_those_in_bf16_but_for_the_roundings_to_three_bits(encoder):
    exact, before = gradients(copy.deepcopy(encoder)), dict(encoder.named_parameters())

    fp8.convert(encoder.layers, emulate=True)
    found = gradients(encoder)

    after = dict(encoder.named_parameters())
    assert list(after) == list(before) and all(after[name] is before[name] for name in before)
    assert not any(isinstance(part, mixed.Linear) for part in encoder.modules())
    norm = torch.stack([part.norm() for part in exact.values()]).norm()
    off = torch.stack([(found[name] - exact[name]).norm() for name in exact]).norm() / norm
    # two factors are rounded in each product, and some six products follow one another on a way through two layers
    assert ROUNDED / 2 < off < ROUNDED * 12**0.5
    assert all(part.dtype == torch.float32 for part in found.values())


@pytest.mark.slow
@pytest.mark.usefixtures("torchao")
def test_layers_in_fp8_compile_to_one_graph_for_ragged_batches(encoder):
    fp8.convert(encoder.layers, emulate=True)
    torch._dynamo.reset()
    counts = torch._dynamo.utils.counters["stats"]
    forward = compiled(Layer.forward, "aot_eager")
    for lengths in ((20, 12), (9, 9, 30), (41,), (5, 6, 7, 8)):
        rows = torch.randn(sum(lengths), 64, dtype=BF16, requires_grad=True)
        forward(encoder.layers[0], rows, pack(lengths, CPU)).sum().backward()

    assert counts["unique_graphs"] <= 2 and not torch._dynamo.utils.counters["graph_break"]
