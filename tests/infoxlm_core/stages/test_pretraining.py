"""The training loop: exact resume, equal results however the work is split, faults (items A3, A11, A13, A14, A20)."""

import contextlib
import errno
import json
import os
import shutil
import signal
import subprocess
import threading
import time
from pathlib import Path

import pytest
import torch

from infoxlm_core import manifests
from infoxlm_core.config import OptimizationConfig
from infoxlm_core.data.shards import open_shards
from infoxlm_core.errors import (
    ConfigError,
    ConfigMismatch,
    LeaseHeld,
    NoValidCheckpoint,
    Preempted,
    RankDesync,
    StorageFull,
    StorageUnavailable,
    TokenizerMismatch,
    TrainingDiverged,
)
from infoxlm_core.stages import pretraining
from infoxlm_core.stages.pretraining import pretrain
from infoxlm_core.systems.infoxlm.learner import InfoXLMLearner
from infoxlm_core.systems.infoxlm.system import build
from infoxlm_core.training import checkpoints as saving
from infoxlm_core.training import distributed, gradients, optimizer, tracker
from infoxlm_core.training.fingerprint import Fingerprint
from infoxlm_core.training.run import run_directory
from infoxlm_core.training.state import Progress, named_tensors
from infoxlm_core.training.step import count_targets, train_step
from tests.helpers import workers
from tests.helpers.curves import losses, numbers, state_of
from tests.toys.pretraining import tiny_config


@pytest.fixture(scope="module")
def undisturbed(tiny_shards, tmp_path_factory) -> Path:
    base = tmp_path_factory.mktemp("undisturbed")
    pretrain(tiny_config(), tiny_shards, base / "out", base / "run")
    return base / "run"


@pytest.mark.item("A27", "P1")
def test_the_same_seed_gives_the_same_losses_bit_by_bit(undisturbed, tiny_shards, tmp_path):
    pretrain(tiny_config(), tiny_shards, tmp_path / "out", tmp_path / "run")

    assert losses(tmp_path / "run") == losses(undisturbed)
    assert state_of(tmp_path / "run", 6) == state_of(undisturbed, 6)
    pretrain(tiny_config(seed=2), tiny_shards, tmp_path / "out2", tmp_path / "other")
    assert losses(tmp_path / "other") != losses(undisturbed)


@pytest.mark.item("A14", "F27")
@pytest.mark.parametrize("left", [(2,), (2, 4)])
def test_a_resumed_run_equals_an_undisturbed_one_bit_by_bit(undisturbed, tiny_shards, tmp_path, left):
    run = tmp_path / "run"
    shutil.copytree(undisturbed, run)
    for path in run.glob("step=*"):
        if int(path.name[5:]) not in left:
            shutil.rmtree(path)
    torch.randn(17)  # global generators must not matter

    pretrain(tiny_config(), tiny_shards, tmp_path / "out", run)

    assert losses(run) == losses(undisturbed)
    assert state_of(run, 6) == state_of(undisturbed, 6)


@pytest.mark.item("A14")
def test_the_ten_steps_after_a_resume_are_those_of_the_undisturbed_run_bit_by_bit(tiny_shards, tmp_path):
    config = tiny_config(optimization={"steps": 16}, checkpoints={"every": 6})
    pretrain(config, tiny_shards, tmp_path / "a", tmp_path / "run")
    expected = losses(tmp_path / "run")
    for step in (12, 16):
        shutil.rmtree(tmp_path / "run" / f"step={step:010d}")

    pretrain(config, tiny_shards, tmp_path / "b", tmp_path / "run")

    assert len(expected) == 16 and losses(tmp_path / "run") == expected


