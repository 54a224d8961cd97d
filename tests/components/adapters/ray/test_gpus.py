"""Trainings on a Ray that has GPUs: fewer than workers, and such as torch cannot use."""

import os
import shutil
import tempfile
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import pytest
import torch

from components.adapters.ray import train as ray_train


class Started(Exception):
    """With how many workers a training would have begun."""


def tell_workers(_work, scaling_config, **_):
    raise Started(scaling_config.num_workers, scaling_config.use_gpu)


def train_on_a_gpu_that_is_none(base: Path, workers: int = 1, believe: bool = False) -> str:
    """Train on a Ray that has been told of one GPU; return the error. `believe` it, and tell what would begin."""
    import ray
    import ray.train.torch

    if believe:
        ray_train._look_at_one_gpu = lambda: None
        ray.train.torch.TorchTrainer = tell_workers

    folder = tempfile.mkdtemp(prefix="rayg-", dir="/tmp")  # names of sockets must be short
    os.environ |= {"RAY_TMPDIR": folder, "RAY_USAGE_STATS_ENABLED": "0"}
    for name in ("RAY_ADDRESS", "CUDA_VISIBLE_DEVICES"):
        os.environ.pop(name, None)
    ray.init(address="local", num_cpus=2, num_gpus=1, include_dashboard=False)
    try:
        ray_train.run(dict, workers, run=base / "run")
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        ray.shutdown()
        shutil.rmtree(folder, ignore_errors=True)
    return "it trained"


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU, and torch can use it")
def test_a_training_whose_gpus_are_of_no_use_ends_in_one_clear_line_before_nccl_does(tmp_path):
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        said = pool.submit(train_on_a_gpu_that_is_none, tmp_path).result()

    assert said.startswith("InputError: torch ") and "cannot use the GPU of" in said


@pytest.mark.slow
def test_two_workers_on_a_machine_with_one_gpu_become_one_on_that_gpu(tmp_path):
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        said = pool.submit(train_on_a_gpu_that_is_none, tmp_path, workers=2, believe=True).result()

    assert said == "Started: (1, True)"
