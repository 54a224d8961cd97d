"""A GPU that torch cannot use is named; nothing computes on the CPU beside it unless somebody says so."""

import pytest
import torch

from infoxlm_core.errors import InputError
from infoxlm_core.model import devices

TOO_OLD = "The NVIDIA driver on your system is too old (found version 12040)."


@pytest.fixture
def driver(monkeypatch):
    """Make torch one that was built for CUDA, on a machine with a GPU whose driver says no in these words."""

    def refuse(words: str) -> None:
        def init() -> None:
            raise RuntimeError(words)

        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        monkeypatch.setattr(torch.cuda, "init", init)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)  # of NVML, which any driver answers
        monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    return refuse


@pytest.mark.parametrize("words", [TOO_OLD, "Found no NVIDIA driver."])
def test_a_driver_that_torch_cannot_use_is_named_with_what_it_takes(driver, words):
    driver(words)

    said = devices.why_no_gpu()

    assert words in said and "update the node's NVIDIA driver (580 or newer for CUDA 13)" in said


def test_a_gpu_that_torch_sees_is_left_alone(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)

    assert devices.why_no_gpu() == ""


def test_beside_a_gpu_whose_driver_is_too_old_nothing_computes_on_the_cpu_unasked(driver):
    driver(TOO_OLD)

    with pytest.raises(InputError, match=r"too old.*CUDA_VISIBLE_DEVICES"):
        devices.choose()


@pytest.mark.parametrize("shown", ["", "-1", "NoDevFiles"])
def test_who_hides_the_gpus_computes_on_the_cpu(driver, monkeypatch, shown):
    driver(TOO_OLD)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", shown)

    assert devices.choose() == torch.device("cpu")


def test_a_torch_that_was_built_without_cuda_computes_on_the_cpu(driver, monkeypatch):
    driver(TOO_OLD)
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: False)

    assert devices.choose() == torch.device("cpu")