@pytest.mark.item("A3", "A13")
@pytest.mark.parametrize("micro", [1, 3, 8])
@pytest.mark.parametrize("weighting", ["mean", "count"])
def test_the_micro_batch_does_not_change_the_step(tiny_shards, micro, weighting):
    def gradients(size: int) -> tuple[dict, torch.Tensor, torch.Tensor]:
        config = tiny_config(batches={"micro_batch_size": size}, objectives={"weighting": weighting})
        shards = open_shards(tiny_shards)
        learner = InfoXLMLearner(config, build(config, shards), shards)
        learner.after_step(0)
        parameters = list(learner.module.parameters())
        recorded = torch.optim.SGD(parameters, lr=0.0)
        recorded.step = lambda: grads.append(torch.cat([p.grad.flatten() for p in parameters]))
        grads: list[torch.Tensor] = []
        figures, _ = train_step(
            learner,
            recorded,
            config.optimization.model_copy(update={"clip_norm": 1e9}),
            Progress(),
            learner.batches(0),
        )
        return figures, grads[0], learner.xlco.queue.rows

    with workers.fp64():
        (expected, gradient, queue), (figures, other, other_queue) = gradients(4), gradients(micro)

    assert (other - gradient).norm() <= 1e-9 * gradient.norm()
    assert {k: v for k, v in figures.items() if "loss" in k} == pytest.approx(
        {k: v for k, v in expected.items() if "loss" in k}, rel=1e-9
    )
    torch.testing.assert_close(other_queue, queue, rtol=1e-9, atol=1e-9)


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
        [learner.xlco.queue.rows, learner.xlco.queue.sentence_ids.double(), learner.xlco.queue.born[:, None].double()],
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


def test_keys_that_are_enqueued_by_the_micro_batch_need_even_shares(monkeypatch, tiny_shards):
    monkeypatch.setattr(distributed, "world_size", lambda: 3)
    config, shards = tiny_config(contrast={"enqueue": "micro_batch"}), open_shards(tiny_shards)

    with pytest.raises(ConfigError, match=r"micro_batch 3 workers must divide batches.virtual_shards \(4\)"):
        InfoXLMLearner(config, build(config, shards), shards)


LATE = {"contrast": {"start_step": 2, "temperature": 0.5}, "model": {"dropout": 0.1}}


def _late_worker(rank: int, size: int, port: int, shards: Path, base: Path) -> None:
    workers.join(rank, size, port)
    with workers.fp64():
        pretrain(tiny_config(**LATE), shards, base / "out", base / "run")
    torch.distributed.destroy_process_group()


@pytest.mark.item("A3")
@pytest.mark.slow
def test_objectives_that_begin_late_do_so_alike_on_two_workers(tiny_shards, tmp_path):
    with workers.fp64():
        pretrain(tiny_config(**LATE), tiny_shards, tmp_path / "out", tmp_path / "alone")
    workers.start(_late_worker, 2, tiny_shards, tmp_path)

    found, expected = (
        [
            v.get(f"loss/{n}", 0.0)
            for _, v in tracker.read(tmp_path / run / tracker.METRICS)
            for n in ("mlm", "tlm", "xlco")
        ]
        for run in ("run", "alone")
    )
    assert found == pytest.approx(expected, rel=1e-9)


@pytest.mark.usefixtures("in_fp64")
@pytest.mark.item("A20")
def test_clipping_sees_the_gradient_of_the_mean_losses(tiny_shards):
    config, shards = tiny_config(optimization={"clip_norm": 1e-3}), open_shards(tiny_shards)
    learner = InfoXLMLearner(config, build(config, shards), shards)
    learner.after_step(0)
    batches = learner.batches(0)
    counts = count_targets(map(learner.counts, batches), learner.weights.by_name)
    for batch in batches:  # by hand: the gradient of the sum of mean losses
        learner.losses(batch, {name: 1 / counts[name] for name in learner.weights.by_name})[0].backward()
    expected = torch.cat([p.grad.flatten() for p in learner.module.parameters()]).norm().item()
    learner.module.zero_grad()
    learner.xlco.new_keys.clear()
    clipped = []
    adam = optimizer.make_adamw(learner.module.parameters(), config.optimization)
    adam.step = lambda: clipped.append(torch.cat([p.grad.flatten() for p in learner.module.parameters()]).norm().item())

    figures, _ = train_step(learner, adam, config.optimization, Progress(), batches)

    assert figures["gradient_norm"] == pytest.approx(expected, rel=1e-9)
    assert clipped == [pytest.approx(1e-3, rel=1e-3)] and expected > 1e-3


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


