"""Training on a Ray cluster whose GPU torch cannot use, and on one with fewer GPUs than workers."""

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
    """Raised instead of starting the workers, with the scaling that Ray Train was asked for."""


def refuse_to_start(_work, scaling_config, **_):
    raise Started(scaling_config.num_workers, scaling_config.use_gpu)


def train_with_fake_gpu(base: Path) -> tuple[str, str]:
    """Start a Ray that claims to have one GPU. Return the errors of a training with and without the check of the GPU.

    The second training requests two workers, which are not started.
    """
    import ray
    import ray.train.torch

    folder = tempfile.mkdtemp(prefix="rayg-", dir="/tmp")  # Ray's socket paths must be short
    os.environ |= {"RAY_TMPDIR": folder, "RAY_USAGE_STATS_ENABLED": "0"}
    for name in ("RAY_ADDRESS", "CUDA_VISIBLE_DEVICES"):
        os.environ.pop(name, None)
    ray.init(address="local", num_cpus=2, num_gpus=1, include_dashboard=False)
    try:
        error_of_check = error_of_training(base, num_workers=1)
        train._check_gpu = lambda: None
        ray.train.torch.TorchTrainer = refuse_to_start
        return error_of_check, error_of_training(base, num_workers=2)
    finally:
        ray.shutdown()
        shutil.rmtree(folder, ignore_errors=True)


def error_of_training(base: Path, num_workers: int) -> str:
    try:
        train.run(dict, num_workers, run=base / "run")
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="torch can use the GPU of this machine")
def test_unusable_gpu_is_reported_and_workers_are_limited_to_the_gpus(tmp_path):
    with ProcessPoolExecutor(1, get_context("spawn")) as process:
        error_of_check, error_without_check = process.submit(train_with_fake_gpu, tmp_path).result()

    assert error_of_check.startswith("InputError: torch ")
    assert "cannot use the GPU of" in error_of_check
    assert error_without_check == "Started: (1, True)"
