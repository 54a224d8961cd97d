"""Gradients are sent in a fixed order, each bucket as soon as it is complete. One process stands for two workers."""

import pytest
import torch
from torch import nn

from infoxlm_core.training import distributed, gradients


class FakeAllReduce:
    """Records what is sent, and adds the gradients of another worker: ten times those of this one."""

    def __init__(self) -> None:
        self.sent: list[list[float]] = []

    def __call__(self, flat: torch.Tensor, async_op: bool) -> "FakeAllReduce":
        self.sent.append(flat.tolist())
        flat.mul_(11)
        return self

    def wait(self) -> None:
        pass


@pytest.fixture
def all_reduce(monkeypatch) -> FakeAllReduce:
    fake = FakeAllReduce()
    monkeypatch.setattr(distributed, "world_size", lambda: 2)
    monkeypatch.setattr(torch.distributed, "all_reduce", fake)
    monkeypatch.setattr(gradients, "BUCKET_BYTES", 8)  # two numbers
    return fake


def make_scalars(count: int) -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(())) for _ in range(count)]


def test_each_bucket_is_sent_in_order_as_soon_as_it_is_complete(all_reduce):
    parameters = make_scalars(5)
    first, second, third, fourth, fifth = parameters
    buckets_sent_before_first: list[int] = []
    first.register_post_accumulate_grad_hook(lambda _: buckets_sent_before_first.append(len(all_reduce.sent)))

    with gradients.summing_over_workers(parameters):
        # The fifth is late, so the complete bucket of the second and third waits for it.
        for parameter, factor in ((fourth, 4.0), (third, 3.0), (second, 2.0), (fifth, 5.0), (first, 1.0)):
            (parameter * factor).backward()

    assert all_reduce.sent == [[5.0, 4.0], [3.0, 2.0], [1.0]]
    assert buckets_sent_before_first == [2]
    assert [parameter.grad.item() for parameter in parameters] == [11.0, 22.0, 33.0, 44.0, 55.0]
    (first * 1.0).backward()
    assert len(all_reduce.sent) == 3  # nothing is sent outside of the context


def test_earlier_gradients_are_included_and_missing_gradients_count_as_zeros(all_reduce):
    parameters = make_scalars(3)
    first, second, _ = parameters
    (first * 2.0 + second * 3.0).backward()

    with gradients.summing_over_workers(parameters):
        (first * 4.0).backward()

    assert all_reduce.sent == [[0.0, 3.0], [6.0]]
    assert [parameter.grad.item() for parameter in parameters] == [66.0, 33.0, 0.0]


@pytest.mark.usefixtures("all_reduce")
def test_a_parameter_that_is_larger_than_a_bucket_has_a_bucket_of_its_own():
    [small, other] = make_scalars(2)
    large = nn.Parameter(torch.ones(3))

    assert gradients.make_buckets([small, large, other]) == [[other], [large], [small]]
