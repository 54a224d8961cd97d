"""Sharding: each worker holds a part of the model, and nothing that can be observed changes (items A3, A18).

All of it in fp64: see `tests.helpers.workers.fp64`.
"""

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch._dynamo.utils import counters

from infoxlm_core import manifests
from infoxlm_core.config import PretrainingConfig
from infoxlm_core.data.shards import open_shards
from infoxlm_core.data.writing import write_table
from infoxlm_core.errors import ConfigError
from infoxlm_core.stages.pretraining import pretrain
from infoxlm_core.systems.infoxlm import learner as infoxlm
from infoxlm_core.systems.infoxlm.learner import InfoXLMLearner
from infoxlm_core.systems.infoxlm.system import build
from infoxlm_core.training import learner as learners
from infoxlm_core.training import optimizer, tracker
from infoxlm_core.training.state import Progress
from infoxlm_core.training.step import train_step
from tests.helpers.curves import losses, numbers, state_of
from tests.helpers.workers import fp64, join, start
from tests.toys.pretraining import make_pairs, tiny_config, write_shards


def config(sharded: bool, **more: bool | int | str) -> PretrainingConfig:
    """Uneven micro-batches; the key encoder is moved twice, then copied; the probe looks at steps 3 and 6."""
    return tiny_config(
        model={"sharded": sharded, "layers": 3, **more},
        contrast={"momentum_schedule": "refresh", "refresh_every": 3, "layer": 2, "temperature": 0.5},
        batches={"micro_batch_size": 3},
        probe={"every": 3, "pairs": 10},
    )


@pytest.fixture(scope="module", autouse=True)
def exact():
    with fp64():
        yield


@pytest.fixture(scope="module")
def shards(tmp_path_factory) -> Path:
    """Tiny shards and ten held-out pairs."""
    directory = write_shards(tmp_path_factory.mktemp("held out") / "shards", {"one": 40, "two": 25})
    facts, rows = manifests.load(directory)["facts"], np.arange(4, 34)
    pairs = make_pairs(rows, np.roll(rows, 6), np.full(10, 3), np.arange(10))
    facts["tables"]["held_out/en-de/kept"] = write_table(directory, "held_out/en-de/kept", [pairs])
    manifests.write(directory, "shards", facts)
    return directory


@pytest.fixture(scope="module")
def alone(shards, tmp_path_factory) -> Path:
    """`out` and `run` of one worker, nothing sharded."""
    base = tmp_path_factory.mktemp("alone")
    pretrain(config(sharded=False), shards, base / "out", base / "run")
    return base


@pytest.fixture(scope="module")
def two(shards, alone, tmp_path_factory) -> Path:
    """What two workers left: `out` and `run`, sharded from the start; `other`, gone on from one worker's step 2."""
    base = tmp_path_factory.mktemp("two")
    shutil.copytree(alone / "run", base / "other")
    forget_after(2, base / "other")
    shutil.copytree(alone / "out/encoder", base / "begun")
    start(_both, 2, shards, base)
    return base


def _both(rank: int, size: int, port: int, shards: Path, base: Path) -> None:
    join(rank, size, port)
    with fp64():
        pretrain(config(sharded=True), shards, base / "out", base / "run")
        pretrain(config(sharded=True), shards, base / "other out", base / "other")
        frozen = config(sharded=True, start=str(base / "begun"), frozen=1)
        pretrain(frozen, shards, base / "frozen out", base / "frozen")
        torch.save(_good_step_then_bad(rank, shards), base / f"{rank}.pt")
    torch.save(_gradient_in_half_precision(shards, sharded=True), base / f"half {rank}.pt")
    counters.clear()
    compiled = _gradient_in_half_precision(shards, sharded=True, compiler="aot_eager")
    found = {"graphs": counters["stats"]["unique_graphs"], "breaks": counters["graph_break"], "gradient": compiled}
    torch.save(found, base / f"compiled {rank}.pt")
    torch.distributed.destroy_process_group()


