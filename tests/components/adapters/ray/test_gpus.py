"""What a training says whose torch cannot use the GPUs that Ray gives it."""

import os
import shutil
import tempfile
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import pytest
import torch

from components.adapters.ray import train as ray_train


@pytest.mark.parametrize(
    "words", ["The NVIDIA driver on your system is too old (found version 12040).", "Found no NVIDIA driver."]
)
def test_a_driver_that_torch_cannot_use_is_named_with_what_it_takes(monkeypatch, words):
    def init() -> None:
        raise RuntimeError(words)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "init", init)

    said = ray_train._why_no_gpu()

    assert words in said and "update the node's NVIDIA driver (580 or newer for CUDA 13)" in said


def test_a_gpu_that_torch_sees_is_left_alone(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)

    assert ray_train._why_no_gpu() == ""


def train_on_a_gpu_that_is_none(base: Path) -> str:
    """Train on a Ray that believes in a GPU; return the error."""
    import ray

    folder = tempfile.mkdtemp(prefix="rayg-", dir="/tmp")  # names of sockets must be short
    os.environ |= {"RAY_TMPDIR": folder, "RAY_USAGE_STATS_ENABLED": "0"}
    for name in ("RAY_ADDRESS", "CUDA_VISIBLE_DEVICES"):
        os.environ.pop(name, None)
    ray.init(address="local", num_cpus=2, num_gpus=1, include_dashboard=False)
    try:
        ray_train.run(dict, 1, run=base / "run")
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
