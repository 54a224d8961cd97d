"""The device of this process, copies to it, and why torch cannot use the machine's GPU.

With a driver that is too old torch silently finds no GPU, and a training would take months on the CPU.
"""

import os
import re
from pathlib import Path

import torch

from infoxlm_core.errors import InputError


def choose() -> torch.device:
    """Return the current GPU, or the CPU if there is none; InputError if torch cannot use the machine's GPUs."""
    return torch.device("cuda", torch.cuda.current_device()) if count_gpus() else torch.device("cpu")


def count_gpus() -> int:
    """Return the number of GPUs; InputError if the machine has some, but torch, built for GPUs, cannot use any."""
    if torch.cuda.is_available():
        return torch.cuda.device_count()
    if torch.backends.cuda.is_built() and _machine_has_gpus():
        raise InputError(f"{why_no_gpu()}. To compute on the CPU, set CUDA_VISIBLE_DEVICES to nothing")
    return 0


def cpu_multiplies_bf16() -> bool:
    """Return whether this CPU has instructions for matrix products in bf16."""
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


def memory(device: torch.device) -> float:
    """Return the bytes of a device's memory, or of the machine's for the CPU."""
    if device.type == "cuda":
        return float(torch.cuda.get_device_properties(device).total_memory)
    return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


def send(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy a tensor to a device without waiting; only copies from pinned memory do not wait."""
    if device.type == "cuda" and not values.is_cuda:
        values = values.pin_memory()
    return values.to(device, non_blocking=True)


def why_no_gpu() -> str:
    """Return why torch cannot use this process's GPU; nothing if it can."""
    if torch.cuda.is_available():
        return ""
    try:
        torch.cuda.init()
        reason = "it finds none"
    except (RuntimeError, AssertionError) as error:  # a driver that is too old, or a build without CUDA
        reason = " ".join(str(error).split())[:200]
    return (
        f"torch {torch.__version__} (CUDA {torch.version.cuda}) cannot use the GPU of {os.uname().nodename}: {reason}: "
        "update the node's NVIDIA driver (580 or newer for CUDA 13), or build the image with VARIANT=cuda"
    )


def _machine_has_gpus() -> bool:
    """Return whether there are GPUs that CUDA_VISIBLE_DEVICES does not hide from this process."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and not re.match(r"\d|GPU-|MIG-", visible):
        return False
    return bool(torch.cuda.device_count() or list(Path("/dev").glob("nvidia[0-9]*")))