@pytest.mark.item("A3")
def test_count_weighting_divides_by_all_targets(tiny_shards):
    shards = open_shards(tiny_shards)
    config = tiny_config(objectives={"weighting": "count"})
    learner = InfoXLMLearner(config, build(config, shards), shards)

    assert learner.weights.divisors({"mlm": 76.0, "tlm": 10.0, "xlco": 1.0}) == dict.fromkeys(
        ("mlm", "tlm", "xlco"), 87.0
    )
    assert [round(n / 87, 4) for n in (76, 10, 1)] == [0.8736, 0.1149, 0.0115]


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


STEPS = 200


def _in_the_background(*given):
    """`run_directory` as on a GPU, where training goes on while a checkpoint is written."""
    return run_directory(*given[:5], True, *given[6:])


def _long_run(shards: Path, base: Path, background: bool = False) -> None:
    torch.set_num_threads(1)
    if background:
        pretraining.run_directory = _in_the_background
    config = tiny_config(optimization={"steps": STEPS}, checkpoints={"every": 10})
    pretrain(config, shards, base / "out", base / "run")


@pytest.fixture(scope="module")
def undisturbed_long_run(tiny_shards, tmp_path_factory) -> Path:
    base = tmp_path_factory.mktemp("long")
    _long_run(tiny_shards, base)
    return base / "run"


@pytest.mark.item("F04")
@pytest.mark.slow
@pytest.mark.parametrize("background", [False, True])
def test_a_run_killed_at_any_moment_ends_like_an_undisturbed_one(
    undisturbed_long_run, tiny_shards, tmp_path, background, record_property
):
    run, killed = tmp_path / "b/run", 0
    for wait in (0.01, 0.1, 0.05, None):  # anywhere: seconds after the first checkpoint of this attempt
        process = workers.start_one(_long_run, tiny_shards, tmp_path / "b", background)
        if wait is not None:
            seen = _newest(run)
            while process.is_alive() and _newest(run) == seen:
                time.sleep(0.002)
            time.sleep(wait)
            process.kill()
        process.join()
        killed += process.exitcode == -signal.SIGKILL

    assert process.exitcode == 0
    assert killed >= 1, "the fault never fired"
    assert losses(run) == losses(undisturbed_long_run)
    assert state_of(run, STEPS) == state_of(undisturbed_long_run, STEPS)
    record_property("figure", f"{killed} kills, equal bit for bit")


def _newest(run: Path) -> int:
    return max((int(path.parent.name[5:]) for path in run.glob("step=*/manifest.json")), default=0)


@pytest.mark.item("F05")
@pytest.mark.parametrize("damage", ["flip", "cut", "missing", "manifest"])
def test_a_damaged_checkpoint_is_found_and_the_older_one_used(undisturbed, tiny_shards, tmp_path, damage, caplog):
    run = tmp_path / "run"
    shutil.copytree(undisturbed, run)
    newest = run / "step=0000000006"
    weights = newest / "state.safetensors"
    content = bytearray(weights.read_bytes())
    if damage == "flip":
        content[len(content) // 2] ^= 1
        weights.write_bytes(content)
    if damage == "cut":
        weights.write_bytes(content[:-7])
    if damage == "missing":
        weights.unlink()
    if damage == "manifest":
        (newest / "manifest.json").write_text((newest / "manifest.json").read_text()[:-20])

    pretrain(tiny_config(), tiny_shards, tmp_path / "out", run)

    assert "CheckpointCorrupt step=6" in caplog.text
    assert losses(run) == losses(undisturbed) and state_of(run, 6) == state_of(undisturbed, 6)


@pytest.mark.item("F06")
def test_a_run_without_a_valid_checkpoint_never_starts_over_by_itself(undisturbed, tiny_shards, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(undisturbed, run)
    for path in run.glob("step=*"):
        (path / "meta.json").unlink()

    with pytest.raises(NoValidCheckpoint, match=r"step 6: .*meta\.json is missing.*restore one") as caught:
        pretrain(tiny_config(), tiny_shards, tmp_path / "out", run)
    assert caught.value.exit_code == 4

    for path in run.glob("step=*"):
        shutil.rmtree(path)
    with pytest.raises(NoValidCheckpoint, match="none is left"):
        pretrain(tiny_config(), tiny_shards, tmp_path / "out", run)


@pytest.mark.item("F18")
@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"optimization": {"learning_rate": 0.02}}, "optimization.learning_rate was 0.01, is 0.02"),
        ({"contrast": {"queue_size": 16}}, "contrast.queue_size was 32, is 16"),
        ({"seed": 2}, "seed was 1, is 2"),
        ({"batches": {"micro_batch_size": 2}}, "batches.micro_batch_size was 4, is 2"),
    ],
)
def test_resuming_with_other_settings_is_refused_with_the_difference(undisturbed, tiny_shards, tmp_path, changes, said):
    shutil.copytree(undisturbed, tmp_path / "run")

    with pytest.raises(ConfigMismatch, match=said):
        pretrain(tiny_config(**changes), tiny_shards, tmp_path / "out", tmp_path / "run")