def _good_step_then_bad(rank: int, path: Path) -> dict:
    """How much a worker holds after a step, in bytes, and what a step changes that is bad on one worker alone."""
    wanted, shards = config(sharded=True), open_shards(path)
    learner = InfoXLMLearner(wanted, build(wanted, shards), shards)
    learner.after_step(0)
    adam, progress = optimizer.make_adamw(learner.module.parameters(), wanted.optimization), Progress()
    parameters, keys, held = list(learner.module.parameters()), list(learner.xlco.key_encoder.parameters()), []
    summed, scatter = [], torch.distributed.reduce_scatter_single

    def weigh(*_) -> None:
        moments = [value for state in adam.state.values() for value in state.values() if value.dim()]
        now = [*learner.module.parameters(), *learner.xlco.key_encoder.parameters()]  # to_local: none is still whole
        kept = [*now, *(p.grad for p in parameters), *moments]
        held.append(sum(tensor.to_local().nbytes for tensor in kept))

    def take() -> float:
        batches = learner.batches(progress.step)
        return train_step(learner, adam, wanted.optimization, progress, batches)[0]["skipped"]

    def count(*given, **more):
        summed.append(1)
        return scatter(*given, **more)

    adam.register_step_post_hook(weigh)
    assert len(learner.batches(0)) == 2
    torch.distributed.reduce_scatter_single = count
    take()
    torch.distributed.reduce_scatter_single = scatter
    sums_in_a_step = len(summed)
    before = [tensor.to_local().clone() for tensor in (*parameters, *keys)]
    plain = learner.losses

    def spoiled(batch, scales):
        loss, sums = plain(batch, scales)
        return loss * float("nan") if rank == 1 else loss, sums

    learner.losses = spoiled
    skipped = take()
    unchanged = all(torch.equal(a, b.to_local()) for a, b in zip(before, (*parameters, *keys), strict=True))
    return {"held": held, "skipped": skipped, "unchanged": unchanged, "summed": sums_in_a_step}


