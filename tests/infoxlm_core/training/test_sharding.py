"""Sharding: each worker holds a part of the model, and no result changes (items A3 and A18).

All of it in fp64: see `tests.helpers.workers.fp64`.
"""

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

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
from infoxlm_core.training import tracker
from infoxlm_core.training.checkpoints import list_checkpoints
from infoxlm_core.training.optimizer import make_adamw
from infoxlm_core.training.state import Progress
from infoxlm_core.training.step import train_step
from tests.helpers.curves import numbers
from tests.helpers.workers import fp64, join, start
from tests.toys.pretraining import make_pairs, tiny_config, write_shards


def make_config(sharded: bool, **model: bool | int | str) -> PretrainingConfig:
    """Return a config with uneven micro-batches; the key encoder is updated twice, then copied; two probes."""
    return tiny_config(
        model={"sharded": sharded, "layers": 3, **model},
        contrast={"momentum_schedule": "refresh", "refresh_every": 3, "layer": 2, "temperature": 0.5},
        batches={"micro_batch_size": 3},
        probe={"every": 3, "pairs": 10},
    )


def make_learner(shards_path: Path, config: PretrainingConfig) -> InfoXLMLearner:
    """Return a learner before its first step, with a filled queue."""
    shards = open_shards(shards_path)
    learner = InfoXLMLearner(config, build(config, shards), shards)
    learner.after_step(0)
    return learner


@pytest.fixture(scope="module", autouse=True)
def exact():
    with fp64():
        yield


@pytest.fixture(scope="module")
def shards(tmp_path_factory) -> Path:
    """Return tiny shards with ten held-out pairs."""
    directory = write_shards(tmp_path_factory.mktemp("held out") / "shards", {"one": 40, "two": 25})
    facts = manifests.load(directory)["facts"]
    tokens = np.arange(4, 34)
    pairs = make_pairs(tokens, np.roll(tokens, 6), np.full(10, 3), np.arange(10))
    facts["tables"]["held_out/en-de/kept"] = write_table(directory, "held_out/en-de/kept", [pairs])
    manifests.write(directory, "shards", facts)
    return directory


@pytest.fixture(scope="module")
def single(shards, tmp_path_factory) -> Path:
    """Return `out` and `run` of one worker without sharding."""
    base = tmp_path_factory.mktemp("single")
    pretrain(make_config(sharded=False), shards, base / "out", base / "run")
    return base


@pytest.fixture(scope="module")
def sharded(shards, single, tmp_path_factory) -> Path:
    """Return the results of two workers with a sharded model: see `run_two_workers`."""
    base = tmp_path_factory.mktemp("sharded")
    shutil.copytree(single / "run", base / "resumed")
    delete_checkpoints_after(2, base / "resumed")
    shutil.copytree(single / "out/encoder", base / "encoder")
    start(run_two_workers, 2, shards, base)
    return base


def run_two_workers(rank: int, size: int, port: int, shards: Path, base: Path) -> None:
    """Train from the start, from a checkpoint that was not sharded, and with a frozen layer; save what steps do."""
    join(rank, size, port)
    with fp64():
        pretrain(make_config(sharded=True), shards, base / "out", base / "run")
        pretrain(make_config(sharded=True), shards, base / "resumed out", base / "resumed")
        frozen = make_config(sharded=True, start=str(base / "encoder"), frozen=1)
        pretrain(frozen, shards, base / "frozen out", base / "frozen")
        torch.save(take_good_and_bad_step(rank, shards), base / f"steps {rank}.pt")
    torch.save(compute_gradient(shards, sharded=True), base / f"gradient {rank}.pt")
    torch.distributed.destroy_process_group()


