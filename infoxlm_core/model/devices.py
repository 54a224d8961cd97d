"""Chooses the device of this process, copies tensors to the device, and explains why torch cannot use a GPU.

If the driver is too old, torch silently finds no GPU, and a training run would take months on the CPU.
"""

import os
import re
from pathlib import Path

import torch

from infoxlm_core.errors import InputError, one_line


def choose() -> torch.device:
    """Return the current GPU, or the CPU if the machine has no GPU. Raise the errors of `count_gpus`."""
    if count_gpus():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def count_gpus() -> int:
    """Return the number of GPUs. Raise InputError if this CUDA build of torch cannot use the machine's GPUs."""
    if torch.cuda.is_available():
        return torch.cuda.device_count()
    if torch.backends.cuda.is_built() and _machine_has_gpus():
        raise InputError(f"{explain_missing_gpu()}. To compute on the CPU, set CUDA_VISIBLE_DEVICES to nothing")
    return 0


def cpu_multiplies_bf16() -> bool:
    """Return whether this CPU has instructions for bf16 matrix products."""
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


def total_memory_bytes(device: torch.device) -> float:
    """Return the total memory of a GPU in bytes, or the machine's memory for the CPU."""
    if device.type == "cuda":
        return float(torch.cuda.get_device_properties(device).total_memory)
    return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


def send(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy a tensor to a device without waiting for the copy."""
    if device.type == "cuda" and not values.is_cuda:
        values = values.pin_memory()  # a copy from pageable memory would block
    return values.to(device, non_blocking=True)


def explain_missing_gpu() -> str:
    """Explain why torch cannot use a GPU, and how to fix it. Return "" if torch can use a GPU."""
    if torch.cuda.is_available():
        return ""
    try:
        torch.cuda.init()
        reason = "CUDA starts, but finds no device"
    except (RuntimeError, AssertionError) as error:  # the driver is too old, or torch was built without CUDA
        reason = one_line(error)
    return (
        f"torch {torch.__version__} (CUDA {torch.version.cuda}) cannot use the GPU of {os.uname().nodename}: {reason}: "
        "update the node's NVIDIA driver (580 or newer for CUDA 13), or build the image with VARIANT=cuda"
    )


def _machine_has_gpus() -> bool:
    """Return whether the machine has GPUs, unless CUDA_VISIBLE_DEVICES hides all of them from this process."""
    visible_devices = os.environ.get("CUDA_VISIBLE_DEVICES")
    # CUDA ignores all entries from the first invalid one on, so an empty variable or -1 hides every GPU.
    if visible_devices is not None and not re.match(r"\d|GPU-|MIG-", visible_devices):
        return False
    device_files = list(Path("/dev").glob("nvidia[0-9]*"))  # these exist even if the driver is too old for torch
    return torch.cuda.device_count() > 0 or bool(device_files)