def _gradient_in_half_precision(
    path: Path, sharded: bool, kind: torch.dtype | None = torch.bfloat16, compiler: str = ""
) -> torch.Tensor:
    """The gradient of a first step on a device that computes in `kind`, as a GPU does; masters stay in fp32."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(learners, "compiler_for", lambda *_: compiler)
        for module in (learners, infoxlm):
            patch.setattr(module, "half_precision", lambda *_: kind)
        wanted, shards = config(sharded), open_shards(path)
        learner = InfoXLMLearner(wanted, build(wanted, shards), shards)
        learner.after_step(0)
        adam, found = optimizer.make_adamw(learner.module.parameters(), wanted.optimization), []
        parameters = [*learner.module.parameters(), *learner.xlco.key_encoder.parameters()]
        assert {p.dtype for p in parameters} == {torch.float32}
        adam.register_step_pre_hook(lambda *_: found.extend(p.grad for p in learner.module.parameters()))
        optimization = wanted.optimization.model_copy(update={"clip_norm": 1e9})
        train_step(learner, adam, optimization, Progress(), learner.batches(0))
        assert {gradient.dtype for gradient in found} == {torch.float32}
        return torch.cat([(g.full_tensor() if sharded else g).flatten().double() for g in found])


def _go_on(rank: int, size: int, port: int, shards: Path, base: Path) -> None:
    join(rank, size, port)
    with fp64():
        pretrain(config(sharded=True, recompute=True), shards, base / "out", base / "run")
        torch.save(_filled_queue(shards), base / f"queue {rank}.pt")
    torch.distributed.destroy_process_group()


def _filled_queue(path: Path) -> torch.Tensor:
    """The keys that a run begins with."""
    wanted, shards = config(sharded=True), open_shards(path)
    learner = InfoXLMLearner(wanted, build(wanted, shards), shards)
    learner.after_step(0)
    return learner.xlco.queue.rows


def forget_after(step: int, run: Path) -> None:
    for path in run.glob("step=*"):
        if int(path.name[5:]) > step:
            shutil.rmtree(path)


def probed(run: Path) -> list[float]:
    return [
        figures["probe/retrieval"] for _, figures in tracker.read(run / tracker.METRICS) if "probe/retrieval" in figures
    ]


def test_alone_the_switch_does_nothing(shards, alone, tmp_path):
    pretrain(config(sharded=True), shards, tmp_path / "out", tmp_path / "run")

    assert losses(tmp_path / "run") == losses(alone / "run")
    assert state_of(tmp_path / "run", 6) == state_of(alone / "run", 6)


@pytest.mark.item("A3")
@pytest.mark.slow
def test_two_workers_with_half_a_model_each_give_the_losses_of_one_with_all_of_it(two, alone, record_property):
    expected = numbers(alone / "run")
    off = max(abs(a - b) / abs(b) for a, b in zip(numbers(two / "run"), expected, strict=True))

    record_property("figure", f"sharded: losses within {off:.1e}")
    assert off <= 1e-9
    assert numbers(two / "other") == pytest.approx(expected, rel=1e-9)  # begun unsharded
    assert probed(two / "run") == probed(alone / "run") and len(probed(two / "run")) == 2


@pytest.mark.item("A3")
@pytest.mark.slow
@pytest.mark.parametrize(
    "file",
    ["run/step=0000000006/state.safetensors", "out/encoder/model.safetensors", "out/encoder/projection.safetensors",
     "out/start/model.safetensors"],
)  # fmt: skip
def test_checkpoints_and_exports_hold_whole_tensors_under_the_same_names(two, alone, file):
    expected, found = load_file(alone / file), load_file(two / file)

    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        exact = 1e-9 if tensor.dtype == torch.float64 else torch.finfo(torch.float32).eps  # models are written in fp32
        torch.testing.assert_close(found[name], tensor, rtol=exact, atol=1e-9, msg=lambda said, n=name: f"{n}: {said}")


@pytest.mark.slow
def test_frozen_layers_of_a_sharded_model_stay_and_the_others_train_as_on_one_worker(two, shards, tmp_path):
    frozen = config(sharded=False, start=str(two / "begun"), frozen=1)
    pretrain(frozen, shards, tmp_path / "out", tmp_path / "run")

    assert numbers(two / "frozen") == pytest.approx(numbers(tmp_path / "run"), rel=1e-9)
    before = load_file(two / "begun/model.safetensors")
    after = load_file(two / "frozen out/encoder/model.safetensors")
    unchanged = {name for name in before if torch.equal(before[name], after[name])}
    assert unchanged == {name for name in before if ".embeddings." in name or ".layer.0." in name}


@pytest.mark.item("A3", "A18", "F17")
@pytest.mark.slow
def test_a_sharded_run_goes_on_with_three_workers_and_then_unsharded_with_one(two, shards, alone, tmp_path):
    shutil.copytree(two / "run", tmp_path / "run")
    forget_after(2, tmp_path / "run")

    start(_go_on, 3, shards, tmp_path)  # layers compute again; two of them have one micro-batch where the first has two

    assert numbers(tmp_path / "run") == pytest.approx(numbers(alone / "run"), rel=1e-9)
    expected = _filled_queue(shards)
    for rank in range(3):
        torch.testing.assert_close(torch.load(tmp_path / f"queue {rank}.pt", weights_only=True), expected)
    forget_after(4, tmp_path / "run")
    pretrain(config(sharded=False), shards, tmp_path / "out", tmp_path / "run")
    assert numbers(tmp_path / "run") == pytest.approx(numbers(alone / "run"), rel=1e-9)


@pytest.mark.item("A8", "F22")
@pytest.mark.slow
def test_a_step_that_is_bad_on_one_worker_is_skipped_on_both(two):
    for rank in range(2):
        found = torch.load(two / f"{rank}.pt", weights_only=True)
        assert found["skipped"] == 1.0 and found["unchanged"]


@pytest.mark.slow
def test_of_two_workers_each_holds_half_of_what_one_held(two):
    d, ffn, vocabulary, positions = 16, 32, 64, 34
    layer = 4 * (d * d + d) + (d * ffn + ffn) + (ffn * d + d) + 4 * d
    embeddings = (vocabulary + positions + 2) * d
    head = d * d + d + 2 * d + vocabulary
    query, key = embeddings + 3 * layer + head + d * d, embeddings + 2 * layer + d * d

    for rank in range(2):  # weight, gradient, two moments of the one; weight of the other; 8 bytes each
        assert torch.load(two / f"{rank}.pt", weights_only=True)["held"] == [8 * (4 * query + key) / 2]


@pytest.mark.slow
def test_gradients_of_shards_are_summed_once_a_step(two):
    groups = 3 + 1  # the layers, and all parameters outside of layers
    for rank in range(2):
        assert torch.load(two / f"{rank}.pt", weights_only=True)["summed"] == groups


@pytest.mark.slow
def test_in_half_precision_gradients_of_shards_are_as_exact_as_those_of_one_worker(two, shards):
    torch.set_default_dtype(torch.float32)
    exact, alone = (_gradient_in_half_precision(shards, False, kind) for kind in (None, torch.bfloat16))
    torch.set_default_dtype(torch.float64)
    first, second = (torch.load(two / f"half {rank}.pt", weights_only=True) for rank in range(2))

    def error(found: torch.Tensor) -> float:
        return ((found - exact).norm() / exact.norm()).item()

    assert torch.equal(first, second) and 0 < error(first) < 2 * error(alone) < 0.05


@pytest.mark.slow
def test_compiled_layers_of_shards_share_their_graphs_and_give_the_gradients_of_plain_ones(two):
    for rank in range(2):
        plain = torch.load(two / f"half {rank}.pt", weights_only=True)
        found = torch.load(two / f"compiled {rank}.pt", weights_only=True)
        layers, head = 3, 2 * 2  # all rows, some rows, and keys; two functions, of one number of rows and of any
        assert found["graphs"] == layers + head and not found["breaks"]
        assert (found["gradient"] - plain).norm() < 0.01 * plain.norm()


def test_a_run_may_go_on_with_the_switch_turned_and_other_systems_refuse_it():
    assert config(sharded=True).result_fields() == config(sharded=False).result_fields()
    with pytest.raises(ConfigError, match=r"system bert cannot be sharded: set model.sharded to false"):
        tiny_config(system="bert", model={"sharded": True}, objectives={"tlm": 0.0, "xlco": 0.0, "nsp": 1.0})