def test_a_run_that_its_config_names_goes_on_with_other_settings_and_says_which(
    undisturbed, tiny_shards, tmp_path, caplog
):
    run = tmp_path / "run"
    shutil.copytree(undisturbed, run)
    changed = {"optimization": {"learning_rate": 0.02, "steps": 8}}

    with pytest.raises(ConfigMismatch, match=r"checkpoints\.resume: run"):
        pretrain(tiny_config(**changed, checkpoints={"resume": "another"}), tiny_shards, tmp_path / "out", run)
    pretrain(tiny_config(**changed, checkpoints={"resume": "run"}), tiny_shards, tmp_path / "out", run)

    (told,) = [message for message in caplog.messages if "resumes with changes" in message]
    assert "optimization.learning_rate was 0.01, is 0.02; optimization.steps was 6, is 8" in told
    assert [row[0] for row in losses(run)] == list(range(1, 9)) and losses(run)[:6] == losses(undisturbed)
    pretrain(tiny_config(**changed), tiny_shards, tmp_path / "again", run)  # what it saved since is of these settings


def test_a_run_goes_on_with_other_code_and_libraries_and_says_which(
    undisturbed, tiny_shards, tmp_path, caplog, monkeypatch
):
    run = tmp_path / "run"
    shutil.copytree(undisturbed, run)
    for step in (4, 6):
        shutil.rmtree(run / f"step={step:010d}")
    now = manifests.describe_software()
    monkeypatch.setattr(manifests, "describe_software", lambda: now | {"code": "sha256:mended", "pyarrow": "99.0"})

    pretrain(tiny_config(), tiny_shards, tmp_path / "out", run)

    (told,) = [message for message in caplog.messages if "resumes with changes" in message]
    assert f"code was {now['code']!r}, is 'sha256:mended'; pyarrow was {now['pyarrow']!r}, is '99.0'" in told
    assert losses(run) == losses(undisturbed)


@pytest.mark.item("F26")
def test_old_checkpoints_go_and_the_newest_stay(undisturbed):
    assert sorted(path.name for path in undisturbed.glob("step=*")) == [f"step={s:010d}" for s in (2, 4, 6)]


def _save_steps(run: Path, *steps: int, keep: int = 3) -> None:
    for step in steps:
        saving.Checkpoints(run, Fingerprint(), 1, keep).save(
            saving.Checkpoint(step, {"w": torch.full((9,), float(step))}, {})
        )


def _flip(state: Path) -> None:
    content = bytearray(state.read_bytes())
    content[-1] ^= 1
    state.write_bytes(content)


@pytest.mark.item("F26")
@pytest.mark.parametrize(("keep", "left"), [(1, [3]), (2, [2, 3]), (3, [1, 2, 3])])
def test_damaged_checkpoints_do_not_push_out_valid_ones(tmp_path, keep, left):
    _save_steps(tmp_path, 1, 2, 4, 6, keep=4)
    for step in (4, 6):
        _flip(tmp_path / f"step={step:010d}/state.safetensors")
    resumed = saving.Checkpoints(tmp_path, Fingerprint(), 1, keep)
    found = resumed.load_newest()
    assert found.step == 2
    assert len(saving.list_checkpoints(tmp_path)) == 4  # nothing goes before there is a newer one

    resumed.save(saving.Checkpoint(3, found.tensors, {}))

    assert [step for step, _ in saving.list_checkpoints(tmp_path)] == left[::-1]
    assert saving.Checkpoints(tmp_path, Fingerprint(), 1, keep).load_newest().step == 3