def take_good_and_bad_step(rank: int, shards: Path) -> dict:
    """Take a step, and a second one that is bad on one worker.

    Returns:
        `bytes` that this worker holds during the first step, `reductions` in the first step, and whether the second
        step was `skipped` and left all weights `unchanged`.
    """
    config = make_config(sharded=True)
    learner = make_learner(shards, config)
    adam = make_adamw(learner.module.parameters(), config.optimization)
    progress = Progress()
    query_parameters = list(learner.module.parameters())
    key_parameters = list(learner.xlco.key_encoder.parameters())
    held_bytes: list[int] = []
    reductions = 0
    reduce_scatter = torch.distributed.reduce_scatter_single

    def record_bytes(*_) -> None:
        moments = [value for state in adam.state.values() for value in state.values() if value.dim()]
        gradients = [parameter.grad for parameter in query_parameters]
        tensors = [*learner.module.parameters(), *learner.xlco.key_encoder.parameters(), *gradients, *moments]
        held_bytes.append(sum(tensor.to_local().nbytes for tensor in tensors))  # fails if a tensor is not a shard

    def count_reductions(*args, **kwargs):
        nonlocal reductions
        reductions += 1
        return reduce_scatter(*args, **kwargs)

    adam.register_step_post_hook(record_bytes)
    batches = learner.batches(0)
    assert len(batches) == 2
    torch.distributed.reduce_scatter_single = count_reductions
    train_step(learner, adam, config.optimization, progress, batches)
    torch.distributed.reduce_scatter_single = reduce_scatter
    before = [parameter.to_local().clone() for parameter in (*query_parameters, *key_parameters)]
    losses_of = learner.losses

    def make_loss_nan_on_one_worker(batch, scales):
        loss, sums = losses_of(batch, scales)
        return loss * float("nan") if rank == 1 else loss, sums

    learner.losses = make_loss_nan_on_one_worker
    metrics, _ = train_step(learner, adam, config.optimization, progress, learner.batches(1))
    after = [parameter.to_local() for parameter in (*query_parameters, *key_parameters)]
    unchanged = all(torch.equal(old, new) for old, new in zip(before, after, strict=True))
    return {"bytes": held_bytes, "reductions": reductions, "skipped": metrics["skipped"], "unchanged": unchanged}


