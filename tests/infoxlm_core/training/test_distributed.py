"""What workers compare: a checksum of every bit, made in parts."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from infoxlm_core.training.distributed import checksum


@pytest.mark.parametrize("at_once", [1, 7, 100, 1000])
def test_a_checksum_does_not_depend_on_how_many_values_are_widened_at_once(at_once):
    values = torch.randn(100, generator=torch.Generator().manual_seed(1))

    assert checksum(values, at_once) == checksum(values)


def test_a_checksum_changes_with_any_bit_and_with_the_order():
    values = torch.arange(9, dtype=torch.uint8)  # no multiple of four bytes
    flipped, turned = values.clone(), values.flip(0)
    flipped[8] ^= 1

    assert len({int(checksum(each)) for each in (values, flipped, turned)}) == 3


class LargestResult(TorchDispatchMode):
    """Bytes of the largest tensor that an operation has made."""

    most = 0

    def __torch_dispatch__(self, func, _types, args=(), kwargs=None):
        made = func(*args, **kwargs or {})
        self.most = max(self.most, made.numel() * made.element_size())
        return made


def test_a_checksum_of_a_large_table_needs_little_memory_beside_it():
    table = torch.zeros(1000, 100)

    with LargestResult() as seen:
        checksum(table, at_once=1000)

    assert seen.most == table.numel() * 4  # views of it; everything else is of a thousand values
