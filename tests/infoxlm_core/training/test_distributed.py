"""What workers compare: a checksum of every bit, made in parts."""

import shutil
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from infoxlm_core.data.shards import open_shards
from infoxlm_core.errors import (
    ConfigError,
    RankDesync,
)
from infoxlm_core.stages.pretraining import pretrain
from infoxlm_core.systems.infoxlm.learner import InfoXLMLearner
from infoxlm_core.systems.infoxlm.system import build
from infoxlm_core.training import checkpoints as saving
from infoxlm_core.training import distributed, gradients, optimizer
from infoxlm_core.training.distributed import checksum
from infoxlm_core.training.state import Progress
from infoxlm_core.training.step import train_step
from tests.helpers import workers
from tests.helpers.curves import numbers
from tests.toys.pretraining import tiny_config


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


def _share_queue(rank: int, size: int, port: int, shards: Path, base: Path) -> None:
    workers.join(rank, size, port)
    for name, weighting, bucket in (("mean", "mean", 2**10), ("count", "count", 2**10), ("at once", "mean", 2**30)):
        gradients.BUCKET_BYTES = bucket
        with workers.fp64():
            torch.save(_three_steps(shards, weighting), base / f"{size}.{rank}.{name}.pt")
    torch.distributed.destroy_process_group()


def _three_steps(path: Path, weighting: str) -> dict[str, torch.Tensor]:
    """The gradient of the first of three steps and the queue after the last; micro-batches are uneven."""
    config = tiny_config(batches={"micro_batch_size": 3}, objectives={"weighting": weighting})
    shards = open_shards(path)
    learner = InfoXLMLearner(config, build(config, shards), shards)
    learner.after_step(0)
    adam, progress = optimizer.make_adamw(learner.module.parameters(), config.optimization), Progress()
    gradients, take = [], adam.step

    def recorded() -> None:
        gradients.append(torch.cat([p.grad.flatten() for p in learner.module.parameters()]))
        take()

    adam.step = recorded
    for _ in range(3):
        train_step(learner, adam, config.optimization, progress, learner.batches(progress.step))
    queue = torch.cat(
        [
            learner.xlco.queue.rows,
            learner.xlco.queue.sentence_ids.double(),
            learner.xlco.queue.added_at_step[:, None].double(),
        ],
        dim=1,
    )
    return {"gradient": gradients[0], "queue": queue}


@pytest.mark.item("A3", "A11")
@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 3])  # of 4 virtual shards three workers have 2, 1 and 1
def test_every_worker_has_the_gradient_and_the_queue_of_the_single_process_run(
    tiny_shards, tmp_path, count, record_property
):
    workers.start(_share_queue, count, tiny_shards, tmp_path)

    for weighting in ("mean", "count"):
        with workers.fp64():
            single = _three_steps(tiny_shards, weighting)
        found = [torch.load(tmp_path / f"{count}.{rank}.{weighting}.pt", weights_only=True) for rank in range(count)]
        assert all(torch.equal(found[0]["queue"], other["queue"]) for other in found)
        torch.testing.assert_close(found[0]["queue"], single["queue"], rtol=1e-9, atol=1e-9)
        off = (found[0]["gradient"] - single["gradient"]).norm() / single["gradient"].norm()
        record_property("figure", f"{count} workers: gradient within {off:.1e}")
        assert off <= 1e-9
    parts, whole = (torch.load(tmp_path / f"{count}.0.{name}.pt", weights_only=True) for name in ("mean", "at once"))
    for name, found in parts.items():  # two workers have but one order to add in
        torch.testing.assert_close(found, whole[name], rtol=(count - 2) * 1e-9, atol=(count - 2) * 1e-12)


@pytest.mark.parametrize(("shards", "count", "expected"), [(4, 3, [2, 1, 1]), (256, 56, [5] * 32 + [4] * 24)])
def test_virtual_shards_are_shared_in_their_order_and_almost_alike(monkeypatch, shards, count, expected):
    monkeypatch.setattr(distributed, "world_size", lambda: count)

    found = distributed.shares(shards)

    assert [len(share) for share in found] == expected
    assert [number for share in found for number in share] == list(range(shards))
    with pytest.raises(ConfigError, match=rf"{count} workers must not exceed batches.virtual_shards \(1\)"):
        distributed.shares(1)


def _desync(rank: int, size: int, port: int, shards: Path, base: Path) -> None:
    workers.join(rank, size, port)
    values = torch.arange(6.0)
    distributed.check_equal({"weights": values, "pointer": torch.tensor(3)}, 7)
    if rank == 1:
        values[[2, 3]] = values[[3, 2]]  # the same numbers in another order
    try:
        distributed.check_equal({"weights": values, "pointer": torch.tensor(3)}, 8)
    except RankDesync as error:
        (base / f"{rank}.txt").write_text(str(error))
    after_step = InfoXLMLearner.after_step

    def drift(self, step, good=True):
        after_step(self, step, good)
        if rank == 1 and step == 7:
            self.xlco.queue.rows[20, 0] += 1e-6  # of the keys that came last

    InfoXLMLearner.after_step = drift
    try:
        pretrain(tiny_config(optimization={"steps": 20}, checkpoints={"every": 80}), shards, base / "out", base / "run")
    except RankDesync as error:
        (base / f"{rank}.run.txt").write_text(str(error))
    torch.distributed.destroy_process_group()


@pytest.mark.item("F25")
@pytest.mark.slow
def test_workers_that_drift_apart_are_found_before_anything_is_saved(tiny_shards, tmp_path):
    workers.start(_desync, 2, tiny_shards, tmp_path)

    said = {path.read_text() for path in tmp_path.glob("?.txt")}
    assert said == {"step 8: weights differs on worker 1: run again from the last checkpoint"}
    said = {path.read_text() for path in tmp_path.glob("?.run.txt")}  # a training that saves every 80 steps
    assert said == {"step 8: queue/rows differs on worker 1: run again from the last checkpoint"}
    assert not saving.list_checkpoints(tmp_path / "run")


def _worker(rank: int, size: int, port: int, shards: Path, base: Path) -> None:
    workers.join(rank, size, port)
    with workers.fp64():
        pretrain(tiny_config(), shards, base / "out", base / "run")
    torch.distributed.destroy_process_group()


@pytest.mark.item("A3", "A18", "F17")
@pytest.mark.slow
def test_two_and_four_workers_give_the_same_losses_and_a_run_may_change_between(tiny_shards, tmp_path):
    with workers.fp64():
        pretrain(tiny_config(), tiny_shards, tmp_path / "out", tmp_path / "run")
    expected, run = numbers(tmp_path / "run"), tmp_path / "more/run"

    workers.start(_worker, 2, tiny_shards, tmp_path / "more")

    assert numbers(run) == pytest.approx(expected, rel=1e-9)
    for step in (4, 6):
        shutil.rmtree(run / f"step={step:010d}")  # two workers began it, four go on
    workers.start(_worker, 4, tiny_shards, tmp_path / "more")
    assert numbers(run) == pytest.approx(expected, rel=1e-9)