@pytest.mark.item("F10")
@pytest.mark.parametrize("broken", [(manifests, "file_sha256"), (saving, "load_file"), (Path, "exists")])
def test_a_disk_that_fails_for_a_while_does_not_make_a_checkpoint_damaged(tmp_path, monkeypatch, broken):
    _save_steps(tmp_path, 2, 4)

    def fail(path: Path) -> None:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(path))

    with monkeypatch.context() as during, pytest.raises(StorageUnavailable, match="step=0000000004"):
        during.setattr(*broken, fail)
        saving.Checkpoints(tmp_path, Fingerprint(), 1, 3).load_newest()

    assert saving.Checkpoints(tmp_path, Fingerprint(), 1, 3).load_newest().step == 4


@pytest.mark.item("P7")
@pytest.mark.parametrize("waited", [False, True])
def test_a_checkpoint_lost_in_the_background_is_told_where_another_error_ends_the_training(tmp_path, caplog, waited):
    checkpoints = saving.Checkpoints(tmp_path, Fingerprint(), 1, 3, background=True)
    lost = saving.Checkpoint(2, {"w": torch.zeros(1)}, {"not": object()})  # no JSON

    with pytest.raises(TypeError if waited else TrainingDiverged), checkpoints.locked():
        checkpoints.begin_save(lost)
        if waited:
            checkpoints.finish_save()
        raise TrainingDiverged("two steps in a row")

    assert [message for message in caplog.messages if "could not be saved" in message] == (
        [] if waited else ["a checkpoint could not be saved: Object of type object is not JSON serializable"]
    )


@pytest.mark.item("F26")
def test_a_damaged_checkpoint_that_was_trained_past_goes_too_and_one_trained_again_stays(tmp_path):
    _save_steps(tmp_path, 2, 4, 5)
    for step in (4, 5):
        _flip(tmp_path / f"step={step:010d}/state.safetensors")
    resumed = saving.Checkpoints(tmp_path, Fingerprint(), 1, 3)
    found = resumed.load_newest()

    for step in (5, 7):
        resumed.save(saving.Checkpoint(step, found.tensors, {}))

    assert [step for step, _ in saving.list_checkpoints(tmp_path)] == [7, 5, 2]


@pytest.mark.item("F26")
def test_a_half_deleted_checkpoint_does_not_count_among_those_that_stay(tmp_path):
    _save_steps(tmp_path, 1, 2, 3)
    (tmp_path / "step=0000000002/manifest.json").unlink()

    _save_steps(tmp_path, 4)

    assert [step for step, _ in saving.list_checkpoints(tmp_path)] == [4, 3, 1]


@pytest.mark.item("F10")
def test_a_full_disk_leaves_the_older_checkpoint_and_nothing_half_written(
    undisturbed, tiny_shards, tmp_path, monkeypatch
):
    run = tmp_path / "run"
    shutil.copytree(undisturbed, run)
    for step in (4, 6):
        shutil.rmtree(run / f"step={step:010d}")

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(saving, "save_file", full)

    with pytest.raises(StorageFull, match="step=0000000004: no space") as caught:
        pretrain(tiny_config(), tiny_shards, tmp_path / "out", run)
    assert caught.value.exit_code == 75
    assert [path.name for path in run.iterdir() if "step=" in path.name] == ["step=0000000002"]


def test_training_goes_on_while_a_checkpoint_is_written_and_changes_nothing_in_it(
    undisturbed, tiny_shards, tmp_path, monkeypatch
):
    plain, write, after, seen = tracker.FileTracker.log, saving.save_file, threading.Event(), []

    def log(self, step, figures):
        plain(self, step, figures)
        if step == 3:
            after.set()

    def slowly(tensors, path):
        seen.append(after.wait(60))  # the first checkpoint is that of step 2
        write(tensors, path)

    monkeypatch.setattr(tracker.FileTracker, "log", log)
    monkeypatch.setattr(saving, "save_file", slowly)
    monkeypatch.setattr(pretraining, "run_directory", _in_the_background)

    pretrain(tiny_config(), tiny_shards, tmp_path / "out", tmp_path / "run")

    assert seen == [True] * 3
    for step in (2, 4, 6):
        assert state_of(tmp_path / "run", step) == state_of(undisturbed, step)


