"""The device of this process, copies to it, and why torch cannot use the machine's GPU.

With a driver that is too old torch silently finds no GPU, and a training would take months on the CPU.
"""

import os
import re
from pathlib import Path

import torch

from infoxlm_core.errors import InputError


def choose() -> torch.device:
    """Return the current GPU, or the CPU if there is none. Raise InputError if torch cannot use the machine's GPUs."""
    if count_gpus():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def count_gpus() -> int:
    """Return the number of GPUs. Raise InputError if the machine has GPUs and a CUDA build of torch cannot use them."""
    if torch.cuda.is_available():
        return torch.cuda.device_count()
    if torch.backends.cuda.is_built() and _machine_has_gpus():
        raise InputError(f"{why_no_gpu()}. To compute on the CPU, set CUDA_VISIBLE_DEVICES to nothing")
    return 0


def cpu_multiplies_bf16() -> bool:
    """Return whether this CPU has instructions for matrix products in bf16."""
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


def memory(device: torch.device) -> float:
    """Return the memory of a device in bytes. For the CPU, return the memory of the machine."""
    if device.type == "cuda":
        return float(torch.cuda.get_device_properties(device).total_memory)
    page_size = os.sysconf("SC_PAGE_SIZE")
    page_count = os.sysconf("SC_PHYS_PAGES")
    return float(page_size * page_count)


def send(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy a tensor to a device without waiting for the copy."""
    if device.type == "cuda" and not values.is_cuda:
        values = values.pin_memory()  # copies from pageable memory would wait
    return values.to(device, non_blocking=True)


def why_no_gpu() -> str:
    """Return why torch cannot use a GPU, with the remedy, or an empty string if it can."""
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
    visible_devices = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible_devices is not None and not re.match(r"\d|GPU-|MIG-", visible_devices):
        return False
    device_files = list(Path("/dev").glob("nvidia[0-9]*"))  # they exist even if the driver is too old for torch
    return torch.cuda.device_count() > 0 or bool(device_files)
