"""Key encoder and queue (acceptance items A2, A7, A8, A10)."""

import pytest
import torch

from infoxlm_core.config import ContrastConfig
from infoxlm_core.model.encoder import EncoderSize, initialise
from infoxlm_core.model.heads import InfoXLM, project
from infoxlm_core.model.momentum import KeyEncoder, Queue, compute_momentum
from infoxlm_core.model.objectives import xlco_logits, xlco_losses

SIZE = EncoderSize(vocabulary=32, layers=3, hidden=8, ffn=16, heads=2, positions=16)
INPUTS = torch.tensor([0, 7, 2, 0, 9, 2]), torch.tensor([0, 1, 2, 0, 1, 2]), (3, 3)  # ids, positions and lengths


@pytest.fixture
def model() -> InfoXLM:
    model = InfoXLM(SIZE, contrast_layer=2, pooling="cls", normalise=False)
    initialise(model, seed=1)
    return model


def compute_queries(model: InfoXLM) -> torch.Tensor:
    return model.encoder(*INPUTS, last_layer=2)[[0, 3]] @ model.projection


@pytest.mark.item("A6", "A7")
def test_key_encoder_begins_as_the_query_encoder_up_to_the_universal_layer(model):
    key_encoder = KeyEncoder(model)

    assert len(key_encoder.encoder.layers) == 2
    query_parameters = dict(model.named_parameters())
    assert all(torch.equal(key, query_parameters[name]) for name, key in key_encoder.named_parameters())
    assert torch.equal(key_encoder(*INPUTS), compute_queries(model))


@pytest.mark.item("A2")
def test_contrast_has_gradients_only_in_the_query_encoder(model):
    key_encoder, queue = KeyEncoder(model), Queue(4, 8)

    xlco_losses(xlco_logits(compute_queries(model), key_encoder(*INPUTS), queue.rows, 0.1)).sum().backward()

    assert model.projection.grad is not None
    assert model.encoder.layers[1].up.weight.grad is not None
    assert model.encoder.layers[2].up.weight.grad is None  # above the universal layer
    assert queue.rows.grad is None
    assert all(parameter.grad is None for parameter in key_encoder.parameters())


@pytest.mark.item("A8")
@pytest.mark.parametrize(("momentum", "steps", "tolerance"), [(0.999, 1000, 1e-5), (0.9999, 20_000, 1e-4)])
def test_n_updates_with_momentum_m_leave_m_to_the_n_of_the_distance(model, momentum, steps, tolerance, record_property):
    key_encoder = KeyEncoder(model)
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.05)
    start, goal = key_encoder.projection.clone(), model.projection.detach()

    for _ in range(steps):
        key_encoder.update(momentum)

    # An update rounds values below 1/4 by at most 2**-27, and later updates shrink this error: 2**-27 / (1 - momentum).
    assert start.abs().max() < 0.25
    assert goal.abs().max() < 0.25
    error = key_encoder.projection - goal - momentum**steps * (start - goal)
    record_property("figure", f"{steps} updates at {momentum}: off by {error.abs().max():.1e}")
    assert error.abs().max() <= tolerance
    assert (key_encoder.projection == start).float().mean() < 0.01


@pytest.mark.item("A8")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_key_encoder_moves_in_fp32_in_half_precision_training(model, dtype):
    key_encoder = KeyEncoder(model)
    with torch.no_grad():
        model.projection.add_(0.01)
    start = key_encoder.projection.clone()

    with torch.autocast("cpu", dtype):
        for _ in range(1000):
            key_encoder.update(0.999)
        keys = key_encoder(*INPUTS)

    assert keys.dtype == key_encoder.projection.dtype == torch.float32
    covered_share = (key_encoder.projection - start) / 0.01
    torch.testing.assert_close(covered_share, torch.full_like(covered_share, 1 - 0.999**1000), atol=1e-3, rtol=0)


def test_projection_is_computed_in_fp32_under_autocast():
    generator = torch.Generator().manual_seed(1)
    pooled, projection = torch.randn(4, 16, generator=generator), torch.randn(16, 16, generator=generator)

    with torch.autocast("cpu", torch.bfloat16):
        projected = project(pooled, projection, normalise=False)

    assert torch.equal(projected, pooled @ projection)


@pytest.mark.item("A8")
def test_momentum_zero_copies_and_one_freezes(model):
    key_encoder = KeyEncoder(model)
    before = key_encoder.projection.clone()
    with torch.no_grad():
        model.projection.add_(1.0)

    key_encoder.update(1.0)
    assert torch.equal(key_encoder.projection, before)
    key_encoder.update(0.0)
    assert torch.equal(key_encoder.projection, model.projection)


@pytest.mark.item("A10")
@pytest.mark.parametrize("batch_size", [1, 2, 3, 5, 7, 12])
def test_queue_of_five_holds_the_last_keys_for_every_batch_size(batch_size):
    queue = Queue(5, 1)
    for step in range(6):
        keys = torch.arange(step * batch_size, (step + 1) * batch_size, dtype=torch.float)[:, None]
        queue.push(keys, keys.long().expand(-1, 2), step)

    oldest_first = queue.rows[:, 0].roll(-int(queue.pointer)).tolist()
    assert oldest_first == [float(key) for key in range(6 * batch_size)][-5:]
    assert torch.equal(queue.sentence_ids[:, 0].float(), queue.rows[:, 0])


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"momentum_schedule": "constant"}, [0.9] * 11),
        ({"momentum_schedule": "linear"}, [0.9 + 0.01 * step for step in range(11)]),
        ({"momentum_schedule": "exponential", "momentum_alpha": 0.5}, [0.0, 1 - 2**-0.5, 1 - 3**-0.5, 0.5]),
        ({"momentum_schedule": "exponential", "momentum_alpha": 2.0}, [0.0, 0.75, 8 / 9] + [0.9] * 8),
        ({"momentum_schedule": "refresh", "refresh_every": 5}, [0.9] * 4 + [0.0] + [0.9] * 4 + [0.0] + [0.9]),
    ],
)
def test_momentum_follows_its_schedule(settings, expected):
    config = ContrastConfig(momentum=0.9, **settings)

    momenta = [compute_momentum(config, step, 11) for step in range(len(expected))]

    assert momenta == pytest.approx(expected)