@pytest.mark.item("F10")
@pytest.mark.parametrize("steps", [3, 6])
def test_a_full_disk_behind_the_training_ends_it_too(tiny_shards, tmp_path, monkeypatch, steps):
    write = saving.save_file

    def full(tensors, path):
        if "step=0000000002" in str(path):
            raise OSError(28, "No space left on device")
        write(tensors, path)

    monkeypatch.setattr(saving, "save_file", full)
    monkeypatch.setattr(pretraining, "run_directory", _in_the_background)

    with pytest.raises(StorageFull, match=r"step=0000000002.*no space"):
        pretrain(tiny_config(optimization={"steps": steps}), tiny_shards, tmp_path / "out", tmp_path / "run")

    assert not list((tmp_path / "run").glob("*step=*"))


@pytest.mark.item("F10")
@pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount a small file system")
def test_a_really_full_disk_is_said_in_one_line(tiny_shards, tmp_path):
    (tmp_path / "small").mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=96k", "tmpfs", str(tmp_path / "small")]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("this machine does not let tests mount a file system")
    try:
        with pytest.raises(StorageFull, match="no space"):
            pretrain(tiny_config(), tiny_shards, tmp_path / "small/out", tmp_path / "small/run")
        with pytest.raises(StorageFull, match="no space"):  # checkpoints fit elsewhere, the model does not fit here
            pretrain(tiny_config(model={"hidden": 64}), tiny_shards, tmp_path / "small/out", tmp_path / "run")
        assert not list((tmp_path / "small/run").glob("*step=*"))
    finally:
        subprocess.run(["umount", str(tmp_path / "small")], check=True)


def test_a_finished_run_started_again_tells_its_figures(undisturbed, tiny_shards, tmp_path):
    shutil.copytree(undisturbed, tmp_path / "run")

    figures = pretrain(tiny_config(), tiny_shards, tmp_path / "out", tmp_path / "run")

    assert figures["loss/xlco"].hex() == losses(undisturbed)[-1][3]


def test_a_model_with_too_few_positions_is_refused(tiny_shards, tmp_path):
    pretrain(tiny_config(), tiny_shards, tmp_path / "a", tmp_path / "run a")
    longer = tiny_config(model={"start": str(tmp_path / "a/encoder")}, batches={"block_tokens": 40})

    with pytest.raises(ConfigError, match=r"sequences of 40 tokens .* exceed the 32 positions"):
        pretrain(longer, tiny_shards, tmp_path / "b", tmp_path / "run b")


@pytest.mark.usefixtures("in_fp64")
def test_with_dropout_too_the_samples_and_losses_do_not_depend_on_the_workers(tiny_shards, monkeypatch):
    config, shards = tiny_config(model={"dropout": 0.2}), open_shards(tiny_shards)
    learner = InfoXLMLearner(config, build(config, shards), shards)
    learner.after_step(0)
    scales = dict.fromkeys(learner.weights.by_name, 1.0)

    def total(count: int) -> float:
        monkeypatch.setattr(distributed, "world_size", lambda: count)
        learner.shares = distributed.shares(config.batches.virtual_shards)  # as a learner of so many workers has
        loss = 0.0
        for rank in range(count):
            monkeypatch.setattr(distributed, "rank", lambda rank=rank: rank)
            loss += sum(learner.losses(batch, scales)[1]["mlm"].item() for batch in learner.batches(0))
        return loss

    assert total(1) == pytest.approx(total(2), rel=1e-9) == pytest.approx(total(4), rel=1e-9)


@pytest.mark.item("F19")
def test_asked_to_stop_it_saves_and_the_next_start_goes_on(undisturbed, tiny_shards, tmp_path, monkeypatch):
    asked = iter([False, False, False, True])
    monkeypatch.setattr(saving.Checkpoints, "asked_to_stop", lambda self: next(asked, False))

    with pytest.raises(Preempted, match="after step 4"):
        pretrain(tiny_config(checkpoints={"every": 100}), tiny_shards, tmp_path / "out", tmp_path / "run")

    pretrain(tiny_config(), tiny_shards, tmp_path / "out", tmp_path / "run")
    assert losses(tmp_path / "run") == losses(undisturbed)


