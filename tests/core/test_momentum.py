"""Key encoder and queue (acceptance items A2, A7, A8, A10, A12)."""

import pytest
import torch

from infoxlm_core.model.encoder import EncoderSize, initialise
from infoxlm_core.model.heads import InfoXLM
from infoxlm_core.model.momentum import KeyEncoder, Queue
from infoxlm_core.objectives import xlco_logits, xlco_loss

SIZE = EncoderSize(vocabulary=32, layers=3, hidden=8, ffn=16, heads=2, positions=16)


@pytest.fixture
def model() -> InfoXLM:
    model = InfoXLM(SIZE, contrast_layer=2, pooling="cls", normalise=False)
    initialise(model, seed=1)
    return model


def test_the_key_encoder_begins_as_the_query_encoder_up_to_the_universal_layer(model):
    key_encoder = KeyEncoder(model)

    assert len(key_encoder.encoder.layers) == 2
    queries = dict(model.named_parameters())
    assert all(torch.equal(key, queries[name]) for name, key in key_encoder.named_parameters())


def test_the_same_input_gives_equal_query_and_key(model):
    ids, where, lengths = torch.tensor([0, 7, 2, 0, 9, 2]), torch.tensor([2, 3, 4, 2, 3, 4]), (3, 3)

    key = KeyEncoder(model)(ids, where, lengths)

    query = model.encoder(ids, where, lengths, last=2)[[0, 3]] @ model.projection
    assert torch.equal(key, query)


def test_contrast_moves_only_the_query_encoder(model):
    key_encoder, queue = KeyEncoder(model), Queue(4, 8)
    ids, where, lengths = torch.tensor([0, 7, 2]), torch.tensor([2, 3, 4]), (3,)
    query = model.encoder(ids, where, lengths, last=2)[:1] @ model.projection

    xlco_loss(xlco_logits(query, key_encoder(ids, where, lengths), queue.rows, 0.1)).backward()

    assert model.projection.grad is not None and model.encoder.layers[1].up.weight.grad is not None
    assert all(p.grad is None for p in key_encoder.parameters()) and queue.rows.grad is None
    assert model.encoder.layers[2].up.weight.grad is None  # nothing above the universal layer


@pytest.mark.parametrize(("momentum", "steps", "tolerance"), [(0.999, 1000, 1e-5), (0.9999, 20_000, 1e-4)])
def test_momentum_covers_the_distance_it_should(model, momentum, steps, tolerance):
    key_encoder = KeyEncoder(model)
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.05)
    start, goal = key_encoder.projection.clone(), model.projection.detach()

    for _ in range(steps):
        key_encoder.follow(momentum)

    distance = key_encoder.projection - goal - momentum**steps * (start - goal)
    assert distance.abs().max() <= tolerance
    assert (key_encoder.projection == start).float().mean() < 0.01


def test_momentum_zero_copies_and_one_freezes(model):
    key_encoder = KeyEncoder(model)
    before = key_encoder.projection.clone()
    with torch.no_grad():
        model.projection.add_(1.0)

    key_encoder.follow(1.0)
    assert torch.equal(key_encoder.projection, before)
    key_encoder.follow(0.0)
    assert torch.equal(key_encoder.projection, model.projection)


@pytest.mark.parametrize("batch", [1, 2, 3, 5, 7, 12])
def test_the_queue_holds_the_last_keys_whatever_the_batch_size(batch):
    queue, pushed = Queue(5, 1), []
    for step in range(6):
        keys = torch.arange(step * batch, (step + 1) * batch, dtype=torch.float)[:, None]
        queue.push(keys, keys.long().expand(-1, 2), step)
        pushed += keys[:, 0].tolist()

    oldest_first = queue.rows[:, 0].roll(-queue.pointer).tolist()
    assert oldest_first == ([0.0] * 5 + pushed)[-5:] if len(pushed) < 5 else oldest_first == pushed[-5:]
    assert torch.equal(queue.meanings[:, 0].float(), queue.rows[:, 0])


def test_overlap_finds_every_shared_meaning():
    queue = Queue(3, 2)
    queue.push(torch.zeros(3, 2), torch.tensor([[1, 2], [3, 4], [5, 5]]), step=0)

    overlaps = queue.overlaps(torch.tensor([[2, 9], [9, 3], [8, 9]]))

    assert overlaps.tolist() == [[True, False, False], [False, True, False], [False, False, False]]
