"""Workers: the checksum that they compare, their shares of a batch, and equal results for any number of them."""

import shutil
from pathlib import Path

import pytest
import torch

from infoxlm_core.data.samples import Sampler
from infoxlm_core.data.shards import open_shards
from infoxlm_core.errors import ConfigError, DataCorrupt, RankDesync
from infoxlm_core.stages import pretraining
from infoxlm_core.stages.pretraining import pretrain
from infoxlm_core.systems.infoxlm.learner import InfoXLMLearner
from infoxlm_core.systems.infoxlm.system import build
from infoxlm_core.training import distributed, gradients, optimizer
from infoxlm_core.training.checkpoints import list_checkpoints
from infoxlm_core.training.distributed import checksum
from infoxlm_core.training.state import Progress
from infoxlm_core.training.step import train_step
from infoxlm_core.training.tracker import FileTracker
from tests.helpers import workers
from tests.helpers.curves import numbers
from tests.toys.pretraining import tiny_config


@pytest.mark.parametrize("chunk", [1, 7, 100, 1000])
def test_a_checksum_does_not_depend_on_its_chunks(chunk):
    values = torch.randn(100, generator=torch.Generator().manual_seed(1))

    assert checksum(values, chunk) == checksum(values)


def test_a_checksum_changes_with_any_bit_and_with_the_order():
    values = torch.arange(9, dtype=torch.uint8)  # not a multiple of four bytes
    changed = values.clone()
    changed[8] ^= 1

    assert len({int(checksum(tensor)) for tensor in (values, changed, values.flip(0))}) == 3


class FakeGpuTensor(torch.Tensor):
    """A tensor that claims to be on a GPU."""

    is_cuda = True

    def detach(self) -> torch.Tensor:
        return self

    def cpu(self) -> torch.Tensor:
        return self.as_subclass(torch.Tensor).clone()


def test_tensors_of_a_gpu_are_copied_to_pageable_memory_if_none_can_be_pinned(monkeypatch):
    original = torch.empty

    def fail_to_pin(*shape, pin_memory: bool = False, **kwargs) -> torch.Tensor:
        if pin_memory:
            raise RuntimeError("CUDA error: out of memory")
        return original(*shape, **kwargs)

    monkeypatch.setattr(torch, "empty", fail_to_pin)
    weight = torch.arange(3.0)

    copy = distributed.tensors_on_first({"w": weight.as_subclass(FakeGpuTensor)})["w"]

    assert torch.equal(copy, weight)
    assert copy.data_ptr() != weight.data_ptr()


@pytest.mark.parametrize(("shards", "count", "expected"), [(4, 3, [2, 1, 1]), (256, 56, [5] * 32 + [4] * 24)])
def test_workers_share_virtual_shards_in_order_and_almost_equally(monkeypatch, shards, count, expected):
    monkeypatch.setattr(distributed, "world_size", lambda: count)

    shares = distributed.shares(shards)

    assert [len(share) for share in shares] == expected
    assert [shard for share in shares for shard in share] == list(range(shards))
    with pytest.raises(ConfigError, match=rf"{count} workers must not exceed batches.virtual_shards \(1\)"):
        distributed.shares(1)


def save_three_steps(rank: int, size: int, port: int, shards: Path, base: Path) -> None:
    """Save the results of `take_three_steps`, whose gradients are sent in many buckets."""
    workers.join(rank, size, port)
    gradients.BUCKET_BYTES = 2**10
    with workers.fp64():
        for weighting in ("mean", "count"):
            torch.save(take_three_steps(shards, weighting), base / f"{weighting} {rank}.pt")
    torch.distributed.destroy_process_group()


def take_three_steps(path: Path, weighting: str) -> dict[str, torch.Tensor]:
    """Return the gradient of the first of three steps and the queue after the last; micro-batches are uneven."""
    config = tiny_config(batches={"micro_batch_size": 3}, objectives={"weighting": weighting})
    shards = open_shards(path)
    learner = InfoXLMLearner(config, build(config, shards), shards)
    learner.after_step(0)
    adam = optimizer.make_adamw(learner.module.parameters(), config.optimization)
    gradients_by_step = []

    def record_gradient(*_) -> None:
        gradients_by_step.append(torch.cat([p.grad.flatten() for p in learner.module.parameters()]))

    adam.register_step_pre_hook(record_gradient)
    progress = Progress()
    for step in range(3):
        train_step(learner, adam, config.optimization, progress, learner.batches(step))
    queue = learner.xlco.queue
    queue_state = torch.cat([queue.rows, queue.sentence_ids.double(), queue.added_at_step[:, None].double()], dim=1)
    return {"gradient": gradients_by_step[0], "queue": queue_state}