@pytest.mark.item("F13")
def test_a_second_trainer_of_the_same_run_is_refused(tmp_path):
    held = saving.Checkpoints(tmp_path, Fingerprint(), every=1, keep=1)

    with (
        held.locked(),
        pytest.raises(LeaseHeld),
        saving.Checkpoints(tmp_path, Fingerprint(), 1, 1).locked(patience=0.6),
    ):
        pass
    with saving.Checkpoints(tmp_path, Fingerprint(), 1, 1).locked(patience=0.1):
        pass


@pytest.mark.item("A8", "F22")
def test_a_bad_step_touches_neither_weights_nor_key_encoder_nor_queue(tiny_shards, monkeypatch):
    config = tiny_config(optimization={"warmup_steps": 0})
    shards = open_shards(tiny_shards)
    learner = InfoXLMLearner(config, build(config, shards), shards)
    learner.after_step(0)
    adam = optimizer.make_adamw(learner.module.parameters(), config.optimization)
    progress = Progress()
    train_step(learner, adam, config.optimization, progress, learner.batches(progress.step))
    before = {name: tensor.clone() for name, tensor in named_tensors(learner, adam).items()}
    plain = learner.losses

    def spoiled(batch, scales):
        loss, sums = plain(batch, scales)
        return loss * float("nan"), sums

    monkeypatch.setattr(learner, "losses", spoiled)

    for _ in range(2):
        figures, _ = train_step(learner, adam, config.optimization, progress, learner.batches(progress.step))

    assert figures["skipped"] == 1.0
    after = named_tensors(learner, adam)
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    assert (progress.step, progress.updates, progress.bad_in_a_row) == (3, 1, 2)


@pytest.mark.item("F16")
def test_a_run_continues_from_a_given_model_and_refuses_one_of_another_tokenizer(tiny_shards, tmp_path):
    shards, start = shutil.copytree(tiny_shards, tmp_path / "shards"), tmp_path / "a/encoder"
    facts = manifests.load(shards)["facts"]
    manifests.write(shards, "shards", facts | {"reserved": ["ab", "cd"]})  # files of test sets that are not in the text
    first = pretrain(tiny_config(), shards, tmp_path / "a", tmp_path / "run a")
    manifests.write(shards, "shards", facts | {"reserved": ["cd", "ef"], "corpus": "sha256:d"})

    again = pretrain(tiny_config(model={"start": str(start)}), shards, tmp_path / "b", tmp_path / "run b")

    assert again["loss/mlm"] < first["loss/mlm"]
    assert manifests.load(start)["facts"] == {"steps": 6, "reserved": ["ab", "cd"]}
    in_neither = {"steps": 6, "reserved": ["cd"], "other_corpora": [facts["corpus"]]}
    assert manifests.load(tmp_path / "b/encoder")["facts"] == in_neither
    manifests.write(start, "encoder", {"steps": 0})  # as one that nobody has trained
    pretrain(tiny_config(model={"start": str(start)}), shards, tmp_path / "c", tmp_path / "run c")
    assert manifests.load(tmp_path / "c/encoder")["facts"] == {"steps": 6, "reserved": ["cd", "ef"]}
    (start / "sentencepiece.bpe.model").write_bytes(b"another")
    with pytest.raises(TokenizerMismatch, match=r"has tokenizer sha256:\w{8}…, .* sha256:t"):
        pretrain(tiny_config(model={"start": str(start)}), tiny_shards, tmp_path / "d", tmp_path / "run d")
    size = json.loads((start / "config.json").read_text()) | {"vocab_size": 65}
    (start / "config.json").write_text(json.dumps(size))
    with pytest.raises(TokenizerMismatch, match=r"has 65 embeddings, .* 64 ids"):
        pretrain(tiny_config(model={"start": str(start)}), tiny_shards, tmp_path / "d", tmp_path / "run d")


