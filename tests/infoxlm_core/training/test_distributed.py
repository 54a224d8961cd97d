"""What workers compare, a checksum of every bit, made in parts; and what one of a machine does for all."""

import os
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from infoxlm_core import manifests
from infoxlm_core.errors import DataCorrupt
from infoxlm_core.training import distributed
from infoxlm_core.training.distributed import checksum
from tests.helpers import workers
from tests.toys.pretraining import write_shards


@pytest.mark.parametrize("chunk", [1, 7, 100, 1000])
def test_a_checksum_does_not_depend_on_how_many_values_are_widened_at_a_time(chunk):
    values = torch.randn(100, generator=torch.Generator().manual_seed(1))

    assert checksum(values, chunk) == checksum(values)


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
        checksum(table, chunk=1000)

    assert seen.most == table.numel() * 4  # views of it; everything else is of a thousand values


def _open(rank: int, size: int, port: int, shards: Path, base: Path) -> None:
    """Four workers on two machines open shards; each writes which files it has hashed, or what was wrong."""
    os.environ["LOCAL_RANK"] = str(rank % 2)
    workers.join(rank, size, port)
    hashed, plain = [], manifests.file_sha256
    manifests.file_sha256 = lambda path: (hashed.append(path.name), plain(path))[1]
    try:
        rows = len(distributed.open_shards(shards).mono["de"][0])
        said = f"{rows} rows, {'every' if len(hashed) == len(manifests.load(shards)['files']) else len(hashed)} hashed"
    except DataCorrupt as error:
        said = f"{error}"
    (base / f"{rank}.txt").write_text(said)
    torch.distributed.destroy_process_group()


@pytest.mark.slow
def test_one_worker_of_each_machine_hashes_the_shards_and_all_hear_of_damage(tmp_path):
    shards = write_shards(tmp_path / "shards", {"one": 40})
    workers.start(_open, 4, shards, tmp_path)
    said = [(tmp_path / f"{rank}.txt").read_text() for rank in range(4)]
    assert [words.partition(", ")[2] for words in said] == ["every hashed", "0 hashed"] * 2

    tokens = next(shards.rglob("*.tokens"))
    tokens.write_bytes(bytes([tokens.read_bytes()[0] ^ 1]) + tokens.read_bytes()[1:])
    workers.start(_open, 4, shards, tmp_path)
    said = {(tmp_path / f"{rank}.txt").read_text() for rank in range(4)}
    assert len(said) == 1 and "its manifest says" in said.pop()


class OnAGpu(torch.Tensor):
    """A tensor that says it is on a GPU."""

    is_cuda = True

    def detach(self) -> torch.Tensor:
        return self

    def cpu(self) -> torch.Tensor:
        return self.as_subclass(torch.Tensor).clone()


def test_where_the_host_pins_no_memory_tensors_are_copied_to_plain_memory(monkeypatch):
    plain = torch.empty

    def refusing(*shape, pin_memory: bool = False, **more) -> torch.Tensor:
        if pin_memory:
            raise RuntimeError("CUDA error: out of memory")
        return plain(*shape, **more)

    monkeypatch.setattr(torch, "empty", refusing)
    weight = torch.arange(3.0)

    found = distributed.tensors_on_first({"w": weight.as_subclass(OnAGpu)})

    assert torch.equal(found["w"], weight) and found["w"].data_ptr() != weight.data_ptr()
