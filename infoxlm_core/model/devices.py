"""Choose the device of this process, copy tensors to it, and explain why torch cannot use a GPU.

With a driver that is too old, torch silently finds no GPU. A training run would then take months on the CPU.
"""

import os
import re
from pathlib import Path

import torch

from infoxlm_core.errors import InputError, one_line


def choose() -> torch.device:
    """Return the current GPU, or the CPU if the machine has no GPU. See `count_gpus` for errors."""
    if count_gpus():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def count_gpus() -> int:
    """Return the number of GPUs. Raise InputError if the machine has GPUs that a CUDA build of torch cannot use."""
    if torch.cuda.is_available():
        return torch.cuda.device_count()
    if torch.backends.cuda.is_built() and _machine_has_gpus():
        raise InputError(f"{explain_missing_gpu()}. To compute on the CPU, set CUDA_VISIBLE_DEVICES to nothing")
    return 0


def cpu_multiplies_bf16() -> bool:
    """Return whether this CPU has instructions for matrix products in bf16."""
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


def total_memory_bytes(device: torch.device) -> float:
    """Return the total memory of a GPU, or of the machine for the CPU, in bytes."""
    if device.type == "cuda":
        return float(torch.cuda.get_device_properties(device).total_memory)
    return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


def send(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy a tensor to a device without waiting for the copy."""
    if device.type == "cuda" and not values.is_cuda:
        values = values.pin_memory()  # copies from pageable memory block
    return values.to(device, non_blocking=True)


def explain_missing_gpu() -> str:
    """Return a message with the reason why torch cannot use a GPU and the remedy, or "" if it can."""
    if torch.cuda.is_available():
        return ""
    try:
        torch.cuda.init()
        reason = "it finds none"  # CUDA starts, but sees no device
    except (RuntimeError, AssertionError) as error:  # a driver that is too old, or a build without CUDA
        reason = one_line(error)
    return (
        f"torch {torch.__version__} (CUDA {torch.version.cuda}) cannot use the GPU of {os.uname().nodename}: {reason}: "
        "update the node's NVIDIA driver (580 or newer for CUDA 13), or build the image with VARIANT=cuda"
    )


def _machine_has_gpus() -> bool:
    """Return whether the machine has GPUs that CUDA_VISIBLE_DEVICES does not hide from this process."""
    visible_devices = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible_devices is not None and not re.match(r"\d|GPU-|MIG-", visible_devices):
        return False
    device_files = list(Path("/dev").glob("nvidia[0-9]*"))  # they exist even if the driver is too old for torch
    return torch.cuda.device_count() > 0 or bool(device_files)