@pytest.mark.item("A3", "A11")
@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 3])  # three workers have 2, 1 and 1 of the 4 virtual shards
def test_every_worker_has_the_gradient_and_the_queue_of_a_single_process(tiny_shards, tmp_path, count, record_property):
    workers.start(save_three_steps, count, tiny_shards, tmp_path)

    for weighting in ("mean", "count"):
        with workers.fp64():
            expected = take_three_steps(tiny_shards, weighting)
        first, *others = [torch.load(tmp_path / f"{weighting} {rank}.pt", weights_only=True) for rank in range(count)]
        for other in others:
            assert torch.equal(other["queue"], first["queue"])
        torch.testing.assert_close(first["queue"], expected["queue"], rtol=1e-9, atol=1e-9)
        error = (first["gradient"] - expected["gradient"]).norm() / expected["gradient"].norm()
        record_property("figure", f"{count} workers: gradient within {error:.1e}")
        assert error <= 1e-9


def pretrain_with_differences(rank: int, size: int, port: int, shards: Path, base: Path) -> None:
    """Change a weight, then in another training a row of the queue, of one worker after step 7. Save the errors."""
    workers.join(rank, size, port)
    after_step = InfoXLMLearner.after_step
    config = tiny_config(optimization={"steps": 20}, checkpoints={"every": 80})
    for name in ("weight", "queue"):

        @torch.no_grad()
        def change_value(self, step, good=True, name=name):
            after_step(self, step, good)
            if rank == 1 and step == 7:
                values = {"weight": self.module.head.bias, "queue": self.xlco.queue.rows[20]}  # one of the newest keys
                values[name][0] += 1e-6

        InfoXLMLearner.after_step = change_value
        try:
            pretrain(config, shards, base / f"{name} out", base / name)
        except RankDesync as error:
            (base / f"{name} {rank}").write_text(str(error))
    torch.distributed.destroy_process_group()


@pytest.mark.item("F25")
@pytest.mark.slow
def test_a_difference_between_workers_is_detected_before_anything_is_saved(tiny_shards, tmp_path):
    workers.start(pretrain_with_differences, 2, tiny_shards, tmp_path)

    for name, tensor in (("weight", "head.bias"), ("queue", "queue/rows")):
        for rank in range(2):
            error = (tmp_path / f"{name} {rank}").read_text()
            assert error == f"step 8: {tensor} differs on worker 1: run again from the last checkpoint"
        assert not list_checkpoints(tmp_path / name)


def pretrain_with_damaged_files(rank: int, size: int, port: int, shards: Path, base: Path) -> None:
    """Train until a read fails on one worker. Save the error of each worker."""
    workers.join(rank, size, port)
    distributed.from_first(None)  # connects the workers, so that none would wait for one that has ended

    def fail(*_args, **_kwargs) -> None:
        raise DataCorrupt("000000.safetensors is missing")

    with pytest.MonkeyPatch.context() as patch:
        failing_rank, reader, method = READS[base.name]
        if rank == failing_rank:
            patch.setattr(reader, method, fail)
        with pytest.raises(DataCorrupt) as failure:
            pretrain(tiny_config(), shards, base / "out", base / "run")
    (base / str(rank)).write_text(str(failure.value))
    torch.distributed.destroy_process_group()


READS = {
    "opening the shards": (1, pretraining, "open_shards"),
    "filling the queue": (1, Sampler, "draw_for_queue"),
    "drawing a batch": (1, Sampler, "draw"),
    "opening the curves": (0, FileTracker, "__init__"),
    "resuming the curves": (0, FileTracker, "resume"),
}


@pytest.mark.slow
@pytest.mark.parametrize("read", READS)
def test_all_workers_end_with_the_error_of_one_whose_files_are_damaged(tiny_shards, tmp_path, read):
    base = tmp_path / read
    base.mkdir()

    workers.start(pretrain_with_damaged_files, 2, tiny_shards, base)

    assert [(base / str(rank)).read_text() for rank in range(2)] == ["000000.safetensors is missing"] * 2


def pretrain_in_fp64(rank: int, size: int, port: int, shards: Path, base: Path) -> None:
    workers.join(rank, size, port)
    with workers.fp64():
        pretrain(tiny_config(), shards, base / "out", base / "run")
    torch.distributed.destroy_process_group()


@pytest.mark.item("A3", "A18", "F17")
@pytest.mark.slow
def test_a_run_continues_with_two_and_then_four_workers_with_the_losses_of_one(tiny_shards, tmp_path):
    with workers.fp64():
        pretrain(tiny_config(), tiny_shards, tmp_path / "out", tmp_path / "run")
    expected = numbers(tmp_path / "run")
    run = tmp_path / "several/run"

    workers.start(pretrain_in_fp64, 2, tiny_shards, tmp_path / "several")
    assert numbers(run) == pytest.approx(expected, rel=1e-9)
    for step in (4, 6):
        shutil.rmtree(run / f"step={step:010d}")
    workers.start(pretrain_in_fp64, 4, tiny_shards, tmp_path / "several")
    assert numbers(run) == pytest.approx(expected, rel=1e-9)
