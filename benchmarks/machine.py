"""Facts about the machine and the code of a measurement, and the machine's speed limits."""

import importlib.metadata
import os
import platform
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

LIBRARIES = ("torch", "transformers", "ve-fairseq", "tokenizers", "sentencepiece", "numpy")
ROOT = Path(__file__).parents[1]


def facts() -> dict[str, Any]:
    """Return facts about this machine and code: CPU, memory, GPU, commit, and library versions."""
    memory = read_field("/proc/meminfo", "MemTotal")  # such as "16316412 kB"
    changes = " with changes" if output_of("git", "status", "--porcelain") else ""
    result: dict[str, Any] = {
        "commit": output_of("git", "rev-parse", "--short", "HEAD") + changes,
        "cpu": read_field("/proc/cpuinfo", "model name") or platform.processor(),
        "cores": os.cpu_count(),
        # torch has no public functions for these instructions.
        "avx512_bf16": bool(torch.cpu._is_avx512_bf16_supported()),
        "amx": bool(torch.cpu._is_amx_tile_supported()),
        "memory_gib": round(int(memory.split()[0]) / 2**20, 1) if memory else None,
        "python": platform.python_version(),
        "versions": {name: version(name) for name in LIBRARIES},
    }
    if torch.cuda.is_available():
        driver = output_of("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
        result |= {"gpu": torch.cuda.get_device_name(), "cuda": torch.version.cuda, "driver": driver}
    return result


def read_field(file: str, name: str) -> str:
    """Return the value of the first line `name: value` in a file, or "" if the file or the line is missing."""
    if Path(file).is_file():
        for line in Path(file).read_text().splitlines():
            field, _, value = line.partition(":")
            if field.strip() == name:
                return value.strip()
    return ""


def output_of(*command: str) -> str:
    """Return the output of a command, or "" if the command is not installed."""
    try:
        return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False).stdout.strip()
    except FileNotFoundError:
        return ""


def version(name: str) -> str | None:
    """Return the version of a package, or None if it is not installed."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def pin() -> None:
    """Use one thread, on the last core available to this process."""
    torch.set_num_threads(1)
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})


def ceilings() -> dict[str, float]:
    """Measure the speed limits of one core: fp32 matrix products in GFLOP/s, and copies in GB/s."""
    left = torch.randn(1024, 384)
    right = torch.randn(384, 1536)
    source = torch.empty(2**26)  # 256 MiB, more than fits into the caches
    target = torch.empty(2**26)
    product_seconds = best_of_ten(lambda: torch.mm(left, right))
    copy_seconds = best_of_ten(lambda: target.copy_(source))
    return {
        "matmul_gflops": 2 * 1024 * 384 * 1536 / product_seconds / 1e9,
        "copy_gb_per_second": 2 * 4 * 2**26 / copy_seconds / 1e9,  # read and written
    }


def best_of_ten(work: Callable[[], object]) -> float:
    """Return the CPU seconds of the fastest of ten calls."""
    seconds = []
    for _ in range(10):
        start_time = time.process_time()
        work()
        seconds.append(time.process_time() - start_time)
    return min(seconds)  # the run that other work disturbed least