@pytest.mark.item("F22")
@pytest.mark.parametrize("asked", [False, True])
def test_among_bad_steps_nothing_is_saved_and_a_request_to_stop_waits_for_a_good_one(
    tiny_shards, tmp_path, monkeypatch, asked
):
    plain, seen, saved = InfoXLMLearner.losses, InfoXLMLearner.after_step, []
    now = [0]

    def spoiled(self, batch, scales):
        loss, sums = plain(self, batch, scales)
        return loss * (float("inf") if now[0] in (2, 3) else 1.0), sums

    def counted(self, step, good=True):
        seen(self, step, good)
        now[0] = step

    save = saving.Checkpoints.save
    monkeypatch.setattr(InfoXLMLearner, "losses", spoiled)
    monkeypatch.setattr(InfoXLMLearner, "after_step", counted)
    monkeypatch.setattr(saving.Checkpoints, "asked_to_stop", lambda self: asked and now[0] >= 2)
    monkeypatch.setattr(
        saving.Checkpoints, "save", lambda self, found, last: (saved.append(found.step), save(self, found, last))
    )

    with pytest.raises(Preempted, match="after step 5") if asked else contextlib.nullcontext():
        pretrain(tiny_config(checkpoints={"every": 1}), tiny_shards, tmp_path / "out", tmp_path / "run")

    assert saved == ([1, 2, 5] if asked else [1, 2, 5, 6])  # the 3rd and 4th step are bad


@pytest.mark.item("F22")
def test_too_many_bad_steps_end_the_run(tiny_shards, tmp_path, monkeypatch):
    plain = InfoXLMLearner.losses

    def spoiled(self, batch, scales):
        loss, sums = plain(self, batch, scales)
        return loss * float("inf"), sums

    monkeypatch.setattr(InfoXLMLearner, "losses", spoiled)

    with pytest.raises(TrainingDiverged, match="3 steps in a row up to step 3") as caught:
        pretrain(tiny_config(), tiny_shards, tmp_path / "out", tmp_path / "run")
    assert caught.value.exit_code == 5


@pytest.mark.item("A20")
@pytest.mark.parametrize(
    ("steps", "peak", "updates", "expected"),
    [(200_000, 2e-4, 0, 0.0), (200_000, 2e-4, 5_000, 1e-4), (200_000, 2e-4, 10_000, 2e-4), 
     (200_000, 2e-4, 105_000, 1e-4),
     (200_000, 2e-4, 200_000, 0.0), (150_000, 2e-4, 80_000, 1e-4), (100_000, 2e-4, 55_000, 1e-4),
     (200_000, 1e-4, 5_000, 5e-5), (200_000, 1e-4, 105_000, 5e-5)],
)  # fmt: skip
def test_the_learning_rate_is_the_schedule_of_the_paper(steps, peak, updates, expected):
    config = OptimizationConfig(steps=steps, learning_rate=peak, warmup_steps=10_000)

    assert optimizer.learning_rate(config, updates) == pytest.approx(expected, abs=1e-12)


@pytest.mark.item("A20")
def test_weight_decay_shrinks_every_parameter_that_has_no_gradient():
    layer = torch.nn.LayerNorm(4)
    adam = optimizer.make_adamw(layer.parameters(), OptimizationConfig(learning_rate=0.5))
    for parameter in layer.parameters():
        parameter.data.fill_(1.0)
        parameter.grad = torch.zeros_like(parameter)

    adam.step()

    assert all(torch.allclose(p, torch.full_like(p, 1 - 0.5 * 0.01)) for p in layer.parameters())


@pytest.mark.item("A25")
@pytest.mark.slow
def test_contrast_learns_a_toy_language_far_above_chance(tiny_shards, tmp_path, record_property):
    config = tiny_config(
        optimization={"steps": 150, "learning_rate": 0.02, "warmup_steps": 10},
        batches={"global_batch_size": 16, "virtual_shards": 1, "micro_batch_size": 16},
        contrast={"pooling": "mean"}, checkpoints={"every": 1000}, log_every=10,
    )  # fmt: skip

    pretrain(config, tiny_shards, tmp_path / "out", tmp_path / "run")

    accuracy = [values["xlco/accuracy"] for _, values in tracker.read(tmp_path / "run" / tracker.METRICS)]
    record_property("figure", f"XLCO accuracy {sum(accuracy[-3:]) / 3:.2f}, chance {1 / 33:.2f}")
    assert sum(accuracy[-3:]) / 3 > 10 / (1 + 32)


def test_helpers_of_distributed_training_are_the_one_worker_case_without_a_group():
    rows = torch.arange(6).view(3, 2)

    assert torch.equal(distributed.gather_rows(rows), rows)
    assert distributed.from_first("x") == "x" and distributed.on_first(lambda: 3) == 3
