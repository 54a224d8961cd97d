"""Key encoder and queue (acceptance items A2, A7, A8, A10)."""

import pytest
import torch

from infoxlm_core.config import ContrastConfig
from infoxlm_core.model.encoder import EncoderSize, initialise
from infoxlm_core.model.heads import InfoXLM, project
from infoxlm_core.model.momentum import KeyEncoder, Queue, momentum_at
from infoxlm_core.model.objectives import xlco_logits, xlco_losses

SIZE = EncoderSize(vocabulary=32, layers=3, hidden=8, ffn=16, heads=2, positions=16)


@pytest.fixture
def model() -> InfoXLM:
    model = InfoXLM(SIZE, contrast_layer=2, pooling="cls", normalise=False)
    initialise(model, seed=1)
    return model


@pytest.mark.item("A7")
def test_the_key_encoder_begins_as_the_query_encoder_up_to_the_universal_layer(model):
    key_encoder = KeyEncoder(model)

    assert len(key_encoder.encoder.layers) == 2
    queries = dict(model.named_parameters())
    assert all(torch.equal(key, queries[name]) for name, key in key_encoder.named_parameters())


@pytest.mark.item("A7")
def test_the_same_input_gives_equal_query_and_key(model):
    ids, where, lengths = torch.tensor([0, 7, 2, 0, 9, 2]), torch.tensor([2, 3, 4, 2, 3, 4]), (3, 3)

    key = KeyEncoder(model)(ids, where, lengths)

    query = model.encoder(ids, where, lengths, last=2)[[0, 3]] @ model.projection
    assert torch.equal(key, query)


@pytest.mark.item("A2")
def test_contrast_moves_only_the_query_encoder(model):
    key_encoder, queue = KeyEncoder(model), Queue(4, 8)
    ids, where, lengths = torch.tensor([0, 7, 2]), torch.tensor([2, 3, 4]), (3,)
    query = model.encoder(ids, where, lengths, last=2)[:1] @ model.projection

    xlco_losses(xlco_logits(query, key_encoder(ids, where, lengths), queue.rows, 0.1)).sum().backward()

    assert model.projection.grad is not None and model.encoder.layers[1].up.weight.grad is not None
    assert all(p.grad is None for p in key_encoder.parameters()) and queue.rows.grad is None
    assert model.encoder.layers[2].up.weight.grad is None  # nothing above the universal layer


@pytest.mark.item("A8")
@pytest.mark.parametrize(("momentum", "steps", "tolerance"), [(0.999, 1000, 1e-5), (0.9999, 20_000, 1e-4)])
def test_momentum_covers_the_distance_it_should(model, momentum, steps, tolerance, record_property):
    key_encoder = KeyEncoder(model)
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.05)
    start, goal = key_encoder.projection.clone(), model.projection.detach()

    for _ in range(steps):
        key_encoder.update(momentum)

    # an update rounds a number below 1/4 by 2**-27 at most, later ones shrink that: 2**-27 / (1 - momentum) in all
    assert start.abs().max() < 0.25 and goal.abs().max() < 0.25
    distance = key_encoder.projection - goal - momentum**steps * (start - goal)
    record_property("figure", f"{steps} updates at {momentum}: off by {distance.abs().max():.1e}")
    assert distance.abs().max() <= tolerance
    assert (key_encoder.projection == start).float().mean() < 0.01


@pytest.mark.item("A8")
@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16])
def test_in_half_precision_training_the_key_encoder_still_moves_in_fp32(model, kind):
    key_encoder = KeyEncoder(model)
    with torch.no_grad():
        model.projection.add_(0.01)
    start = key_encoder.projection.clone()
    ids, where, lengths = torch.tensor([0, 7, 2]), torch.tensor([2, 3, 4]), (3,)

    with torch.autocast("cpu", kind):
        for _ in range(1000):
            key_encoder.update(0.999)
        keys = key_encoder(ids, where, lengths)

    assert keys.dtype == key_encoder.projection.dtype == torch.float32
    covered = (key_encoder.projection - start) / 0.01
    torch.testing.assert_close(covered, torch.full_like(covered, 1 - 0.999**1000), atol=1e-3, rtol=0)


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16])
def test_in_half_precision_training_queries_and_keys_are_projected_in_fp32(kind):
    drawn = torch.Generator().manual_seed(1)
    pooled, projection = torch.randn(4, 16, generator=drawn), torch.randn(16, 16, generator=drawn)

    with torch.autocast("cpu", kind):
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
@pytest.mark.parametrize("batch", [1, 2, 3, 5, 7, 12])
def test_the_queue_holds_the_last_keys_whatever_the_batch_size(batch):
    queue, pushed = Queue(5, 1), []
    for step in range(6):
        keys = torch.arange(step * batch, (step + 1) * batch, dtype=torch.float)[:, None]
        queue.push(keys, keys.long().expand(-1, 2), step)
        pushed += keys[:, 0].tolist()

    oldest_first = queue.rows[:, 0].roll(-int(queue.pointer)).tolist()
    assert oldest_first == ([0.0] * 5 + pushed)[-5:] if len(pushed) < 5 else oldest_first == pushed[-5:]
    assert torch.equal(queue.sentence_ids[:, 0].float(), queue.rows[:, 0])


def test_momentum_may_rise_to_one_follow_a_power_of_the_step_or_be_dropped_now_and_then():
    def course(schedule: str, **more) -> list[float]:
        config = ContrastConfig(momentum=0.9, momentum_schedule=schedule, **more)
        return [momentum_at(config, step, 11) for step in range(11)]

    assert course("constant") == [0.9] * 11
    assert course("linear") == pytest.approx([0.9 + 0.01 * step for step in range(11)])
    assert course("exponential", momentum_alpha=0.5)[:4] == pytest.approx([0.0, 1 - 2**-0.5, 1 - 3**-0.5, 0.5])
    assert course("exponential", momentum_alpha=2.0)[9] == 0.9
    assert course("refresh", refresh_every=5) == [0.9] * 4 + [0.0] + [0.9] * 4 + [0.0] + [0.9]
