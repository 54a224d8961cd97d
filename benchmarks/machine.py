"""Facts about machine and code without which a figure is worth nothing, and the most that the machine can do."""

import importlib.metadata
import os
import platform
import subprocess
import time
from pathlib import Path
from typing import Any

import torch

LIBRARIES = ("torch", "transformers", "sentence-transformers", "ve-fairseq", "tokenizers", "sentencepiece", "numpy")
ROOT = Path(__file__).parent.parent


def facts() -> dict[str, Any]:
    """CPU, memory, GPU, commit and versions."""
    cpu, memory = _field("/proc/cpuinfo", "model name"), _field("/proc/meminfo", "MemTotal")
    found: dict[str, Any] = {
        "commit": _git("rev-parse", "--short", "HEAD") + (" with changes" if _git("status", "--porcelain") else ""),
        "cpu": cpu or platform.processor(),
        "cores": os.cpu_count(),
        "avx512_bf16": bool(torch.cpu._is_avx512_bf16_supported()),
        "amx": bool(torch.cpu._is_amx_tile_supported()),
        "memory_gib": round(int(memory.split()[0]) / 2**20, 1) if memory else None,
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in LIBRARIES},
    }
    if torch.cuda.is_available():
        found |= {"gpu": torch.cuda.get_device_name(), "cuda": torch.version.cuda, "driver": _driver()}
    return found


def _field(file: str, name: str) -> str:
    lines = Path(file).read_text().splitlines() if Path(file).is_file() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(name)), "")


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], capture_output=True, text=True, cwd=ROOT, check=False)
    return done.stdout.strip()


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _driver() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def pin() -> None:
    """One thread, on one core: the last that this process may use."""
    torch.set_num_threads(1)
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})


def ceilings() -> dict[str, float]:
    """GFLOP and GB in a CPU second that a fp32 matrix product and a copy reach: the best of a few."""
    left, right = torch.randn(1024, 384), torch.randn(384, 1536)
    source, target = torch.empty(2**26), torch.empty(2**26)
    product = _best(lambda: torch.mm(left, right))
    copied = _best(lambda: target.copy_(source))
    return {
        "matmul_gflops": 2 * 1024 * 384 * 1536 / product / 1e9,
        "copy_gb_per_second": 2 * 4 * 2**26 / copied / 1e9,  # read and written
    }


def _best(work) -> float:
    seconds = []
    for _ in range(10):
        began = time.process_time()
        work()
        seconds.append(time.process_time() - began)
    return min(seconds)
