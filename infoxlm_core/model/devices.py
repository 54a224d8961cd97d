"""The device that this process computes on, how tensors get there; and why torch cannot use a GPU that is there.

torch itself says nothing: with a driver that is too old it finds no GPU, and a training would take months on the CPU.
"""

import os
import re
from pathlib import Path

import torch

from infoxlm_core.errors import InputError


def choose() -> torch.device:
    """The current GPU, else the CPU; InputError if there are GPUs and torch, built for them, cannot use one."""
    return torch.device("cuda", torch.cuda.current_device()) if count_gpus() else torch.device("cpu")


def count_gpus() -> int:
    """GPUs that torch can use; InputError if there are some and torch, built for them, can use none."""
    if torch.cuda.is_available():
        return torch.cuda.device_count()
    if torch.backends.cuda.is_built() and _machine_has_gpus():
        raise InputError(f"{why_no_gpu()}; to compute on the CPU set CUDA_VISIBLE_DEVICES to nothing")
    return 0


def cpu_multiplies_bf16() -> bool:
    """Whether this CPU has instructions for products in bf16."""
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


def memory(device: torch.device) -> float:
    """Bytes that a device has in all; of the CPU those of the machine."""
    if device.type == "cuda":
        return float(torch.cuda.get_device_properties(device).total_memory)
    return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


def send(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor of the CPU on a device, without waiting for it; from memory that pages may leave a copy would wait."""
    if device.type == "cuda" and not values.is_cuda:
        values = values.pin_memory()
    return values.to(device, non_blocking=True)


def why_no_gpu() -> str:
    """Why torch cannot use the GPU that this process has been given, if it cannot."""
    if torch.cuda.is_available():
        return ""
    try:
        torch.cuda.init()
        why = "it finds none"
    except (RuntimeError, AssertionError) as error:  # a driver that is too old, or a build without CUDA
        why = " ".join(str(error).split())[:200]
    return (
        f"torch {torch.__version__} (CUDA {torch.version.cuda}) cannot use the GPU of {os.uname().nodename}: {why}: "
        "update the node's NVIDIA driver (580 or newer for CUDA 13), or build the image with VARIANT=cuda"
    )


def _machine_has_gpus() -> bool:
    """Whether there are GPUs that nobody has hidden from this process."""
    shown = os.environ.get("CUDA_VISIBLE_DEVICES")
    if shown is not None and not re.match(r"\d|GPU-|MIG-", shown):
        return False
    return bool(torch.cuda.device_count() or list(Path("/dev").glob("nvidia[0-9]*")))  # as the driver, as Linux counts