def compute_gradient(shards: Path, sharded: bool, dtype: torch.dtype | None = torch.bfloat16) -> torch.Tensor:
    """Return the gradient of the first step if layers are computed in `dtype` as on a GPU; weights are in fp32."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(learners, "choose_compiler", lambda *_: "")
        for module in (learners, infoxlm):
            patch.setattr(module, "half_precision", lambda *_: dtype)
        config = make_config(sharded)
        learner = make_learner(shards, config)
        parameters = list(learner.module.parameters())
        assert {p.dtype for p in (*parameters, *learner.xlco.key_encoder.parameters())} == {torch.float32}
        adam = make_adamw(parameters, config.optimization)
        gradients: list[torch.Tensor] = []
        adam.register_step_pre_hook(lambda *_: gradients.extend(parameter.grad for parameter in parameters))
        optimization = config.optimization.model_copy(update={"clip_norm": 1e9})
        train_step(learner, adam, optimization, Progress(), learner.batches(0))
        assert {gradient.dtype for gradient in gradients} == {torch.float32}
        if sharded:
            gradients = [gradient.full_tensor() for gradient in gradients]
        return torch.cat([gradient.flatten().double() for gradient in gradients])


def continue_with_three_workers(rank: int, size: int, port: int, shards: Path, base: Path) -> None:
    join(rank, size, port)
    with fp64():
        pretrain(make_config(sharded=True, recompute=True), shards, base / "out", base / "run")
        torch.save(make_learner(shards, make_config(sharded=True)).xlco.queue.rows, base / f"queue {rank}.pt")
    torch.distributed.destroy_process_group()


def delete_checkpoints_after(last_step: int, run: Path) -> None:
    for step, path in list_checkpoints(run):
        if step > last_step:
            shutil.rmtree(path)


def read_probes(run: Path) -> list[float]:
    points = tracker.read(run / tracker.METRICS)
    return [metrics["probe/retrieval"] for _, metrics in points if "probe/retrieval" in metrics]


@pytest.mark.item("A3")
@pytest.mark.slow
def test_two_workers_with_a_sharded_model_have_the_losses_of_one(sharded, single, record_property):
    expected = np.array(numbers(single / "run"))
    largest_error = np.abs(np.array(numbers(sharded / "run")) / expected - 1).max()

    record_property("figure", f"sharded: losses within {largest_error:.1e}")
    assert largest_error <= 1e-9
    assert numbers(sharded / "resumed") == pytest.approx(expected, rel=1e-9)
    probes = read_probes(sharded / "run")
    assert len(probes) == 2
    assert probes == read_probes(single / "run")


@pytest.mark.item("A3")
@pytest.mark.slow
@pytest.mark.parametrize(
    "file",
    ["run/step=0000000006/state.safetensors", "out/encoder/model.safetensors", "out/encoder/projection.safetensors",
     "out/start/model.safetensors"],
)  # fmt: skip
def test_checkpoints_and_exported_models_contain_complete_tensors(sharded, single, file):
    expected = load_file(single / file)
    tensors = load_file(sharded / file)

    assert tensors.keys() == expected.keys()
    for name, tensor in expected.items():
        rtol = 1e-9 if tensor.dtype == torch.float64 else torch.finfo(torch.float32).eps  # models are written in fp32
        torch.testing.assert_close(tensors[name], tensor, rtol=rtol, atol=1e-9, msg=lambda text, n=name: f"{n}: {text}")


@pytest.mark.slow
def test_frozen_layers_of_a_sharded_model_do_not_change(sharded, shards, tmp_path):
    frozen = make_config(sharded=False, start=str(sharded / "encoder"), frozen=1)
    pretrain(frozen, shards, tmp_path / "out", tmp_path / "run")

    assert numbers(sharded / "frozen") == pytest.approx(numbers(tmp_path / "run"), rel=1e-9)
    before = load_file(sharded / "encoder/model.safetensors")
    after = load_file(sharded / "frozen out/encoder/model.safetensors")
    unchanged = {name for name in before if torch.equal(before[name], after[name])}
    assert unchanged == {name for name in before if ".embeddings." in name or ".layer.0." in name}


@pytest.mark.item("A3", "A18", "F17")
@pytest.mark.slow
def test_a_sharded_run_continues_with_three_workers_and_then_without_sharding(sharded, shards, single, tmp_path):
    run = shutil.copytree(sharded / "run", tmp_path / "run")
    delete_checkpoints_after(2, run)
    expected = pytest.approx(numbers(single / "run"), rel=1e-9)

    # Layers are recomputed. Two of the workers have one micro-batch where the first has two.
    start(continue_with_three_workers, 3, shards, tmp_path)

    assert numbers(run) == expected
    expected_queue = make_learner(shards, make_config(sharded=False)).xlco.queue.rows
    for rank in range(3):
        torch.testing.assert_close(torch.load(tmp_path / f"queue {rank}.pt", weights_only=True), expected_queue)
    delete_checkpoints_after(4, run)
    pretrain(make_config(sharded=False), shards, tmp_path / "out", run)
    assert numbers(run) == expected


@pytest.mark.item("A8", "F22")
@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_each_of_two_workers_holds_half_of_the_state_and_skips_a_step_that_is_bad_on_one(sharded, rank):
    d, ffn, vocabulary, positions = 16, 32, 64, 34
    layer = 4 * (d * d + d) + (d * ffn + ffn) + (ffn * d + d) + 4 * d
    embeddings = (vocabulary + positions + 2) * d
    head = d * d + d + 2 * d + vocabulary
    query = embeddings + 3 * layer + head + d * d
    key = embeddings + 2 * layer + d * d

    steps = torch.load(sharded / f"steps {rank}.pt", weights_only=True)
    # 8 bytes each: weight, gradient and two moments of the query encoder, weight of the key encoder
    assert steps["bytes"] == [8 * (4 * query + key) / 2]
    assert steps["reductions"] == 3 + 1  # once for each layer, and for all parameters outside of layers
    assert steps["skipped"] == 1.0
    assert steps["unchanged"]


@pytest.mark.slow
def test_gradients_of_shards_in_half_precision_are_as_exact_as_those_of_one_worker(sharded, shards):
    torch.set_default_dtype(torch.float32)
    exact = compute_gradient(shards, sharded=False, dtype=None)
    single = compute_gradient(shards, sharded=False)
    torch.set_default_dtype(torch.float64)
    first, second = [torch.load(sharded / f"gradient {rank}.pt", weights_only=True) for rank in range(2)]

    def error(gradient: torch.Tensor) -> float:
        return ((gradient - exact).norm() / exact.norm()).item()

    assert torch.equal(first, second)
    assert 0 < error(first) < 2 * error(single) < 0.05


def test_sharding_does_not_change_the_fingerprint_and_other_systems_refuse_it():
    assert make_config(sharded=True).result_fields() == make_config(sharded=False).result_fields()
    with pytest.raises(ConfigError, match=r"system bert cannot be sharded: set model.sharded to false"):
        tiny_config(system="bert", model={"sharded": True}, objectives={"tlm": 0.0, "xlco": 0.0, "nsp": 1.0})
