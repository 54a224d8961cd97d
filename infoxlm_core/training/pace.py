"""How fast a training goes: a line on the console every ten seconds, and figures of speed for the curves."""

import logging
import time
from collections.abc import Mapping

import torch

from infoxlm_core.model.flops import peak
from infoxlm_core.progress import time_left
from infoxlm_core.training import distributed

logger = logging.getLogger(__name__)
SECONDS_BETWEEN_LINES = 10.0
CLOCKED = ("tokens_per_second", "data_wait", "gpu_memory_gib", "mfu")
"""Figures that depend on the machine and its load, not on the training."""


class Pace:
    """The clock of one training."""

    def __init__(self, steps: int) -> None:
        self.steps, self.taken = steps, 0  # of the whole run; by this process, which may go back
        self.began = self.spoke = time.monotonic()
        self.tokens = self.waited = 0.0  # since the last line
        self.probed: dict[str, float] = {}  # what was seen last

    def tell(self, step: int, figures: Mapping[str, float], waited: float) -> dict[str, float]:
        """Count a step, log a line if it is time; return tokens per second and the share of time that the step waited
        for data, since the last line, and on a GPU the most memory used and, if we know it, model FLOPs utilisation."""
        now = time.monotonic()
        self.taken, self.tokens, self.waited = self.taken + 1, self.tokens + figures["tokens"], self.waited + waited
        seconds = max(now - self.spoke, 1e-9)
        self.probed |= {name: value for name, value in figures.items() if name.startswith("probe/")}
        rate = self.tokens / seconds
        speed = {"tokens_per_second": rate, "data_wait": self.waited / seconds}
        if torch.cuda.is_available():
            speed["gpu_memory_gib"] = torch.cuda.max_memory_allocated() / 2**30
            fastest = peak(torch.cuda.get_device_name())
            if fastest and "flops" in figures:
                needed = figures["flops"] / figures["tokens"] * rate
                speed["mfu"] = needed / (fastest * distributed.world_size())
        if now - self.spoke >= SECONDS_BETWEEN_LINES or step == self.steps:
            shown = {name: value for name, value in figures.items() if name.startswith("loss/")}
            shown |= {name: value for name, value in figures.items() if name.endswith("accuracy")} | self.probed
            words = " ".join(f"{name} {value:.3f}" for name, value in shown.items() if name.count("/") == 1)
            left = time_left(now - self.began, self.taken, self.taken + self.steps - step)
            logger.info("step %d/%d %s, %.0f tokens/s, %s", step, self.steps, words, rate, left)
            self.spoke, self.tokens, self.waited = now, 0.0, 0.0
        return speed
