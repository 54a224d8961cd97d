"""Measure the speed of a training, for a log line every ten seconds and for the curves."""

import logging
import time
from collections.abc import Mapping

import torch

from infoxlm_core.model.flops import peak
from infoxlm_core.progress import time_left
from infoxlm_core.training import distributed

logger = logging.getLogger(__name__)
SECONDS_BETWEEN_LINES = 10.0
MACHINE_FIGURES = ("tokens_per_second", "data_wait", "gpu_memory_gib", "mfu")
"""Figures that depend on the machine and its load, not on the training."""


class Pace:
    """Measures the speed of one training of so many steps, in this process."""

    def __init__(self, steps: int) -> None:
        self.steps, self.steps_taken = steps, 0  # of this process, repeated steps included
        self.started = self.last_line = time.monotonic()
        self.tokens = self.seconds_waited = 0.0  # since the last line
        self.last_probe: dict[str, float] = {}

    def record(self, step: int, figures: Mapping[str, float], waited: float) -> dict[str, float]:
        """Count a step, log a line if one is due, and return the figures of speed since the last line.

        Args:
            step: number of steps including this one.
            figures: of the step.
            waited: seconds for which the step waited for its data.
        """
        now = time.monotonic()
        self.steps_taken += 1
        self.tokens += figures["tokens"]
        self.seconds_waited += waited
        self.last_probe |= {name: value for name, value in figures.items() if name.startswith("probe/")}
        seconds = max(now - self.last_line, 1e-9)
        rate = self.tokens / seconds
        speed = {"tokens_per_second": rate, "data_wait": self.seconds_waited / seconds}
        if torch.cuda.is_available():
            speed["gpu_memory_gib"] = torch.cuda.max_memory_allocated() / 2**30
            gpu_peak = peak(torch.cuda.get_device_name())
            if gpu_peak and "flops" in figures:
                speed["mfu"] = figures["flops"] / figures["tokens"] * rate / (gpu_peak * distributed.world_size())
        if now - self.last_line >= SECONDS_BETWEEN_LINES or step == self.steps:
            left = time_left(now - self.started, self.steps_taken, self.steps_taken + self.steps - step)
            logger.info("step %d/%d %s, %.0f tokens/s, %s", step, self.steps, self._quality(figures), rate, left)
            self.last_line, self.tokens, self.seconds_waited = now, 0.0, 0.0
        return speed

    def _quality(self, figures: Mapping[str, float]) -> str:
        """Return losses, accuracies and the last probe as text."""
        losses = {name: value for name, value in figures.items() if name.startswith("loss/")}
        accuracies = {name: value for name, value in figures.items() if name.endswith("accuracy")}
        shown = losses | accuracies | self.last_probe
        return " ".join(f"{name} {value:.3f}" for name, value in shown.items() if name.count("/") == 1)
