"""The network that NCCL has chosen, in the log before the first step: without RDMA gradients take longer than the step.

NCCL says it in some hundred lines a worker, into a file; one of them becomes a line of our log.
"""

import logging
import os
import re
import resource
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist

from infoxlm_core.training import distributed

logger = logging.getLogger(__name__)
_CHOSEN = re.compile(r"NCCL INFO (?:Using network|Assigned NET plugin) (.+?)(?: to comm)?$", re.MULTILINE)
_CARDS = re.compile(r"NCCL INFO (NET/\w+ ?:? ?(?:Using \[|Selected [Pp]rovider|No device found).*)$", re.MULTILINE)


def tell() -> None:
    """Join the workers by NCCL, if it is that which joins them, and say over what; a setting of NCCL_DEBUG or of
    its file is left alone, and then NCCL says all of it there itself."""
    if not dist.is_initialized() or dist.get_backend() != "nccl":
        return
    with tempfile.TemporaryDirectory(prefix="infoxlm-nccl-") as scratch:  # a name that nobody else can have taken
        file = Path(scratch) / "log"
        # it is read once, when workers speak to each other first: now
        if not {"NCCL_DEBUG", "NCCL_DEBUG_FILE"} & os.environ.keys():
            os.environ |= {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,NET", "NCCL_DEBUG_FILE": str(file)}
        distributed.sum_over_workers(torch.zeros((), device=distributed.device())).item()
        if not file.is_file():
            return
        said = file.read_text(encoding="utf-8", errors="replace")
    if distributed.rank():  # one is enough
        return
    name, cards = chosen(said)
    alone = os.environ.get("LOCAL_WORLD_SIZE") == str(distributed.world_size())
    logger.info("network between nodes: %s (%s)", name or "NCCL does not say", cards)
    if name == "Socket" and not alone:
        logger.warning("gradients go over TCP: a step may take four times as long: ray.devices, in docs/cluster.md")
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if limit != resource.RLIM_INFINITY and Path("/dev/infiniband").is_dir():
        logger.warning("RDMA needs locked memory, the node allows %d kB: LimitMEMLOCK=infinity there", limit // 1024)


def chosen(said: str) -> tuple[str, str]:
    """From NCCL's log (2.12 to 2.30): the name of the network, and which cards it has found, or that it found none."""
    names = _CHOSEN.findall(said)
    return (names[-1].strip() if names else ""), "; ".join(dict.fromkeys(_CARDS.findall(said)))
