"""Trainings on a Ray that has GPUs: fewer than workers, and such as torch cannot use."""

import os
import shutil
import tempfile
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import pytest
import torch

from components.adapters.ray import train


class Started(Exception):
    """With how many workers a training would have begun."""


def tell_workers(_work, scaling_config, **_):
    raise Started(scaling_config.num_workers, scaling_config.use_gpu)


def train_on_a_gpu_that_is_none(base: Path) -> list[str]:
    """Train on a Ray that has been told of one GPU; return the error, and that of two workers if it is believed."""
    import ray
    import ray.train.torch

    folder = tempfile.mkdtemp(prefix="rayg-", dir="/tmp")  # names of sockets must be short
    os.environ |= {"RAY_TMPDIR": folder, "RAY_USAGE_STATS_ENABLED": "0"}
    for name in ("RAY_ADDRESS", "CUDA_VISIBLE_DEVICES"):
        os.environ.pop(name, None)
    ray.init(address="local", num_cpus=2, num_gpus=1, include_dashboard=False)
    try:
        said = [ended(base, 1)]
        train._check_gpu = lambda: None
        ray.train.torch.TorchTrainer = tell_workers
        return [*said, ended(base, 2)]
    finally:
        ray.shutdown()
        shutil.rmtree(folder, ignore_errors=True)


def ended(base: Path, workers: int) -> str:
    try:
        train.run(dict, workers, run=base / "run")
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "it trained"


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU, and torch can use it")
def test_a_gpu_of_no_use_is_told_in_one_clear_line_before_nccl_does_and_on_one_gpu_two_workers_become_one(tmp_path):
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        useless, believed = pool.submit(train_on_a_gpu_that_is_none, tmp_path).result()

    assert useless.startswith("InputError: torch ") and "cannot use the GPU of" in useless
    assert believed == "Started: (1, True)"
