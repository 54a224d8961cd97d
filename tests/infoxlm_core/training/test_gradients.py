"""Gradients are sent while others are made, and always in the same order. Two workers are stood in for by one."""

import pytest
import torch
from torch import nn

from infoxlm_core.training import distributed, gradients


class Sent:
    """What was sent so far: the other worker's gradients are these times ten."""

    def __init__(self) -> None:
        self.values: list[list[float]] = []

    def __call__(self, flat: torch.Tensor, async_op: bool) -> "Sent":
        self.values.append(flat.tolist())
        flat.mul_(11)
        return self

    def wait(self) -> None:
        pass


@pytest.fixture
def sent(monkeypatch) -> Sent:
    found = Sent()
    monkeypatch.setattr(distributed, "world_size", lambda: 2)
    monkeypatch.setattr(torch.distributed, "all_reduce", found)
    monkeypatch.setattr(gradients, "BUCKET_BYTES", 8)  # two numbers
    return found


def numbers(count: int) -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(())) for _ in range(count)]


def test_each_bucket_is_sent_in_its_turn_as_soon_as_it_is_complete(sent):
    first, second, third, fourth, fifth = given = numbers(5)
    seen: list[int] = []
    first.register_post_accumulate_grad_hook(lambda _: seen.append(len(sent.values)))

    with gradients.summed(given):
        for parameter, factor in ((fourth, 4.0), (third, 3.0), (second, 2.0), (fifth, 5.0), (first, 1.0)):
            (parameter * factor).backward()  # the fifth is late, and what is complete waits for it

    assert sent.values == [[5.0, 4.0], [3.0, 2.0], [1.0]] and seen == [2]
    assert [parameter.grad.item() for parameter in given] == [11.0, 22.0, 33.0, 44.0, 55.0]
    (first * 1.0).backward()
    assert len(sent.values) == 3  # only inside


def test_what_other_micro_batches_have_added_counts_and_what_none_has_touched_is_zero(sent):
    first, second, _ = given = numbers(3)
    (first * 2.0 + second * 3.0).backward()

    with gradients.summed(given):
        (first * 4.0).backward()

    assert sent.values == [[0.0, 3.0], [6.0]]
    assert [parameter.grad.item() for parameter in given] == [66.0, 33.0, 0.0]


def test_a_parameter_that_is_larger_than_a_bucket_goes_alone(sent):
    small, large, other = numbers(1)[0], nn.Parameter(torch.ones(3)), numbers(1)[0]

    assert gradients.make_buckets([small, large, other]) == [[other], [large], [small]]
