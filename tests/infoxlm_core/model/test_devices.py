"""If torch cannot use a GPU of the machine, nothing falls back to the CPU unless the user asks for it."""

import pytest
import torch

from infoxlm_core.errors import InputError
from infoxlm_core.model import devices


@pytest.fixture
def old_driver(monkeypatch):
    """Simulate a machine whose GPU driver is too old for this build of torch."""

    def refuse() -> None:
        raise RuntimeError("The NVIDIA driver on your system is too old (found version 12040).")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "init", refuse)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)  # from NVML, which works with every driver
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


@pytest.mark.usefixtures("old_driver")
def test_gpu_with_an_old_driver_is_reported_with_reason_and_remedies():
    message = r"driver on your system is too old.*update the node's NVIDIA driver.*set CUDA_VISIBLE_DEVICES to nothing"
    with pytest.raises(InputError, match=message):
        devices.choose()


@pytest.mark.usefixtures("old_driver")
@pytest.mark.parametrize("visible_devices", ["", "-1", "NoDevFiles"])
def test_hidden_gpus_are_ignored(monkeypatch, visible_devices):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible_devices)

    assert devices.choose() == torch.device("cpu")


@pytest.mark.usefixtures("old_driver")
def test_build_of_torch_without_cuda_uses_the_cpu(monkeypatch):
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: False)

    assert devices.choose() == torch.device("cpu")
